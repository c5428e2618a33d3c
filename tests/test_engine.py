"""The contract of every rollout engine: what it says about its samples is true, and it leaves no trace."""

import copy
import math
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from helpers_engines import exact_configs, started
from predmask.rollout import ENGINES, RolloutError, Sampling, TransformersConfig, TransformersEngine
from predmask.rollout.numerics import MISMATCH_TOLERANCES, NumericsCopy
from predmask.train.models import EMBEDDED
from small_models import SIZES, VOCABULARY, dense_logp, dense_rows, small_model, with_logits

INF, NAN = math.inf, math.nan
EXACT = ("float32", "int4")
"""Numerics whose answer does not depend on how the computation is batched, but for the last bits."""
VARIANTS = exact_configs() + [
    TransformersConfig(numerics=numerics) for numerics in MISMATCH_TOLERANCES if numerics != "float32"
]
PROMPTS = [[5, 9, 12], [7], [4, 4, 8, 20, 11, 6, 9, 13, 21], [7], [7], [10, 4, 5, 6, 8, 9]]
"""Ragged, with repeats beside each other and apart."""

every_engine = pytest.mark.parametrize(
    "config", VARIANTS, ids=lambda config: f"{config.name}-{getattr(config, 'numerics', 'default')}"
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def sampling(**changes):
    return Sampling(**{"temperature": 1.0, "max_new_tokens": 12, "top_k": 4, "record_full": True} | changes)


def greedy(**changes):
    return sampling(temperature=0.0, top_k=0, record_full=False, **changes)


def reference(config, model):
    """A copy of the model in the numerics of the engine."""
    numerics = getattr(config, "numerics", "float32")
    return copy.deepcopy(model) if numerics == "float32" else NumericsCopy(model, numerics).model


def assert_true_records(rollout, dense, *, exact=True):
    """Log-probs of sampled token, top-K and full rows are those of `dense`, [N, V]."""
    top_k = rollout.top_k
    rollout.check(top_k=top_k, vocabulary_size=dense.shape[1])
    pairs = [
        (rollout.logp, dense.gather(1, rollout.tokens[:, None])[:, 0]),
        (rollout.topk_logp, dense.gather(1, rollout.topk_ids)),
        (rollout.topk_logp, dense.sort(dim=-1, descending=True).values[:, :top_k]),
        (rollout.full_logp, dense),
    ]
    for found, expected in pairs:
        assert found.dtype == torch.float32
        if exact:
            torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=3e-6)
        elif expected.numel():
            # A last bit that tips a rounding over changes more than last bits, but rarely, or by little.
            assert (found - expected).abs().mean() < 0.02


# --- The log-probs are those of the distribution that was sampled from


@every_engine
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probs_are_those_of_a_dense_forward(config, temperature):
    model = small_model("qwen3")
    rollout = started(config, model).generate(PROMPTS, sampling(temperature=temperature), seeded())
    dense = dense_rows(reference(config, model), rollout, temperature)
    assert_true_records(rollout, dense, exact=getattr(config, "numerics", "float32") in EXACT)


@pytest.mark.parametrize("kind", [*SIZES, EMBEDDED])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_every_architecture(kind, temperature):
    """Learned and rotary positions, grouped heads, soft-caps, sliding windows, experts: ragged and shared prompts."""
    model = small_model(kind, eos_token_id=[3, 8, 12])
    rollout = TransformersEngine(model).generate(PROMPTS * 3, sampling(temperature=temperature), seeded(3))
    assert len(set(rollout.lengths.tolist())) > 1  # some rows left the batch early
    assert_true_records(rollout, dense_rows(model, rollout, temperature))


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_long_responses(kind):
    """Longer than any room that a cache may have set aside, with rows leaving early and late."""
    model = small_model(kind, eos_token_id=VOCABULARY - 1)

    def make_the_end_rare(_module, _inputs, output):
        output.logits[..., VOCABULARY - 1] -= 2.5
        return output

    model.register_forward_hook(make_the_end_rare)
    rollout = TransformersEngine(model).generate(PROMPTS * 2, sampling(max_new_tokens=330), seeded(1))
    assert rollout.lengths.max() == 330 > 2 * rollout.lengths.min()
    assert_true_records(rollout, dense_rows(model, rollout))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_engine
def test_cuda(config):
    model = small_model("qwen3").cuda()
    rollout = started(config, model).generate(PROMPTS, sampling(), seeded())
    assert rollout.tokens.device.type == rollout.full_logp.device.type == "cpu"
    exact = getattr(config, "numerics", "float32") in EXACT
    assert_true_records(rollout, dense_rows(reference(config, model), rollout), exact=exact)


@every_engine
def test_padding_changes_no_answer(config):
    """A prompt beside longer ones, and alone."""
    engine = started(config, small_model("qwen3"))
    together = engine.generate(PROMPTS, greedy(), seeded()).responses()
    alone = [engine.generate([prompt], greedy(), seeded()).responses()[0] for prompt in PROMPTS]
    agreeing = sum(a == b for a, b in zip(together, alone, strict=True))
    exact = getattr(config, "numerics", "float32") in EXACT
    assert agreeing == len(PROMPTS) if exact else agreeing >= len(PROMPTS) // 2


@every_engine
def test_repeated_prompts(config):
    """Neighbours that share their prefill, and the same prompts kept apart."""
    engine = started(config, small_model("qwen3"))
    a, b = PROMPTS[0], PROMPTS[5]
    shared = engine.generate([a, a, a, b, b], greedy(), seeded()).responses()
    apart = engine.generate([a, b, a, b, a], greedy(), seeded()).responses()
    assert shared[0] == shared[1] == shared[2] == apart[0]
    assert shared[3] == shared[4] == apart[1] != apart[0]
    sampled = engine.generate([a] * 8, sampling(), seeded()).responses()
    assert len({tuple(response) for response in sampled}) > 1


# --- Samples follow those log-probs

SCORES = [-INF, 2.0, 0.0, -INF, -INF, -3.0, 1.0, -INF]
"""Logits with impossible tokens first, in the middle and last."""


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_log_probs(temperature):
    """Chi-square over 20,000 draws; the limit is passed by chance once in 100,000."""
    model = with_logits(SCORES, eos_token_id=2)
    draws = 20_000
    engine = TransformersEngine(model, batch_size=4096)
    settings = sampling(temperature=temperature, max_new_tokens=1, top_k=2, record_full=False)
    counts = Counter(engine.generate([[1]] * draws, settings, seeded()).tokens.tolist())
    weights = [math.exp(score / temperature) for score in SCORES]
    possible = {token: draws * weight / sum(weights) for token, weight in enumerate(weights) if weight}
    assert set(counts) <= set(possible)  # none of the impossible tokens
    assert sum((counts[token] - expected) ** 2 / expected for token, expected in possible.items()) < 25.9


@pytest.mark.parametrize("certain", [0, 3, 7])
def test_one_possible_token(certain):
    row = [0.5 if token == certain else -INF for token in range(8)]
    rollout = TransformersEngine(with_logits(row)).generate([[1]] * 2000, sampling(max_new_tokens=1, top_k=1), seeded())
    assert set(rollout.tokens.tolist()) == {certain}
    assert rollout.logp.abs().max() < 1e-6
    assert rollout.topk_ids.unique().tolist() == [certain]


@pytest.mark.parametrize("number", [0.0, 2**-24, 1 - 2**-24])
def test_extreme_random_numbers(monkeypatch, number):
    """The least and the largest numbers of `torch.rand` draw no impossible token either."""
    drawn = []
    monkeypatch.setattr(torch, "rand", lambda *size, **_: drawn.append(size) or torch.full(size, number))
    for row in (SCORES, SCORES[::-1], [-INF, 0.0, -INF, -60.0, -INF]):
        rollout = TransformersEngine(with_logits(row)).generate([[1]], sampling(max_new_tokens=1, top_k=1), seeded())
        assert rollout.logp.isfinite().all()
    assert drawn


def test_equal_logits_are_sampled_evenly():
    row = [3.0] * 64
    tokens = TransformersEngine(with_logits(row)).generate([[1]] * 6400, sampling(max_new_tokens=1), seeded()).tokens
    counts = torch.bincount(tokens, minlength=64).double()
    assert ((counts - 100) ** 2 / 100).sum() < 127  # 63 degrees of freedom: once in 300,000


def test_huge_logits_do_not_overflow():
    row = [1e4, 1e4 - 1, -1e4, 0.0]
    rollout = TransformersEngine(with_logits(row)).generate([[1]] * 500, sampling(max_new_tokens=1), seeded())
    assert set(rollout.tokens.tolist()) == {0, 1}
    expected = torch.log_softmax(torch.tensor(row).double(), dim=-1)
    torch.testing.assert_close(rollout.full_logp[0].double(), expected, atol=1e-3, rtol=1e-6)


@every_engine
def test_sampled_tokens_are_as_likely_as_their_log_probs_say(config):
    """The sum of log pi + entropy over sampled tokens is a martingale: its z-score is that of a standard normal."""
    rollout = started(config, small_model("qwen3")).generate(PROMPTS * 60, sampling(), seeded())
    logp = rollout.full_logp.double()
    probability = logp.exp()
    mean = (probability * logp).sum(-1)
    variance = (probability * logp**2).sum(-1) - mean**2
    assert abs((rollout.logp - mean).sum() / variance.sum().sqrt()) < 4.5
    # And each token id appears as often as was predicted.
    counts = torch.bincount(rollout.tokens, minlength=VOCABULARY)
    spread = (probability * (1 - probability)).sum(0).sqrt()
    assert ((counts - probability.sum(0)).abs() / spread).max() < 5


@pytest.mark.parametrize("row", [[0.0, NAN, 1.0], [0.0, INF, 1.0], [-INF] * 3])
@pytest.mark.parametrize("settings", [greedy(), sampling(top_k=1)], ids=["greedy", "sampled"])
def test_logits_that_are_not_finite_are_an_error(row, settings):
    with pytest.raises(RolloutError, match=r"NaN or infinite.*engine\.numerics"):
        TransformersEngine(with_logits(row)).generate([[1]], settings, seeded())


@every_engine
def test_greedy_takes_the_likeliest(config):
    model = small_model("qwen3")
    rollout = started(config, model).generate(PROMPTS, greedy(), seeded()).check(top_k=0, vocabulary_size=VOCABULARY)
    dense = dense_rows(reference(config, model), rollout)
    chosen = dense.gather(1, rollout.tokens[:, None])[:, 0]
    assert (dense.max(-1).values - chosen).max() < (
        1e-5 if getattr(config, "numerics", "float32") in EXACT else config.mismatch_tolerance
    )
    assert rollout.logp.tolist() == [0.0] * len(rollout.tokens)
    assert (rollout.topk_ids.shape[1], rollout.full_logp) == (0, None)


# --- Where a response ends


@every_engine
@pytest.mark.parametrize("end", [3, [3], [3, 11, 17]])
def test_ends_at_any_end_token(config, end):
    ends = {end} if isinstance(end, int) else set(end)
    engine = started(config, small_model("qwen3", eos_token_id=end))
    rollout = engine.generate(PROMPTS * 20, sampling(), seeded())
    for response, finished in zip(rollout.responses(), rollout.finished.tolist(), strict=True):
        assert not ends & set(response[:-1])
        assert finished == (response[-1] in ends)
        assert finished or len(response) == 12
    last = {response[-1] for response, finished in zip(rollout.responses(), rollout.finished, strict=True) if finished}
    assert last == ends
    assert not rollout.finished.all()
    assert rollout.sampled.all()


def test_end_token_of_the_model_configuration():
    model = small_model("qwen3", eos_token_id=None)
    assert TransformersEngine(model).generate(PROMPTS * 20, sampling(), seeded()).finished.any()
    model.config.eos_token_id = None
    with pytest.raises(ValueError, match=r"eos_token_id in its generation_config\.json"):
        TransformersEngine(model)


@every_engine
@pytest.mark.parametrize("limit", [1, 2, 5])
def test_limit_of_new_tokens(config, limit):
    engine = started(config, small_model("qwen3", eos_token_id=[VOCABULARY]))  # no such id
    rollout = engine.generate(PROMPTS, sampling(max_new_tokens=limit), seeded())
    assert rollout.lengths.tolist() == [limit] * len(PROMPTS)
    assert not rollout.finished.any()


def test_end_token_as_the_first_and_as_the_last():
    """It counts as finished at the length limit too."""
    engine = TransformersEngine(with_logits([0.0, -INF, -INF], eos_token_id=0))
    for limit in (1, 3):
        rollout = engine.generate([[1], [2, 1]], sampling(top_k=1, max_new_tokens=limit), seeded())
        assert (rollout.responses(), rollout.finished.tolist()) == ([[0], [0]], [True, True])


# --- What is recorded


@every_engine
@pytest.mark.parametrize("top_k", [0, 1, VOCABULARY])
@pytest.mark.parametrize("record_full", [False, True])
def test_recorded_ids(config, top_k, record_full):
    settings = sampling(top_k=top_k, record_full=record_full)
    rollout = started(config, small_model("qwen3")).generate(PROMPTS, settings, seeded())
    rollout.check(top_k=top_k, vocabulary_size=VOCABULARY)
    count = len(rollout.tokens)
    assert rollout.topk_ids.shape == rollout.topk_logp.shape == (count, top_k)
    if record_full:
        torch.testing.assert_close(rollout.full_logp.exp().sum(-1), torch.ones(count))
        torch.testing.assert_close(rollout.full_logp.gather(1, rollout.topk_ids), rollout.topk_logp)
    else:
        assert rollout.full_logp is None
    if top_k == VOCABULARY:
        assert (rollout.topk_ids.sort(dim=-1).values == torch.arange(VOCABULARY)).all()
        torch.testing.assert_close(rollout.topk_logp.exp().sum(-1), torch.ones(count))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_splitting_into_batches(batch_size):
    """Response i belongs to prompt i, whatever the batches."""
    model = small_model("qwen3")
    engine = TransformersConfig(batch_size=batch_size).start(model)
    rollout = engine.generate(PROMPTS, sampling(), seeded())
    assert rollout.prompts == tuple(map(tuple, PROMPTS))
    assert rollout.lengths.shape == rollout.finished.shape == (len(PROMPTS),)
    assert_true_records(rollout, dense_rows(model, rollout))
    answers = [engine.generate([prompt], greedy(), seeded()).responses()[0] for prompt in PROMPTS]
    assert engine.generate(PROMPTS, greedy(), seeded()).responses() == answers


# --- What is refused


@every_engine
@pytest.mark.parametrize(
    ("prompts", "changes", "match"),
    [
        ([], {}, "no prompts"),
        ([[5], []], {}, "prompt 1 is empty"),
        ([[5], [6, VOCABULARY]], {}, f"prompt 1 holds id {VOCABULARY}.*0 to {VOCABULARY - 1}"),
        ([[-1]], {}, "prompt 0 holds id -1"),
        ([[5]], {"top_k": VOCABULARY + 1}, rf"top_k is {VOCABULARY + 1}.*{VOCABULARY} tokens; lower rollout\.top_k"),
        ([[5], [5] * 508], {"max_new_tokens": 5}, r"513 tokens.*takes 512; lower rollout\.max_new_tokens"),
        ([[5]], {"max_new_tokens": 512}, "513 tokens"),
    ],
)
def test_requests_that_cannot_be_met(config, prompts, changes, match):
    engine = started(config, small_model("qwen3"))
    with pytest.raises(RolloutError, match=match):
        engine.generate(prompts, sampling(**changes), seeded())
    engine.generate([[5]], sampling(), seeded())  # and the engine goes on


def test_the_whole_context_can_be_used():
    model = small_model("qwen3", eos_token_id=VOCABULARY)
    rollout = TransformersEngine(model).generate([[5] * 500], sampling(), seeded())
    assert rollout.lengths.tolist() == [12]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"temperature": INF}, "temperature is inf"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"temperature": 0.0}, "greedy.*set top_k to 0"),
        ({"temperature": 0.0, "top_k": 0}, "greedy"),
    ],
)
def test_impossible_sampling(changes, match):
    with pytest.raises(ValueError, match=match):
        sampling(**changes)


def test_impossible_configurations():
    with pytest.raises(ValueError, match=r"engine\.batch_size is 0"):
        TransformersConfig(batch_size=0)
    with pytest.raises(ValueError, match="numerics is 'bf16'; choose one of float32, bfloat16"):
        TransformersEngine(small_model("qwen3"), numerics="bf16")


# --- New weights


def nudge(model, seed=5, size=0.2):
    """Move all weights, as an optimiser does: in place."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * parameter.std() * torch.randn(parameter.shape, generator=generator))


@every_engine
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_untied"])
def test_update_weights(config, kind):
    """Answers are those of an engine started with the new weights, for the same prompts as before."""
    model = small_model(kind)
    engine = started(config, model)
    before = engine.generate(PROMPTS, sampling(), seeded())
    assert before.version.unique().tolist() == [0]
    for version in (4, 9):
        nudge(model, seed=version)
        engine.update_weights(model, version)
        after = engine.generate(PROMPTS, sampling(), seeded())
        assert after.version.tolist() == [version] * len(after.tokens)
        fresh = started(config, small_model(kind))
        fresh.update_weights(copy.deepcopy(model), version)  # another object
        for other in (started(config, model), fresh):
            expected = other.generate(PROMPTS, sampling(), seeded())
            assert after.tokens.tolist() == expected.tokens.tolist()
            assert torch.equal(after.full_logp, expected.full_logp)
        dense = dense_rows(reference(config, model), after)
        assert_true_records(after, dense, exact=getattr(config, "numerics", "float32") in EXACT)
        distance = (after.full_logp[0] - before.full_logp[0]).abs().max()
        assert distance > 10 * 0.02  # far above what rounding or a stale head would leave
        before = after


@every_engine
@pytest.mark.parametrize("part", ["head", "layers"])
def test_update_of_one_part(config, part):
    """The head too is taken over, and so are rounded layers."""
    model = small_model("qwen3_untied")
    engine = started(config, model)
    engine.generate(PROMPTS, sampling(), seeded())
    nudge(model.lm_head if part == "head" else model.model.layers)
    engine.update_weights(model, 1)
    after = engine.generate(PROMPTS, sampling(), seeded())
    dense = dense_rows(reference(config, model), after)
    assert_true_records(after, dense, exact=getattr(config, "numerics", "float32") in EXACT)
    expected = started(config, copy.deepcopy(model)).generate(PROMPTS, sampling(), seeded())
    assert torch.equal(after.full_logp, expected.full_logp)


@every_engine
def test_the_trained_model_is_left_as_it_was(config):
    model = small_model("qwen3")
    model.train()
    model.model.layers[1].eval()
    model.model.embed_tokens.requires_grad_(False)
    sum(parameter.sum() for parameter in model.parameters()).backward()

    def state():
        return (
            {name: value.clone() for name, value in model.state_dict().items()},
            {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad},
            {name: parameter.requires_grad for name, parameter in model.named_parameters()},
            {name: module.training for name, module in model.named_modules()},
            {name: len(module._forward_pre_hooks) for name, module in model.named_modules()},
        )

    before = state()
    engine = started(config, model)
    engine.generate(PROMPTS, sampling(), seeded())
    engine.update_weights(model, 1)
    engine.generate(PROMPTS, sampling(), seeded())
    with pytest.raises(RolloutError):
        engine.generate([[]], sampling(), seeded())
    engine.close()
    engine.close()
    for old, new in zip(before, state(), strict=True):
        assert old.keys() == new.keys()
        assert all(torch.equal(torch.as_tensor(old[name]), torch.as_tensor(new[name])) for name in old)


@every_engine
def test_no_dropout_while_sampling(config):
    model = small_model("qwen3")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    ids = torch.tensor([PROMPTS[2]])
    assert not torch.equal(model.train()(ids).logits, model.eval()(ids).logits)  # there is dropout
    expected = started(config, model).generate(PROMPTS, sampling(), seeded())
    found = started(config, copy.deepcopy(model).train()).generate(PROMPTS, sampling(), seeded())
    assert torch.equal(found.full_logp, expected.full_logp)


# --- Random numbers


@every_engine
def test_the_seed_decides(config):
    engine = started(config, small_model("qwen3"))
    generator = seeded(7)
    first, second = (engine.generate(PROMPTS, sampling(), generator) for _ in range(2))
    again = started(config, small_model("qwen3")).generate(PROMPTS, sampling(), seeded(7))
    for field in ("tokens", "lengths", "logp", "topk_ids", "topk_logp", "full_logp", "finished", "version"):
        assert torch.equal(getattr(first, field), getattr(again, field))
    other = engine.generate(PROMPTS, sampling(), seeded(8))
    assert first.responses() != second.responses()
    assert first.responses() != other.responses()


@every_engine
def test_global_random_numbers_are_untouched(config):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    engine = started(config, small_model("qwen3"))
    engine.generate(PROMPTS, sampling(), seeded())
    engine.update_weights(small_model("qwen3"), 1)
    engine.generate(PROMPTS, greedy(), seeded())
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_draws_do_not_depend_on_what_is_recorded():
    """The same seed answers the same, so that studies with full rows repeat a run without."""
    engine = TransformersEngine(small_model("qwen3"))
    answers = [
        engine.generate(PROMPTS, sampling(top_k=top_k, record_full=full), seeded()).responses()
        for top_k, full in ((0, False), (4, True), (VOCABULARY, False))
    ]
    assert all(one == other for one, other in pairwise(answers))


def test_positions_of_a_batch_are_those_of_each_prompt():
    """Equal prompts of another length apart: one token of padding must not shift the first answer."""
    model = small_model("gpt2")
    engine = TransformersEngine(model)
    rollout = engine.generate([[7, 8], [9, 7, 8]], sampling(max_new_tokens=1), seeded())
    for prompt, row in zip(rollout.prompts, rollout.full_logp, strict=True):
        torch.testing.assert_close(row.double(), dense_logp(model, prompt, [0])[0], atol=1e-5, rtol=3e-6)


def test_configurations_are_values():
    assert all(ENGINES[config.name] is type(config) for config in VARIANTS)
    config = replace(TransformersConfig(), numerics="fp8")
    assert config.mismatch_tolerance == MISMATCH_TOLERANCES["fp8"] > TransformersConfig().mismatch_tolerance
