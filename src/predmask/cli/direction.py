"""`predmask direction`: was each direction criterion right about the tokens outside the trust region?"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from predmask.cli.numbers import above_zero, positive

_USAGE = """\
%(prog)s RUN_DIR [--delta DELTA]
       %(prog)s --seeds N [--delta DELTA] [--workers N] [--output DIR]
                          [--OPTION VALUE ...]"""
_HELP = """\
A token outside the trust region is kept by a criterion unless the criterion predicts, by the sign
of A·rate, that the token's own update leads further out. Its divergence is measured again after the
real optimiser step:

  unsafe-keep   share of the tokens kept whose divergence rose
  shrink-kept   share of the tokens kept whose divergence fell
  right         share of the tokens whose divergence moved as predicted

for each criterion: the ratio (r - 1), the top-K divergence's rate under the aggregated, the uniform
and the exact tail, and the full-vocabulary rate. What carries a claim is the difference to the
ratio on the same set of tokens; where the two disagree, each token is kept by exactly one of them.
Intervals are 95 % percentiles of a bootstrap over clusters, in which criterion and ratio are
resampled together. Clusters are optimiser steps in one run, seeds in the study; with fewer than 10,
figures have no interval. Tables of the full-vocabulary divergence are left out where they have the
same figures. docs/direction.md has the protocol and the results.

A run must have been recorded with the policy after each optimiser step (docs/direction.md says how
another trainer does that). Its delta is that of the recorded rule, or 0.15 where that has none,
unless given. Best is a run without a mask, where every token's own gradient is in the step:
  predmask train arithmetic-stress --rule none --steps 3 --traces --traces.after --traces.full

With --seeds, the study trains the embedded model that often, a few steps each, and writes
direction.json (the counts of every seed), direction.txt (all tables) and direction.svg. When it was
interrupted, the same command goes on where it was. A seed whose training fails is reported and left
out. Any option of `predmask train` changes what is trained.

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
    from predmask.analysis.direction.view import lines
    from predmask.analysis.runs import read_run
    from predmask.analysis.text import rule_text, visible

    recorded = read_run(path)
    trace = recorded.need_trace()
    with tqdm(total=trace.size, unit="token", unit_scale=True, leave=False, disable=None) as bar:
        found = measure(trace, delta, progress=bar.update)
    print(f"run       {visible(recorded.name)}, rule {rule_text(trace.info.rule)}")
    if trace.info.rule["name"] != "none":
        print("note      what the rule dropped had no gradient of its own in the step; --rule none drops nothing")
    rows, kind = summarise(found.counts), "optimiser steps"
    text = lines(found.counts, found.steps, rows, delta=found.delta, trainable=found.trainable, clusters=kind)
    print("\n".join(text))
    return 0


def _study(args: argparse.Namespace) -> int:
    from predmask.analysis.direction.figure import draw
    from predmask.analysis.direction.outcomes import summarise
    from predmask.analysis.direction.study_file import FILE, pooled
    from predmask.analysis.direction.view import study_lines
    from predmask.plotting import need_matplotlib

    need_matplotlib()
    output = args.output or Path("runs/direction")
    # Ended by a scheduler or by Ctrl-C, the study keeps the seeds that are done.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        study = _run_study(args, output)
    except KeyboardInterrupt:
        print(f"interrupted; the seeds that are done lie in {output}, and the same command goes on", file=sys.stderr)
        raise
    summaries = {variant: summarise(pooled(study, variant)[0]) for variant in study["seeds"]}
    print("\n".join(study_lines(study, summaries)))
    text = "\n".join(study_lines(study, summaries, brief=False))
    (output / "direction.txt").write_text(text + "\n", encoding="utf-8")
    draw(summaries, output / "direction.svg", delta=study["protocol"]["delta"])
    for name in (FILE, "direction.txt", "direction.svg"):
        print(f"wrote {output / name}", file=sys.stderr)
    return 0


def _run_study(args: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Run the seeds that are missing, with a bar on a terminal, else with a line for each."""
    from tqdm import tqdm

    from predmask.analysis.direction.study import DELTA, run_study
    from predmask.train.options import overrides

    with tqdm(unit="run", leave=False, dynamic_ncols=True, disable=None) as bar:

        def show(done: int, total: int) -> None:
            if bar.disable:
                print(f"{done} of {total} runs done", file=sys.stderr, flush=True)
            else:
                bar.total = total
                bar.update(done - bar.n)

        delta, workers = args.delta or DELTA, args.workers or _cores()
        return run_study(overrides(args.rest), args.seeds, output, delta=delta, workers=workers, progress=show)


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
