"""What the page and the examples of TRL show is what runs."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")

from datasets import Dataset

from helpers_trl import HOST_WARNINGS
from predmask.core import DPPO, RULES, Predictive
from predmask.plugins.trl import PredmaskGRPOConfig, PredmaskGRPOTrainer
from predmask.plugins.trl.host import HostError, refuse
from predmask.traces import TokenTrace, Trace
from predmask.train.presets import PRESETS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "trl.md").read_text()
ARITHMETIC = ROOT / "src" / "predmask" / "data" / "arithmetic"
ON_CPU = {"use_cpu": True, "bf16": False, "report_to": "none"}

pytestmark = [pytest.mark.filterwarnings(text) for text in HOST_WARNINGS]


def load(name: str) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Configurations are made as written, but for a CPU, and small."""
    small = {"max_steps": 2, "max_completion_length": 8, "save_strategy": "no"}

    def make(**options: Any) -> PredmaskGRPOConfig:
        return PredmaskGRPOConfig(**{**small, **ON_CPU, **options, "output_dir": str(tmp_path / "out")})

    monkeypatch.setattr("predmask.plugins.trl.config.PredmaskGRPOConfig", make)


def test_the_arithmetic_example_reports_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("trl_arithmetic")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trl_arithmetic.py", "--steps", "32"])
    questions = example.questions
    monkeypatch.setattr(example, "questions", lambda split, count: questions(split, min(count, 64)))
    example.main()
    printed = capsys.readouterr().out
    (before,) = re.findall(r"before: (\S+)", printed)
    ((after, was),) = re.findall(r"after: +(\S+) +\(it was (\S+)\)", printed)
    assert was == before
    assert 0 < float(before) < 0.5
    assert 0 <= float(after) <= 1
    steps = re.findall(r"step +(\d+) +reward (\S+) +mask_frac (\S+)", printed)
    assert [step for step, _, _ in steps] == ["16", "32"]
    assert all(0 < float(reward) < 1 for _, reward, _ in steps)
    assert float(steps[0][2]) > 0, "the mask has nothing to do"
    (directory,) = re.findall(r"predmask report (\S+) --open", printed)
    trace = Trace(Path(directory))
    tokens = TokenTrace.cat(list(trace.tokens()))
    assert list(trace.steps) == [1, 2]
    assert tokens.decision.dropped.any()


@pytest.mark.slow
def test_the_arithmetic_example_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trl_arithmetic.py", "--steps", "64"])
    load("trl_arithmetic").main()
    ((after, before),) = re.findall(r"after: +(\S+) +\(it was (\S+)\)", capsys.readouterr().out)
    assert float(after) > float(before) + 0.3


def test_the_qwen_example_has_the_values_of_the_preset(tmp_path: Path) -> None:
    example = load("trl_qwen3")
    config = example.make_config(str(tmp_path / "run"), **ON_CPU)
    preset = PRESETS["qwen3-4b-dapo"].values
    rule = dict(preset["rule"])
    assert config.rule == RULES[rule.pop("name")](**rule)
    rollout, loss, optimizer = preset["rollout"], preset["loss"], preset["optimizer"]
    assert config.behaviour_top_k == rollout["top_k"]
    assert config.num_generations == rollout["group_size"]
    assert config.max_completion_length == rollout["max_new_tokens"] == loss["horizon"]
    assert config.temperature == rollout["temperature"]
    assert config.generation_batch_size == rollout["prompts"] * rollout["group_size"]
    optimizer_steps = config.steps_per_generation / config.gradient_accumulation_steps
    assert optimizer_steps == preset["update"]["steps_per_rollout"]
    assert config.max_steps == preset["steps"] * optimizer_steps
    assert config.ratio_cap == loss["ratio_cap"]
    assert (loss["aggregation"], config.loss_type) == ("seq_mean_token_sum_norm", "dr_grpo")
    assert (preset["advantage"]["scale_by_std"], config.scale_rewards) == (False, "none")
    for ours, theirs in {
        "learning_rate": "learning_rate",
        "beta2": "adam_beta2",
        "weight_decay": "weight_decay",
        "grad_clip": "max_grad_norm",
    }.items():
        assert getattr(config, theirs) == optimizer[ours]
    assert config.vllm_max_model_length == preset["engine"]["max_length"]
    assert preset["prompt"]["max_tokens"] == example.MAX_PROMPT
    assert (config.use_vllm, config.vllm_mode) == (True, "colocate")


@pytest.mark.parametrize("processes", [2, 8])
def test_the_qwen_example_shares_a_generation_among_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    alone = load("trl_qwen3").make_config(str(tmp_path), **ON_CPU)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    micro_batches = []

    def record(**options: Any) -> None:
        micro_batches.append((options["steps_per_generation"], options["gradient_accumulation_steps"]))

    example = load("trl_qwen3")
    monkeypatch.setattr(example, "PredmaskGRPOConfig", record)
    example.make_config(str(tmp_path))
    each, accumulated = micro_batches[0]
    assert each * processes == alone.steps_per_generation
    assert accumulated * processes == alone.gradient_accumulation_steps


def test_the_qwen_example_scores_by_the_task(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    from predmask.tasks.math import Math
    from predmask.tasks.verifier import Verifier

    example = load("trl_qwen3")
    data = tmp_path / "train.jsonl"
    lines = [f'{{"question": "What is {n} + {n}?", "answer": "{2 * n}"}}\n' for n in range(8)]
    data.write_text("".join([*lines, '{"question": "' + "long " * 2000 + '", "answer": "1"}\n']))
    task = Math(data=(str(data),), heldout_data=(str(data.with_name("other.jsonl")),))
    data.with_name("other.jsonl").write_text(lines[0])
    tokenizer = SimpleNamespace(apply_chat_template=lambda chat, **_: chat[0]["content"].split())
    rows = example.make_dataset(task, tokenizer)
    assert rows["reference"] == [str(2 * n) for n in range(1, 8)]  # neither held out nor too long
    assert rows["prompt"][0] == [{"role": "user", "content": "What is 1 + 1?"}]
    texts = [r"so it is \boxed{2}", r"so it is \boxed{2}"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {name: rows[name][:2] for name in ("prompt", "id", "reference")}
    with Verifier(task, workers=1) as verifier:
        reward = example.make_reward(verifier)
        scores = reward(columns.pop("prompt"), completions, **columns, trainer_state=None)
    assert scores == [1.0, 0.0]


@pytest.mark.usefixtures("on_cpu")
def test_the_five_lines_train(capsys: pytest.CaptureFixture[str]) -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE, flags=re.DOTALL)
    after = "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith("-"))
    before = "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith("+"))
    compile(before, "docs/trl.md", "exec")
    names: dict[str, Any] = {
        "model": str(ARITHMETIC),
        "reward": lambda completions, **_: [float(number % 2) for number in range(len(completions))],
        "dataset": Dataset.from_list([{"prompt": "1 2 3 4 + 5 6 7 8 ="}] * 8),
    }
    exec(compile(after, "docs/trl.md", "exec"), names)
    assert isinstance(names["trainer"], PredmaskGRPOTrainer)
    assert names["args"].rule == Predictive(delta=0.15)
    assert names["trainer"].state.global_step == 2


@pytest.mark.usefixtures("on_cpu")
def test_the_lines_for_the_removed_trainer_run() -> None:
    (block,) = re.findall(r"```py\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "docs/trl.md", "exec"), names)
    assert names["args"].rule == DPPO(divergence="tv", support="topk", delta=0.15)


def test_the_page_names_every_option() -> None:
    host = {name for base in PredmaskGRPOConfig.__mro__[1:] for name in getattr(base, "__dataclass_fields__", ())}
    ours = set(PredmaskGRPOConfig.__dataclass_fields__) - host
    assert {"rule", "traces"} <= ours
    assert {name for name in ours if f"`{name}`" not in PAGE} == set()


def test_the_page_names_everything_that_is_refused() -> None:
    class Bad:
        use_vllm, vllm_mode = True, "colocate"
        temperature, behaviour_top_k, ratio_cap = 0.0, -1, -1.0

        def __getattr__(self, name: str) -> str:
            return "bad"

    with pytest.raises(HostError) as caught:
        refuse(Bad())
    names = set(re.findall(r"^- (\w+) is", str(caught.value), flags=re.MULTILINE))
    assert len(names) > 15
    (table,) = re.findall(r"## What is refused\n(.*?)\n## ", PAGE, flags=re.DOTALL)
    explained = names - {"rule", "ratio_cap"}  # whose values are plainly wrong
    assert {name for name in explained if not re.search(rf"`{name}\b", table)} == set()
