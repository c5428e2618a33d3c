"""`predmask direction`: was each direction criterion right about the tokens outside the trust region?"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predmask.cli.numbers import above_zero, positive

if TYPE_CHECKING:
    from predmask.analysis.direction.outcomes import Counts, Row

_USAGE = """\
%(prog)s RUN_DIR [--delta DELTA]
       %(prog)s --seeds N [--delta DELTA] [--workers N] [--output DIR]
                          [--OPTION VALUE ...]"""
_HELP = """\
A token outside the trust region is kept by a criterion unless the criterion predicts, by the sign of
A·rate, that the token's own update leads further out. Its divergence is measured again after the
real optimiser step:

  unsafe-keep   share of the tokens kept whose divergence rose
  shrink-kept   share of the tokens kept whose divergence fell
  right         share of the tokens whose divergence moved as predicted

for each criterion: the ratio (r - 1), the top-K divergence's rate under the aggregated, the uniform
and the exact tail, and the full-vocabulary rate. What carries a claim is the paired difference to
the ratio on the same tokens; intervals are 95 % percentiles of a bootstrap over clusters: optimiser
steps in one run, seeds in the study. docs/direction.md has the protocol and the results.

A run must have been recorded with the policy after each optimiser step. Its delta is that of the
recorded rule, or 0.15 where that has none, unless given. Best is a run without a mask, where every
token's own gradient is in the step:
  predmask train arithmetic-stress --rule none --steps 3 --traces --traces.after --traces.full

With --seeds, the study trains the embedded model that often, a few steps each, and writes
direction.json (the counts of every seed), direction.txt (the tables) and direction.svg; interrupted,
it goes on where it was when started again with the same --output. Any option of `predmask train`
changes what is trained.

examples:
  predmask direction runs/...
  predmask direction runs/... --delta 0.02
  predmask direction --seeds 61
  predmask direction --seeds 10 --rule predictive --output runs/direction-predictive
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = subparsers.add_parser(
        "direction",
        help="was a criterion right about the tokens outside the trust region?",
        description="Compare what direction criteria predict with what an optimiser step does.",
        usage=_USAGE,
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--delta", type=above_zero, help="threshold of the top-K KL, in nats")
    parser.add_argument("--seeds", type=positive, metavar="N", help="run the study with seeds 0 to N - 1")
    parser.add_argument("--workers", type=positive, metavar="N", help="of the study: runs at once (default: cores)")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="of the study: where it writes (default: runs/direction)"
    )
    # RUN_DIR is taken from the rest too: argparse would take an option's value for it.
    parser.set_defaults(rest=(), parser=parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Study one run, or many seeds."""
    positional = args.rest[:1] if args.rest and not args.rest[0].startswith("-") else []
    if args.seeds is not None:
        if positional:
            args.parser.error(f"give either RUN_DIR ({positional[0]}) or --seeds N, for the study")
        return _study(args)
    if not positional:
        args.parser.error("say what to look at: RUN_DIR, or --seeds N for the study (see --help)")
    if args.workers or args.output or len(args.rest) > 1:
        args.parser.error("only --delta goes with RUN_DIR; other options belong to the study: give --seeds N instead")
    return _one(Path(args.rest[0]), args.delta)


def _one(path: Path, delta: float | None) -> int:
    from tqdm import tqdm

    from predmask.analysis.direction.outcomes import summarise
    from predmask.analysis.direction.run import measure
    from predmask.analysis.runs import read_run
    from predmask.analysis.text import rule_text, visible

    recorded = read_run(path)
    trace = recorded.need_trace()
    with tqdm(total=trace.size, unit="token", unit_scale=True, leave=False, disable=None) as bar:
        found = measure(trace, delta, progress=bar.update)
    print(f"run       {visible(recorded.name)}, rule {rule_text(trace.info.rule)}")
    if trace.info.rule["name"] != "none":
        print("note      what the rule dropped had no gradient of its own in the step; --rule none drops nothing")
    rows = summarise(found.counts)
    print("\n".join(_lines(found.counts, found.steps, rows, found.delta, found.trainable, "optimiser steps")))
    return 0


def _study(args: argparse.Namespace) -> int:
    from predmask.analysis.direction.outcomes import summarise
    from predmask.analysis.direction.study import DELTA, FILE, pooled, run_study
    from predmask.analysis.direction.view import draw
    from predmask.analysis.text import rule_text
    from predmask.plotting import need_matplotlib
    from predmask.train import TrainingError
    from predmask.train.options import overrides

    need_matplotlib()
    layer = overrides(args.rest)
    output = args.output or Path("runs/direction")
    delta = args.delta or DELTA
    # Ended by a scheduler or by Ctrl-C, the study keeps the seeds that are done.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    workers = args.workers or _cores()
    try:
        with Progress() as progress:
            study = run_study(layer, args.seeds, output, delta=delta, workers=workers, progress=progress)
    except KeyboardInterrupt:
        print(f"interrupted; the seeds that are done lie in {output}, and the same command goes on", file=sys.stderr)
        raise
    except TrainingError as error:
        print(f"predmask: error: {error}", file=sys.stderr)
        return 1
    summaries, text = {}, list[str]()
    for variant, seeds in study["seeds"].items():
        counts, steps = pooled(study, variant)
        config = study["protocol"]["variants"][variant]
        summaries[variant] = summarise(counts)
        trainable = sum(seed["trainable"] for seed in seeds.values())
        text.append(f"study     {variant}, rule {rule_text(config['rule'])}, steps {config['steps']}")
        text += [*_lines(counts, steps, summaries[variant], delta, trainable, "seeds"), ""]
    print("\n".join(text))
    (output / "direction.txt").write_text("\n".join(text), encoding="utf-8")
    draw(summaries, output / "direction.svg", delta=delta)
    for name in (FILE, "direction.txt", "direction.svg"):
        print(f"wrote {output / name}", file=sys.stderr)
    return 0


def _lines(
    counts: Counts, steps: Counts, rows: Sequence[Row], delta: float, trainable: int, cluster: str
) -> Iterator[str]:
    """The tables of a run, or of a variant of the study."""
    from predmask.analysis.direction.bootstrap import LEAST_CLUSTERS
    from predmask.analysis.direction.outcomes import OUTSIDE
    from predmask.analysis.direction.view import (
        DIVERGENCES,
        aligned,
        disagreement_table,
        outside_table,
        steps_table,
    )

    clusters = len(next(iter(counts.values())))
    tokens = rows[0].tokens
    yield f"outside   {tokens:,} of {trainable:,} trainable tokens have top-K KL above {delta:g}"
    few = f"; intervals need {LEAST_CLUSTERS} or more" if clusters < LEAST_CLUSTERS else ""
    yield f"clusters  {clusters:,} {cluster if clusters > 1 else cluster.removesuffix('s')}{few}"
    if not tokens:
        return
    for divergence, label in DIVERGENCES.items():
        of = [row for row in rows if row.divergence == divergence]
        if not of:
            continue
        yield f"\nThe {label} rose for {of[0].rose:.1%} of all tokens outside:"
        yield aligned(outside_table(rows, divergence))
        disagreement = [row.rose for row in of if row.of != OUTSIDE and row.rose is not None]
        if disagreement:
            shares = " to ".join(dict.fromkeys(f"{share:.1%}" for share in (min(disagreement), max(disagreement))))
            yield f"\nWhere a criterion disagrees with the ratio, it rose for {shares}:"
            yield aligned(disagreement_table(rows, divergence))
        else:
            yield "\nNo criterion disagrees with the ratio on any of them."
    for divergence, label in DIVERGENCES.items():
        if steps:
            number = int(next(iter(steps.values()))[:, 0].sum())
            yield f"\nA single token's logit step: sign of the change of its {label} right, % of {number:,} tokens"
            yield aligned(steps_table(steps, divergence))


class Progress:
    """How many runs of the study are done: a bar on a terminal, else a line each."""

    def __enter__(self) -> Progress:
        self._bar: Any = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, done: int, total: int) -> None:
        """Show it."""
        from tqdm import tqdm

        if not sys.stderr.isatty():
            print(f"{done} of {total} runs done", file=sys.stderr, flush=True)
            return
        if self._bar is None:
            self._bar = tqdm(total=total, initial=done, unit="run", leave=False, dynamic_ncols=True)
        self._bar.update(done - self._bar.n)


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
