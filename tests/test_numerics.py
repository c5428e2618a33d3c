"""Rounded copies of a policy: the formats, what is rounded, and how much mismatch that makes."""

import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from predmask.rollout import Sampling, TransformersConfig
from predmask.rollout.numerics import MISMATCH_TOLERANCES, NumericsCopy, round_fp8, round_int4, round_int8
from predmask.tasks import Arithmetic
from predmask.train.config import PromptConfig
from predmask.train.models import EMBEDDED, load_policy
from predmask.train.prompts import Prompts
from small_models import dense_rows, small_model

ROUNDED = {"fp8": round_fp8, "int8": round_int8, "int4": round_int4}
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}


def fp8_grid():
    """The 127 values of float8 e4m3 that are not negative, by their bits: 4 of exponent (bias 7), 3 of mantissa."""
    values = [
        mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent in range(16)
        for mantissa in range(8)
    ]
    return np.array(values[:-1])  # the last pattern is NaN


GRIDS = {"fp8": fp8_grid(), "int8": np.arange(128.0), "int4": np.arange(8.0)}


def to_grid(values, grid):
    """The nearest value of the grid, that of the even index where two are as near."""
    upper = np.clip(np.searchsorted(grid, np.abs(values)), 1, len(grid) - 1)
    below, above = np.abs(values) - grid[upper - 1], grid[upper] - np.abs(values)
    down = (below < above) | ((below == above) & (upper % 2 == 1))
    return np.copysign(np.where(down, grid[upper - 1], grid[upper]), values)


def expected_rounding(x, name):
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(LARGEST[name])
    scale = np.where(scale > 0, scale, np.float32(1))
    return to_grid((x / scale).astype(np.float64), GRIDS[name]) * scale


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("shape", [(64,), (40, 33), (3, 5, 16)])
def test_rounding_is_that_of_the_format(name, shape):
    generator = np.random.default_rng(0)
    x = (generator.standard_t(2, shape) * 10.0 ** generator.integers(-6, 7, (*shape[:-1], 1))).astype(np.float32)
    found = ROUNDED[name](torch.from_numpy(x))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected_rounding(x, name), rtol=1e-6)


@pytest.mark.parametrize("name", ROUNDED)
def test_grid_points_and_midpoints(name):
    """A row whose scale is 1: grid values stay, midpoints go to the even neighbour."""
    grid = torch.tensor(GRIDS[name], dtype=torch.float32)
    assert torch.equal(ROUNDED[name](torch.cat([grid, -grid])), torch.cat([grid, -grid]))
    lower = torch.arange(len(grid) - 1)
    middle = torch.cat([(grid[1:] + grid[:-1]) / 2, grid[-1:]])  # the last one sets the scale
    assert torch.equal(ROUNDED[name](middle)[:-1], grid[lower + lower % 2])


@pytest.mark.parametrize("name", ROUNDED)
def test_each_row_has_a_scale_of_its_own(name):
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    factors = torch.tensor([1.0, 2.0**-20, 2.0**20, 0.5, 8.0, -1.0])[:, None]
    torch.testing.assert_close(ROUNDED[name](x * factors), ROUNDED[name](x) * factors, rtol=1e-6, atol=0)
    one_by_one = torch.stack([ROUNDED[name](row) for row in x])
    assert torch.equal(ROUNDED[name](x), one_by_one)
    largest = x.abs().amax(-1)
    torch.testing.assert_close(ROUNDED[name](x).abs().amax(-1), largest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_twice_changes_nothing_more(name):
    once = ROUNDED[name](torch.randn(40, 64, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(ROUNDED[name](once), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 3e38])
def test_extreme_rows(name, value):
    row = torch.tensor([[value, 0.0, -value]])
    torch.testing.assert_close(ROUNDED[name](row), row, rtol=1e-6, atol=1e-44)


# --- The copy


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_untied", "gemma2"])
def test_linear_layers_are_rounded_but_not_the_head(name, kind):
    model = small_model(kind)
    rounded = NumericsCopy(model, name).model
    changed = set()
    for (weight, found), expected in zip(rounded.named_parameters(), model.parameters(), strict=True):
        if "proj" in weight:
            np.testing.assert_allclose(found.numpy(), expected_rounding(expected.detach().numpy(), name), rtol=1e-6)
            changed.add(weight)
        else:
            assert torch.equal(found, expected)
    assert len(changed) == 2 * 7  # q, k, v, o, gate, up, down of two layers
    assert torch.equal(rounded.get_output_embeddings().weight, model.get_output_embeddings().weight)


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_activations_are_rounded_in_w8a8_formats(name):
    model = small_model("qwen3")
    layer = model.model.layers[0].mlp.up_proj
    layer_copy = NumericsCopy(model, name).model.model.layers[0].mlp.up_proj
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    inputs = x.numpy() if name == "int4" else expected_rounding(x.numpy(), name)
    expected = inputs @ expected_rounding(layer.weight.detach().numpy(), name).T
    np.testing.assert_allclose(layer_copy(x).numpy(), expected, rtol=1e-4, atol=1e-5)


def test_head_computes_unrounded():
    model = small_model("qwen3_untied")
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    for name in ROUNDED:
        assert torch.equal(NumericsCopy(model, name).model.lm_head(x), model.lm_head(x))


def test_bfloat16_is_what_loading_in_bfloat16_gives(tmp_path):
    """Rotary frequencies stay float32: far positions show it."""
    model = small_model("qwen3")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ids = torch.randint(4, 24, (2, 500), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(NumericsCopy(model, "bfloat16").model(ids).logits, loaded(ids).logits)


@pytest.mark.parametrize("name", MISMATCH_TOLERANCES)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_untied", "qwen3_moe"])
def test_loading_again_is_a_new_copy(name, kind):
    model = small_model(kind)
    found = NumericsCopy(model, name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3).add_(0.05)
    before = copy.deepcopy(model.state_dict())
    found.load(model)
    expected = NumericsCopy(model, name).model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in found.model.state_dict().items())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in found.model.parameters())
    assert not any(module.training for module in found.model.modules())


@pytest.mark.parametrize("name", ROUNDED)
def test_what_would_not_be_rounded_is_refused(name):
    """Matrices outside linear layers would be left as they are, and the mismatch would silently be too small."""
    with pytest.raises(ValueError, match=rf"numerics '{name}' rounds linear layers and .*c_attn.*; use numerics"):
        NumericsCopy(small_model("gpt2"), name)
    NumericsCopy(small_model("gpt2"), "bfloat16")


# --- Mixtures of experts


def with_experts(kind, **changes):
    """A random mixture of experts, small as `small_model` has it."""
    config = AutoConfig.for_model(
        kind, vocab_size=24, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, num_experts_per_tok=2, pad_token_id=0, eos_token_id=3,
        initializer_range=0.3, **changes,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


MIXTURES = {
    "qwen3_moe": lambda: small_model("qwen3_moe"),
    "mixtral": lambda: with_experts("mixtral", num_local_experts=4),
    # With an expert that all tokens go to, and a gate for it.
    "qwen2_moe": lambda: with_experts(
        "qwen2_moe", num_experts=4, moe_intermediate_size=12, shared_expert_intermediate_size=20
    ),
    # Its experts' matrices are transposed, and have biases.
    "gpt_oss": lambda: with_experts("gpt_oss", num_local_experts=4, head_dim=8),
}
SPARED = ("norm", "bias", "gate.weight", "router.weight", "shared_expert_gate.weight", "embed", "lm_head", "sinks")


def rounded_experts(experts, name):
    """NumPy's rounding of (gate_up, down), [E, outputs, inputs]: a scale for each output of each expert."""
    weights = [weight.detach().numpy() for weight in (experts.gate_up_proj, experts.down_proj)]
    if type(experts).__name__ == "GptOssExperts":  # which has [E, inputs, outputs]
        weights = [weight.swapaxes(1, 2) for weight in weights]
    return [expected_rounding(weight, name) for weight in weights]


def expected_experts(experts, x, chosen, shares, name):
    """NumPy's sum over each token's experts [T, D], whose inputs are rounded in W8A8 formats."""

    def inputs(values):
        return values if name == "int4" else expected_rounding(values.astype(np.float32), name)

    gate_up, down = rounded_experts(experts, name)
    found = np.zeros_like(x)
    for token, slot in np.ndindex(*chosen.shape):
        expert = chosen[token, slot]
        gate, up = np.split(gate_up[expert] @ inputs(x[token]), 2)
        inner = gate / (1 + np.exp(-gate)) * up
        found[token] += shares[token, slot] * (down[expert] @ inputs(inner))
    return found


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_are_rounded_but_not_what_weighs_them(name, kind):
    model = MIXTURES[kind]()
    rounded = NumericsCopy(model, name).model
    changed = set()
    for (weight, found), expected in zip(rounded.named_parameters(), model.parameters(), strict=True):
        if torch.equal(found, expected):
            assert any(part in weight for part in SPARED), weight
        else:
            changed.add(weight.rpartition("layers.")[2].partition(".")[2])
            assert not weight.endswith(SPARED)
    assert {weight for weight in changed if "experts" in weight} == {
        "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    }  # fmt: skip
    assert ("mlp.shared_expert.up_proj.weight" in changed) == (kind == "qwen2_moe")
    for layer, original in zip(rounded.model.layers, model.model.layers, strict=True):
        found = [layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj]
        if kind == "gpt_oss":
            found = [weight.mT for weight in found]
        for values, expected in zip(found, rounded_experts(original.mlp.experts, name), strict=True):
            np.testing.assert_allclose(values.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_inputs_of_experts_are_rounded_in_w8a8_formats(name, kind, implementation):
    """Those of gate and up, and those of down, whatever computes the policy's own experts."""
    model = MIXTURES[kind]()
    model.set_experts_implementation(implementation)
    copied = NumericsCopy(model, name).model
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 16, generator=generator)
    chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(7)])
    shares = torch.rand(7, 2, generator=generator)
    found = copied.model.layers[1].mlp.experts(x, chosen, shares)
    experts = model.model.layers[1].mlp.experts
    expected = expected_experts(experts, x.numpy(), chosen.numpy(), shares.numpy(), name)
    # A last bit that tips a rounding over changes one term, by what the format's grid is apart.
    close = np.isclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)
    assert close.all(axis=-1).mean() > 0.8
    assert model.config._experts_implementation == implementation
    torch.testing.assert_close(copied.model.layers[1].mlp.gate(x)[0], model.model.layers[1].mlp.gate(x)[0])


def test_other_experts_are_refused():
    """Of which this knows no matrices, since they have no gate."""
    model = small_model("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.experts.has_gate = False
    with pytest.raises(ValueError, match=r"rounds linear layers and experts, but .*gate_up_proj .*is in none"):
        NumericsCopy(model, "fp8")


@pytest.mark.parametrize("name", MISMATCH_TOLERANCES)
def test_rounded_experts_mismatch_as_their_format_does(name):
    model = small_model("qwen3_moe")
    settings = Sampling(temperature=1.0, max_new_tokens=12, top_k=0, record_full=True)
    prompts = [[4 + i % 20, 5 + i % 7, 6 + i % 3] for i in range(20)]
    engine = TransformersConfig(numerics=name).start(model)
    rollout = engine.generate(prompts, settings, torch.Generator().manual_seed(0))
    copied = NumericsCopy(model, name).model
    to_copy = (rollout.full_logp - dense_rows(copied, rollout)).abs().mean()
    to_policy = (rollout.full_logp - dense_rows(model, rollout)).abs().mean()
    if name == "float32":
        assert to_policy < 1e-5
    else:
        assert to_copy < 0.3 * to_policy


def test_biases_and_other_modules_are_left():
    model = small_model("llama")
    model.model.layers[0].mlp.up_proj.bias = nn.Parameter(torch.linspace(0, 1, 32))
    copied = NumericsCopy(model, "int4").model
    assert torch.equal(copied.model.layers[0].mlp.up_proj.bias, model.model.layers[0].mlp.up_proj.bias)


# --- How much mismatch


@functools.cache
def mismatch(numerics, temperature=1.0):
    """(mean KL, mean |Δ log-prob| of sampled tokens) of the engine against the embedded model itself."""
    tokenizer = load_policy(EMBEDDED, torch.device("cpu"))[1]
    prompts = Prompts(tokenizer, PromptConfig()).encode(Arithmetic().problems("train")[:48])
    model = small_model(EMBEDDED)
    settings = Sampling(temperature=temperature, max_new_tokens=64, top_k=0, record_full=True)
    engine = TransformersConfig(numerics=numerics).start(model)
    rollout = engine.generate(prompts, settings, torch.Generator().manual_seed(0))
    assert len(rollout.tokens) > 800
    exact = dense_rows(model, rollout, temperature)
    engine_logp = rollout.full_logp.double()
    kl = (engine_logp.exp() * (engine_logp - exact)).sum(-1).mean()
    gap = (rollout.logp - exact.gather(1, rollout.tokens[:, None])[:, 0]).abs().mean()
    return kl.item(), gap.item()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_coarser_formats_mismatch_more(temperature):
    kl = {numerics: mismatch(numerics, temperature)[0] for numerics in MISMATCH_TOLERANCES}
    assert abs(kl["float32"]) < 1e-6
    for fine in ("bfloat16", "int8"):
        assert abs(kl["float32"]) < 0.1 * kl[fine]
        assert kl[fine] < 0.5 * kl["fp8"]
    assert kl["fp8"] < kl["int4"]


@pytest.mark.parametrize("numerics", MISMATCH_TOLERANCES)
def test_mismatch_is_within_its_tolerance(numerics):
    config = TransformersConfig(numerics=numerics)
    assert mismatch(numerics)[1] < config.mismatch_tolerance
    assert mismatch(numerics, 2.0)[1] < config.mismatch_tolerance


@pytest.mark.parametrize("numerics", ["fp8", "int8", "int4"])
def test_the_engine_samples_from_its_copy(numerics):
    """Its log-probs are far nearer to those of the rounded copy than to those of the policy."""
    model = small_model("qwen3")
    prompts = [[4 + i % 20, 5 + i % 7, 6 + i % 3] for i in range(40)]
    settings = Sampling(temperature=1.0, max_new_tokens=12, top_k=0, record_full=True)
    rollout = (
        TransformersConfig(numerics=numerics).start(model).generate(prompts, settings, torch.Generator().manual_seed(0))
    )
    to_copy = (rollout.full_logp - dense_rows(NumericsCopy(model, numerics).model, rollout)).abs().mean()
    to_policy = (rollout.full_logp - dense_rows(model, rollout)).abs().mean()
    assert to_copy < 0.1 * to_policy
