"""`predmask eval`: accuracy of a trained checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from predmask.cli.numbers import natural, positive


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = subparsers.add_parser(
        "eval",
        help="accuracy of a trained checkpoint, greedy and sampled",
        description="Answer held-out problems with the checkpoint of a run, under the run's own configuration.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the directory of a run, such as runs/...")
    parser.add_argument("--prompts", type=positive, help="held-out problems (default: all of the task's)")
    parser.add_argument("--samples", type=positive, default=8, help="sampled answers a problem (default: 8)")
    parser.add_argument("--seed", type=natural, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    return parser


def run(args: argparse.Namespace) -> int:
    """Evaluate and print a table."""
    from predmask.cli.display import accuracy_lines
    from predmask.tasks.verifier import Verifier
    from predmask.train.directory import find_checkpoint
    from predmask.train.evaluate import evaluate
    from predmask.train.models import load_policy, resolve_device
    from predmask.train.options import read_toml, resolve
    from predmask.train.trainer import problems_of

    directory = Path(args.run_dir)
    checkpoint = find_checkpoint(directory)
    config = resolve(read_toml(str(directory / "config.toml")))
    problems = problems_of(config.task, "heldout")[: args.prompts]
    model, tokenizer = load_policy(str(checkpoint), resolve_device(args.device))
    with Verifier(config.task) as verifier:
        accuracy = evaluate(
            model,
            tokenizer,
            problems,
            verifier,
            samples=args.samples,
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_new_tokens,
            seed=args.seed,
            batch_size=config.eval.batch_size,
        )
    for line in accuracy_lines(accuracy, temperature=config.rollout.temperature):
        print(line)
    return 0
