"""The direction study: what criteria predicted for tokens outside, and what happened to them."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers_traces import make_tokens, make_trace
from predmask.analysis import AnalysisError
from predmask.analysis.direction.figure import draw
from predmask.analysis.direction.logit_steps import EPSILONS, STEP_DELTA, single_steps
from predmask.analysis.direction.outcomes import (
    CRITERIA,
    Outside,
    outside_region,
    summarise,
    tally,
)
from predmask.analysis.direction.run import measure
from predmask.analysis.direction.study import DELTA as DIRECTION_DELTA
from predmask.analysis.direction.study import run_seed, run_study, variants
from predmask.analysis.direction.study_file import FILE, load, pooled
from predmask.analysis.direction.view import aligned, disagreement_table, lines, outside_table, steps_table, study_lines
from predmask.bootstrap import LEAST_CLUSTERS, interval, resampled_sums
from predmask.cli import main
from predmask.core import RULES, NoMask, Predictive
from predmask.traces import TokenTrace, Trace, TraceInfo, TraceWriter, rule_settings, tokens_from_arrays
from predmask.train import PRESETS, Config, TrainingError
from predmask.train.options import overrides, resolve

DELTA = 0.05


def _kl(mu: np.ndarray, pi: np.ndarray) -> float:
    return float(sum(m * math.log(m / p) for m, p in zip(mu, pi, strict=True)))


def _views(tokens: TokenTrace, row: int) -> tuple[list[int], int, np.ndarray, np.ndarray, np.ndarray]:
    """Support ids, sampled token, and mu, pi and pi after as probabilities, from the whole distributions."""
    full = tokens.full
    assert full is not None
    assert full.after is not None
    mu, pi, after = (np.exp(rows[row].double().numpy()) for rows in (full.behaviour, full.policy, full.after))
    k = int(tokens.id[row])
    support = [k, *(i for i in np.argsort(-mu)[: tokens.behaviour.top_k].tolist() if i != k)]
    return support, k, mu, pi, after


def _coarse(p: np.ndarray, support: list[int]) -> np.ndarray:
    return np.append(p[support], 1 - p[support].sum())


def _expected_rates(tokens: TokenTrace, row: int) -> dict[str, float]:
    """The closed forms of the method page, in plain numbers."""
    support, k, mu, pi, _ = _views(tokens, row)
    base = pi[k] - mu[k] + sum(pi[i] * (mu[i] - pi[i]) for i in support)
    tail = [i for i in range(len(mu)) if i not in support]
    mu_tail, pi_tail = mu[tail].sum(), pi[tail].sum()
    squares = {"aggregated": pi_tail**2, "uniform": pi_tail**2 / len(tail), "exact": (pi[tail] ** 2).sum()}
    rates = {name: base + (square / pi_tail) * (mu_tail - pi_tail) for name, square in squares.items()}
    return {"ratio": pi[k] / mu[k] - 1, **rates, "full": pi[k] - mu[k] + (pi * (mu - pi)).sum()}


def test_counts_are_those_of_a_plain_loop() -> None:
    tokens = make_tokens(NoMask(), tokens=400, noise=1.0, after=True, full=True)
    found = tally(outside_region(tokens, DELTA))
    expected = {key: np.zeros_like(found[key]) for key in found}
    clusters = sorted(
        {
            int(tokens.optimizer_step[row])
            for row in range(len(tokens))
            if _kl(*(_coarse(p, _views(tokens, row)[0]) for p in _views(tokens, row)[2:4])) > DELTA
        }
    )
    for row in range(len(tokens)):
        support, _, mu, pi, after = _views(tokens, row)
        before = {"topk": _kl(_coarse(mu, support), _coarse(pi, support)), "full": _kl(mu, pi)}
        then = {"topk": _kl(_coarse(mu, support), _coarse(after, support)), "full": _kl(mu, after)}
        if before["topk"] <= DELTA:
            continue
        signs = {
            name: np.sign(float(tokens.advantage[row]) * rate) for name, rate in _expected_rates(tokens, row).items()
        }
        cluster = clusters.index(int(tokens.optimizer_step[row]))
        for key in found:
            divergence, of, criterion = key.split("/")
            change = then[divergence] - before[divergence]
            kept = {name: not sign > 0 for name, sign in signs.items()}
            if of != "outside" and kept[of] == kept["ratio"]:
                continue
            expected[key][cluster] += (
                1,
                change > 0,
                kept[criterion],
                kept[criterion] and change > 0,
                kept[criterion] and change < 0,
                signs[criterion] == np.sign(change),
            )
    assert len(found) == 2 * (5 + 4 * 2)
    for key in found:
        assert (found[key] == expected[key]).all(), key
    assert found["topk/outside/ratio"][:, 0].sum() > 100
    assert found["topk/aggregated/ratio"][:, 0].sum() > 3


@pytest.mark.parametrize("seed", range(3))
def test_exactly_one_keeps_where_two_disagree(seed: int) -> None:
    counts = tally(outside_region(make_tokens(NoMask(), tokens=300, noise=1.5, seed=seed, after=True, full=True), 0.02))
    for divergence in ("topk", "full"):
        for name in CRITERIA[1:]:
            one, other = counts[f"{divergence}/{name}/{name}"], counts[f"{divergence}/{name}/ratio"]
            assert (one[:, 0] == one[:, 2] + other[:, 2]).all()  # tokens = kept by one + kept by the other
            assert (one[:, 1] == one[:, 3] + other[:, 3]).all()  # so do the tokens that rose
            assert (one[:, 0] == one[:, 5] + other[:, 5]).all()  # no change is exactly 0 here: one sign is right


def test_zero_rates_keep_and_zero_changes_neither_rise_nor_fall() -> None:
    sign = torch.tensor([0, 0, 1, -1], dtype=torch.int8)
    counts = tally(Outside(torch.zeros(4, dtype=torch.int64), {"ratio": sign}, {"topk": torch.tensor([0.0, 1, 0, -1])}))
    assert counts["topk/outside/ratio"].tolist() == [[4, 1, 3, 1, 1, 2]]


def test_tokens_that_were_not_trained_on_or_are_unknown_after_are_left_out() -> None:
    tokens = make_tokens(NoMask(), tokens=60, noise=1.5, after=True)
    everything = len(outside_region(tokens, 1e-9))
    assert tokens.after is not None
    lost = tokens.after.logp.clone()
    lost[7] = math.nan
    unknown = dataclasses.replace(tokens, after=dataclasses.replace(tokens.after, logp=lost))
    assert len(outside_region(unknown, 1e-9)) == everything - 1
    without = make_tokens(NoMask(), tokens=60, noise=1.5, after=True, advantage=torch.zeros(60))
    decided = dataclasses.replace(without, decision=NoMask()(without.behaviour, without.policy, without.advantage))
    assert len(outside_region(decided, 1e-9)) == 0


def test_criteria_without_their_numbers_are_absent() -> None:
    tokens = make_tokens(NoMask(), tokens=60, after=True)
    assert set(outside_region(tokens, DELTA).outward) == {"ratio", "aggregated", "uniform", "exact"}
    policy = dataclasses.replace(tokens.policy, tail_sum_squares=None)
    bare = outside_region(dataclasses.replace(tokens, policy=policy), DELTA)
    assert set(bare.outward) == {"ratio", "aggregated", "uniform"}
    assert set(bare.change) == {"topk"}


@pytest.mark.parametrize("name", RULES)
def test_a_trace_of_any_rule_is_measured(name: str, tmp_path: Path) -> None:
    trace = make_trace(tmp_path, RULES[name](), steps=2, tokens=120, noise=1.0, after=True, full=True)
    found = measure(trace, DELTA)
    together = TokenTrace.cat([*trace.tokens()])
    expected = tally(outside_region(together, DELTA))
    assert found.counts.keys() == expected.keys()
    for key in expected:
        assert (found.counts[key] == expected[key]).all()
    assert found.trainable == int(together.decision.trainable.sum())
    rows = summarise(found.counts, samples=50)
    assert {row.criterion for row in rows} == set(CRITERIA)


@pytest.mark.parametrize("first_has", [True, False])
@pytest.mark.parametrize("column", ["full", "tail_sum_squares"])
def test_what_only_some_steps_have_is_left_out(column: str, first_has: bool, tmp_path: Path) -> None:
    whole, bare = (make_tokens(NoMask(), tokens=120, noise=1.0, step=step, after=True, full=True) for step in (1, 2))
    if column == "full":
        bare = dataclasses.replace(bare, full=None)
    else:
        bare = dataclasses.replace(bare, policy=dataclasses.replace(bare.policy, tail_sum_squares=None))
    parts = (whole, bare) if first_has else (bare, whole)
    info = TraceInfo(run="mixed", rule=rule_settings(NoMask()), vocabulary_size=12, top_k=4)
    with TraceWriter(tmp_path / "traces", info) as writer:
        for number, part in enumerate(parts, 1):
            writer.add(dataclasses.replace(part, step=torch.full((len(part),), number)))
            writer.commit(number)
    assert writer.problem is None
    found = measure(Trace(tmp_path), DELTA)
    together = [outside_region(part, DELTA) for part in (whole, bare)]
    assert found.counts["topk/outside/ratio"][:, 0].sum() == sum(map(len, together))
    criteria = {key.split("/")[2] for key in found.counts}
    assert criteria == set(CRITERIA) - {"full" if column == "full" else "exact"}
    assert (found.steps == {}) == (column == "full")


def test_a_trace_of_another_trainer_is_made_as_the_page_says(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "direction.md").read_text()
    (block,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    generator = torch.Generator().manual_seed(0)
    rows, length, size, temperature = 30, 8, 12, 0.7
    mu, logits, then = (2 * torch.randn(rows, length, size, generator=generator) for _ in range(3))
    mu, moved = mu.log_softmax(-1), logits + 0.2 * then
    ids = mu.exp().view(-1, size).multinomial(1, generator=generator).view(rows, length)
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)
    top = mu.topk(4)
    advantage = torch.randn(rows, generator=generator)
    info = TraceInfo(run="other", rule=rule_settings(NoMask()), vocabulary_size=size, top_k=4, temperature=temperature)
    with TraceWriter(tmp_path / "traces", info) as writer:
        names = {
            "tokens_from_arrays": tokens_from_arrays,
            "info": info,
            "step": 1,
            "optimizer_step": 7,
            "ids": ids,
            "mu": mu.gather(-1, ids[..., None])[..., 0],
            "top_ids": top.indices,
            "top_mu": top.values,
            "logits": logits,
            "advantage": advantage,
            "mask": mask,
            "optimizer": SimpleNamespace(step=lambda: None),
            "compute_logits": lambda: moved,
            "writer": writer,
        }
        exec(compile(block, "direction.md", "exec"), names)
        writer.commit(1)
    assert writer.problem is None
    counts = measure(Trace(tmp_path), DELTA).counts["topk/outside/ratio"]
    expected = [0, 0]
    pi, after = ((values / temperature).softmax(-1).double().numpy() for values in (logits, moved))
    for row, place in torch.nonzero(mask).tolist():
        k = int(ids[row, place])
        support = [k, *(i for i in top.indices[row, place].tolist() if i != k)]
        of_mu = _coarse(mu[row, place].double().exp().numpy(), support)
        before = _kl(of_mu, _coarse(pi[row, place], support))
        if before > DELTA:
            expected[0] += 1
            expected[1] += _kl(of_mu, _coarse(after[row, place], support)) > before
    assert counts[0, :2].tolist() == expected
    assert expected[1] > 20


def test_delta_is_the_recorded_one_where_that_bounds_a_kl(tmp_path: Path) -> None:
    settings = {"noise": 1.0, "after": True}
    assert measure(make_trace(tmp_path / "a", Predictive(delta=0.02), **settings)).delta == 0.02
    assert measure(make_trace(tmp_path / "b", Predictive(divergence="tv", delta=0.2), **settings)).delta == 0.15
    assert measure(make_trace(tmp_path / "c", NoMask(), **settings)).delta == 0.15


def test_what_cannot_be_measured_says_why(tmp_path: Path) -> None:
    with pytest.raises(AnalysisError, match=r"--traces\.after.*docs/direction\.md"):
        measure(make_trace(tmp_path / "a"))
    with pytest.raises(AnalysisError, match="top-K missing"):
        measure(make_trace(tmp_path / "b", NoMask(), top_k=0, after=True))
    with pytest.raises(AnalysisError, match=r"largest top-K KL of .* delta is 900.*--delta \d"):
        measure(make_trace(tmp_path / "c", after=True), 900.0)


def test_a_single_logit_step_is_predicted_exactly_in_the_limit() -> None:
    tokens = make_tokens(NoMask(), tokens=2000, noise=1.0, full=True)
    counts = single_steps(tokens)
    number, right = counts["topk/1e-05/exact"][0]
    assert number == right > 1500
    number, right = counts["full/1e-05/full"][0]
    assert number == right > 1500
    assert 0.8 < counts["topk/1e-05/ratio"][0, 1] / number < 0.99
    errors = [number - counts[f"topk/{epsilon:g}/exact"][0, 1] for epsilon in EPSILONS]
    assert errors[0] > errors[2]


def test_a_single_logit_step_is_that_of_the_formula() -> None:
    tokens = make_tokens(NoMask(), tokens=60, noise=1.0, full=True, after=True)
    counts = single_steps(tokens)
    for epsilon in (0.1, 1e-3):
        expected = dict.fromkeys(("topk/ratio", "topk/uniform", "full/full"), 0)
        number = 0
        for row in range(len(tokens)):
            support, k, mu, pi, _ = _views(tokens, row)
            before = _kl(_coarse(mu, support), _coarse(pi, support))
            if before <= STEP_DELTA:
                continue
            number += 1
            sign = np.sign(float(tokens.advantage[row]))
            moved = pi * np.exp(epsilon * sign * ((np.arange(len(pi)) == k) - pi))
            moved /= moved.sum()
            change = {
                "topk": _kl(_coarse(mu, support), _coarse(moved, support))
                - _kl(_coarse(mu, support), _coarse(pi, support)),
                "full": _kl(mu, moved) - _kl(mu, pi),
            }
            rates = _expected_rates(tokens, row)
            for key in expected:
                divergence, criterion = key.split("/")
                expected[key] += np.sign(sign * rates[criterion]) == np.sign(change[divergence])
        for key, right in expected.items():
            divergence, criterion = key.split("/")
            assert counts[f"{divergence}/{epsilon:g}/{criterion}"].tolist() == [[number, right]]


def test_shares_and_differences_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("predmask.bootstrap.LEAST_CLUSTERS", 2)
    #                                tokens rose kept rose fell right
    counts = {
        "topk/outside/ratio": np.array([[10, 4, 5, 2, 3, 6], [10, 6, 5, 4, 1, 4]]),
        "topk/outside/exact": np.array([[10, 4, 4, 1, 3, 8], [10, 6, 6, 3, 2, 5]]),
        "topk/exact/ratio": np.zeros((2, 6), dtype=np.int64),
        "topk/exact/exact": np.zeros((2, 6), dtype=np.int64),
    }
    ratio, exact, *empty = summarise(counts)
    assert (ratio.tokens, ratio.kept, ratio.rose) == (20, 10, 0.5)
    assert [ratio.figures[name].value for name in ("unsafe_keep", "shrink_kept", "accuracy")] == [0.6, 0.4, 0.5]
    assert [exact.figures[name].value for name in ("unsafe_keep", "shrink_kept", "accuracy")] == [0.4, 0.5, 0.65]
    assert exact.to_ratio["unsafe_keep"].value == pytest.approx(-0.2)
    # Two clusters: a resample has the one twice, both, or the other twice.
    assert exact.figures["unsafe_keep"][1:] == (1 / 4, 3 / 6)
    assert exact.to_ratio["unsafe_keep"][1:] == pytest.approx((3 / 6 - 4 / 5, 1 / 4 - 2 / 5))
    assert ratio.to_ratio["accuracy"] == (0, 0, 0)
    for row in empty:
        assert row.rose is None
        assert row.figures["unsafe_keep"] == row.to_ratio["accuracy"] == (None, None, None)


@pytest.mark.parametrize(("clusters", "has_interval"), [(1, False), (9, False), (10, True)])
def test_few_clusters_have_figures_and_no_interval(clusters: int, has_interval: bool) -> None:
    (row,) = summarise({"topk/outside/ratio": np.array(clusters * [[10, 4, 5, 2, 3, 6]])})
    assert row.figures["unsafe_keep"] == (0.4, *((0.4, 0.4) if has_interval else (None, None)))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=2, max_size=12), st.integers(2, 50))
def test_copies_of_tokens_within_a_cluster_teach_nothing(clusters: list[tuple[int, int]], copies: int) -> None:
    counts = np.array([[0, 0, hit + missed, hit, missed, 0] for hit, missed in clusters])
    once, many = (summarise({"topk/outside/ratio": n * counts}, samples=100)[0].figures for n in (1, copies))
    assert once["unsafe_keep"] == pytest.approx(many["unsafe_keep"], nan_ok=True)


def test_resampling_is_of_clusters_and_repeats_itself() -> None:
    counts = np.array([[1, 0, 5], [0, 1, 5], [0, 0, 5]])
    sums = resampled_sums(counts, samples=2000, seed=3)
    assert (sums == resampled_sums(counts, samples=2000, seed=3)).all()
    assert (sums != resampled_sums(counts, samples=2000, seed=4)).any()
    assert (sums[:, 2] == 15).all()  # always three clusters
    # How often a cluster is drawn is binomial (3, 1/3), and two of them have covariance -1/3.
    assert np.bincount(sums[:, 0].astype(int)) / 2000 == pytest.approx([8 / 27, 12 / 27, 6 / 27, 1 / 27], abs=0.03)
    assert np.cov(sums[:, 0], sums[:, 1])[0, 1] == pytest.approx(-1 / 3, abs=0.05)


def test_an_interval_is_as_wide_as_its_clusters_allow() -> None:
    generator = np.random.RandomState(1)
    rates = generator.uniform(0.2, 0.8, size=100)
    hits = (100 * rates).round().astype(int)
    counts = np.stack([0 * hits, 0 * hits, 0 * hits + 100, hits, 100 - hits, 0 * hits], -1)
    figure = summarise({"topk/outside/ratio": counts})[0].figures["unsafe_keep"]
    assert figure.high is not None
    assert figure.low is not None
    expected = 2 * 1.96 * (hits / 100).std() / math.sqrt(100)  # not that of 10,000 tokens
    assert figure.high - figure.low == pytest.approx(expected, rel=0.08)


def test_an_interval_needs_its_tokens_in_more_than_a_cluster_or_two() -> None:
    values = np.linspace(0, 1, 1001)
    assert interval(np.append(values, [math.nan] * 20), 60) == pytest.approx((0.025, 0.975))
    assert interval(np.append(values, [math.nan] * 60), 60) == (None, None)
    assert interval(values, 1) == (None, None)


FAST = ["--rollout.prompts", "4", "--rollout.group_size", "4", "--update.steps_per_rollout", "4", "--steps", "1"]
"""Options that cut a seed of the study down to a second."""


def test_the_study_is_of_the_preset_without_a_mask() -> None:
    preset = resolve(PRESETS["arithmetic-stress"].values)
    configs = variants({})
    assert [config.optimizer.beta1 for config in configs.values()] == [0.9, 0]
    for config in configs.values():
        assert config.engine == preset.engine
        assert config.rollout == preset.rollout
        assert config.update == preset.update
        assert config.loss == preset.loss
        assert dataclasses.replace(config.optimizer, beta1=0.9) == preset.optimizer
        assert config.rule == NoMask()
        assert config.threads == 1
    assert preset.rule.delta == DIRECTION_DELTA  # pyright: ignore[reportAttributeAccessIssue]


def test_the_study_takes_options() -> None:
    (config,) = variants(overrides(["--rule", "predictive", "--optimizer.beta1", "0.5", "--steps", "2"])).values()
    assert config.rule == Predictive(delta=0.05)  # the preset's delta
    assert (config.optimizer.beta1, config.steps) == (0.5, 2)
    for owned in ("seed", "output", "threads", "traces.every"):
        with pytest.raises(AnalysisError, match=owned.partition(".")[0]):
            variants(overrides([f"--{owned}", "3"]))
    with pytest.raises(AnalysisError, match="top_k"):
        variants(overrides(["--rollout.top_k", "0"]))


@pytest.mark.slow
def test_a_study_goes_on_where_it_was(tmp_path: Path) -> None:
    layer = overrides([*FAST, "--optimizer.beta1", "0"])
    calls: list[tuple[int, int]] = []
    first = run_study(layer, 1, tmp_path, delta=1e-3, progress=lambda *done: calls.append(done))
    second = run_study(layer, 2, tmp_path, delta=1e-3, progress=lambda *done: calls.append(done))
    assert calls == [(0, 1), (1, 1), (1, 2), (2, 2)]
    assert second["seeds"]["beta1 = 0"]["0"] == first["seeds"]["beta1 = 0"]["0"]
    assert load(tmp_path / FILE) == second
    # The same seed gives the same numbers, here and in a process of its own.
    (config,) = variants(layer).values()
    again = run_seed(dataclasses.replace(config, seed=1), 1e-3)
    assert json.loads(json.dumps(again)) == second["seeds"]["beta1 = 0"]["1"]
    assert again != second["seeds"]["beta1 = 0"]["0"]

    counts, steps = pooled(second, "beta1 = 0")
    rows = summarise(counts, samples=20)
    assert rows[0].tokens > 10
    assert counts["topk/outside/ratio"].shape == (2, 6)
    number, right = steps["topk/1e-05/exact"].sum(0)
    assert right >= 0.999 * number > 10
    assert run_study(layer, 1, tmp_path, delta=1e-3) == first
    with pytest.raises(AnalysisError, match="other options"):
        run_study(layer, 1, tmp_path, delta=0.5)


def test_a_file_that_is_no_study_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"protocol": {}}')
    with pytest.raises(AnalysisError, match="cannot be read"):
        load(tmp_path / FILE)


def _counted(seed: int) -> dict[str, Any]:
    """A seed's counts as `run_seed` gives them, of made-up tokens."""
    tokens = make_tokens(NoMask(), tokens=300, noise=1.0, seed=seed, after=True, full=True)
    counts = {key: value.sum(0) for key, value in tally(outside_region(tokens, DELTA)).items()}
    steps = {key: value[0].tolist() for key, value in single_steps(tokens).items()}
    return {"accuracy": [0.5], "trainable": 300, "counts": {k: v.tolist() for k, v in counts.items()}, "steps": steps}


@pytest.fixture
def made_up_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """Runs of the study are made up, in a thread: seed 1 fails without momentum. Returns beta1 and seed of each."""
    ran: list[tuple[float, int]] = []

    def run_one(config: Config, delta: float) -> dict[str, Any]:
        ran.append((config.optimizer.beta1, config.seed))
        if ran[-1] == (0, 1):
            raise TrainingError("the loss is nan")
        return _counted(config.seed)

    monkeypatch.setattr("predmask.analysis.direction.study.run_seed", run_one)
    monkeypatch.setattr(
        "predmask.analysis.direction.study.ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(max_workers=1)
    )
    return ran


def test_a_seed_that_fails_is_left_out_and_not_tried_again(
    made_up_runs: list[tuple[float, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["direction", "--seeds", "3", "--output", str(tmp_path)]
    assert main(arguments) == 0
    printed, progress = capsys.readouterr()
    assert "6 of 6 runs done" in progress
    assert "failed    1 of 3 seeds, which are left out: 1\n          seed 1: the loss is nan\n" in printed
    assert [line for line in printed.splitlines() if line.startswith("clusters")] == [
        "clusters  3 seeds; intervals need 10 or more",
        "clusters  2 seeds; intervals need 10 or more",
    ]
    study = load(tmp_path / FILE)
    assert study["failed"] == {"beta1 = 0.9": {}, "beta1 = 0": {"1": "the loss is nan"}}
    assert {name: sorted(seeds) for name, seeds in study["seeds"].items()} == {
        "beta1 = 0.9": ["0", "1", "2"],
        "beta1 = 0": ["0", "2"],
    }
    assert len(pooled(study, "beta1 = 0")[0]["topk/outside/ratio"]) == 2
    assert len(made_up_runs) == 6
    assert main(arguments) == 0
    assert len(made_up_runs) == 6
    assert capsys.readouterr().out == printed


def test_a_variant_whose_seeds_all_fail_is_said(
    made_up_runs: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(config: Config, delta: float) -> dict[str, Any]:
        raise TrainingError("the loss is inf; lower the rate")

    monkeypatch.setattr("predmask.analysis.direction.study.run_seed", fail)
    with pytest.raises(AnalysisError, match=r"beta1 = 0.9: .*every seed.*the loss is inf; lower the rate"):
        run_study({}, 2, tmp_path)


def test_what_had_finished_when_a_study_was_interrupted_is_kept(
    made_up_runs: list[tuple[float, int]], tmp_path: Path
) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 1:
            while len(made_up_runs) < 5:  # so that four are through
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study({}, 10, tmp_path, progress=interrupt)
    assert 4 <= sum(map(len, load(tmp_path / FILE)["seeds"].values())) < 20
    assert load(tmp_path / FILE)["failed"]["beta1 = 0"] == {"1": "the loss is nan"}


@pytest.mark.slow
def test_a_killed_worker_is_an_error_with_a_remedy_and_the_rest_is_kept(tmp_path: Path) -> None:
    def kill(done: int, total: int) -> None:
        if done == 1:
            multiprocessing.active_children()[0].kill()

    with pytest.raises(AnalysisError, match=r"one of 2 processes was killed.*fewer --workers"):
        run_study(overrides(FAST), 20, tmp_path, delta=1e-3, workers=2, progress=kill)
    assert sum(map(len, load(tmp_path / FILE)["seeds"].values())) >= 1
    assert multiprocessing.active_children() == []


def _running(group: int) -> int:
    """How many processes of a process group run."""
    listed = subprocess.run(["ps", "-axo", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    return sum(int(line.split()[0]) == group and line.split()[1][0] != "Z" for line in listed.splitlines())


def _wait_until(true: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "steps", "runs_done"), [(signal.SIGTERM, 1000, 0), (signal.SIGINT, 1000, 0), (signal.SIGINT, 1, 2)]
)
def test_an_interrupted_study_ends_at_once_silently_with_its_workers(
    stop: signal.Signals, steps: int, runs_done: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "predmask", "direction", "--seeds", "50", "--workers", "2", *FAST]
    command += ["--steps", str(steps), "--output", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        try:
            next(line for line in process.stderr if line.startswith(f"{runs_done} of 100"))
            _wait_until(lambda: _running(process.pid) == 4, 60)  # the study, its two workers, Python's resource tracker
            time.sleep(0.5)  # the last one has read what it is told at its start
            # Ctrl-C reaches the whole group, a scheduler's signal the study alone.
            (os.killpg if stop == signal.SIGINT else os.kill)(process.pid, stop)
            rest = process.communicate(timeout=15)[1]
            _wait_until(lambda: _running(process.pid) == 0, 10)
        finally:
            if _running(process.pid):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert "interrupted; " in rest
    assert "Traceback" not in rest
    if runs_done:
        assert sum(map(len, load(tmp_path / FILE)["seeds"].values())) >= runs_done


def test_a_study_of_two_seeds_is_tidy_without_intervals(
    made_up_runs: list[tuple[float, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["direction", "--seeds", "2", "--output", str(tmp_path), "--optimizer.beta1", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert "[" not in printed
    assert "clusters  2 seeds; intervals need 10 or more\nfigures   in %, differences in percentage points\n" in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert (tmp_path / "direction.txt").read_text().startswith(printed.partition("\n")[0])
    assert "95 % intervals" not in (tmp_path / "direction.svg").read_text()
    # A blank line parts tables, and there is none inside of one.
    assert all(len(block.splitlines()) != 2 for block in printed.split("\n\n"))


def test_the_command_line_prints_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trace(tmp_path / "run", steps=8, tokens=200, noise=1.0, after=True, full=True)
    assert main(["direction", str(tmp_path / "run"), "--delta", "0.02"]) == 0
    printed = capsys.readouterr().out
    found = measure(Trace(tmp_path / "run"), 0.02)
    assert len(found.counts["topk/outside/ratio"]) >= LEAST_CLUSTERS
    rows = summarise(found.counts)
    for divergence in ("topk", "full"):  # V = 12 and K = 4: they differ
        for table in (outside_table, disagreement_table):
            assert aligned(table(rows, divergence)) in printed
        assert aligned(steps_table(found.steps, divergence)) in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_tables_have_every_figure_with_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("predmask.bootstrap.LEAST_CLUSTERS", 2)
    # The counts of `test_shares_and_differences_by_hand`, where every resample can be listed.
    counts = {
        "topk/outside/ratio": np.array([[10, 4, 5, 2, 3, 6], [10, 6, 5, 4, 1, 4]]),
        "topk/outside/exact": np.array([[10, 4, 4, 1, 3, 8], [10, 6, 6, 3, 2, 5]]),
    }
    rows = summarise(counts)
    expected = [
        "criterion  kept   unsafe-keep        vs ratio   shrink-kept         right        vs ratio",
        "ratio        10          60.0                          40.0          50.0",
        "                 [40.0, 80.0]                  [20.0, 60.0]  [40.0, 60.0]",
        "exact        10          40.0           -20.0          50.0          65.0           +15.0",
        "                 [25.0, 50.0]  [-30.0, -15.0]  [33.3, 75.0]  [50.0, 80.0]  [+10.0, +20.0]",
    ]
    assert aligned(outside_table(rows, "topk")).splitlines() == expected
    alone = [row.split()[0] for row in aligned(disagreement_table(rows, "topk")).splitlines()]
    assert alone == ["criterion"]


def test_the_widest_tables_fit_a_terminal() -> None:
    counts = {
        f"topk/{of}/{name}": np.array(6 * [[90_000, 9, 40_000, 40_000, 0, 0], [9_000, 9, 4_000, 0, 4_000, 9_000]])
        for of, names in (("outside", CRITERIA), *((name, ("ratio", name)) for name in CRITERIA[1:]))
        for name in names
    }
    rows = summarise(counts)
    text = [*lines(counts, {}, rows, delta=0.05, trainable=2_000_000, clusters="seeds")]
    assert max(len(row) for line in text for row in line.splitlines()) <= 100


def test_steps_of_each_size_have_their_own_number_of_tokens() -> None:
    counts = {
        f"topk/{epsilon:g}/{name}": np.array([[1000 + place, 500], [234, 100 + place]])
        for place, epsilon in enumerate(EPSILONS)
        for name in ("ratio", "exact")
    }
    table = steps_table(counts, "topk")
    assert table[0] == ["step", "tokens", "ratio", "exact"]
    assert [row[:2] for row in table[1:]] == [[f"{epsilon:g}", f"{1234 + i:,}"] for i, epsilon in enumerate(EPSILONS)]
    assert table[2][2] == f"{601 / 1235:.2%}"


def test_the_full_vocabulary_is_shown_where_it_differs() -> None:
    seed = _counted(0)
    counts = {key: np.array([value]) for key, value in seed["counts"].items() if key.startswith("topk/")}
    steps = {key: np.array([value]) for key, value in seed["steps"].items() if key.startswith("topk/")}

    def text(brief: bool = True, **changes: int) -> str:
        def both(found: dict[str, Any]) -> dict[str, Any]:
            return found | {key.replace("topk/", "full/", 1): value.copy() for key, value in found.items()}

        all_counts, all_steps = both(counts), both(steps)
        all_counts["full/outside/exact"][0, 5] -= changes.get("right", 0)
        all_steps["full/0.1/exact"][0, 1] -= changes.get("step", 0)
        rows = summarise(all_counts)
        return "\n".join(lines(all_counts, all_steps, rows, delta=DELTA, trainable=300, clusters="seeds", brief=brief))

    same = "The full-vocabulary KL gives the same figures"
    assert same in text()
    assert "full-vocabulary KL rose" not in text()
    for shown in (text(brief=False), text(right=1), text(step=1)):
        assert same not in shown
        assert "The full-vocabulary KL rose for" in shown
        assert "change of its full-vocabulary KL:" in shown


def test_the_help_says_what_an_interval_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["direction", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert f"with fewer than {LEAST_CLUSTERS}, figures have no interval" in printed
    assert f"fewer than {LEAST_CLUSTERS} clusters" in (Path(__file__).parent.parent / "docs/direction.md").read_text()


@pytest.mark.parametrize(
    "arguments", [[], ["--delta", "1"], ["a", "b"], ["--rule", "none"], ["a", "--workers", "2"], ["a", "--delta", "0"]]
)
def test_the_command_line_refuses_what_makes_no_sense(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["direction", *arguments])
    assert ended.value.code == 2


def test_mistakes_are_told_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trace(tmp_path / "run")
    for arguments in ([str(tmp_path / "run")], [str(tmp_path / "no")], ["--seeds", "2", "--seed", "3"]):
        assert main(["direction", *arguments]) == 2
        assert "predmask: error: " in capsys.readouterr().err


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    counts = tally(outside_region(make_tokens(NoMask(), tokens=600, noise=1.0, after=True, full=True), 0.02))
    rows = summarise(counts, samples=50)
    for path in (tmp_path / "a.svg", tmp_path / "b.svg"):
        draw({"one": rows, "other": rows}, path, delta=0.02)
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def test_the_page_shows_what_was_measured() -> None:
    docs = Path(__file__).parent.parent / "docs"
    page = (docs / "direction.md").read_text()
    study = load(docs / "figures" / "direction.json")
    for variant, seeds in study["seeds"].items():
        assert len(seeds) == 61
        counts, steps = pooled(study, variant)
        rows = summarise(counts)
        assert f"The top-K KL rose for {rows[0].rose:.1%} of all {rows[0].tokens:,} tokens outside" in page
        assert "full-vocabulary KL gives the same" in "\n".join(study_lines(study, {variant: rows}))
        for divergence in ("topk", "full"):
            assert aligned(outside_table(rows, divergence)) in page
            assert aligned(disagreement_table(rows, divergence)) in page
            if variant == "beta1 = 0.9":
                assert aligned(steps_table(steps, divergence)) in page
    number, right = pooled(study, "beta1 = 0.9")[1]["topk/1e-05/exact"].sum(0)
    assert (number, number - right) == (365_370, 1)
    assert "all but one token of 365,370" in page


@pytest.mark.parametrize("name", ["predictive", "fp8"])
def test_the_page_shows_what_was_measured_of_the_variants(name: str) -> None:
    docs = Path(__file__).parent.parent / "docs"
    page = (docs / "direction.md").read_text()
    study = load(docs / "figures" / f"direction-{name}.json")
    for variant, seeds in study["seeds"].items():
        assert len(seeds) == 12
        for row in summarise(pooled(study, variant)[0]):
            if row.criterion == "exact" and row.divergence == "topk":
                value, _, _ = row.figures["unsafe_keep"]
                difference, low, high = row.to_ratio["unsafe_keep"]
                assert None not in (value, difference, low, high)
                of = "all outside" if row.of == "outside" else "disagreement"
                shown = f"{100 * (value - difference):.1f} | {100 * value:.1f} | {100 * difference:+.1f}"  # pyright: ignore
                ends = f"[{100 * low:+.1f}, {100 * high:+.1f}]"  # pyright: ignore
                beta = variant.removeprefix("beta1 = ")
                assert f"| {name} | {beta} | {row.tokens:,} | {of} | {shown} {ends} |" in page
