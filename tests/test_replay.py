"""Replay: other rules on recorded tokens."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers_traces import make_tokens, make_trace
from helpers_training import small
from predmask.analysis import AnalysisError
from predmask.analysis.replay import Replay, registered_rules, replay, rule_labels
from predmask.analysis.replay.crosstab import SPLITS
from predmask.cli import main
from predmask.core import (
    DPPO,
    RULES,
    TAILS,
    BehaviourSupport,
    PolicySupport,
    PPOClip,
    Predictive,
    Reason,
    Rule,
    divergence_rate,
    get_divergence,
)
from predmask.traces import TokenTrace, Trace, TraceInfo, TraceWriter, rule_settings
from predmask.train import run

RULE_LIST: list[Rule] = [
    *(cls() for cls in RULES.values()),
    Predictive(delta=0.02, tail="uniform"),
    Predictive(delta=0.02, tail="aggregated", divergence="js"),
    DPPO(delta=0.1, divergence="tv", support="binary"),
    PPOClip(dual_clip=3.0),
]


def write(directory: Path, *parts: TokenTrace, rule: Rule | dict[str, Any]) -> Trace:
    """A trace of these tokens, a step each."""
    settings = rule if isinstance(rule, dict) else rule_settings(rule)
    size, top_k = parts[0].policy.vocabulary_size, parts[0].behaviour.top_k
    info = TraceInfo(run="run", rule=settings, vocabulary_size=size, top_k=top_k)
    with TraceWriter(directory / "traces", info) as writer:
        for step, part in enumerate(parts, 1):
            writer.add(dataclasses.replace(part, step=torch.full((len(part),), step)))
            writer.commit(step)
    assert writer.problem is None
    return Trace(directory)


def decided(tokens: TokenTrace, rule: Rule) -> TokenTrace:
    """The tokens with another rule's decisions."""
    decision = rule(tokens.behaviour, tokens.policy, tokens.advantage, tokens.decision.response_mask)
    return dataclasses.replace(tokens, decision=decision)


def without_sum_squares(tokens: TokenTrace) -> TokenTrace:
    return dataclasses.replace(tokens, policy=dataclasses.replace(tokens.policy, tail_sum_squares=None, entropy=None))


def spoiled(tokens: TokenTrace) -> TokenTrace:
    """Tokens among which are padding, A = 0, and log-probs that are not finite."""
    advantage, mask = tokens.advantage.clone(), torch.ones(len(tokens), dtype=torch.bool)
    advantage[3::7], mask[5::9] = 0.0, False
    mu, pi = tokens.behaviour.logp.clone(), tokens.policy.logp.clone()
    mu[2, 0], pi[11, 0], pi[13, 0] = torch.nan, -torch.inf, torch.nan
    pi[20:40, 2] = torch.nan  # unknown to the rules that read more than the sampled token alone
    behaviour = dataclasses.replace(tokens.behaviour, logp=mu)
    policy = dataclasses.replace(tokens.policy, logp=pi)
    decision = dataclasses.replace(tokens.decision, response_mask=mask)
    return dataclasses.replace(tokens, advantage=advantage, behaviour=behaviour, policy=policy, decision=decision)


@pytest.mark.parametrize("rule", RULE_LIST, ids=rule_labels(RULE_LIST))
def test_a_rule_reproduces_its_own_decisions(rule: Rule, tmp_path: Path) -> None:
    parts = [decided(spoiled(make_tokens(tokens=300, step=step)), rule) for step in (1, 2)]
    found = replay(write(tmp_path, *parts, rule=rule))
    assert found.reproduction is not None
    assert (found.reproduction.reproduced, found.reproduction.tokens) == (600, 600)
    assert found.notes == []
    # The recorded row is what was recorded.
    reasons = torch.cat([part.decision.reason for part in parts])
    row = found.rules[0]
    assert row.dropped_positive == int((reasons == Reason.DROPPED_POSITIVE).sum())
    assert row.dropped_negative == int((reasons == Reason.DROPPED_NEGATIVE).sum())
    assert row.unknown == int((reasons == Reason.UNKNOWN).sum()) > 0
    assert row.trainable == int(((reasons != Reason.UNKNOWN) & (reasons != Reason.NOT_TRAINABLE)).sum())
    # Among all registered rules, laid over the recorded one, is that rule itself.
    assert rule in registered_rules(rule)
    assert found.overall.agreement(0, 1 + registered_rules(rule).index(rule)) == 1.0


def test_decisions_that_are_not_the_rules_own_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rule = Predictive(delta=0.05)
    tokens = make_tokens(rule)
    reason, keep = tokens.decision.reason.clone(), tokens.decision.keep.clone()
    kept = torch.nonzero(keep)[:3, 0]
    reason[kept], keep[kept] = int(Reason.DROPPED_POSITIVE), False
    divergence = tokens.decision.divergence.clone()
    divergence[kept] += torch.tensor([0.0, 0.25, 0.125])
    decision = dataclasses.replace(tokens.decision, reason=reason, keep=keep, divergence=divergence)
    trace = write(tmp_path, dataclasses.replace(tokens, decision=decision), rule=rule)
    found = replay(trace, [rule])
    assert found.reproduction is not None
    assert (found.reproduction.reproduced, found.reproduction.tokens) == (57, 60)
    assert found.reproduction.largest_difference == pytest.approx(0.25, abs=1e-6)
    assert found.overall.agreement(0, 1) == 57 / 60
    assert main(["replay", str(tmp_path)]) == 1
    assert "recorded decisions reproduced: 57 of 60" in capsys.readouterr().out


def test_counts_and_shares_are_those_of_a_count_by_hand(tmp_path: Path) -> None:
    rule, other = Predictive(delta=0.05), PPOClip()
    parts = [decided(spoiled(make_tokens(tokens=400, step=step)), rule) for step in (1, 2)]
    found = replay(write(tmp_path, *parts, rule=rule), [other])
    tokens = TokenTrace.cat(parts)
    recorded, asked = tokens.decision, decided(tokens, other).decision
    drops = np.stack([recorded.dropped.numpy(), asked.dropped.numpy()])
    can = np.stack([recorded.trainable.numpy(), asked.trainable.numpy()])
    assert drops.any(axis=1).all()
    assert (drops[0] != drops[1]).any()
    both = can[0] & can[1]
    assert found.overall.agreement(0, 1) == pytest.approx((drops[0] == drops[1])[both].mean())
    assert found.overall.jaccard(0, 1) == pytest.approx((drops[0] & drops[1]).sum() / (drops[0] | drops[1])[both].sum())
    assert found.overall.dropped_share(1) == pytest.approx(drops[1].sum() / can[1].sum())
    assert (can[0] != can[1]).any()
    assert found.overall.trainable.tolist() == [[int((a & b).sum()) for b in can] for a in can]
    assert found.overall.dropped.tolist() == [[int((a & b).sum()) for b in can] for a in drops]
    assert found.rules[1].outside == int((asked.outside & asked.trainable).sum())
    mu = tokens.behaviour.logp[:, 0].exp().numpy()
    inside = {
        "advantage": {"A>0": tokens.advantage.numpy() > 0, "A<0": tokens.advantage.numpy() < 0},
        "probability": {
            "<.01": mu < 0.01,
            ".01-.1": (mu >= 0.01) & (mu < 0.1),
            ".1-.5": (mu >= 0.1) & (mu < 0.5),
            ".5-.9": (mu >= 0.5) & (mu < 0.9),
            "≥.9": mu >= 0.9,
        },
        "position": {"0-3": tokens.position.numpy() < 4, "4-15": tokens.position.numpy() >= 4},
        "staleness": {
            "0": tokens.staleness.numpy() == 0,
            "1-3": (tokens.staleness.numpy() > 0) & (tokens.staleness.numpy() < 4),
            "4-15": (tokens.staleness.numpy() > 3) & (tokens.staleness.numpy() < 16),
        },
    }
    assert [split.name for split in SPLITS] == list(found.splits) == list(inside)
    for name, buckets in inside.items():
        present = {bucket: which for bucket, which in buckets.items() if (which & can.any(0)).any()}
        assert found.splits[name].keys() == present.keys()
        for bucket, which in present.items():
            table = found.splits[name][bucket]
            for number in (0, 1):
                assert table.dropped_share(number) == pytest.approx(
                    drops[number][which].sum() / can[number][which].sum()
                )
            assert table.agreement(0, 1) == pytest.approx((drops[0] == drops[1])[which & both].mean())


def test_buckets_of_long_responses(tmp_path: Path) -> None:
    tokens = make_tokens(tokens=600, length=300)
    tokens = dataclasses.replace(tokens, optimizer_step=tokens.version + torch.arange(600) % 40)
    found = replay(write(tmp_path, tokens, rule=Predictive(delta=0.05)), [])

    def sizes(name: str) -> list[int]:
        return [int(table.trainable[0, 0]) for table in found.splits[name].values()]

    assert sizes("position") == [8, 24, 96, 384, 88]
    assert sizes("staleness") == [15, 45, 180, 360]


@pytest.mark.parametrize("rule", [rule for rule in RULE_LIST if hasattr(rule, "delta")], ids=str)
def test_the_sweep_is_what_a_rerun_at_each_delta_gives(rule: Any, tmp_path: Path) -> None:
    tokens = decided(spoiled(make_tokens(tokens=300)), rule)
    # Thresholds that tokens lie on exactly, too.
    met = tokens.decision.divergence[tokens.decision.dropped][:5].double().tolist() or [1.0]
    near = [float(np.nextafter(value, side)) for value in met if value > 0 for side in (0, 1, value)]
    deltas = sorted({0.003, 0.05, 0.1, 1.5, *near})
    found = replay(write(tmp_path, tokens, rule=rule), [PPOClip(), rule], deltas=deltas)
    assert found.deltas == deltas
    (curve,) = found.sweep
    reruns = [int(decided(tokens, dataclasses.replace(rule, delta=delta)).decision.dropped.sum()) for delta in deltas]
    assert curve.dropped == reruns
    assert reruns[0] > reruns[-1]
    assert curve.shares == [count / found.rules[2].trainable for count in reruns]


def test_a_default_sweep_has_the_rules_own_deltas(tmp_path: Path) -> None:
    found = replay(make_trace(tmp_path, Predictive(delta=0.07)), [DPPO(delta=0.123)])
    assert {0.01, 0.07, 0.123, 1.0} <= set(found.deltas)
    assert [curve.label for curve in found.sweep] == ["predictive", "dppo"]
    for number, delta in ((0, 0.07), (1, 0.123)):
        assert found.sweep[number].dropped[found.deltas.index(delta)] == found.rules[number].dropped


@pytest.mark.parametrize("divergence", ["kl", "tv"])
def test_estimators_against_the_full_vocabulary(divergence: Any, tmp_path: Path) -> None:
    rule = Predictive(delta=0.05, divergence=divergence)
    parts = [make_tokens(rule, tokens=80, full=True, step=step, top_k=5) for step in (1, 2)]
    found = replay(write(tmp_path, *parts, rule=rule), []).estimators
    assert found is not None
    assert (found.divergence, found.delta, found.tokens, found.unknown) == (divergence, 0.05, 160, 0)
    assert [row.top_k for row in found.rows] == [0, 1, 2, 5, 10]
    tokens = TokenTrace.cat(parts)
    assert tokens.full is not None
    full = tokens.full.behaviour.double(), tokens.full.policy.double()
    mu, pi = (logp.exp().numpy() for logp in full)
    step = np.eye(mu.shape[1])[tokens.id.numpy()] - pi
    if divergence == "kl":
        value, gradient = (mu * np.log(mu / pi)).sum(1), -mu / pi
    else:
        value, gradient = 0.5 * np.abs(mu - pi).sum(1), 0.5 * np.sign(pi - mu)
    rate = (pi * (gradient - (pi * gradient).sum(1, keepdims=True)) * step).sum(1)
    assert found.outside == (value > 0.05).sum() > 20
    # At the recorded K the view is the recorded one.
    row = found.rows[3]
    assert row.divergence_share == pytest.approx(
        tokens.decision.divergence.double().numpy().sum() / value.sum(), rel=1e-5
    )
    for tail in TAILS:
        estimate = divergence_rate(tokens.behaviour, tokens.policy, divergence=divergence, tail=tail).double().numpy()
        right = np.sign(estimate) == np.sign(rate)
        assert row.error[tail] == pytest.approx(np.abs(estimate - rate).mean(), rel=1e-4)
        assert row.right_outside[tail] == pytest.approx(right[value > 0.05].mean())
        assert row.right[tail] == pytest.approx(right[np.abs(rate) > 1e-6].mean())
    # The more of mu is seen, the more of the divergence; K = 0 knows the ratio alone.
    shares = [row.divergence_share or 0.0 for row in found.rows]
    assert 0 < shares[0] < 1
    assert shares == sorted(shares)
    rises = tokens.policy.logp[:, 0].numpy() > tokens.behaviour.logp[:, 0].numpy()
    for tail in TAILS:
        assert found.rows[0].right_outside[tail] == pytest.approx((rises == (rate > 0))[value > 0.05].mean())
    assert min(found.rows[0].right_outside.values()) < 1


def test_distributions_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    tokens = make_tokens(full=True)
    assert tokens.full is not None
    policy = tokens.full.policy.clone()
    policy[[4, 9], 2] = torch.nan
    mask = torch.arange(len(tokens)) < 50
    decision = Predictive(delta=0.05)(tokens.behaviour, tokens.policy, tokens.advantage, mask)
    changed = dataclasses.replace(tokens, decision=decision, full=dataclasses.replace(tokens.full, policy=policy))
    found = replay(write(tmp_path, changed, rule=Predictive(delta=0.05)), []).estimators
    assert found is not None
    assert (found.tokens, found.unknown) == (48, 2)
    assert all(np.isfinite(list(row.error.values())).all() for row in found.rows)


def test_no_token_outside_gives_no_figure_over_them(tmp_path: Path) -> None:
    trace = make_trace(tmp_path, Predictive(delta=50.0), full=True)
    found = replay(trace).estimators
    assert found is not None
    assert found.outside == 0
    assert all(row.right_outside == {} and row.right for row in found.rows)
    assert main(["replay", str(tmp_path)]) == 0


def test_labels_tell_rules_apart() -> None:
    rules = [DPPO(), DPPO(delta=0.05), Predictive(), PPOClip(dual_clip=3.0)]
    assert rule_labels(rules) == ["dppo (delta 0.15)", "dppo (delta 0.05)", "predictive", "ppo_clip (dual_clip 3.0)"]


def example(mu: float, pi: float, advantage: float) -> TokenTrace:
    """One token as the binary view sees it."""
    behaviour = BehaviourSupport.from_topk(torch.tensor([3]), torch.tensor([mu]).log())
    rest = torch.full((1, 12), (1 - pi) / 11).log()
    rest[0, 3] = np.log(pi)
    policy = PolicySupport.from_logits(rest, behaviour)
    value = torch.tensor([advantage])
    decision = DPPO(support="binary", divergence="tv", delta=0.2)(behaviour, policy, value)
    one = make_tokens(tokens=1)
    return dataclasses.replace(
        one, behaviour=behaviour, policy=policy, advantage=value, decision=decision, after=None, full=None
    )


@pytest.mark.parametrize(
    ("mu", "pi", "advantage", "clip_masks", "divergence_masks"),
    [(1e-6, 1e-4, 1.0, 1, 0), (0.95, 0.60, -1.0, 0, 1)],
)
def test_clip_and_divergence_disagree_where_they_are_known_to(
    mu: float, pi: float, advantage: float, clip_masks: int, divergence_masks: int, tmp_path: Path
) -> None:
    trace = write(tmp_path, example(mu, pi, advantage), rule=DPPO(support="binary", divergence="tv", delta=0.2))
    binary = DPPO(support="binary", divergence="tv", delta=0.2)
    found = replay(trace, [PPOClip(eps_low=0.4), binary])
    assert [row.dropped for row in found.rules] == [divergence_masks, clip_masks, divergence_masks]
    assert found.overall.agreement(1, 2) == 0.0
    assert found.overall.jaccard(0, 2) == (1.0 if divergence_masks else None)
    assert found.reproduction is not None
    assert found.reproduction.exact


@pytest.fixture
def sampled_only(tmp_path: Path) -> Path:
    """A run of another trainer, whose engine recorded no top-K."""
    tokens = make_tokens(PPOClip(), top_k=0)
    write(tmp_path, without_sum_squares(tokens), rule={"name": "ppo_clip", "eps_low": 0.2})
    return tmp_path


def test_a_topk_rule_without_topk_is_refused(sampled_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AnalysisError, match=r"top-K missing: rule 'predictive'.*rollout\.top_k"):
        replay(Trace(sampled_only), [PPOClip(), Predictive()])
    assert main(["replay", str(sampled_only), "--rule", "dppo"]) == 2
    assert "top-K missing: rule 'dppo'" in capsys.readouterr().err
    assert main(["replay", str(sampled_only), "--rule", "dppo", "--rule.support", "binary"]) == 0


def test_by_default_rules_without_their_columns_are_left_out_with_a_note(sampled_only: Path) -> None:
    found = replay(Trace(sampled_only))
    assert [row.rule["name"] for row in found.rules] == ["ppo_clip", "none", "ppo_clip", "cispo", "icepop"]
    assert [note.partition("rule ")[2].split("'")[1] for note in found.notes] == ["dppo", "predictive"]
    assert all("left out: top-K missing" in note for note in found.notes)
    assert found.reproduction is not None
    assert found.reproduction.exact


def test_the_exact_tail_without_its_column_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rule = Predictive(delta=0.05)
    trace = write(tmp_path, without_sum_squares(make_tokens(rule)), rule=rule)
    with pytest.raises(AnalysisError, match=r"tail_sum_squares.*--rule\.tail uniform or --rule\.tail aggregated"):
        replay(trace, [rule])
    found = replay(trace)
    assert found.reproduction is None
    assert "predictive" not in [row.rule["name"] for row in found.rules[1:]]
    assert "the recorded rule cannot be asked again: rule 'predictive'" in found.notes[0]
    assert "left out: rule 'predictive'" in found.notes[1]
    assert main(["replay", str(tmp_path), "--rule", "predictive", "--rule.tail", "uniform"]) == 0
    assert "predictive (tail uniform, delta 0.05)" in capsys.readouterr().out


def test_a_rule_of_another_trainer_is_said_and_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, make_tokens(), rule={"name": "gspo", "width": "\x1b[31m3"})
    assert main(["replay", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert r"recorded rule: gspo (width \x1b[31m3)" in shown
    assert "note: the trace was decided by rule 'gspo'" in shown
    assert "reproduced" not in shown
    assert " 7  predictive " in shown
    assert main(["replay", str(tmp_path), "--rule", "dppo"]) == 0


def test_rules_of_the_command_line_lie_over_the_recorded_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_trace(tmp_path / "run", Predictive(delta=0.07, divergence="js", tail="uniform"))
    asked: list[Any] = []

    def spy(trace: Trace, rules: Any = None, **settings: Any) -> Replay:
        asked.append(rules)
        return replay(trace, rules, **settings)

    monkeypatch.setattr("predmask.analysis.replay.replay", spy)
    args = "--rule dppo --rule.delta 0.1 --rule=predictive --rule.tail=exact --rule ppo_clip --rule.dual_clip 3"
    assert main(["replay", str(tmp_path / "run"), *args.split(), "--sweep", "0.1", "0.2"]) == 0
    assert main(["replay", str(tmp_path / "run")]) == 0
    assert asked == [
        [DPPO(delta=0.1, divergence="js"), Predictive(delta=0.07, divergence="js"), PPOClip(dual_clip=3.0)],
        None,
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rule", "dpo"], "did you mean 'dppo'"),
        (["--rule", "dppo", "--rule.dleta", "1"], "rule.delta"),
        (["--rule", "dppo", "--rule.delta", "-1"], "rule.delta is -1.0"),
        (["--rule", "dppo", "--steps", "3"], "unknown option --steps"),
        (["--rule.delta", "0.1"], "'--rule.delta' belongs to no rule"),
        (["--rule"], "rule"),
        (["--figure", "a.gif"], ".svg or .png"),
        (["--json", "nowhere/a.json"], "there is no directory nowhere"),
    ],
)
def test_a_slip_is_named_with_its_remedy(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trace(tmp_path)
    assert main(["replay", str(tmp_path), *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("predmask: error: ")


def test_tables_json_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trace(tmp_path / "run", Predictive(delta=0.05), full=True, tokens=200)
    outputs = ["--json", str(tmp_path / "r.json"), "--figure", str(tmp_path / "r.svg")]
    assert main(["replay", str(tmp_path / "run"), *outputs]) == 0
    shown = capsys.readouterr().out
    assert "recorded decisions reproduced: 400 of 400" in shown
    assert "(no delta: none, ppo_clip, cispo, icepop)" in shown
    assert max(map(len, shown.splitlines())) <= 100
    written = json.loads((tmp_path / "r.json").read_text())
    found = replay(Trace(tmp_path / "run"))
    assert written["info"]["rule"]["delta"] == 0.05
    assert written["overall"]["agreement"][0][3] == found.overall.agreement(0, 3)
    assert written["overall"]["jaccard"][1][1] is None
    assert written["splits"]["advantage"]["A<0"]["dropped_share"][0] > 0
    assert written["sweep"][0]["dropped"] == found.sweep[0].dropped
    assert written["estimators"]["rows"][1]["top_k"] == 1
    assert (tmp_path / "r.svg").read_text().count("<svg") == 1
    first = (tmp_path / "r.svg").read_bytes()
    assert main(["replay", str(tmp_path / "run"), *outputs[2:]]) == 0
    assert (tmp_path / "r.svg").read_bytes() == first


def test_a_trace_without_whole_distributions_says_how_to_record_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trace(tmp_path)
    assert main(["replay", str(tmp_path), "--rule", "none"]) == 0
    assert "--traces --traces.full" in capsys.readouterr().out.replace("\n", " ")


def test_progress_counts_all_tokens(tmp_path: Path) -> None:
    done: list[int] = []
    replay(make_trace(tmp_path, tokens=70, steps=3), [], progress=done.append)
    assert done == [70, 70, 70]


@pytest.mark.slow
@pytest.mark.parametrize("rule", [{"name": "predictive", "delta": 0.002}, {"name": "ppo_clip", "eps_high": 0.02}])
def test_a_real_run_is_reproduced(rule: dict[str, Any], tmp_path: Path) -> None:
    config = small({"rule": rule, "traces": {"enabled": True, "full": True}}, output=str(tmp_path / "run"))
    run(config)
    found = replay(Trace(tmp_path / "run"))
    assert found.reproduction is not None
    assert found.reproduction.exact
    assert found.rules[0].dropped > 10
    assert found.estimators is not None
    # The tokens' own top-K view is that of their whole distributions.
    tokens = TokenTrace.cat(list(Trace(tmp_path / "run").tokens()))
    assert tokens.full is not None
    kl = get_divergence("kl")
    whole = BehaviourSupport.full(tokens.id, tokens.full.behaviour)
    share = (
        kl(tokens.behaviour, tokens.policy).sum()
        / kl(whole, PolicySupport.from_logits(tokens.full.policy, whole)).sum()
    )
    at_k = next(row for row in found.estimators.rows if row.top_k == tokens.behaviour.top_k)
    assert at_k.divergence_share == pytest.approx(float(share), rel=1e-3)
