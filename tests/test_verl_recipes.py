"""The recipes for verl: what they launch, against the presets that have the same values."""

import importlib.util
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from predmask.core import RULES
from predmask.train.presets import PRESETS

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes" / "verl"
MODELS = {
    "qwen3-4b-fsdp": "qwen3-4b-dapo",
    "qwen3-8b-fsdp": "qwen3-8b-dapo",
    "qwen3-30b-a3b-megatron": "qwen3-30b-a3b-dapo",
}
MASKS = {"predictive": "", "dppo-topk-kl": "-dppo", "grpo-clip-higher": "-grpo"}
needs_verl = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed")
ignores_verl = pytest.mark.filterwarnings("ignore::UserWarning:verl", "ignore::DeprecationWarning")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def command(recipe, *arguments, **variables):
    """The words that a recipe would run after `python -m verl.trainer.main_ppo`."""
    environment = {"PYTHONPATH": str(ROOT / "src"), "PYTHON": sys.executable, "DRY_RUN": "1", "DATA": "/data"}
    found = subprocess.run(
        ["bash", str(RECIPES / f"{recipe}.sh"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment, **variables},
        check=False,
    )
    assert found.returncode == 0, found.stderr
    python, *words = shlex.split(found.stdout)
    assert (python, words[:2]) == (sys.executable, ["-m", "verl.trainer.main_ppo"])
    return words[2:]


def said(words):
    return {path.lstrip("+"): yaml.safe_load(value) for path, _, value in (word.partition("=") for word in words)}


@pytest.mark.parametrize("script", sorted(RECIPES.glob("*.sh")), ids=lambda path: path.name)
def test_the_shell_reads_it(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.name == "common.sh" or os.access(script, os.X_OK)


@pytest.mark.parametrize("recipe", MODELS)
def test_values_are_those_of_the_preset(recipe):
    values = PRESETS[MODELS[recipe]].values
    prompts = values["rollout"]["prompts"]
    expected = {
        "actor_rollout_ref.model.path": values["model"],
        "data.train_batch_size": prompts,
        "data.max_prompt_length": values["prompt"]["max_tokens"],
        "data.max_response_length": values["rollout"]["max_new_tokens"],
        f"{ROLLOUT}.n": values["rollout"]["group_size"],
        f"{ROLLOUT}.temperature": values["rollout"]["temperature"],
        f"{ROLLOUT}.max_model_len": values["engine"]["max_length"],
        f"{ROLLOUT}.val_kwargs.n": values["eval"]["samples"],
        f"{ROLLOUT}.val_kwargs.temperature": values["rollout"]["temperature"],
        f"{ACTOR}.ppo_mini_batch_size": prompts // values["update"]["steps_per_rollout"],
        f"{ACTOR}.ppo_max_token_len_per_gpu": values["update"]["micro_batch_tokens"],
        f"{ACTOR}.loss_agg_mode": values["loss"]["aggregation"].replace("_", "-"),
        f"{ACTOR}.loss_scale_factor": values["loss"]["horizon"],
        f"{ACTOR}.optim.weight_decay": values["optimizer"]["weight_decay"],
        f"{ACTOR}.optim.betas": [0.9, values["optimizer"]["beta2"]],
        f"{ACTOR}.optim.clip_grad": values["optimizer"]["grad_clip"],
        "algorithm.norm_adv_by_std_in_grpo": values["advantage"]["scale_by_std"],
        "trainer.total_training_steps": values["steps"],
        "trainer.test_freq": values["eval"]["every"],
    }
    given = said(command(recipe))
    assert {path: given[path] for path in expected} == expected
    assert float(given[f"{ACTOR}.optim.lr"]) == values["optimizer"]["learning_rate"] == 1e-6


def test_masks_differ_in_the_rule_alone():
    loss = f"{ACTOR}.policy_loss."
    names = ("trainer.experiment_name", "trainer.default_local_dir")
    first, *others = (said(command("qwen3-4b-fsdp", MASK=mask)) for mask in (*MASKS, "none"))
    for other in others:
        different = {path for path in first | other if first.get(path) != other.get(path)}
        assert all(path.startswith(f"{loss}rule.") or path in names for path in different)
        assert f"{loss}rule.name" in different


def test_switches():
    words = said(
        command("qwen3-30b-a3b-megatron", "trainer.save_freq=-1", NNODES="4", FP8="1", TRACES="/t", ROLLOUT="sglang")
    )
    assert words["trainer.nnodes"] == 4
    assert words["trainer.save_freq"] == -1
    assert words["trainer.experiment_name"] == "qwen3-30b-a3b-predictive-fp8"
    assert words[f"{ROLLOUT}.quantization"] == "fp8"
    assert words[f"{ROLLOUT}.name"] == "sglang"
    assert words[f"{ACTOR}.policy_loss.traces.directory"] == "/t"
    assert f"{ROLLOUT}.quantization" not in said(command("qwen3-4b-fsdp"))


def test_an_unknown_mask_is_refused():
    found = subprocess.run(
        ["bash", str(RECIPES / "qwen3-4b-fsdp.sh")],
        capture_output=True,
        text=True,
        env={**os.environ, "MASK": "ppo", "DRY_RUN": "1"},
        check=False,
    )
    assert found.returncode == 2
    assert "choose predictive, dppo-topk-kl" in found.stderr


@needs_verl
@ignores_verl
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "mask"),
    [(recipe, "predictive") for recipe in MODELS] + [("qwen3-4b-fsdp", mask) for mask in [*MASKS, "none"][1:]],
)
def test_verl_takes_it(recipe, mask):
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf
    from verl.utils.config import validate_config

    from predmask.plugins.verl.settings import PolicyLossConfig

    words = command(recipe, MASK=mask, NNODES="2", FP8=str(int(recipe.endswith("megatron"))))
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=words)
    loss = OmegaConf.to_container(config.actor_rollout_ref.actor.policy_loss, resolve=True)
    assert loss.pop("_target_") == f"{PolicyLossConfig.__module__}.{PolicyLossConfig.__name__}"
    settings = PolicyLossConfig(**loss)  # raises for any hindrance
    if mask != "none":
        values = PRESETS[MODELS[recipe] + MASKS[mask]].values
        fields = dict(values["rule"])
        assert settings.make_rule() == RULES[fields.pop("name")](**fields)
        assert (settings.top_k, settings.ratio_cap) == (values["rollout"]["top_k"], values["loss"]["ratio_cap"])
    validate_config(config, use_reference_policy=False, use_critic=False)


def written(tmp_path):
    """The three files, made of tables in the layouts of the data sets."""
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    spec = importlib.util.spec_from_file_location("make_data", RECIPES / "make_data.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    asked = [f"{script.BEFORE}{question}{script.AFTER}" for question in ("1+1?", "1+1?", "2+2?", "3+3?")]
    train = {
        "prompt": [[{"role": "user", "content": text}] for text in asked],
        "reward_model": [{"ground_truth": answer, "style": "rule"} for answer in ("2", "2", "4", "6")],
    }
    pq.write_table(pa.table(train), tmp_path / "train.parquet")
    for name, question, answer in (("a", "2+2?", "4"), ("b", "5+5?", "10")):
        pq.write_table(pa.table({"problem": [question], "answer": [answer]}), tmp_path / f"{name}.parquet")
    held_out = {"aime24": str(tmp_path / "a.parquet"), "aime25": str(tmp_path / "b.parquet")}
    script.main(tmp_path / "out", (str(tmp_path / "train.parquet"),), held_out)
    names = ("dapo-math-17k", "aime24", "aime25")
    return {name: pq.read_table(tmp_path / "out" / f"{name}.parquet").to_pylist() for name in names}


def test_the_data_has_each_question_once_and_none_that_is_held_out(tmp_path, capsys):
    files = written(tmp_path)
    rows = files["dapo-math-17k"]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["2", "6"]
    assert [row["data_source"] for row in rows] == ["math_dapo", "math_dapo"]
    assert [row["reward_model"]["ground_truth"] for row in files["aime24"] + files["aime25"]] == ["4", "10"]
    for row in [*rows, *files["aime24"]]:
        [message] = row["prompt"]
        assert message["role"] == "user"
        assert message["content"].count("Answer:") == 2
        assert message["content"].startswith("Solve the following math problem step by step.")
    assert "2 problems in" in capsys.readouterr().out


@needs_verl
@ignores_verl
def test_verl_scores_the_data(tmp_path):
    from verl.utils.reward_score import default_compute_score

    for rows in written(tmp_path).values():
        for row in rows:
            truth = row["reward_model"]["ground_truth"]
            right = default_compute_score(row["data_source"], f"so it is.\nAnswer: {truth}", truth)
            wrong = default_compute_score(row["data_source"], "so it is.\nAnswer: 7", truth)
            assert (right["score"], wrong["score"]) == (1.0, -1.0)
