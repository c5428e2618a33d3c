"""`predmask mismatch`: do rollout engine and trainer agree on the same tokens?"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predmask.cli.numbers import positive
from predmask.cli.outputs import add_output_arguments, check_outputs, say_written

if TYPE_CHECKING:
    from predmask.train.config import Config

_USAGE = """\
%(prog)s MODEL [OTHER] [--config FILE] [--OPTION VALUE ...]
                         [--worst N] [--json PATH] [--figure PATH]"""
_HELP = """\
The engine samples responses to held-out prompts and says how likely each token was (mu); the
trainer computes the same for the very same tokens (pi), before any update. Both should agree but
for rounding. Where they do not, every rule masks and weighs tokens for a distance that no update
made, and a run may be unstable from its first step on: look here first.

MODEL is 'embedded', a model directory, a name on the Hugging Face hub, or the directory of a run:
then its checkpoint is looked into under the run's own configuration (task, engine, rule, rollout).
With OTHER, the engine samples with the weights of OTHER, and MODEL scores: how far apart are two
models? The options are those of `predmask train`; these matter here:
  --engine NAME, --engine.FIELD      what samples, and in which numerics (`predmask list engines`)
  --rollout.prompts, .group_size     how many responses are sampled: 16 · 16
  --rollout.temperature, .top_k, .max_new_tokens
  --rule NAME, --rule.FIELD          whose trust region is looked at (`predmask list rules`)
  --update.micro_batch_size, .autocast, .head    how the trainer computes
  --task, --seed, --device, --threads

It prints
  - |log mu - log pi| of the sampled tokens, and the mean of log mu - log pi, which estimates
    KL(mu‖pi), with its standard error over responses;
  - KL(mu‖pi) over the K likeliest tokens and their tail, and the share of tokens that are outside
    the rule's trust region already;
  - both by the probability mu with which a token was sampled, and by its position;
  - the tokens that differ most; Δ log-prob is log mu - log pi, D the rule's distance;
  - the verdict: within what the numerics explain; more, and what to look at; or a fault that
    explains it: log-probs shifted by one position, or those of another temperature.

examples:
  predmask mismatch embedded --engine transformers --engine.numerics fp8
  predmask mismatch runs/... --figure mismatch.svg        the checkpoint of a run, as it was trained
  predmask mismatch runs/... --engine.numerics int4       the same with another engine
  predmask mismatch runs/... embedded                     how far training has moved the model

exit code: 0 within what the numerics explain, and always with OTHER; 1 above, or a fault; 2 for a
mistake in what was asked, and for records of the engine that cannot be trained on
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = subparsers.add_parser(
        "mismatch",
        help="do rollout engine and trainer agree on the same tokens?",
        description="Compare what the rollout engine says of its own samples with what the trainer computes for them.",
        usage=_USAGE,
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file of options, over those of the run")
    parser.add_argument("--worst", type=positive, default=10, metavar="N", help="tokens to list (default: 10)")
    add_output_arguments(parser)
    # MODEL and OTHER are taken from the rest too: argparse would take an option's value for them.
    parser.set_defaults(rest=(), parser=parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Sample, score, and print the tables."""
    names = _names(args)
    check_outputs(args)
    config = _config(names[0], args.config, args.rest[len(names) :])
    other = _model_of(names[1]) if len(names) > 1 else None

    from predmask.analysis.mismatch import measure
    from predmask.analysis.mismatch.figure import draw
    from predmask.analysis.mismatch.sample import sample
    from predmask.analysis.mismatch.view import lines, to_json

    # Ended by a scheduler, it closes the engine all the same.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _Progress() as progress:
        sampled = sample(config, other=other, progress=progress)
    found = measure(sampled.tokens, worst=args.worst)
    if args.json:
        args.json.write_text(json.dumps(to_json(sampled, found), indent=1) + "\n", encoding="utf-8")
    if args.figure:
        draw(sampled.tokens, config.rule, args.figure)
    print("\n".join(lines(sampled, found)))
    say_written(args)
    return 0 if sampled.verdict is None or sampled.verdict.passed else 1


def _names(args: argparse.Namespace) -> list[str]:
    """MODEL and OTHER: what comes before the first option."""
    names: list[str] = []
    for argument in args.rest:
        if argument.startswith("-"):
            break
        names.append(argument)
    if not names:
        args.parser.error("say what to look into: MODEL comes first, such as 'embedded' or the directory of a run")
    if len(names) > 2:
        args.parser.error(f"MODEL and OTHER are all that comes before the options, but there are {len(names)} names")
    return names


def _config(name: str, file: str | None, options: Sequence[str]) -> Config:
    """The run that is looked into: that of the directory, then the file, then the options."""
    from predmask.train.config import ConfigError
    from predmask.train.options import overrides, read_toml, resolve

    layers: list[Mapping[str, Any]] = []
    if _is_run(name):
        layers.append(read_toml(Path(name) / "config.toml"))
    if file is not None:
        layers.append(read_toml(file))
    given = overrides(options)
    if "model" in given:
        raise ConfigError("--model is not needed here: MODEL, which comes first, is the model")
    # Nothing is updated, so the responses need not be divided into steps.
    return resolve(*layers, given, {"model": _model_of(name), "update": {"steps_per_rollout": 1}})


def _model_of(name: str) -> str:
    """A model as the trainer loads it; of a run, its checkpoint."""
    from predmask.train.directory import find_checkpoint

    return str(find_checkpoint(Path(name))) if _is_run(name) else name


def _is_run(name: str) -> bool:
    return (Path(name) / "config.toml").is_file()


class _Progress:
    """What is being done: a bar on a terminal, else a line for each stage."""

    def __enter__(self) -> _Progress:
        from tqdm import tqdm

        self._bar = tqdm(unit="response", leave=False, dynamic_ncols=True, disable=None)
        self._stage = ""
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._bar.disable and stage != self._stage:
            print(f"{stage}{f' {total} responses' if total else ''}", file=sys.stderr, flush=True)
        self._stage = stage
        self._bar.total = total or None
        self._bar.set_description(stage)
        self._bar.update(done - self._bar.n)
