"""The policy's weights on their way to an engine, and the proof that it answers with them."""

import copy
import shutil
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from predmask.rollout import Rollout, RolloutError
from predmask.rollout.numerics import MISMATCH_TOLERANCES, NumericsCopy
from predmask.rollout.probe import Probe
from predmask.rollout.weights import weights_file
from predmask.train.models import EMBEDDED
from small_models import SIZES, VOCABULARY, small_model

UNDELIVERED = "the engine does not answer with the policy's weights"
OLD = "the engine still answers with old weights"


def probe_of(model, numerics):
    context = model.config.max_position_embeddings
    return Probe(vocabulary_size=model.config.vocab_size, context=context, tolerance=MISMATCH_TOLERANCES[numerics])


@torch.no_grad()
def answers(engine, probe, *, noise=None):
    """What an engine with the weights of this model says to the probe's prompts; `noise` [P, V] is added to logits."""
    logits = engine(torch.tensor(probe.prompts), use_cache=False).logits[:, -1].float()
    logp = (logits if noise is None else logits + noise).log_softmax(-1)
    top = logp.topk(probe.sampling.top_k)
    count = len(probe.prompts)
    return Rollout(
        prompts=tuple(map(tuple, probe.prompts)),
        lengths=torch.ones(count, dtype=torch.int64),
        tokens=top.indices[:, 0],
        logp=top.values[:, 0],
        topk_ids=top.indices,
        topk_logp=top.values,
        sampled=torch.ones(count, dtype=torch.bool),
        version=torch.zeros(count, dtype=torch.int64),
        finished=torch.zeros(count, dtype=torch.bool),
    )


@torch.no_grad()
def nudge(model, size, seed=0, part=""):
    """Move the parameters of that name by `size` of their spread."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        change = size * parameter.norm() / parameter.numel() ** 0.5 * torch.randn(parameter.shape, generator=generator)
        if part in name:
            parameter.add_(change)


def parameter_names(kind):
    return [name for name, _ in small_model(kind).named_parameters()]


# --- An engine that has the weights


@pytest.mark.parametrize("numerics", MISMATCH_TOLERANCES)
@pytest.mark.parametrize("kind", ["qwen3", EMBEDDED])
def test_a_right_engine_passes(numerics, kind):
    model = small_model(kind)
    probe = probe_of(model, numerics)
    for version, size in enumerate([0, 0, 1e-7, 1e-5, 1e-3, 1e-2, 0.03, 0, 0.1, 1e-6]):
        nudge(model, size, version)
        probe.check(model, answers(NumericsCopy(model, numerics).model, probe), version)


@given(st.lists(st.floats(-9, -1), min_size=1, max_size=6), st.sampled_from(["float32", "bfloat16", "fp8"]))
def test_a_right_engine_passes_whatever_the_steps(sizes, numerics):
    model = small_model("qwen3")
    probe = probe_of(model, numerics)
    probe.check(model, answers(NumericsCopy(model, numerics).model, probe), 0)
    for version, size in enumerate(sizes, 1):
        nudge(model, 10**size, version)
        probe.check(model, answers(NumericsCopy(model, numerics).model, probe), version)


def test_what_is_asked():
    """The same prompts each time, of all ids, longer than a block of any prefix cache; what the context takes."""
    probe = Probe(vocabulary_size=24, context=512, tolerance=1e-3)
    assert len(probe.prompts) == 8
    assert {len(prompt) for prompt in probe.prompts} == {160}
    assert {token for prompt in probe.prompts for token in prompt} == set(range(24))
    assert probe.prompts == Probe(vocabulary_size=24, context=512, tolerance=1e-3).prompts
    assert (probe.sampling.max_new_tokens, probe.sampling.top_k, probe.sampling.temperature) == (1, 16, 1.0)
    for context in (2, 40):
        short = Probe(vocabulary_size=24, context=context, tolerance=1e-3).prompts
        assert {len(prompt) for prompt in short} == {context - 1}
    assert Probe(vocabulary_size=5, context=40, tolerance=1).sampling.top_k == 5


def test_neither_model_nor_random_numbers_are_touched():
    model = small_model("qwen3").train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    probe = probe_of(model, "float32")
    probe.check(model, answers(copy.deepcopy(model).eval(), probe), 0)
    assert modes == [module.training for module in model.modules()]
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


# --- An engine that has not


@pytest.mark.parametrize("numerics", MISMATCH_TOLERANCES)
def test_weights_that_never_arrived(numerics):
    """The engine still has the random weights that it started with (of vLLM: up to a thousandth)."""
    model = small_model(EMBEDDED)
    engine = copy.deepcopy(model)
    for parameter in engine.parameters():
        torch.nn.init.uniform_(parameter, -1e-3, 1e-3, torch.Generator().manual_seed(1))
    probe = probe_of(model, numerics)
    with pytest.raises(RolloutError, match=rf"{UNDELIVERED} \(version 0\).*nats from the policy's.*explain") as caught:
        probe.check(model, answers(engine, probe), 0)
    assert f"explain {MISMATCH_TOLERANCES[numerics]:g}" in str(caught.value)


@pytest.mark.parametrize("name", parameter_names("qwen3_untied"))
def test_one_tensor_that_never_arrived(name):
    model = small_model("qwen3_untied")
    engine = copy.deepcopy(model)
    torch.nn.init.uniform_(engine.get_parameter(name), -1e-3, 1e-3, torch.Generator().manual_seed(1))
    probe = probe_of(model, "float32")
    with pytest.raises(RolloutError, match=UNDELIVERED):
        probe.check(model, answers(engine, probe), 0)


@pytest.mark.parametrize("name", parameter_names("qwen3_untied"))
def test_one_tensor_of_an_update_that_did_not_arrive(name):
    model = small_model("qwen3_untied")
    probe = probe_of(model, "float32")
    probe.check(model, answers(model, probe), 0)
    nudge(model, 0.05)
    engine = copy.deepcopy(model)
    engine.get_parameter(name).data.copy_(small_model("qwen3_untied").get_parameter(name))
    with pytest.raises(RolloutError, match=UNDELIVERED):
        probe.check(model, answers(engine, probe), 1)


@pytest.mark.parametrize("numerics", MISMATCH_TOLERANCES)
@pytest.mark.parametrize("kind", ["qwen3", EMBEDDED])
def test_an_update_that_did_not_arrive(numerics, kind):
    model = small_model(kind)
    old = NumericsCopy(model, numerics).model
    probe = probe_of(model, numerics)
    probe.check(model, answers(old, probe), 0)
    nudge(model, 0.02, 1)
    probe.check(model, answers(NumericsCopy(model, numerics).model, probe), 1)
    old = NumericsCopy(model, numerics).model
    nudge(model, 0.05, 2)
    with pytest.raises(RolloutError, match=rf"({OLD}|{UNDELIVERED}) \(version 2\)"):
        probe.check(model, answers(old, probe), 2)


def test_an_update_that_did_not_arrive_names_both_moves():
    model = small_model("qwen3")
    probe = probe_of(model, "fp8")
    old = copy.deepcopy(model)
    probe.check(model, answers(old, probe), 0)
    nudge(model, 0.02)
    before, after = (answers(one, probe) for one in (old, model))
    moved = [
        later.topk_logp[row][later.topk_ids[row] == token] - earlier.topk_logp[row, slot]
        for earlier, later in [(before, replace(after, **dense(model, probe)))]
        for row in range(8)
        for slot, token in enumerate(earlier.topk_ids[row])
    ]
    size = torch.cat(moved).square().mean().sqrt()
    with pytest.raises(RolloutError, match=f"{OLD}.*log-probs moved by {size:.3g} nats, the engine's by 0;"):
        probe.check(model, before, 1)


def dense(model, probe):
    logp = model(torch.tensor(probe.prompts), use_cache=False).logits[:, -1].log_softmax(-1).detach()
    return {"topk_ids": torch.arange(VOCABULARY).expand(8, -1), "topk_logp": logp}


@pytest.mark.parametrize(("numerics", "size"), [("float32", 1e-7), ("bfloat16", 1e-4), ("fp8", 1e-3)])
def test_small_moves_add_up(numerics, size):
    """Each is too small to be told from rounding; an engine that follows none of them is found out."""
    model = small_model(EMBEDDED)
    old = answers(NumericsCopy(model, numerics).model, probe_of(model, numerics))
    followed, stale = probe_of(model, numerics), probe_of(model, numerics)
    for version in range(60):
        followed.check(model, answers(NumericsCopy(model, numerics).model, followed), version)
        try:
            stale.check(model, old, version)
        except RolloutError as error:
            found = str(error)
            break
        nudge(model, size, seed=1)  # in one direction
    assert 3 < version < 59
    assert OLD in found


def test_what_the_engine_did_not_know_is_refused():
    model = small_model("qwen3")
    probe = probe_of(model, "float32")
    known = answers(model, probe)
    for unknown in (torch.nan, -torch.inf):
        broken = replace(known, topk_logp=known.topk_logp.clone())
        broken.topk_logp[3, 5] = unknown
        with pytest.raises(RolloutError, match="15 of 16 top-K log-probs are finite"):
            probe.check(model, broken, 0)
    nothing = replace(known, logp=known.logp.clone(), topk_logp=known.topk_logp.clone())
    nothing.logp[3] = nothing.topk_logp[3] = torch.nan
    with pytest.raises(RolloutError):
        probe.check(model, nothing, 0)
    with pytest.raises(RolloutError, match="top-15, but top-16"):
        probe.check(model, replace(known, topk_ids=known.topk_ids[:, 1:], topk_logp=known.topk_logp[:, 1:]), 0)


def test_a_policy_that_is_not_finite_is_no_agreement():
    model = small_model("qwen3")
    probe = probe_of(model, "float32")
    said = answers(model, probe)
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(RolloutError):
        probe.check(model, said, 0)


# --- The file of weights


@pytest.mark.parametrize("kind", [*SIZES, EMBEDDED])
def test_names_and_values_are_those_of_a_checkpoint(kind, tmp_path):
    """Experts one by one, and a tied head beside its embedding."""
    model = small_model(kind)
    model.save_pretrained(tmp_path)
    (tmp_path / "sent").mkdir()
    expected = load_file(tmp_path / "model.safetensors")
    for policy in (model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)):
        with weights_file(policy, torch.float32, [tmp_path / "sent"]) as path:
            found = load_file(path)
        extra = found.keys() - expected.keys()
        assert extra == ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
        for name in extra:
            assert torch.equal(found[name], model.get_input_embeddings().weight)
        for name, weight in expected.items():
            assert torch.equal(found[name], weight)


def test_dtype(tmp_path):
    model = small_model("qwen3")
    model.register_buffer("steps", torch.tensor([2**40]))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with weights_file(model, torch.bfloat16, [tmp_path]) as path, safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            weight = file.get_tensor(name)
            assert weight.dtype == (torch.int64 if name == "steps" else torch.bfloat16)
            assert torch.equal(weight, before[name].to(weight.dtype))
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert not any(weight.requires_grad is False for weight in model.parameters())


Room = namedtuple("Room", "free")


def test_where_the_file_lies(monkeypatch, tmp_path):
    """In the first directory with room, else in the last; gone afterwards, also after an interruption."""
    fast, large = tmp_path / "fast", tmp_path / "large"
    for place in (fast, large):
        place.mkdir()
    model = small_model("qwen3")
    with weights_file(model, torch.float32, [fast, large]) as path:
        size = path.stat().st_size
        assert path.parent == fast
    for room, place in ((2 * size, fast), (size, large), (0, large)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, room=room: Room(room))
        with weights_file(model, torch.float32, [fast, large]) as path:
            assert path.parent == place
        assert not path.exists()
    with pytest.raises(KeyboardInterrupt), weights_file(model, torch.float32, [fast, large]):
        raise KeyboardInterrupt
    with weights_file(model, torch.float32, [large]) as path:
        assert path.parent == large
    assert not [*fast.iterdir(), *large.iterdir()]
