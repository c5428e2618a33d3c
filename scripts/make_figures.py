"""Train what the README's figures show, and draw them.

    python scripts/make_figures.py run       one run of the preset arithmetic         (a minute)
    python scripts/make_figures.py stress    every rule under stress, over five seeds (half an hour on two cores)
    python scripts/make_figures.py draw      draw again from the figures' data

Data and figures lie in docs/figures/.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
SEEDS = range(5)
LAST = 10
"""Accuracies are means over the last steps, not one endpoint."""

RULES: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "cispo": {"name": "cispo"},
    "icepop": {"name": "icepop"},
    "ppo_clip": {"name": "ppo_clip"},
    "dppo": {"name": "dppo", "delta": 0.05},
    "predictive (aggregated)": {"name": "predictive", "tail": "aggregated", "delta": 0.05},
    "predictive (uniform)": {"name": "predictive", "tail": "uniform", "delta": 0.05},
    "predictive (exact)": {"name": "predictive", "tail": "exact", "delta": 0.05},
}


def train(preset: str, layer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records of metrics.jsonl of one run, on one thread."""
    from predmask.train import PRESETS, run
    from predmask.train.options import resolve

    with tempfile.TemporaryDirectory() as folder:
        config = resolve(PRESETS[preset].values, layer, {"threads": 1, "output": f"{folder}/run"})
        _, directory = run(config)
        return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def study(seeds: Sequence[int], workers: int) -> None:
    """Train every rule under stress, and keep what was measured after each run."""
    path = FIGURES / "stress.json"
    done: dict[str, dict[str, Any]] = {}
    todo = [(rule, seed) for seed in seeds for rule in RULES]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {
            pool.submit(train, "arithmetic-stress", {"rule": RULES[rule], "seed": seed}): (rule, seed)
            for rule, seed in todo
        }
        for count, future in enumerate(as_completed(futures), 1):
            rule, seed = futures[future]
            steps = [record for record in future.result() if record["step"] > 0]
            done.setdefault(rule, {})[str(seed)] = {
                name: [round(record[name], 6) for record in steps] for name in ("accuracy", "behaviour_kl", "mask_frac")
            }
            path.write_text(json.dumps(done, indent=None, sort_keys=True).replace("}, ", "},\n") + "\n")
            print(
                f"{count}/{len(todo)}  {rule}, seed {seed}: accuracy {fmean(_last(done, rule, seed)):.3f}", flush=True
            )


def table(done: Mapping[str, Any]) -> str:
    """The study as a Markdown table: mean ± standard deviation over seeds, of means over the last steps."""
    lines = [
        f"| rule | accuracy, last {LAST} steps | collapsed (< .1) | mean KL(mu‖pi) | masked |",
        "|---|---|---|---|---|",
    ]
    for rule in RULES:
        per_seed = [fmean(_last(done, rule, seed)) for seed in done[rule]]
        kl = fmean(fmean(one["behaviour_kl"]) for one in done[rule].values())
        masked = fmean(fmean(one["mask_frac"]) for one in done[rule].values())
        lines.append(
            f"| {rule} | {fmean(per_seed):.2f} ± {_deviation(per_seed):.2f} "
            f"| {sum(value < 0.1 for value in per_seed)} of {len(per_seed)} | {kl:.3f} | {masked:.1%} |"
        )
    return "\n".join(lines)


def draw_stress() -> None:
    """Accuracy over steps: mean over seeds, and the range from the worst to the best seed."""
    done = json.loads((FIGURES / "stress.json").read_text())
    plt = _pyplot()
    figure, axes = plt.subplots(2, 4, figsize=(11, 4.6), sharex=True, sharey=True)
    for axis, rule in zip(axes.flat, RULES, strict=True):
        curves = list(zip(*(one["accuracy"] for one in done[rule].values()), strict=True))
        steps = range(1, len(curves) + 1)
        colour = "#b2182b" if rule == "none" else "#2166ac" if rule.startswith("predictive") else "#555555"
        axis.fill_between(steps, [min(c) for c in curves], [max(c) for c in curves], color=colour, alpha=0.18, lw=0)
        axis.plot(steps, [fmean(c) for c in curves], color=colour, lw=1.6)
        axis.set_title(rule, fontsize=10)
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.25)
    seeds = len(done["none"])
    figure.supxlabel("step", fontsize=10)
    figure.supylabel("accuracy of the sampled answers", fontsize=10)
    figure.suptitle(
        f"preset arithmetic-stress: mean and range of {seeds} seeds (int4 rollout, learning rate 5e-4)", fontsize=11
    )
    figure.tight_layout()
    _save(figure, "stress.svg")


def draw_run() -> None:
    """One run: accuracy on top, what the mask did below."""
    records = json.loads((FIGURES / "run.json").read_text())
    plt = _pyplot()
    steps = [record for record in records if record["step"] > 0]
    evaluated = [record for record in records if "heldout" in record]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
    number = [record["step"] for record in steps]
    left.plot(number, [record["accuracy"] for record in steps], color="#999999", lw=1.2, label="training, sampled")
    at = [record["step"] for record in evaluated]
    for name, colour in (("sampled", "#2166ac"), ("greedy", "#b2182b")):
        values = [record["heldout"][name] for record in evaluated]
        left.plot(at, values, "o-", color=colour, ms=4, lw=1.6, label=f"held-out, {name}")
    left.set(xlabel="step", ylabel="accuracy", ylim=(-0.03, 1.05), title="preset arithmetic")
    left.legend(fontsize=8, loc="lower right")
    right.stackplot(
        number,
        [100 * record["mask_frac_pos"] for record in steps],
        [100 * record["mask_frac_neg"] for record in steps],
        labels=["A > 0", "A < 0"],
        colors=["#2166ac", "#b2182b"],
        alpha=0.75,
    )
    right.set(xlabel="step", ylabel="masked tokens, %", title="what the mask drops")
    right.legend(fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.25)
    figure.tight_layout()
    _save(figure, "run.svg")


def _last(done: Mapping[str, Any], rule: str, seed: int | str) -> list[float]:
    return done[rule][str(seed)]["accuracy"][-LAST:]


def _deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else math.nan


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    # The same data draws the same file.
    matplotlib.rcParams["svg.hashsalt"] = "predmask"
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, name: str) -> None:
    figure.savefig(FIGURES / name, metadata={"Date": None}, facecolor="white")
    print(f"wrote docs/figures/{name}")


def main() -> None:
    """Parse the command line and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "stress", "draw"))
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at once, one thread each")
    args = parser.parse_args()
    FIGURES.mkdir(parents=True, exist_ok=True)
    if args.what == "run":
        records = json.dumps(train("arithmetic", {})).replace("}, {", "},\n{")
        (FIGURES / "run.json").write_text(records + "\n")
    if args.what == "stress":
        study(SEEDS, args.workers)
    if args.what in ("run", "draw"):
        draw_run()
    if args.what in ("stress", "draw"):
        draw_stress()
        print(table(json.loads((FIGURES / "stress.json").read_text())))


if __name__ == "__main__":
    main()
