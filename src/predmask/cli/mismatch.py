"""`predmask mismatch`: do rollout engine and trainer agree on the same tokens?"""

from __future__ import annotations

import argparse
import json
import signal
from typing import Any

from predmask.cli.numbers import positive
from predmask.cli.options import add_model_arguments, given_layers, model_layer, model_names, model_of, run_layer
from predmask.cli.outputs import add_output_arguments, check_outputs, say_written
from predmask.cli.progress import Progress

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
    add_model_arguments(parser)
    parser.add_argument("--worst", type=positive, default=10, metavar="N", help="tokens to list (default: 10)")
    add_output_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Sample, score, and print the tables."""
    names = model_names(args, "MODEL", "OTHER")
    check_outputs(args)
    layers = given_layers(args, names)

    from predmask.analysis.mismatch import measure
    from predmask.analysis.mismatch.figure import draw
    from predmask.analysis.mismatch.sample import sample
    from predmask.analysis.mismatch.view import lines, to_json
    from predmask.train.options import resolve

    config = resolve(run_layer(names[0]), *layers, model_layer(names[0]))
    other = model_of(names[1]) if len(names) > 1 else None
    # Ended by a scheduler, it closes the engine all the same.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Progress("response") as progress:
        sampled = sample(config, other=other, progress=progress)
    found = measure(sampled.tokens, worst=args.worst)
    if args.json:
        args.json.write_text(json.dumps(to_json(sampled, found), indent=1) + "\n", encoding="utf-8")
    if args.figure:
        draw(sampled.tokens, config.rule, args.figure)
    print("\n".join(lines(sampled, found)))
    say_written(args)
    return 0 if sampled.verdict is None or sampled.verdict.passed else 1
