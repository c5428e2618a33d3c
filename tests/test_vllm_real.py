"""vLLM itself, beyond the contract of all engines in test_engine.py: numerics, new weights, faults, training."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers_backends import FAULT
from helpers_engines import started
from helpers_processes import MARK, comes_true, offspring
from helpers_training import small
from predmask.rollout import RolloutError, Sampling, VLLMConfig
from predmask.rollout import vllm as vllm_module
from predmask.train import Trainer
from predmask.train.config import LoraConfig
from predmask.train.lora import add_adapters
from predmask.train.models import EMBEDDED
from small_models import VOCABULARY, dense_rows, small_model

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm runs these")

FLOAT32 = VLLMConfig(dtype="float32", kv_cache_gb=0.5)
BFLOAT16 = VLLMConfig(kv_cache_gb=0.5)
FP8 = VLLMConfig(quantization="fp8_per_channel", kv_cache_gb=0.5)
PROMPTS = [[5, 9, 12], [7], [4, 4, 8, 20, 11, 6, 9, 13, 21], [7], [10, 4, 5, 6, 8, 9]] * 4
LONG = [[(7 * position + shift) % VOCABULARY for position in range(200)] for shift in range(4)]
"""Longer than a block of the prefix cache, 128 tokens on a CPU."""
TESTS = str(Path(__file__).parent)
BACKEND = {"backend": "helpers_backends:FaultyBackend"}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def sampling(**changes):
    return Sampling(**{"temperature": 1.0, "max_new_tokens": 12, "top_k": 8} | changes)


def nudge(model, seed, size=0.05):
    """Move all weights, as an optimiser does: in place."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * parameter.std() * torch.randn(parameter.shape, generator=generator))


def gaps(model, rollout, temperature=1.0):
    """|log mu - log pi| of the sampled tokens [N] and of the likeliest [N, K]."""
    dense = dense_rows(model, rollout, temperature)
    return (
        (rollout.logp - dense.gather(1, rollout.tokens[:, None])[:, 0]).abs(),
        (rollout.topk_logp - dense.gather(1, rollout.topk_ids)).abs(),
    )


def largest_gap(model, rollout, temperature=1.0):
    rollout.check(top_k=rollout.top_k, vocabulary_size=model.config.vocab_size)
    return max(float(gap.max()) for gap in gaps(model, rollout, temperature))


# --- Numerics


@pytest.mark.parametrize("kind", [EMBEDDED, "qwen3_untied"])
def test_float32_agrees_with_the_trainer(kind):
    """Field cases 8 and 12: at any temperature, and for K above 20, which is vLLM's own limit."""
    model = small_model(kind)
    engine = started(FLOAT32, model)
    for temperature in (0.5, 1.0, 2.0):
        rollout = engine.generate(PROMPTS, sampling(temperature=temperature, top_k=22), seeded())
        assert rollout.top_k == 22
        assert largest_gap(model, rollout, temperature) < 1e-4


def test_mixture_of_experts():
    """vLLM 0.32 lays experts out for a CPU, and wrongly so when they are loaded again: the probe refuses that."""
    config = small_model("qwen3_moe").config
    config.update({"hidden_size": 32, "moe_intermediate_size": 32})  # sizes that its CPU kernels take
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    if not torch.cuda.is_available():
        with pytest.raises(RolloutError, match="does not answer with the policy's weights"):
            FLOAT32.start(model)
        return
    engine = started(FLOAT32, model)
    for version in (1, 2):
        assert largest_gap(model, engine.generate(PROMPTS, sampling(), seeded())) < 1e-4
        nudge(model, version)
        engine.update_weights(model, version)


def test_rounded_numerics_are_rounded_within_their_tolerance():
    model = small_model(EMBEDDED)
    found = {}
    for config in (FLOAT32, BFLOAT16, FP8):
        rollout = started(config, model).generate(PROMPTS * 4, sampling(top_k=20), seeded())
        rollout.check(top_k=20, vocabulary_size=model.config.vocab_size)
        found[config] = [float(gap.mean()) for gap in gaps(model, rollout)]
        assert max(found[config]) < config.mismatch_tolerance
    for config, lower, factor in ((BFLOAT16, FLOAT32, 100), (FP8, BFLOAT16, 2)):
        assert all(gap > factor * less for gap, less in zip(found[config], found[lower], strict=True))


# --- New weights


def test_quantised_engines_quantise_anew():
    """After updates of all weights, the tied head included: the answers of an engine that began with these."""
    model = small_model(EMBEDDED)
    engine = started(FP8, model)
    before = engine.generate(PROMPTS, sampling(), seeded())
    for version in (1, 2):
        nudge(model, version)
        engine.update_weights(model, version)
    after = engine.generate(PROMPTS, sampling(), seeded())
    fresh = FP8.start(model)
    expected = fresh.generate(PROMPTS, sampling(), seeded())
    fresh.close()
    for name in ("tokens", "logp", "topk_ids", "topk_logp"):
        assert torch.equal(getattr(after, name), getattr(expected, name))
    assert set(after.version.tolist()) == {2}
    assert gaps(model, before)[1].mean() > 1.5 * gaps(model, after)[1].mean()


@pytest.mark.parametrize("config", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "targets"), [("qwen3", ["all-linear"]), ("qwen3_untied", ["q_proj", "lm_head"])])
def test_updates_of_adapters_reach_the_engine(config, kind, targets):
    """Merged into the weights that it holds; the policy is left as it was."""
    lora = LoraConfig(enabled=True, rank=3, targets=tuple(targets))
    model = add_adapters(small_model(kind), lora, 0).eval()
    engine = started(config, model)
    for version in (1, 2):
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter.data, std=0.1 * version, generator=seeded(version))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        engine.update_weights(model, version)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        rollout = engine.generate(PROMPTS, sampling(), seeded())
        mean = [float(gap.mean()) for gap in gaps(model, rollout)]
        without = [float(gap.mean()) for gap in gaps(small_model(kind), rollout)]
        assert max(mean) < (1e-5 if config is FLOAT32 else config.mismatch_tolerance)
        assert all(5 * near < far for near, far in zip(mean, without, strict=True))


def test_cached_prompts_follow_the_weights():
    """Field case 16: prompts of which the cache holds a part, seen before and after two updates."""
    model = small_model("qwen3")
    engine = started(FLOAT32, model)
    for version in (1, 2, 3):
        for _ in range(2):
            assert largest_gap(model, engine.generate(LONG, sampling(), seeded())) < 1e-4
        nudge(model, version)
        engine.update_weights(model, version)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """Starts engines that leave out a part of each update, and says which part from now on."""
    path = tmp_path_factory.mktemp("faulty") / "fault"
    engines = {}
    remote = vllm_module.RemoteEngine

    def start(config, fault=""):
        path.write_text(fault)
        if config not in engines:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(FAULT, str(path))
                patch.setenv("PYTHONPATH", os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]))
                patch.setattr(vllm_module, "RemoteEngine", lambda model, **given: remote(model, **given | BACKEND))
                engines[config] = config.start(small_model("qwen3"))
        return engines[config], path.write_text

    yield start
    for engine in engines.values():
        engine.close()


@pytest.mark.parametrize("config", [FLOAT32, FP8], ids=["float32", "fp8"])
@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ("cache", "does not answer with the policy's weights"),
        ("all", "old weights|does not answer with the policy's weights"),
        ("lm_head.weight", r"as they were: lm_head\.weight$"),
        ("model.layers.1.input_layernorm.weight", r"as they were: model\.layers\.1\.input_layernorm\.weight$"),
        ("model.layers.0.self_attn.k_proj.weight", None),  # a part of one that vLLM holds as a whole
    ],
    ids=["cache", "all", "head", "norm", "key"],
)
def test_an_update_that_leaves_something_out_is_an_error(faulty, config, fault, match):
    engine, leave_out = faulty(config)
    model = small_model("qwen3")
    engine.update_weights(model, 0)
    nudge(model, 1, size=1.0 if (fault, config) == ("cache", FP8) else 1e-3)  # a stale prefix may be within rounding
    leave_out(fault)
    with pytest.raises(RolloutError, match=match):
        engine.update_weights(model, 1)
    leave_out("")
    engine.update_weights(model, 1)


def test_an_engine_that_never_gets_the_weights_does_not_start(faulty):
    with pytest.raises(RolloutError, match=r"does not answer with the policy's weights \(version 0\)"):
        faulty(replace(FP8, kv_cache_gb=0.25), "all")


# --- What is sampled from


def test_the_models_own_sampling_settings_are_left_aside():
    """Field case 9: the whole distribution, whatever generation_config says."""
    model = small_model("qwen3", do_sample=True, top_k=2, top_p=0.5, temperature=0.3, repetition_penalty=3.0)
    rollout = started(FLOAT32, model).generate([[7]] * 300, sampling(max_new_tokens=4), seeded())
    assert len(rollout.tokens.unique()) > 10
    assert largest_gap(model, rollout) < 1e-4


def test_no_token_of_a_padded_vocabulary():
    """Field case 15: vLLM pads 24 ids to 64; none of them is sampled or has a share of the probability."""
    model = small_model("qwen3_untied")
    settings = sampling(temperature=2.0, top_k=VOCABULARY)
    rollout = started(FLOAT32, model).generate([[7]] * 400, settings, seeded())
    rollout.check(top_k=VOCABULARY, vocabulary_size=VOCABULARY)
    assert set(rollout.tokens.tolist()) == set(range(VOCABULARY))
    torch.testing.assert_close(rollout.topk_logp.exp().sum(-1), torch.ones(len(rollout.tokens)))


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_temperatures_that_vllm_would_change_or_refuse(temperature):
    engine = started(FLOAT32, small_model("qwen3"))
    with pytest.raises(RolloutError, match=f"temperature is {temperature}, but the engine samples") as caught:
        engine.generate([[7]], sampling(temperature=temperature), seeded())
    assert "\n" not in str(caught.value)
    for allowed in (0.01, 2.0):
        engine.generate([[7]], sampling(temperature=allowed), seeded())


# --- Faults


def test_configurations_that_do_not_fit_the_model():
    model = small_model("qwen3")
    with pytest.raises(ValueError, match=r"engine\.max_length is 513, but the model's context is 512"):
        VLLMConfig(max_length=513).start(model)
    with pytest.raises(RolloutError, match=r"engine\.kv_cache_gb"):
        VLLMConfig(kv_cache_gb=1e-6).start(model)


def test_killed_while_it_answers(monkeypatch, tmp_path):
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = replace(FLOAT32, max_length=64, batch_size=4).start(small_model("qwen3", eos_token_id=[0]))
    with pytest.raises(RolloutError, match="come to 65 tokens, but the engine takes 64; lower rollout"):
        engine.generate([[7]], sampling(max_new_tokens=64), seeded())
    threading.Timer(0.5, os.kill, (engine.pid, signal.SIGKILL)).start()
    with pytest.raises(RolloutError, match="vllm engine's process was ended by SIGKILL") as caught:
        engine.generate([[7]] * 1000, sampling(max_new_tokens=60), seeded())
    (log,) = tmp_path.glob("*.failed.log")
    assert str(log) in str(caught.value)
    engine.close()
    assert comes_true(lambda: not offspring(), 2)


# --- Training


def test_training_learns_and_repeats_itself():
    settings = {"name": "vllm", "quantization": "fp8_per_channel", "kv_cache_gb": 0.5}
    sizes = {"rollout": {"prompts": 16, "group_size": 16}, "update": {"steps_per_rollout": 16, "micro_batch_size": 16}}
    config = small(sizes, {"engine": settings, "steps": 8, "eval": {"prompts": 64}})
    trainer = Trainer(config)
    before = trainer.evaluate()
    results = list(trainer.steps())
    trainer.close()
    after = results[-1].accuracy
    assert trainer.agreement is not None
    assert 1e-4 < trainer.agreement.mean < config.engine.mismatch_tolerance
    assert after.sampled > before.sampled + 0.3
    assert after.greedy > before.greedy + 0.3
    again = Trainer(replace(config, steps=1))
    (repeated,) = again.steps()
    again.close()
    assert {"reward", "mask_frac", "mismatch_kl"} <= repeated.metrics.keys()
    for name, value in repeated.metrics.items():
        assert value == results[0].metrics[name] or "second" in name, name


def test_interrupted_training_leaves_no_process(monkeypatch, tmp_path):
    """Ctrl-C reaches all processes in the foreground."""
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    output = tmp_path / "run"
    options = {
        "engine": "vllm",
        "engine.quantization": "fp8_per_channel",
        "engine.kv_cache_gb": 0.5,
        "rollout.prompts": 4,
        "rollout.group_size": 4,
        "eval.prompts": 4,
        "steps": 1000,
        "output": output,
    }
    pairs = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    run = [sys.executable, "-m", "predmask", "train", "arithmetic", *pairs]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as trainer:
        metrics = output / "metrics.jsonl"
        assert comes_true(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2, 100)
        assert len(offspring()) > 1
        os.killpg(trainer.pid, signal.SIGINT)
        said, _ = trainer.communicate(timeout=60)
    assert trainer.returncode == 130, said.decode()
    assert json.loads((output / "summary.json").read_text())["status"] == "interrupted"
    assert b"Traceback" not in said
    assert comes_true(lambda: not offspring(), 2)
    assert not list(tmp_path.glob("predmask-*"))
