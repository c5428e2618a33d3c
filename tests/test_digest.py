"""The numbers of a report, against NumPy's."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers_memory import peak_growth
from helpers_traces import make_tokens, make_trace
from predmask.analysis.report.digest import (
    CELLS,
    DIVERGENCE_BINS,
    LIMIT,
    UNREAD,
    Digest,
    StepDigest,
    digest,
    late_step,
    log_odds,
    outside,
)
from predmask.core import DPPO, RULES, IcePop, PPOClip, Predictive, Reason
from predmask.traces import TokenTrace, TraceInfo, TraceWriter, rule_settings
from predmask.traces.reader import Trace


def written(directory, tokens, rule, **info):
    """A trace of these tokens as its only step."""
    described = TraceInfo(
        run="made up",
        rule=rule_settings(rule),
        vocabulary_size=tokens.policy.vocabulary_size,
        top_k=tokens.behaviour.top_k,
        **info,
    )
    with TraceWriter(directory, described) as writer:
        writer.add(tokens)
        writer.commit(int(tokens.step[0]))
    return Trace(directory)


def everything(trace):
    return TokenTrace.cat(list(trace.tokens(without=UNREAD)))


def test_counts_equal_numpy(tmp_path):
    trace = make_trace(tmp_path / "run", steps=3, tokens=400, noise=1.0)
    tokens, found = everything(trace), digest(trace)
    reason, step = tokens.decision.reason.numpy(), tokens.step.numpy()
    assert found.tokens == found.known == 1200
    assert list(found.steps) == [1, 2, 3]
    for number, part in found.steps.items():
        assert part.reasons.tolist() == np.bincount(reason[step == number], minlength=6).tolist()
    assert found.reasons.tolist() == np.bincount(reason, minlength=6).tolist()
    assert found.occurrences == Counter(tokens.id.tolist())
    edges = DIVERGENCE_BINS.numpy()
    inside = np.clip(tokens.decision.divergence.double().numpy(), edges[0], edges[-1])
    for each in Reason:
        assert found.divergences[each].tolist() == np.histogram(inside[reason == each], edges)[0].tolist()


def test_curves_equal_numpy(tmp_path):
    trace = make_trace(tmp_path / "run", steps=2, tokens=300, noise=1.0)
    tokens, found = everything(trace), digest(trace)
    mu, pi = (each.logp[:, 0].double().numpy() for each in (tokens.behaviour, tokens.policy))
    reason = tokens.decision.reason.numpy()
    fresh = (tokens.optimizer_step == tokens.version).numpy()
    figures = found.metrics.compute()
    assert figures["mask_frac_pos"] == pytest.approx((reason == Reason.DROPPED_POSITIVE).mean())
    assert figures["mask_frac_neg"] == pytest.approx((reason == Reason.DROPPED_NEGATIVE).mean())
    assert figures["mismatch_kl"] == pytest.approx((np.exp(pi - mu) - 1 - (pi - mu))[fresh].mean(), rel=1e-5)
    samples = [sample for number in trace.steps for sample in trace.samples(number)]
    assert figures["reward"] == pytest.approx(np.mean([sample.reward for sample in samples]))
    assert figures["response_length"] == pytest.approx(np.mean([sample.length for sample in samples]))
    # Few, and well named; those of a trace alone are those of a run.
    assert set(figures) == {
        *("mask_frac", "mask_frac_pos", "mask_frac_neg"),
        *("divergence_kept_mean", "divergence_kept_max", "divergence_masked_mean", "divergence_masked_max"),
        *("behaviour_kl", "mismatch_kl", "entropy", "staleness_mean", "staleness_max"),
        *("unknown_logprob_count", "overflow_count", "reward", "response_length"),
    }


def test_maps_equal_numpy(tmp_path):
    trace = make_trace(tmp_path / "run", steps=2, tokens=500, noise=1.0)
    tokens, found = everything(trace), digest(trace)
    mu, pi = (each.logp[:, 0].double().exp().numpy() for each in (tokens.behaviour, tokens.policy))
    cells = [np.clip(np.log10(p / (1 - p)), -LIMIT, LIMIT) for p in (mu, pi)]
    edges = np.linspace(-LIMIT, LIMIT, CELLS + 1)
    # Tokens on an edge may fall on either side of it.
    assert np.abs(found.cells.numpy() - np.histogram2d(*cells, bins=(edges, edges))[0]).sum() <= 4
    ratio, advantage = pi / mu, tokens.advantage.numpy()
    ppo, dppo, predictive = found.maps
    assert [each.rule.name for each in found.maps] == ["ppo_clip", "dppo", "predictive"]
    assert ppo.positive.sum() == ((ratio > 1.28) & (advantage > 0)).sum()
    assert ppo.negative.sum() == ((ratio < 0.8) & (advantage < 0)).sum()
    beyond = tokens.decision.divergence.numpy() > 0.05
    assert dppo.rule == DPPO(delta=0.05)
    assert dppo.dropped == (beyond & (advantage * (ratio - 1) > 0)).sum()
    assert predictive.recorded
    assert predictive.negative.sum() == (tokens.decision.reason == Reason.DROPPED_NEGATIVE).sum()


@pytest.mark.parametrize(
    ("rule", "top_k"),
    [
        *((rule(), 4) for rule in RULES.values()),
        *((rule(), 0) for rule in RULES.values() if not rule().needs_topk),
        (DPPO(support="binary"), 0),
        (DPPO(support="binary"), 4),
    ],
)
def test_every_rule_has_its_map(tmp_path, rule, top_k):
    trace = make_trace(tmp_path / "run", rule, tokens=200, noise=2.0, top_k=top_k)
    found = digest(trace)
    names = [each.rule.name for each in found.maps]
    assert len(set(names)) == len(names)
    assert {"ppo_clip", "dppo"} <= set(names)
    assert ("predictive" in names) == (top_k > 0)
    recorded = [each for each in found.maps if each.recorded]
    assert [each.rule for each in recorded] == ([rule] if rule.can_fire else [])
    if recorded:
        assert recorded[0].dropped == everything(trace).decision.dropped.sum() > 0


def test_other_rules_take_the_recorded_delta_and_divergence(tmp_path):
    found = digest(make_trace(tmp_path / "run", DPPO(delta=0.2, divergence="tv")))
    assert found.maps[2].rule == Predictive(delta=0.2, divergence="tv")


def test_which_ids_are_dropped(tmp_path):
    """Of 100 tokens 2 are masked, both the same id with A > 0."""
    tokens = make_tokens(Predictive(delta=1e9), tokens=100)
    chosen = (tokens.id == tokens.id[10]).nonzero()[:2, 0]
    reason = tokens.decision.reason.clone()
    reason[chosen] = Reason.DROPPED_POSITIVE
    decision = replace(tokens.decision, reason=reason, keep=tokens.decision.keep.index_fill(0, chosen, False))
    found = digest(written(tmp_path / "t", replace(tokens, decision=decision), Predictive(delta=1e9)))
    assert len(found.masked) == 1
    first = found.masked[0]
    assert (first.id, first.count, first.share, first.positive, first.negative) == (int(tokens.id[10]), 2, 1.0, 2, 0)
    assert found.occurrences[first.id] == (tokens.id == first.id).sum()


def test_unknown_tokens_are_counted_and_left_out(tmp_path):
    tokens = make_tokens(tokens=50)
    logp = tokens.behaviour.logp.clone()
    logp[[3, 7], 0] = math.nan
    behaviour = replace(
        tokens.behaviour, logp=logp, log_tail=tokens.behaviour.log_tail.index_fill(0, torch.tensor([3, 7]), math.nan)
    )
    rule = Predictive(delta=0.05)
    decision = rule(behaviour, tokens.policy, tokens.advantage)
    found = digest(written(tmp_path / "t", replace(tokens, behaviour=behaviour, decision=decision), rule))
    assert (found.tokens, found.known, int(found.reasons[Reason.UNKNOWN])) == (50, 48, 2)
    assert found.cells.sum() == found.divergences.sum() == found.occurrences.total() == 48
    assert found.metrics.totals["unknown_logprob_count"] == 2


def test_a_vocabulary_may_be_said_to_be_of_any_size(tmp_path):
    tokens = make_tokens(tokens=200)
    policy = replace(tokens.policy, vocabulary_size=2**31 - 2)
    trace = written(tmp_path / "t", replace(tokens, policy=policy), Predictive(delta=0.05))
    assert peak_growth(lambda: digest(trace)) < 200e6
    found = digest(trace)
    assert found.occurrences == Counter(tokens.id.tolist())


def test_chunks_do_not_matter(tmp_path, monkeypatch):
    trace = make_trace(tmp_path / "run", steps=2, tokens=150, noise=1.0)
    whole = digest(trace)
    seen = []
    monkeypatch.setattr("predmask.traces.reader.rows_at_once", lambda schema: 7)
    parts = digest(trace, seen.append)
    assert len(seen) > 20
    assert sum(seen) == 300
    assert parts.occurrences == whole.occurrences
    assert parts.masked == whole.masked
    assert torch.equal(parts.cells, whole.cells)
    assert torch.equal(parts.divergences, whole.divergences)
    assert parts.metrics.compute() == pytest.approx(whole.metrics.compute())


def test_a_rule_of_another_version_is_no_obstacle(tmp_path):
    tokens = make_tokens(tokens=50)
    info = TraceInfo(run="r", rule={"name": "theirs", "x": 1}, vocabulary_size=12, top_k=4)
    with TraceWriter(tmp_path / "t", info) as writer:
        writer.add(tokens)
        writer.commit(1)
    found = digest(Trace(tmp_path / "t"))
    assert found.rule is None
    assert not any(each.recorded for each in found.maps)
    assert found.known == 50


def test_log_odds_at_both_ends():
    p = np.array([1e-3, 0.2, 0.5, 0.9, 1 - 1e-4])
    assert log_odds(torch.tensor(np.log(p))).numpy() == pytest.approx(np.log10(p / (1 - p)))
    ends = log_odds(torch.tensor([-math.inf, -100.0, 0.0, 1e-7]))
    assert ends.tolist() == [-LIMIT, -LIMIT, LIMIT, LIMIT]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (PPOClip(eps_low=0.2, eps_high=0.3), lambda mu, pi: (pi / mu < 0.8) | (pi / mu > 1.3)),
        (IcePop(low=0.5, high=3.0), lambda mu, pi: (pi / mu < 0.5) | (pi / mu > 3)),
        (DPPO(divergence="tv", delta=0.1), lambda mu, pi: np.abs(mu - pi) > 0.1),
        (Predictive(delta=0.1), lambda mu, pi: mu * np.log(mu / pi) + (1 - mu) * np.log((1 - mu) / (1 - pi)) > 0.1),
    ],
)
def test_borders(rule, expected):
    odds = np.linspace(-5, 5, 41)
    mu, pi = np.meshgrid(*[1 / (1 + 10.0**-odds)] * 2)
    assert (outside(rule, torch.tensor(mu), torch.tensor(pi)).numpy() == expected(mu, pi)).all()


def test_a_late_step_with_many_drops():
    def step(dropped, tokens=100):
        reasons = torch.zeros(6, dtype=torch.int64)
        reasons[Reason.DROPPED_NEGATIVE], reasons[Reason.KEPT_INSIDE] = dropped, tokens - dropped
        return StepDigest(reasons=reasons)

    def found(*steps):
        return Digest(None, [], steps=dict(enumerate(steps, 1)))

    assert late_step(found(step(50), step(1), step(9), step(3))) == 3
    assert late_step(found(step(0), step(0), step(0))) == 3
    assert late_step(found(step(0), step(0, tokens=0))) == 1
    assert late_step(found(step(0, tokens=0))) is None
