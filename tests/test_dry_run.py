"""What a dry run finds: whether a run fits, and what is missing for it; without a network."""

from __future__ import annotations

import importlib.util
import json
import socket
from pathlib import Path

import pytest
import torch

from helpers_math import tiny_model_directory
from predmask.cli import main
from predmask.train import Config, ConfigError
from predmask.train.options import overrides, resolve
from predmask.train.plan import DryRun, dry_run
from predmask.train.plan.architectures import KNOWN, Architecture
from predmask.train.plan.memory import plan_memory
from predmask.train.plan.needs import Machine, needs_of
from predmask.train.presets import PRESETS

HAS_PEFT = importlib.util.find_spec("peft") is not None
BIG = 10**15


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of the hub, and no connection to anywhere."""

    def refuse(*args: object) -> None:
        raise AssertionError(f"a connection was opened: {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return tmp_path


def machine(*, accelerator: int | None = BIG, host: int | None = BIG) -> Machine:
    return Machine(gpu=True, name="a GPU", accelerator=accelerator, host=host)


def dapo(*options: str) -> Config:
    """The recipe for the 4B model, and options."""
    return resolve(PRESETS["qwen3-4b-dapo"].values, overrides(options))


# A dry run


def test_it_fits_to_the_byte() -> None:
    config = dapo()
    plan = plan_memory(config, Architecture.of(config.model), gpu=True)
    needed, host = plan.peak("accelerator"), plan.peak("host")
    assert dry_run(config, machine(accelerator=needed)).fits("accelerator") is True
    found = dry_run(config, machine(accelerator=needed - 1))
    assert found.fits("accelerator") is False
    assert not found.ready
    assert dry_run(config, machine(host=host - 1)).fits("host") is False
    assert dry_run(config, machine(host=None)).fits("host") is None
    assert dry_run(config, machine(accelerator=None)).fits("accelerator") is False


def test_over_how_many_gpus_the_state_would_have_to_be_spread() -> None:
    found = dry_run(dapo(), machine(accelerator=80 * 10**9))
    rest = found.memory.peak("accelerator") - found.memory.state
    assert found.memory.state == 16 * 4_022_468_096
    assert found.gpus is not None
    assert found.memory.state / found.gpus + rest <= 80 * 10**9 < found.memory.state / (found.gpus - 1) + rest
    assert dry_run(dapo(), machine(accelerator=rest)).gpus is None


def states(found: DryRun) -> dict[str, str]:
    return {need.name: need.state for need in found.needs}


def test_what_is_not_here_is_to_be_downloaded() -> None:
    found = states(dry_run(dapo(), machine()))
    assert found["Qwen/Qwen3-4B-Base"] == "to be downloaded"
    for name in ("BytedTsinghua-SIA/DAPO-Math-17k@train", "HuggingFaceH4/aime_2024@train", "math-ai/aime25@test"):
        assert found[name] == "to be downloaded"


def test_what_is_in_the_cache_is_found_there(no_network: Path) -> None:
    snapshot = no_network / "hub" / "models--Qwen--Qwen3-4B-Base" / "snapshots" / "0123"
    refs = snapshot.parent.parent / "refs"
    snapshot.mkdir(parents=True)
    refs.mkdir()
    (refs / "main").write_text("0123")
    shape = {**KNOWN["Qwen/Qwen3-4B-Base"], "num_hidden_layers": 7}
    (snapshot / "config.json").write_text(json.dumps(shape))
    assert Architecture.of("Qwen/Qwen3-4B-Base").layers == 7  # the cache, not the table
    assert states(dry_run(dapo(), machine()))["Qwen/Qwen3-4B-Base"] == "to be downloaded"
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "tokenizer.json").write_text("{}")
    (snapshot / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert states(dry_run(dapo(), machine()))["Qwen/Qwen3-4B-Base"] == "to be downloaded"
    (snapshot / "model-00002-of-00002.safetensors").write_bytes(b"")
    (no_network / "datasets" / "BytedTsinghua-SIA___dapo-math-17k").mkdir(parents=True)
    found = states(dry_run(dapo(), machine()))
    assert found["Qwen/Qwen3-4B-Base"] == "in the cache"
    assert found["BytedTsinghua-SIA/DAPO-Math-17k@train"] == "in the cache"
    assert found["math-ai/aime25@test"] == "to be downloaded"


def test_files_that_are_here_and_not(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"problem": "1+1", "answer": "2"}\n')
    model = tiny_model_directory(tmp_path / "model")
    options = [f"--model={model}", f"--task.data={data}", f"--task.heldout_data={tmp_path / 'aime.parquet'}"]
    found = states(dry_run(dapo(*options), machine()))
    assert found[str(model)] == "here"
    assert found[str(data)] == "here"
    assert found[str(tmp_path / "aime.parquet")] == "missing"
    (model / "model.safetensors").unlink()
    assert states(dry_run(dapo(*options), machine()))[str(model)] == "missing"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("cut.parquet", b"PAR1", "cut.parquet cannot be read"),
        ("broken.jsonl", b'{"problem": "1+1", "ans\n', "line 1 is not valid JSON"),
        ("empty.csv", b"problem,answer\n", "has no rows"),
        ("other.csv", b"text,gold\n1+1,2\n", "no known layout"),
    ],
)
def test_a_file_that_cannot_be_read_is_not_usable(
    name: str, content: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    model = tiny_model_directory(tmp_path / "model", num_hidden_layers=1)
    options = [f"--model={model}", f"--task=math:{tmp_path / name}"]
    (need,) = (need for need in dry_run(resolve(overrides(options)), machine()).needs if need.kind == "data")
    assert need.state == "not usable"
    assert reason in need.detail
    assert main(["train", *options, "--dry-run", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert f"! data     {tmp_path / name}: not usable" in out
    assert "this cannot run here" in out


def test_a_verifier_of_the_users_own_is_imported(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"problem": "1+1", "answer": "2"}\n')

    def found(verifier: str) -> tuple[str, str]:
        config = resolve(overrides([f"--task=math:{data}", f"--task.verifier={verifier}"]))
        (need,) = (need for need in dry_run(config, machine()).needs if need.kind == "verifier")
        return need.state, need.detail

    assert found("helpers_math:contains") == ("here", "")
    assert found("helpers_math:nosuch")[0] == "not usable"
    assert "has no function 'nosuch'" in found("helpers_math:nosuch")[1]
    assert "cannot be imported" in found("no_such_module:f")[1]
    # What comes with predmask is no need of its own, and a small file is not 0.0 MB.
    needs = dry_run(resolve(overrides([f"--task=math:{data}"])), machine()).needs
    assert not [need for need in needs if need.kind == "verifier"]
    assert next(need.detail for need in needs if need.kind == "data") == "0.0 kB"


@pytest.mark.skipif(not HAS_PEFT, reason="needs peft")
def test_adapters_are_not_offered_to_a_run_that_has_them() -> None:
    def effects(*options: str) -> list[str]:
        remedies = dry_run(dapo(*options), machine()).remedies
        return [remedy.effect for remedy in remedies if "--lora.base_dtype" in remedy.options]

    assert effects()[0].startswith("adapters are trained")
    assert effects("--lora.enabled")[0] == "the weights under the adapters in 16 bits"
    assert not effects("--lora.base_dtype=bfloat16")


def test_a_cache_that_cannot_hold_one_response() -> None:
    def state(*options: str) -> str:
        config = dapo(*options)
        needs = needs_of(config, Architecture.of(config.model), gpu=True)
        return next(need.state for need in needs if need.name == "key-value cache")

    needed = 9216 * 147_456 / 1e9  # 1.359 GB
    assert state(f"--engine.kv_cache_gb={needed}") == "enough"
    assert state(f"--engine.kv_cache_gb={needed * 0.999}") == "too small"
    assert state(f"--engine.kv_cache_gb={needed / 2}", "--engine.kv_cache=fp8") == "enough"


def test_a_context_that_is_too_short() -> None:
    assert states(dry_run(dapo("--engine.max_length=9000"), machine()))["context"] == "too small"
    assert "context" not in states(dry_run(dapo(), machine()))


def test_an_output_that_exists_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("")
    with pytest.raises(ConfigError, match="exists already"):
        dry_run(dapo(f"--output={tmp_path}"))


@pytest.mark.parametrize("name", ["nowhere", "Qwen/Qwen3-40B-Base", "./nowhere"])
def test_a_wrong_model_name_is_an_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=name):
        dry_run(dapo(f"--model={name}"))
    assert main(["train", "qwen3-4b-dapo", "--dry-run", f"--model={name}"]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.skipif(not HAS_PEFT, reason="needs peft")
def test_layers_that_cannot_be_adapted_are_an_error() -> None:
    with pytest.raises(ConfigError, match="kyu_proj"):
        dry_run(resolve(overrides(["--lora.targets", "kyu_proj"])))


# The command line


@pytest.mark.parametrize("argv", [["arithmetic", "--dry-run"], ["--dry-run", "arithmetic"]])
def test_a_run_that_can_start(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *argv, "--seed", "7", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert 'name = "arithmetic"' in out
    assert "seed = 7" in out
    assert out.splitlines()[-1] == "dry run: this can run here"


def test_a_run_that_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "qwen3-8b-dapo", "--dry-run", "--device", "cuda", "--rule.delta", "0.05"]) == 1
    out = capsys.readouterr().out
    assert "! model    Qwen/Qwen3-8B-Base: to be downloaded (about 16.4 GB)" in out
    if not torch.cuda.is_available():
        assert "DOES NOT FIT: this machine has no GPU" in out
    assert "--lora.base_dtype bfloat16" in out
    lines = out.splitlines()
    assert max(map(len, lines[next(n for n, line in enumerate(lines) if line.startswith("# Sources")) :])) <= 100
    # The source of a value stands beside it as long as it is the preset's.
    (learning_rate,) = (line for line in lines if line.startswith("learning_rate"))
    assert "# nearest known recipe" in learning_rate
    (delta,) = (line for line in lines if line.startswith("delta"))
    assert "#" not in delta


def test_a_directory_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model_directory(tmp_path / "model", "qwen3_moe")
    assert main(["train", "arithmetic", "--model", str(model), "--dry-run", "--device", "cpu"]) == 0
    assert "config.json" in capsys.readouterr().out


def test_sources_are_not_those_of_another_rule(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for options in ((), ("--rule", "dppo")):
        main(["train", "qwen3-4b-dapo", *options, "--dry-run"])
        out = capsys.readouterr().out
        shown[options] = next(line for line in out.splitlines() if line.startswith("delta = 0.15"))
    assert "# paper, by summaries" in shown[()]
    assert "#" not in shown["--rule", "dppo"]
