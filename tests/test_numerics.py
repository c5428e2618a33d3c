"""Rounded copies of a policy: the formats, what is rounded, and how much mismatch that makes."""

import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from predmask.rollout import Sampling, TransformersConfig
from predmask.rollout.numerics import MISMATCH_TOLERANCES, NumericsCopy, round_fp8, round_int4, round_int8
from predmask.tasks import Arithmetic
from predmask.train.evaluate import encode
from predmask.train.models import EMBEDDED, load_policy
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
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_untied"])
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
@pytest.mark.parametrize(("kind", "part"), [("gpt2", "c_attn"), ("qwen3_moe", "experts")])
def test_what_would_not_be_rounded_is_refused(name, kind, part):
    """Matrices outside linear layers would be left as they are, and the mismatch would silently be too small."""
    with pytest.raises(ValueError, match=rf"numerics '{name}' rounds linear layers, but .*{part}.*; use numerics"):
        NumericsCopy(small_model(kind), name)
    NumericsCopy(small_model(kind), "bfloat16")


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
    prompts = encode(tokenizer, Arithmetic().problems("train")[:48])
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
