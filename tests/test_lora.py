"""Adapters: what is trained, the weights that engines and files get of it, and that the policy stays as it was."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers_training import small
from predmask.cli import main
from predmask.rollout import RolloutError, Sampling, TransformersConfig
from predmask.rollout.numerics import MISMATCH_TOLERANCES, NumericsCopy
from predmask.rollout.remote import RemoteEngine
from predmask.rollout.weights import base_model, checkpoint_weights, merged_state
from predmask.train import ConfigError, Trainer, run
from predmask.train.config import LoraConfig
from predmask.train.directory import RunDirectory, find_checkpoint
from predmask.train.forward import FusedForward, choose_forward
from predmask.train.lora import add_adapters
from predmask.train.models import load_policy, load_trained_policy
from small_models import dense_logp, dense_rows, small_model

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 12], [7], [4, 4, 8, 20, 11, 6], [7]] * 3
TARGETS = {
    "qwen3": "all-linear",
    "qwen3_untied": ("all-linear", "lm_head"),
    "llama": ("q_proj", "mlp.down_proj"),
    "qwen3_moe": "all-linear",
    "gemma2": "all-linear",
    "gpt2": "all-linear",
}
"""Kinds of models, and the layers of them that get adapters."""
MODULES = {
    "qwen3": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "qwen3_untied": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"},
    "llama": {"q_proj", "down_proj"},
    "qwen3_moe": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "gemma2": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "gpt2": {"c_attn", "c_proj", "c_fc"},
}


def lora(targets, **changes):
    names = (targets,) if isinstance(targets, str) else targets
    return LoraConfig(**{"enabled": True, "rank": 3, "alpha": 5, "targets": names} | changes)


def untrained(kind="qwen3", seed=0):
    return add_adapters(small_model(kind), lora(TARGETS[kind]), seed).eval()


def adapted(kind="qwen3", seed=0):
    """With adapters that look trained."""
    return trained(untrained(kind, seed), seed)


@torch.no_grad()
def trained(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def half(kind):
    """A model whose weights are bfloat16; its rotary frequencies stay float32, as those of a loaded one."""
    model = small_model(kind)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def by_peft(**settings):
    """A model that peft adapted in a way that is not offered here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, model = settings.pop("kind", peft.LoraConfig), settings.pop("model", "qwen3_untied")
        return peft.get_peft_model(small_model(model), kind(r=3, **settings)).eval()


def merged_by_peft(model):
    return copy.deepcopy(model).merge_and_unload(progressbar=False)


def frozen(model):
    """A copy of all that a model is."""
    return copy.deepcopy(model.state_dict())


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def sampling(**changes):
    return Sampling(**{"temperature": 1.0, "max_new_tokens": 8, "top_k": 5} | changes)


def generated(config, model, seed=0):
    return config.start(model).generate(PROMPTS, sampling(), torch.Generator().manual_seed(seed))


# --- What is trained


@pytest.mark.parametrize("kind", TARGETS)
def test_adapters_alone_are_trained_and_change_nothing_at_first(kind):
    model = untrained(kind)
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trainable} == MODULES[kind]
    for name, value in trainable.items():
        assert value.dtype == torch.float32
        assert 3 in value.shape, name
    assert not any(module.training for module in model.modules())
    plain = small_model(kind)
    assert torch.equal(dense_logp(model, [5, 6], [7, 8, 9]), dense_logp(plain, [5, 6], [7, 8, 9]))
    assert same(merged_state(model), plain.state_dict())


def test_the_seed_alone_decides_what_adapters_start_from():
    before = torch.get_rng_state()
    first = untrained(seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(99)
        again = untrained(seed=4)
    assert same(first.state_dict(), again.state_dict())
    assert not same(first.state_dict(), untrained(seed=5).state_dict())


def test_a_layers_output_is_that_of_the_formula():
    model = adapted("llama")
    layer = base_model(model).model.layers[0].self_attn.q_proj
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(layer(x), x @ (layer.base_layer.weight + 5 / 3 * product).T)


@pytest.mark.parametrize(
    ("kind", "targets", "match"),
    [
        ("qwen3", ("q_proj", "w1"), r"names w1, but Qwen3ForCausalLM has no linear .*: down_proj, gate_proj, k_proj"),
        ("qwen3", ("proj",), "names proj, but"),  # whole names, not their ends
        ("qwen3", ("embed_tokens",), "names embed_tokens, but Qwen3ForCausalLM has no linear layer of that name"),
        ("qwen3_moe", ("gate_up_proj",), r"names gate_up_proj, but .* has k_proj, lm_head, o_proj, q_proj, v_proj"),
        ("qwen3", ("all-linear", "lm_head"), r"includes the head, .* shares its weight with the embedding \(tied\)"),
    ],
)
def test_targets_that_cannot_be_adapted(kind, targets, match):
    model = small_model(kind)
    with pytest.raises(ConfigError, match=rf"lora\.targets .*{match}"):
        add_adapters(model, lora(targets), 0)
    assert same(model.state_dict(), small_model(kind).state_dict())


def test_adapters_on_fused_experts_are_refused():
    """peft puts some on the experts, too, where a dense layer has the names that theirs once had."""
    config = small_model("qwen3_moe").config
    config.mlp_only_layers = [0]
    model = AutoModelForCausalLM.from_config(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # peft's own
        with pytest.raises(ConfigError, match=r"lora\.targets is all-linear: .*experts.* name other layers, such as"):
            add_adapters(model, lora("all-linear"), 0)
    add_adapters(AutoModelForCausalLM.from_config(config), lora(("q_proj", "o_proj")), 0)


def test_a_missing_peft_is_said_before_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"predmask\[lora\]"):
        load_trained_policy(small({"model": "/nowhere"}, lora={"enabled": True}), CPU)
    assert main(["train", "arithmetic", "--lora", "--device=cpu"]) == 2
    assert "install predmask[lora]" in capsys.readouterr().err


# --- Merged weights


@pytest.mark.parametrize("kind", TARGETS)
def test_merged_weights_are_those_that_peft_merges(kind):
    model = adapted(kind)
    before = frozen(model)
    found = checkpoint_weights(model, torch.float32)
    assert same(model.state_dict(), before)
    expected = checkpoint_weights(merged_by_peft(model), torch.float32)
    assert found.keys() == expected.keys() == checkpoint_weights(small_model(kind), torch.float32).keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)
    changed = {name for name, value in checkpoint_weights(small_model(kind), torch.float32).items()
               if not torch.equal(value, found[name])}  # fmt: skip
    assert {name.split(".")[-2] for name in changed} == MODULES[kind]


def test_merged_weights_are_rounded_once():
    """In float32 first, also where the base is bfloat16."""
    model = add_adapters(half("qwen3"), lora("all-linear"), 0).eval()
    trained(model, 0)
    exact = merged_state(model)["model.layers.0.mlp.up_proj.weight"]
    layer = base_model(model).model.layers[0].mlp.up_proj
    factors = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    expected = layer.base_layer.weight.double() + 5 / 3 * factors
    assert exact.dtype == torch.float32
    torch.testing.assert_close(exact.double(), expected, rtol=1e-6, atol=1e-7)
    sent = checkpoint_weights(model, torch.bfloat16)["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(sent, exact.bfloat16())


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"target_modules": ["v_proj"], "use_dora": True}, "v_proj cannot be merged: LoRA of a variant"),
        ({"target_modules": ["v_proj"], "lora_bias": True}, "v_proj cannot be merged: .* with a bias"),
        ({"target_modules": ["v_proj"], "kind": peft.LoHaConfig}, "v_proj cannot be merged: .* is not LoRA"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens cannot be merged: .* is not LoRA on a linear layer"),
        ({"target_modules": ["lm_head"], "model": "qwen3"}, r"lm_head cannot be merged: .* another layer.* \(tied\)"),
    ],
)
def test_adapters_that_are_no_matrix_of_their_own_are_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        checkpoint_weights(by_peft(**settings), torch.float32)


def test_adapters_that_are_switched_off_are_not_merged():
    model = adapted("llama")
    with model.disable_adapter():
        off = merged_state(model)
    assert same(off, small_model("llama").state_dict())
    assert not same(merged_state(model), off)


# --- Engines


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_untied", "qwen3_moe", "gpt2"])
def test_the_engine_samples_with_its_adapters(kind):
    model = adapted(kind)
    before = frozen(model)
    engine = TransformersConfig().start(model)
    for version in (1, 2):
        rollout = engine.generate(PROMPTS, sampling(record_full=True), torch.Generator().manual_seed(0))
        torch.testing.assert_close(rollout.full_logp.double(), dense_rows(model, rollout), rtol=0, atol=1e-5)
        trained(model, version)
        engine.update_weights(model, version)
    trained(model, 0)
    assert same(model.state_dict(), before)


@pytest.mark.parametrize("numerics", MISMATCH_TOLERANCES)
def test_copies_round_merged_weights(numerics):
    model = adapted("qwen3_untied")
    before = frozen(model)
    found = NumericsCopy(model, numerics)
    for seed in (1, 2):
        expected = NumericsCopy(merged_by_peft(model), numerics).model.state_dict()
        assert found.model.state_dict().keys() == expected.keys()
        for name, value in expected.items():
            # Sums in another order may tip a rounding over, here and there.
            assert ((found.model.state_dict()[name] - value).abs() < 1e-6).float().mean() > 0.99, name
        trained(model, seed)
        found.load(model)
    trained(model, 0)
    assert same(model.state_dict(), before)


@pytest.mark.parametrize("numerics", ["fp8", "bfloat16"])
def test_the_engine_samples_from_the_rounded_copy(numerics):
    model = adapted("qwen3")
    rollout = generated(TransformersConfig(numerics=numerics), model)
    copied = NumericsCopy(model, numerics).model
    to_copy = (rollout.logp - dense_rows(copied, rollout).gather(1, rollout.tokens[:, None])[:, 0]).abs().mean()
    to_base = (rollout.logp - dense_rows(small_model("qwen3"), rollout).gather(1, rollout.tokens[:, None])[:, 0]).abs()
    assert to_copy < 0.1 * to_base.mean()


@pytest.fixture
def remote(monkeypatch):
    """Starts engines of another process; the second process is transformers, too."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    engines = []

    def start(model):
        engines.append(
            RemoteEngine(
                model, name="remote", backend="helpers_backends:ModelBackend", settings={}, environment={},
                dtype=torch.float32, tolerance=1e-3, context=512, temperatures=(0.01, 2.0),
            )
        )  # fmt: skip
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_updates_of_adapters_reach_an_engine_in_another_process(remote, kind):
    model = adapted(kind)
    before = frozen(model)
    engine = remote(model)
    for version in (1, 2):
        rollout = engine.generate(PROMPTS, sampling(), torch.Generator().manual_seed(0))
        expected = dense_rows(model, rollout).gather(1, rollout.tokens[:, None])[:, 0]
        torch.testing.assert_close(rollout.logp.double(), expected, rtol=0, atol=1e-5)
        trained(model, version)
        engine.update_weights(model, version)
    trained(model, 0)
    assert same(model.state_dict(), before)


def test_an_engine_without_the_adapters_is_found_out(remote, monkeypatch):
    monkeypatch.setattr("predmask.rollout.weights.merged_weight", lambda layer: layer.base_layer.weight)
    with pytest.raises(RolloutError, match="does not answer with the policy's weights"):
        remote(adapted())


# --- Forward passes


def test_a_bfloat16_base_is_computed_fused():
    """Float32 adapters, on the head too, over weights of 16 bits."""
    model = add_adapters(half("qwen3_untied"), lora(("all-linear", "lm_head")), 0).eval()
    trained(model, 0)
    rollout = generated(TransformersConfig(), model)
    forwards = [choose_forward(model, path, temperature=1.0, autocast=True)[0] for path in ("fused", "dense")]
    assert isinstance(forwards[0], FusedForward)
    (_, fused), (_, dense) = (forward.support(rollout) for forward in forwards)
    assert (fused.logp - dense.logp).nan_to_num().abs().mean() < 0.02  # where a slot is empty, both are -inf
    assert base_model(model).lm_head.base_layer.weight.dtype == torch.bfloat16


def test_a_wrong_head_is_found_out_in_bfloat16():
    model = half("qwen3")
    model.register_forward_hook(lambda _module, _inputs, output: setattr(output, "logits", output.logits * 1.001))
    _, reason = choose_forward(model, "auto", temperature=1.0, autocast=True)
    assert "away from" in reason
    assert choose_forward(half("qwen3"), "auto", temperature=1.0, autocast=True)[1] is None


# --- Files


@pytest.mark.parametrize("kind", [*TARGETS, "bfloat16"])
def test_the_checkpoint_is_merged_and_the_adapter_stands_beside_it(kind, tmp_path):
    if kind == "bfloat16":
        model = trained(add_adapters(half("qwen3"), lora("all-linear"), 0).eval(), 0)
    else:
        model = adapted(kind)
    before = frozen(model)
    directory = RunDirectory(small(output=str(tmp_path / "run")))
    _, tokenizer = load_policy("embedded", CPU)
    directory.write_checkpoint(model, tokenizer)
    assert same(model.state_dict(), before)
    assert {path.name for path in directory.path.iterdir() if path.is_dir()} == {"checkpoint", "adapter"}
    loaded, _ = load_policy(str(find_checkpoint(directory.path)), CPU)
    assert same(loaded.state_dict(), {name: value.float() for name, value in merged_state(model).items()})
    expected = dense_logp(model.float(), [5, 6, 7], [8, 9, 10, 11])
    torch.testing.assert_close(dense_logp(loaded, [5, 6, 7], [8, 9, 10, 11]), expected, rtol=0, atol=1e-5)
    if kind == "bfloat16":
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = peft.PeftModel.from_pretrained(small_model(kind), directory.path / "adapter").eval()
    assert same(again.state_dict(), before)
    assert not list((directory.path / "adapter").glob("*.bin"))


# --- Runs


def test_a_run_trains_its_adapters_alone():
    config = small(lora={"enabled": True, "rank": 4}, engine={"numerics": "float32"}, optimizer={"learning_rate": 1e-3})
    trainer = Trainer(config)
    start = frozen(trainer.model)
    list(trainer.steps())
    trainer.close()
    moved = {name for name, value in trainer.model.state_dict().items() if not torch.equal(value, start[name])}
    assert moved
    assert all(".lora_" in name for name in moved)
    assert not any(value.grad is not None for name, value in trainer.model.named_parameters() if ".lora_" not in name)
    assert trainer.agreement.mean < 1e-5


def test_a_run_in_bfloat16_ends_in_a_policy_that_loads(tmp_path):
    config = small(
        lora={"enabled": True, "base_dtype": "bfloat16"}, update={"autocast": True}, output=str(tmp_path / "run")
    )
    _, directory = run(config)
    loaded, _ = load_policy(str(find_checkpoint(directory)), CPU)
    assert loaded.dtype == torch.float32
    assert (directory / "adapter" / "adapter_model.safetensors").is_file()
