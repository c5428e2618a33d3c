"""The plug-in for verl: what the doctor finds, of an installation and of a configuration."""

import os
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from predmask.cli import main
from predmask.core import PPOClip, Predictive
from predmask.plugins.verl import installation
from predmask.plugins.verl.launch import launch_args

pytestmark = pytest.mark.filterwarnings("ignore:.*Apex.* not installed")  # Megatron says so where it is imported

HERE = Path(__file__).parent
verl_is_here = find_spec("verl") is not None
needs_verl = pytest.mark.skipif(not verl_is_here, reason="verl is not installed")
# What verl says of engines that are not installed, and of its own defaults.
ignores_verl = pytest.mark.filterwarnings("ignore::UserWarning:verl", "ignore::DeprecationWarning")
RUNNABLE = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.use_dynamic_bsz=true")


@pytest.mark.skipif(verl_is_here, reason="verl is installed")
def test_the_doctor_without_verl(capsys):
    assert main(["verl", "doctor", "--", "trainer.nnodes=2"]) == 1
    out = capsys.readouterr().out
    assert "problem" in out
    assert "pip install 'predmask[verl]'" in out


def composed(*overrides, name="ppo_trainer"):
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(name, overrides=list(overrides))


def examined(*words):
    """What the doctor finds, by what it looked at, in a process that has loaded the plug-in."""
    from predmask.plugins.verl import register  # noqa: F401
    from predmask.plugins.verl.doctor import examine

    found = {}
    for finding in examine(words):
        found.setdefault(finding.what, []).append(finding)
    return found


@needs_verl
@ignores_verl
def test_the_doctor_reads_hydras_flags(tmp_path):
    words = [*RUNNABLE, *launch_args(Predictive())]
    [finding] = examined(*words)["configuration"]
    assert finding.state == "ok"
    for flags in (["--config-path=config", "--config-name=ppo_megatron_trainer.yaml"], ["-cn", "ppo_megatron_trainer"]):
        found = examined(*flags, *words)
        assert found["configuration"][0].state == "ok"
        assert "engine megatron" in found
    own = "hydra:\n  searchpath: [pkg://verl.trainer.config, pkg://predmask.plugins.verl.config]\n"
    own += "defaults: [ppo_trainer, predmask: verl, _self_]\nactor_rollout_ref: {rollout: {top_p: 0.9}}\n"
    (tmp_path / "mine.yaml").write_text(own, encoding="utf-8")
    [finding] = examined("-cp", str(tmp_path), "-cn", "mine", *RUNNABLE, *words[4:])["configuration"]
    assert finding.text.startswith("actor_rollout_ref.rollout.top_p is 0.9")


@needs_verl
@ignores_verl
@pytest.mark.parametrize("flags", [["--config-dir", "/x"], ["-cd", "/x"], ["--multirun"], ["--experimental-rerun=x"]])
def test_the_doctor_says_what_it_cannot_follow(flags):
    [finding] = examined(*flags, *RUNNABLE, *launch_args(Predictive()))["configuration"]
    assert finding.state == "problem"
    assert "is not read here" in finding.text
    assert "--cfg job" in finding.remedy
    [finding] = examined("--no-such-flag", *RUNNABLE)["configuration"]
    assert "--no-such-flag" in finding.text


@needs_verl
@ignores_verl
def test_the_doctor_compares_the_configuration_with_what_is_installed(monkeypatch):
    words = launch_args(Predictive())
    assert "engine megatron" not in examined(*RUNNABLE, *words)
    there = find_spec
    monkeypatch.setattr(installation, "find_spec", lambda name: None if "megatron" in name else there(name))
    found = examined(*RUNNABLE, *words, "model_engine=megatron", "actor_rollout_ref.rollout.name=sglang")
    [_, finding] = found["rollout server"]
    assert (finding.state, finding.remedy) == ("problem", "pip install 'verl[sglang]', or name another")
    [finding] = found["engine megatron"]
    assert (finding.state, "megatron.core is not installed" in finding.text) == ("problem", True)
    # With Megatron, and no engine of the plug-in.
    monkeypatch.setattr(installation, "find_spec", lambda name: True if "megatron" in name else there(name))
    monkeypatch.setattr(installation, "_takes_mask", lambda strategy: strategy != "megatron")
    for device, state in (("cpu", "note"), ("cuda", "problem"), ("npu", "problem")):
        monkeypatch.setattr("verl.utils.device.get_device_name", lambda device=device: device)
        [finding] = examined(*RUNNABLE, *words, "model_engine=megatron")["engine megatron"]
        assert finding.state == state


@needs_verl
@ignores_verl
@pytest.mark.parametrize(
    ("vllm", "state", "text"),
    [("0.32.1", "ok", "vLLM 0.32.1"), ("0.24.0", "note", "vLLM 0.24.0; the plug-in was tested with 0.32")],
)
def test_the_doctor_notes_a_version_of_vllm_that_was_not_tested(monkeypatch, vllm, state, text):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: vllm if name == "vllm" else real(name))
    finding = examined()["rollout server"][0]
    assert (finding.state, finding.text) == (state, text)


@needs_verl
@ignores_verl
def test_the_doctor_notes_a_model_with_a_processor(tmp_path):
    words = [*RUNNABLE, *launch_args(Predictive()), f"actor_rollout_ref.model.path={tmp_path}"]
    assert "model" not in examined(*words)
    (tmp_path / "preprocessor_config.json").write_text("{}", encoding="utf-8")
    [finding] = examined(*words)["model"]
    assert finding.state == "note"
    assert "placeholders of images" in finding.text
    assert "model" not in examined(*words, "actor_rollout_ref.rollout.name=sglang")


def doctor(*words, **environment):
    paths = [str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = subprocess.run(
        [sys.executable, "-m", "predmask", "verl", "doctor", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        check=False,
    )
    assert "Traceback" not in found.stderr
    return found.returncode, found.stdout


LOADED = {"VERL_USE_EXTERNAL_MODULES": "predmask.plugins.verl.register"}


@needs_verl
@pytest.mark.slow
def test_the_doctor_finds_what_hinders(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    words = [*RUNNABLE, *launch_args(Predictive())]
    code, out = doctor("--", *words, **LOADED)
    assert code == 0, out
    assert "Predictive(divergence='kl', tail='exact', delta=0.15), K=20, C=5.0" in out
    data = tmp_path / "d.parquet"
    pq.write_table(pa.table({"prompt": ["x"], "agent_name": ["tool_agent"]}), data)
    code, out = doctor("--", *words, "distillation.enabled=true", f"data.train_files={data}", **LOADED)
    assert code == 1
    assert "-> set distillation.enabled=false" in out
    assert "agent_name" in out
    code, out = doctor("--", *RUNNABLE, *launch_args(PPOClip()), f"data.train_files={data}", **LOADED)
    assert code == 0, out


@needs_verl
@pytest.mark.slow
def test_the_doctor_reads_what_verl_wrote(tmp_path):
    from omegaconf import OmegaConf

    written = tmp_path / "config.yaml"
    config = composed(*RUNNABLE, *launch_args(Predictive()), "actor_rollout_ref.rollout.top_k=50")
    written.write_text(OmegaConf.to_yaml(config), encoding="utf-8")
    code, out = doctor(str(written), **LOADED)
    assert code == 1
    assert "-> set actor_rollout_ref.rollout.top_k=-1" in out
    code, out = doctor("--", *RUNNABLE, **LOADED)
    assert code == 1
    assert "it does not use predmask" in out
    code, out = doctor(str(tmp_path / "none.yaml"), **LOADED)
    assert (code, "No such file" in out) == (1, True)


@needs_verl
@pytest.mark.slow
def test_the_doctor_says_why_verl_does_not_load_the_plug_in():
    code, out = doctor(VERL_USE_EXTERNAL_PLUGINS="none", VERL_USE_EXTERNAL_MODULES="")
    assert code == 1
    assert "VERL_USE_EXTERNAL_PLUGINS" in out or "entry point" in out


ENTRY_POINTS = [point.value for point in metadata.entry_points(group="verl.plugins")]


@needs_verl
@pytest.mark.slow
@pytest.mark.skipif(
    "predmask.plugins.verl.register" not in ENTRY_POINTS, reason="predmask is not installed beside verl"
)
def test_the_entry_point_alone_has_verl_load_the_plug_in():
    environment = {"VERL_USE_EXTERNAL_MODULES": "", "VERL_USE_EXTERNAL_PLUGINS": "auto"}
    code, out = doctor("--", *RUNNABLE, *launch_args(Predictive()), **environment)
    assert code == 0, out
    assert "loaded by verl" in out
