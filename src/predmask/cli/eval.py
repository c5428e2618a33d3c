"""`predmask eval`: accuracy of a model or of a run's checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predmask.cli.numbers import positive
from predmask.cli.options import add_model_arguments, given_layers, model_layer, model_names, run_layer
from predmask.cli.outputs import check_outputs, say_written
from predmask.cli.progress import Progress

if TYPE_CHECKING:
    from predmask.train.config import Config
    from predmask.train.evaluate import Answer

_SAMPLES = 8
_ALL = 2**31 - 1
_USAGE = """\
%(prog)s MODEL [--samples N] [--prompts N] [--data FILES] [--config FILE]
                     [--OPTION VALUE ...] [--table PATH] [--answers PATH] [--json PATH]"""
_HELP = """\
Each held-out problem is answered once greedily and N times at a temperature, and the answers are
scored by the task's verifier. MODEL is 'embedded', a model directory, a name on the Hugging Face
hub, or the directory of a run: then its checkpoint answers under the run's own configuration.

It prints, each with a 95 % interval from a bootstrap over problems (docs/evaluation.md):
  greedy     share of right greedy answers
  avg@N      share of right samples
  pass@k     probability that at least one of k samples is right, estimated from all N
  maj@N      score of the answer that most samples give
and how many answers were cut at the length limit, which are scored as they are, and how many could
not be scored, which count as not right.

The options are those of `predmask train`; these matter here:
  --task NAME, --task.FIELD          what is asked (`predmask list tasks`)
  --prompt.template, .chat           how a question becomes a prompt
  --rollout.max_new_tokens           length at which an answer is cut
  --eval.temperature                 of the samples (without it: --rollout.temperature)
  --engine NAME, --engine.FIELD      what answers (`predmask list engines`); without it the policy
                                     itself, or what the run's eval.engine says
  --verifier.FIELD, --seed (0 here), --device (auto here), --threads

examples:
  predmask eval runs/...                                           the checkpoint of a run
  predmask eval runs/... --samples 32 --answers answers.jsonl      the same, keeping every answer
  predmask eval Qwen/Qwen3-4B --task math --data aime24.parquet --samples 16 --prompt.chat \\
      --rollout.max_new_tokens 8192 --engine vllm --table aime24-qwen3-4b.parquet
  predmask verify answers.jsonl                                    mathematics scored anew

Ctrl-C ends it; --answers keeps what was answered so far. No file that exists is replaced.
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = subparsers.add_parser(
        "eval",
        help="accuracy of a model or checkpoint: avg@k, pass@k, maj@k, with intervals",
        description="Answer held-out problems with a model or with the checkpoint of a run, and score the answers.",
        usage=_USAGE,
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--samples", type=positive, metavar="N", help=f"sampled answers a problem (default: {_SAMPLES})"
    )
    parser.add_argument("--prompts", type=positive, metavar="N", help="the first N problems (default: all)")
    parser.add_argument(
        "--data", metavar="FILES", help="evaluate on all problems of these files or data sets, separated by commas"
    )
    add_model_arguments(parser)
    parser.add_argument("--table", type=Path, metavar="PATH", help="write a row for each problem, as Parquet")
    parser.add_argument("--answers", type=Path, metavar="PATH", help="write every answer, as JSON lines, as they come")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure")
    return parser


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the table; 130 when interrupted."""
    (name,) = model_names(args, "MODEL")
    check_outputs(args)
    if args.table:
        import pyarrow.parquet  # noqa: F401 - if it is missing, that is said before anything is answered
    config = _config(name, args)

    from predmask.cli.display import evaluation_lines
    from predmask.train.evaluate_model import evaluate_model
    from predmask.train.evaluation_files import AnswersFile, to_json, write_table

    # Ended by a scheduler, it closes engine and files all the same.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(Progress("answer"))
        file = stack.enter_context(AnswersFile(args.answers)) if args.answers else None
        done = 0

        def show(stage: str, answers: Sequence[Answer], total: int) -> None:
            nonlocal done
            if file is not None:
                for answer in answers:
                    file.add(answer)
            done += len(answers)
            bar(stage, done, total)

        try:
            found = evaluate_model(config, progress=show)
        except KeyboardInterrupt:
            kept = f"; {args.answers} has {done} answers" if args.answers and done else ""
            stack.close()  # the bar would be over the line
            print(f"interrupted{kept}", file=sys.stderr)
            return 130
    print("\n".join(evaluation_lines(found)), flush=True)  # first: a disk may be full
    if args.table:
        write_table(found.evaluation, args.table)
    if args.json:
        args.json.write_text(json.dumps(to_json(found), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    say_written(args)
    return 0


def _config(name: str, args: argparse.Namespace) -> Config:
    """That of the run, then the file, then the options; how much is asked is said here or is this verb's default."""
    from predmask.train.config import ConfigError
    from predmask.train.fields import Text
    from predmask.train.options import describe, resolve

    file, options = given_layers(args, [name])
    layers: list[Mapping[str, Any]] = [
        run_layer(name),
        {"seed": 0, "device": "auto"},  # a run's own may be of another machine
        _engine_answers(file),
        {"eval": {"samples": _SAMPLES, "prompts": _ALL}},
        _engine_answers(options),
        {"eval": {key: value for key in ("samples", "prompts") if (value := getattr(args, key)) is not None}},
    ]
    if args.data is not None:
        if "task.heldout_data" not in {option.path for option in describe(*layers)}:
            raise ConfigError("--data is for a task that reads files: add --task math")
        layers.append({"task": {"data": (), "heldout_data": Text(args.data)}})
    return resolve(*layers, model_layer(name))


def _engine_answers(layer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The layer, in which an engine that is asked for is the one that answers."""
    settings = layer.get("eval", {})
    if "engine" not in layer or not isinstance(settings, Mapping) or "engine" in settings:
        return layer
    return {**layer, "eval": {**settings, "engine": "rollout"}}
