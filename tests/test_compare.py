"""Runs side by side: what is pooled, over which steps, and the intervals, against numbers by hand."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_traces import make_trace
from predmask.analysis.compare import FIGURES, compare, mean_of, student_t
from predmask.analysis.compare_views import text, to_json
from predmask.cli import main

BY_KEY = {figure.key: figure for figure in FIGURES}


def write_run(
    directory: Path,
    accuracy: list[float],
    *,
    seed: int = 0,
    rule: str = 'name = "dppo"\ndelta = 0.05',
    planned: int | None = None,
    top: str = "",
    traces: str = "",
    status: str | None = "finished",
    heldout: dict[int, float] | None = None,
    **figures: list[float | None],
) -> Path:
    """A run whose steps have an accuracy and further figures (None: the step has none)."""
    directory.mkdir()
    (directory / "config.toml").write_text(
        f"steps = {planned or len(accuracy)}\nseed = {seed}\n{top}\n[rule]\n{rule}\n[traces]\n{traces}\n"
    )
    heldout = heldout or {}
    lines: list[dict[str, Any]] = [{"step": 0, "heldout": {"sampled": 0.125, "greedy": 0.0}}]
    for step, value in enumerate(accuracy, 1):
        line: dict[str, Any] = {"step": step, "accuracy": value}
        line |= {name: values[step - 1] for name, values in figures.items() if values[step - 1] is not None}
        if step in heldout:
            line["heldout"] = {"sampled": heldout[step], "greedy": 1.0}
        lines.append(line)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if status is not None:
        (directory / "summary.json").write_text(json.dumps({"status": status}))
    return directory


# Published tables of Student's t, two-sided 95 % and 99 %.
@pytest.mark.parametrize(
    ("degrees", "at_95", "at_99"),
    [
        (1, 12.706, 63.657),
        (2, 4.303, 9.925),
        (3, 3.182, 5.841),
        (4, 2.776, 4.604),
        (5, 2.571, 4.032),
        (7, 2.365, 3.499),
        (9, 2.262, 3.250),
        (10, 2.228, 3.169),
        (30, 2.042, 2.750),
        (60, 2.000, 2.660),
        (120, 1.980, 2.617),
    ],
)
def test_student_t_against_published_values(degrees: int, at_95: float, at_99: float) -> None:
    assert student_t(degrees) == pytest.approx(at_95, abs=5.1e-4)
    assert student_t(degrees, 0.99) == pytest.approx(at_99, abs=5.1e-4)


def test_student_t_tends_to_the_normal_quantile() -> None:
    assert student_t(4000) == pytest.approx(1.95996, abs=1e-3)


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=10))
def test_intervals_shift_and_scale_with_their_values(values: list[float]) -> None:
    mean, moved = mean_of(values), mean_of([-2 * value + 3 for value in values])
    assert mean is not None
    assert mean.half_width is not None
    assert moved is not None
    assert mean.value == pytest.approx(np.mean(values), abs=1e-9)
    assert moved.value == pytest.approx(-2 * mean.value + 3, abs=1e-9)
    assert moved.half_width == pytest.approx(2 * mean.half_width, rel=1e-6, abs=1e-9)


def test_intervals_hold_the_true_mean_as_often_as_they_say() -> None:
    generator = np.random.RandomState(0)
    means = [mean_of(list(row)) for row in generator.randn(4000, 3)]
    held = np.mean([abs(mean.value) <= mean.half_width for mean in means if mean and mean.half_width is not None])
    assert held == pytest.approx(0.95, abs=0.012)


def test_one_value_has_no_interval_and_none_is_absent() -> None:
    mean = mean_of([0.5])
    assert mean is not None
    assert (mean.value, mean.half_width, mean.runs) == (0.5, None, 1)
    assert mean_of([]) is None


def test_runs_that_differ_in_seed_and_machine_only_are_one_group(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", [0.1, 0.3, 0.5], seed=0, heldout={3: 0.5}),
        write_run(tmp_path / "b", [0.2, 0.4, 0.8], seed=1, heldout={3: 0.7}, top="threads = 2\ndevice = 'cpu'"),
        write_run(tmp_path / "c", [0.0, 0.5, 0.8], seed=2, heldout={3: 0.9}, traces="enabled = true"),
        write_run(tmp_path / "d", [0.9, 0.8, 0.7], seed=0, heldout={3: 0.1}, rule='name = "none"'),
    ]
    found = compare(runs, last=2)
    assert [group.label for group in found.groups] == ["rule=dppo", "rule=none"]
    assert [group.seeds for group in found.groups] == [(0, 1, 2), (0,)]
    assert found.differing == ("rule.name", "rule.delta")
    assert (found.first, found.last, found.evaluated) == (2, 3, 3)
    accuracy = found.groups[0].mean(BY_KEY["accuracy"])
    assert accuracy is not None
    # Means over steps 2 and 3: .4, .6, .65; t(2) = 4.303.
    assert accuracy.value == pytest.approx(0.55)
    assert accuracy.half_width == pytest.approx(4.30265 * np.std([0.4, 0.6, 0.65], ddof=1) / math.sqrt(3), rel=1e-5)
    sampled = found.groups[0].mean(BY_KEY["sampled"])
    assert sampled is not None
    assert sampled.value == pytest.approx(0.7)
    alone = found.groups[1].mean(BY_KEY["accuracy"])
    assert alone is not None
    assert (alone.value, alone.half_width) == (pytest.approx(0.75), None)
    assert "rule.delta                0.05          -" in text(found)


def test_one_group_has_its_interval_and_no_difference(tmp_path: Path) -> None:
    found = compare([write_run(tmp_path / name, [0.5], seed=seed) for seed, name in enumerate("ab")])
    assert [group.label for group in found.groups] == ["rule=dppo"]
    assert list(found.pairs()) == []
    assert "options that differ" not in text(found)


def test_labels_are_the_options_that_tell_the_groups_apart(tmp_path: Path) -> None:
    rules = ['name = "none"', 'name = "dppo"\ndelta = 0.05\ntail = "x"', 'name = "dppo"\ndelta = 0.15\ntail = "x"']
    runs = [write_run(tmp_path / str(index), [0.5], rule=rule) for index, rule in enumerate(rules)]
    labels = [group.label for group in compare(runs).groups]
    assert labels == ["rule=none", "rule=dppo rule.delta=0.05", "rule=dppo rule.delta=0.15"]
    assert [group.label for group in compare(runs[1:]).groups] == ["rule.delta=0.05", "rule.delta=0.15"]


def test_unfinished_runs_are_marked_and_compared_over_the_steps_that_all_have(tmp_path: Path) -> None:
    full = write_run(tmp_path / "full", [0.1, 0.2, 0.3, 0.4], heldout={2: 0.5, 3: 0.6, 4: 0.9}, seconds=[1.0] * 4)
    cut = write_run(
        tmp_path / "cut", [0.1, 0.4, 0.6], seed=1, heldout={2: 0.7}, seconds=[2.0] * 3, status="interrupted", planned=4
    )
    killed = write_run(tmp_path / "killed", [0.0] * 4, rule='name = "none"', heldout={2: 0.1}, status=None)
    found = compare([full, cut, killed], last=2)
    assert (found.first, found.last, found.evaluated) == (2, 3, 2)
    assert found.groups[0].values["accuracy"] == (pytest.approx(0.25), pytest.approx(0.5))
    assert found.groups[0].values["sampled"] == (0.5, 0.7)
    assert found.groups[0].values["seconds"] == (3.0, 6.0)  # in all, up to the last step that every run has
    assert found.notes == (
        "full: its steps after 3 are left out, since another run does not have them",
        "cut: interrupted, with 3 of 4 steps",
        "killed: unfinished, with 4 of 4 steps",
        "killed: its steps after 3 are left out, since another run does not have them",
    )
    shown = text(found)
    assert "Means over steps 2 to 3" in shown
    assert "held-out accuracy, sampled (step 2)" in shown
    assert "note  cut: interrupted" in shown


def test_figures_that_some_run_lacks(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", [0.5, 0.5], divergence_masked_mean=[0.2, None], entropy=[1.0, 2.0])
    two = write_run(tmp_path / "two", [0.5, 0.5], seed=1, divergence_masked_mean=[None, None])
    other = write_run(tmp_path / "other", [0.5, 0.5], rule='name = "none"')
    found = compare([one, two, other])
    assert found.groups[0].values["divergence_masked_mean"] == (0.2, None)
    lines = {line.strip(): line for line in text(found).splitlines()}
    row = next(line for line in lines if line.startswith("rule's divergence, masked"))
    assert row.split()[3:] == ["0.2", "(n", "=", "1)", "-"]
    assert next(line for line in lines if line.startswith("held-out accuracy, greedy")).split()[3:] == ["-", "-"]


def test_numbers_that_are_not_finite_are_left_out_and_said(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", [0.5, math.nan, 0.7], behaviour_kl=[math.inf] * 3)
    two = write_run(tmp_path / "two", [0.5, 0.5, 0.5], rule='name = "none"', behaviour_kl=[1.0] * 3)
    found = compare([one, two])
    assert found.groups[0].values["accuracy"] == (pytest.approx(0.6),)
    assert found.groups[0].mean(BY_KEY["behaviour_kl"]) is None
    assert "one: accuracy is not finite in 1 of 3 steps" in found.notes
    assert "one: behaviour_kl is not finite in 3 of 3 steps" in found.notes
    json.dumps(to_json(found), allow_nan=False)


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    a, b = {0: 0.1, 1: 0.5, 2: 0.9}, {1: 0.6, 2: 0.95, 3: 0.2}
    runs = [write_run(tmp_path / f"a{seed}", [value], seed=seed) for seed, value in a.items()]
    runs += [write_run(tmp_path / f"b{seed}", [value], seed=seed, rule='name = "none"') for seed, value in b.items()]
    runs += [write_run(tmp_path / "c0", [0.3], seed=0, rule='name = "cispo"')]
    found = compare(runs)
    [(group, seeds)] = found.pairs()
    assert (group.label, seeds) == ("rule=none", [1, 2])
    difference = found.difference(group, seeds, BY_KEY["accuracy"])
    assert difference is not None
    assert difference.value == pytest.approx(0.075)
    assert difference.half_width == pytest.approx(12.7062 * np.std([0.1, 0.05], ddof=1) / math.sqrt(2), rel=1e-5)
    shown = text(found)
    assert "Differences to rule=dppo, paired by seed (1, 2;" in shown
    assert "+7.5 pp ± 31.8 pp" in shown
    assert to_json(found)["differences"][0]["figures"]["accuracy"]["mean"] == pytest.approx(0.075)


def test_nothing_is_called_better(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"a{seed}", [0.1 + seed / 1000], seed=seed) for seed in range(3)]
    runs += [write_run(tmp_path / f"b{seed}", [0.9 + seed / 1000], seed=seed, rule='name = "x"') for seed in range(3)]
    shown = text(compare(runs))
    assert not re.search(r"\b(better|best|winner|wins|significant)", shown.replace(str(tmp_path), ""))
    assert "for the intervals of differences to say" in shown


@pytest.mark.parametrize("groups", [2, 3, 9, 14])
@pytest.mark.parametrize("width", [60, 100])
def test_many_groups_stay_within_the_width(tmp_path: Path, groups: int, width: int) -> None:
    runs = [
        write_run(tmp_path / f"{g}-{seed}", [0.5 + seed / 10], seed=seed, rule=f'name = "dppo"\ndelta = {g}')
        for g in range(groups)
        for seed in range(2)
    ]
    shown = text(compare(runs), width)
    tables = shown[shown.index("mean ± 95 % interval") : shown.index("Differences")]
    assert max(map(len, tables.splitlines())) <= width
    for g in range(groups):
        assert len(re.findall(rf"rule\.delta={g}\b", tables)) == 1


def test_control_characters_of_a_configuration_are_shown(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, [0.5], rule=rf'name = "{name}\u001b[2J"') for name in "ab"]
    shown = text(compare(runs))
    assert "\x1b" not in shown
    assert r"rule=a\x1b[2J" in shown


def test_json_has_every_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / f"{seed}", [0.25, 0.75], seed=seed, heldout={2: 0.5}) for seed in (3, 4)]
    assert main(["compare", *map(str, runs), "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["steps"], found["evaluated"], found["confidence"]) == ([1, 2], 2, 0.95)
    [group] = found["groups"]
    assert [run["seed"] for run in group["runs"]] == [3, 4]
    assert group["figures"]["accuracy"] == {"mean": 0.5, "half_width": 0.0, "runs": 2, "values": [0.5, 0.5]}
    assert group["figures"]["entropy"] == {"mean": None, "half_width": None, "runs": 0, "values": [None, None]}
    assert "rule=dppo" in capsys.readouterr().out


def test_the_figure_is_written_and_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [write_run(tmp_path / f"a{seed}", [0.25, 0.75], seed=seed, mask_frac=[0.1, None]) for seed in range(2)]
    runs += [write_run(tmp_path / "b", [0.5, 0.5, math.nan], rule='name = "none"', behaviour_kl=[0.1, 0.2, 0.3])]
    for name in ("one.svg", "two.svg", "three.png"):
        assert main(["compare", *map(str, runs), "--figure", str(tmp_path / name)]) == 0
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert (tmp_path / "three.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (write_run(tmp_path / name, [0.5], seed=seed) for seed, name in enumerate(("one", "other")))
    again = write_run(tmp_path / "again", [0.5])
    empty = write_run(tmp_path / "empty", [], seed=5)
    make_trace(tmp_path / "foreign")

    def message(*arguments: object) -> str:
        assert main(["compare", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert "two runs or more" in message(one)
    assert "named twice" in message(one, tmp_path / "other" / ".." / "one")
    assert "no directory" in message(one, tmp_path / "nowhere")
    assert "no run directory" in message(one, tmp_path)
    assert "no training step" in message(one, empty)
    assert "no metrics.jsonl, which compare reads" in message(one, tmp_path / "foreign")
    twice = message(one, again)
    assert "same configuration and the same seed 0" in twice
    assert "leave one out" in twice
    assert ".svg or .png" in message(one, other, "--figure", tmp_path / "x.pdf")
    assert "there is no directory" in message(one, other, "--json", tmp_path / "nowhere" / "x.json")


def test_runs_without_a_configuration_stand_alone(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_trace(tmp_path / name)
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "accuracy": 0.5}\n')
    found = compare([tmp_path / "one", tmp_path / "two", write_run(tmp_path / "three", [0.5])])
    assert [group.label for group in found.groups] == ["one", "two", "rule=dppo"]
    assert found.differing == ()
    assert "one: has no config.toml, and stands alone" in found.notes
