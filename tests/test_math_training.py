"""Mathematics from a data file to a better model: the real verifier rewards, whatever is trained and however."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers_maths_student import QUESTION, QUESTIONS, student_directory
from predmask.train import Config, ConfigError, Trainer
from predmask.train import run as train
from predmask.train.options import resolve

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All questions in the layout of MATH, and those in which the first number is 2 in that of AIME."""
    path = tmp_path_factory.mktemp("sums")
    rows = [(QUESTION.format(a=a, b=b), a, a + b) for a, b in QUESTIONS]
    worked = [{"problem": question, "solution": f"Hence \\boxed{{{total}}}."} for question, _, total in rows]
    (path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in worked))
    short = [{"Problem": question, "Answer": total} for question, first, total in rows if first == 2]
    (path / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short))
    return path


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return student_directory(tmp_path_factory.mktemp("models") / "student")


def config(student: Path, data: Path, **layer: Any) -> Config:
    base = {
        "model": str(student),
        "device": "cpu",
        "steps": 8,
        "task": {"name": "math", "data": [str(data / "train.jsonl")], "heldout_share": 0.2},
        "prompt": {"chat": True},
        "engine": {"numerics": "fp8"},
        "rule": {"name": "predictive", "delta": 0.15},
        "rollout": {"prompts": 8, "group_size": 16, "max_new_tokens": 24},
        "advantage": {"scale_by_std": True},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 4},
        "update": {"steps_per_rollout": 4, "micro_batch_tokens": 1024},
        "eval": {"prompts": 16, "samples": 8, "every": 0},
    }
    return resolve(base, layer)


@pytest.mark.parametrize(
    "layer",
    [
        {},
        {"lora": {"rank": 8, "alpha": 32}, "optimizer": {"learning_rate": 3e-3}},
        {"rollout": {"dynamic_sampling": True, "prompts": 6}, "update": {"gradient_checkpointing": True}},
        {"eval": {"engine": "rollout", "temperature": 0.7}, "loss": {"mask_truncated": True}},
    ],
    ids=["all weights", "lora", "dynamic sampling", "evaluated by the engine"],
)
def test_a_model_learns_from_the_verifier(student: Path, data: Path, layer: dict[str, Any], tmp_path: Path) -> None:
    layers = {"output": str(tmp_path / "run"), **layer}
    summary, path = train(config(student, data, **layers))
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    steps = lines[1:]
    assert steps[0]["accuracy"] < 0.45
    assert (steps[-2]["accuracy"] + steps[-1]["accuracy"]) / 2 > steps[0]["accuracy"] + 0.3
    assert sum(step["unscored_count"] for step in steps) == 0
    assert summary.status == "finished"
    assert (path / "adapter" / "adapter_model.safetensors").is_file() == ("lora" in layer)


def test_what_is_held_out_in_another_file_is_not_trained_on(student: Path, data: Path) -> None:
    task = {"heldout_data": [str(data / "heldout.jsonl")]}
    trainer = Trainer(config(student, data, task=task, steps=1))
    asked = {problem.prompt for problem in trainer.heldout}
    assert asked == {QUESTION.format(a=2, b=b) for b in range(3)}
    (result,) = trainer.steps()
    trainer.close()
    assert result.accuracy is not None
    assert result.accuracy.majority is not None
    assert any("3 problems of task.data are not trained on" in note for note in trainer.notes)


def test_a_column_that_does_not_exist_names_those_that_do(student: Path, data: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)questoin.*problem.*solution"):
        Trainer(config(student, data, task={"question_column": "questoin"}))
