"""Every preset: where its values come from, what its baselines differ in, its dry run, and a run of it in small."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers_math import laid_out, sums, tiny_model_directory, write_rows
from predmask.core import DPPO, PPOClip, Predictive
from predmask.rollout import VLLMConfig
from predmask.tasks.math import Math
from predmask.train import Config, run
from predmask.train.options import resolve
from predmask.train.plan import dry_run
from predmask.train.plan.architectures import KNOWN
from predmask.train.plan.needs import Machine
from predmask.train.presets import LEGEND, PRESETS

RECIPES = [name for name in PRESETS if name.startswith("qwen3")]
"""The settings of the paper, each with two baselines."""
PREDICTIVE = [name for name in RECIPES if not name.endswith(("-dppo", "-grpo"))]


def paths(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from paths(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_the_recipes_are_there_with_their_baselines() -> None:
    assert PREDICTIVE == ["qwen3-4b-dapo", "qwen3-8b-dapo", "qwen3-30b-a3b-dapo", "qwen3-30b-a3b-dapo-fp8"]
    assert sorted(RECIPES) == sorted(f"{name}{ending}" for name in PREDICTIVE for ending in ("", "-dppo", "-grpo"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_value_has_a_source(name: str) -> None:
    preset = PRESETS[name]
    assert set(preset.sources) == set(paths(preset.values))
    for source in preset.sources.values():
        (phrase,) = (phrase for phrase in LEGEND if source.startswith(phrase))
        if phrase == "our choice":
            assert len(source) > len(phrase) + 5, "a choice needs its reason"


def test_every_phrase_of_the_legend_is_used() -> None:
    sources = [source for name in RECIPES for source in PRESETS[name].sources.values()]
    assert all(any(source.startswith(phrase) for source in sources) for phrase in LEGEND)
    assert "not public" in LEGEND["paper, by summaries"]


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_known_of_the_paper(name: str) -> None:
    config = resolve(PRESETS[name].values)
    size = {"4b": "4B", "8b": "8B", "30b": "30B-A3B"}[name.split("-")[1]]
    assert config.model == f"Qwen/Qwen3-{size}-Base"
    assert config.model in KNOWN
    assert isinstance(config.task, Math)
    assert config.task.data == ("BytedTsinghua-SIA/DAPO-Math-17k@train",)
    assert [source.lower() for source in config.task.heldout_data] == [
        "huggingfaceh4/aime_2024@train",
        "math-ai/aime25@test",
    ]
    assert (config.rollout.top_k, config.loss.ratio_cap, config.eval.samples) == (20, 5.0, 16)
    expected = {
        "dppo": DPPO(divergence="kl", support="topk", delta=0.15),
        "grpo": PPOClip(eps_low=0.2, eps_high=0.28),
    }.get(name.rpartition("-")[2], Predictive(divergence="kl", tail="aggregated", delta=0.15))
    assert config.rule == expected
    assert isinstance(config.engine, VLLMConfig)
    assert (config.engine.quantization is not None) == ("-fp8" in name)
    # The engine holds what the longest prompt and response come to.
    assert config.prompt.max_tokens is not None
    assert config.engine.max_length == config.prompt.max_tokens + config.rollout.max_new_tokens
    assert config.loss.horizon == config.rollout.max_new_tokens


@pytest.mark.parametrize("ending", ["-dppo", "-grpo"])
@pytest.mark.parametrize("name", PREDICTIVE)
def test_a_baseline_differs_in_its_rule_alone(name: str, ending: str) -> None:
    recipe, baseline = resolve(PRESETS[name].values), resolve(PRESETS[name + ending].values)
    assert baseline.rule != recipe.rule
    assert dataclasses.replace(baseline, rule=recipe.rule) == recipe


def test_fp8_rollouts_differ_in_the_engines_numerics_alone() -> None:
    plain, fp8 = (resolve(PRESETS[name].values) for name in ("qwen3-30b-a3b-dapo", "qwen3-30b-a3b-dapo-fp8"))
    assert isinstance(plain.engine, VLLMConfig)
    engine = dataclasses.replace(plain.engine, quantization="fp8_per_block")
    assert dataclasses.replace(plain, engine=engine) == fp8


def test_the_tables_in_the_documentation_are_those_of_the_presets() -> None:
    tables = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "make_recipe_tables.py"))
    page = tables["PAGE"].read_text(encoding="utf-8")
    assert tables["updated"](page) == page, "run python scripts/make_recipe_tables.py"
    assert "0.15" in page
    assert tables["updated"](page.replace("0.15", "0.16")) == page


# Dry runs


@pytest.mark.parametrize("name", PRESETS)
def test_the_dry_run_of_every_preset(name: str) -> None:
    config = resolve(PRESETS[name].values)
    found = dry_run(config, Machine(gpu=True, name="a GPU", accelerator=10**13, host=10**13))
    assert found.fits("accelerator")
    assert found.memory.peak("accelerator") > 4 * found.model.parameters
    assert {need.kind for need in found.needs} >= {"model", "disk"}


@pytest.mark.slow
def test_a_dry_run_without_a_network(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
        # Whatever would be asked for, nobody answers.
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
    }
    command = [sys.executable, "-m", "predmask", "train", "qwen3-4b-dapo-grpo", "--dry-run", "--seed", "3"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    toml, _, rest = done.stdout.partition("# Sources")
    assert resolve(tomllib.loads(toml)) == resolve(PRESETS["qwen3-4b-dapo-grpo"].values, {"seed": 3})
    assert "math-ai/aime25@test: to be downloaded" in rest
    assert list(tmp_path.iterdir()) == []


# Each recipe on a tiny random model of its architecture, with data of the same layout


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: tiny_model_directory(folder / kind, kind) for kind in ("qwen3", "qwen3_moe")}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """A file of DAPO's layout to train on, and two of those of AIME24 and AIME25."""
    folder = tmp_path_factory.mktemp("data")
    train = write_rows(folder / "dapo.parquet", laid_out("dapo", sums(24)))
    aime = [
        write_rows(folder / "aime24.parquet", laid_out("math500", sums(3, start=100))),
        write_rows(folder / "aime25.jsonl", laid_out("aime", sums(3, start=200))),
    ]
    return str(train), [str(path) for path in aime]


def in_small(name: str, model: Path, data: tuple[str, list[str]], output: Path) -> dict[str, Any]:
    """What size and machine demand; everything else is the recipe's."""
    train, aime = data
    fp8 = "-fp8" in name
    return {
        "model": str(model),
        "steps": 2,
        "device": "cpu",
        "threads": 1,
        "output": str(output),
        # A random model is never right: half of all answers must be, for there to be an advantage.
        "task": {"data": [train], "heldout_data": aime, "verifier": "helpers_math:even_length"},
        "engine": {"name": "transformers", "numerics": "fp8" if fp8 else "bfloat16"},
        "prompt": {"max_tokens": 200},
        "rollout": {"prompts": 4, "max_new_tokens": 16},
        "loss": {"horizon": 16},
        "update": {"micro_batch_tokens": 500},
        "eval": {"prompts": 6, "samples": 2},
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_in_small(
    name: str, tiny_models: dict[str, Path], data: tuple[str, list[str]], tmp_path: Path
) -> None:
    preset = PRESETS[name].values
    kind = KNOWN[preset["model"]]["model_type"]
    small = in_small(name, tiny_models[kind], data, tmp_path / "run")
    config = resolve(preset, small)
    changed = set(paths(small))
    kept = [path for path in paths(preset) if path not in changed and not path.startswith("engine.")]
    assert {"prompt.chat", "rule.name", "rollout.group_size", "update.autocast", "optimizer.beta2"} <= set(kept)
    assert all(_value(config, path) == _value(resolve(preset), path) for path in kept if path != "rule.name")

    summary, directory = run(config)

    assert summary.status == "finished"
    assert summary.rule == resolve(preset).rule.name
    assert summary.optimizer_steps == 2 * 4
    assert summary.mismatch_before is not None
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        assert line["grad_norm"] > 0
        assert line["learning_rate"] == 1e-6
        assert line["unscored_count"] == 0
    assert lines[0]["heldout"]["prompts"] == lines[-1]["heldout"]["prompts"] == 6
    assert (directory / "checkpoint" / "config.json").is_file()
    again = resolve(tomllib.loads((directory / "config.toml").read_text()))
    assert again == dataclasses.replace(config, output=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-8b-dapo", "qwen3-30b-a3b-dapo-fp8"])
def test_adapters_as_one_machine_needs_them_in_small(
    name: str, tiny_models: dict[str, Path], data: tuple[str, list[str]], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    preset = PRESETS[name].values
    small = in_small(name, tiny_models[KNOWN[preset["model"]]["model_type"]], data, tmp_path / "run")
    lora = {"lora": {"base_dtype": "bfloat16"}, "optimizer": {"learning_rate": 1e-5}}
    summary, directory = run(resolve(preset, small, lora))
    assert summary.status == "finished"
    assert summary.optimizer_steps == 2 * 4
    assert (directory / "adapter" / "adapter_config.json").is_file()


@pytest.mark.slow
def test_the_recipes_own_verifier(tiny_models: dict[str, Path], data: tuple[str, list[str]], tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    preset = PRESETS["qwen3-4b-dapo"].values
    small = in_small("qwen3-4b-dapo", tiny_models["qwen3"], data, tmp_path / "run")
    del small["task"]["verifier"]
    summary, directory = run(resolve(preset, small, {"steps": 1}))
    # No answer of a random model is right, but each is scored.
    assert (summary.status, summary.optimizer_steps, summary.accuracy_after) == ("finished", 0, 0.0)
    last = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["unscored_count"], last["reward"]) == (0, 0.0)


def _value(config: Config, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value
