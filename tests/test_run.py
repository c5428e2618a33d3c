"""Run directories, and the verbs train and eval."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers_training import ForgetfulEngine, InterruptedEngine, small
from predmask.cli import main
from predmask.cli.display import Console, step_line
from predmask.train import Config, ConfigError, StepResult, Trainer, run
from predmask.train.directory import find_checkpoint
from predmask.train.models import load_policy
from predmask.train.options import read_toml, resolve
from predmask.train.trainer import mask_cannot_fire

TINY = [
    "--device=cpu", "--steps=1", "--rollout.prompts=2", "--rollout.group_size=4", "--update.steps_per_rollout=2",
    "--eval.prompts=4", "--eval.samples=1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(path: Path) -> dict[str, object]:
    return json.loads(path.read_text())


def test_a_run_directory_holds_what_it_should() -> None:
    summary, directory = run(small(steps=2, eval={"every": 1}))
    assert directory.parent == Path("runs")
    assert read(directory / "summary.json").keys() >= {
        "accuracy_before", "accuracy_after", "seconds", "steps", "rule", "greedy_before", "greedy_after",
    }  # fmt: skip
    assert (summary.status, summary.steps, summary.rule) == ("finished", 2, "predictive")
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2]
    assert summary.accuracy_before == records[0]["heldout"]["sampled"]
    assert summary.accuracy_after == records[2]["heldout"]["sampled"]
    assert read(directory / "versions.json")["torch"] == torch.__version__
    assert not (directory / "checkpoint.partial").exists()


def test_the_checkpoint_is_the_trained_policy() -> None:
    config = small(steps=1)
    _, directory = run(config)
    model, tokenizer = load_policy(str(find_checkpoint(directory)), torch.device("cpu"))
    trainer = Trainer(config)
    list(trainer.steps())
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    assert tokenizer.decode(tokenizer.encode("1 + 2 =")) == "1 + 2 ="


def test_the_resolved_configuration_can_be_run_again() -> None:
    _, directory = run(small(steps=1, output="first", seed=5))
    again = resolve(read_toml(directory / "config.toml"))
    assert again == small(steps=1, seed=5)
    _, second = run(again)
    first_line, second_line = (
        json.loads((path / "metrics.jsonl").read_text().splitlines()[1]) for path in (directory, second)
    )
    assert first_line["loss"] == second_line["loss"]


def test_nothing_is_overwritten() -> None:
    Path("taken").mkdir()
    Path("taken/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="'taken' exists already"):
        run(small(output="taken"))
    assert [path.name for path in Path("taken").iterdir()] == ["notes.txt"]


def test_an_interrupted_run_leaves_what_it_reached() -> None:
    config = small(steps=3, output="out")
    trainer = Trainer(config)
    with pytest.raises(KeyboardInterrupt):
        run(config, engine=InterruptedEngine(trainer.model))
    summary = read(Path("out/summary.json"))
    assert (summary["status"], summary["steps"]) == ("interrupted", 1)
    assert len(Path("out/metrics.jsonl").read_text().splitlines()) == 2
    assert find_checkpoint(Path("out")) == Path("out/checkpoint")


def test_a_failed_run_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["train", "arithmetic", *TINY, "--output=out", "--task=helpers_training:Constant", "--task.value=nan"]
    assert main(args) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "none of the 4 answers could be scored" in error


def test_tensorboard_files_are_written() -> None:
    _, directory = run(small(steps=2, tensorboard=True))
    assert [path.name.split(".")[2] for path in (directory / "tensorboard").iterdir()] == ["tfevents"]


def test_train_and_eval_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "arithmetic", *TINY, "--rule", "dppo", "--rule.delta", "0.15", "--output", "out"]) == 0
    shown = capsys.readouterr().out
    assert "step 1/1  reward" in shown
    assert "held-out accuracy" in shown
    assert "predmask eval out" in shown
    assert read(Path("out/summary.json"))["rule"] == "dppo"
    assert main(["eval", "out", "--prompts", "8", "--samples", "2"]) == 0
    table = capsys.readouterr().out
    assert "avg@2" in table
    assert "greedy" in table


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rule", "predictve"], "predictive"),
        (["--rule.dleta", "0.1"], "rule.delta"),
        (["--rule.delta", "0"], "rule.delta is 0.0; it must be a finite number above 0"),
        (["--rule.delta", "-1"], "rule.delta is -1.0"),
        (["--rule.delta", "nan"], "rule.delta is nan"),
        (["--rollout.top_k", "100"], "vocabulary of 64"),
        (["--rollout.top_k", "0"], "needs top-K log-probs"),
        (["--rollout.group_size", "1"], "rollout.group_size is 1; it must be 2 or more"),
        (["--rollout.temperature", "0"], "rollout.temperature is 0.0"),
        (["--rollout.max_new_tokens", "5000"], "the context of model 'embedded', 128; choose at most 118"),
        (["--update.steps_per_rollout", "3"], "does not divide"),
        (["--model", "nowhere"], "model 'nowhere' does not exist"),
        (["--model", "./nowhere"], "model './nowhere' does not exist"),
        (["--model", "."], "without config.json"),
        (["--task", "helpers_training:NoVerifier"], "score"),
        (["--task", "nowhere:Task"], "nowhere"),
        (["--task", "reasoning_gym:chain_sun"], "chain_sum"),
        (["--device", "cuda"] if not torch.cuda.is_available() else ["--device", "tpu"], "device"),
    ],
)
def test_a_slip_is_named_with_its_remedy(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "arithmetic", *TINY, *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("predmask: error: ")
    assert error.count("\n") <= 3
    assert not Path("runs").exists()


def test_train_without_anything_says_what_it_wants(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train"])
    assert "a preset such as 'arithmetic'" in capsys.readouterr().err


def test_answers_that_cannot_be_scored_are_said_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "run"
    config = small(task="helpers_training:SometimesUnscored", output=str(output))
    summary, _ = run(config, display=Console())
    shown = capsys.readouterr().out
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    counts = [int(line["unscored_count"]) for line in lines[1:]]
    assert min(counts) > 0
    assert summary.unscored["not_a_number"]["count"] == sum(counts)
    assert json.loads((output / "summary.json").read_text())["unscored"] == summary.unscored
    warned = [line for line in shown.splitlines() if "WARNING: answers could not be scored (not_a_number)" in line]
    assert len(warned) == 1
    assert warned[0].endswith("its verifier returned nan")
    assert f"not scored {counts[1]}" in shown
    assert f"not scored         {sum(counts)} not_a_number" in shown


def test_eval_of_what_does_not_exist_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "nowhere"]) == 2
    assert "model 'nowhere' does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ({}, None),
        ({"rule": "none"}, "never drops a token"),
        ({"rule": "cispo"}, "never drops a token"),
        ({"rule": {"name": "dppo", "divergence": "tv", "delta": 1.0}}, "never drops a token"),
        ({"rule": {"divergence": "js", "delta": 0.7}}, "never drops a token"),
        ({"engine": {"numerics": "float32"}, "update": {"steps_per_rollout": 1}}, "one optimiser step"),
        ({"engine": {"numerics": "float32"}, "update": {"steps_per_rollout": 1, "epochs": 2}}, None),
        ({"engine": {"numerics": "fp8"}, "update": {"steps_per_rollout": 1}}, None),
    ],
)
def test_a_mask_that_cannot_fire_is_announced(layer: dict[str, object], reason: str | None) -> None:
    found = mask_cannot_fire(small(layer))
    assert found is None if reason is None else reason in str(found)


def test_a_mismatch_beyond_the_numerics_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    from helpers_training import NoisyEngine
    from predmask.cli.display import Console

    config = small({"engine": {"numerics": "float32"}}, steps=1)
    run(config, engine=NoisyEngine(Trainer(config).model), display=Console())
    assert "WARNING: that is more than the numerics explain" in capsys.readouterr().out


def test_figures_over_no_token_are_dashes() -> None:
    line = step_line(StepResult(3, {"reward": 1.0}, None), steps=10)
    assert line.startswith("step  3/10  reward 1.000  acc -")
    assert "masked -" in line


def test_an_engine_of_ones_own() -> None:
    config: Config = small(steps=1)
    summary, _ = run(config, engine=ForgetfulEngine(Trainer(config).model))
    assert summary.steps == 1
