"""The command line: one file a verb, each with `add_parser(subparsers)` and `run(args) -> int`."""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import sys
from collections.abc import Sequence

# To add a verb, write its file and add its name here. Verbs import what is slow to import only when they run.
VERBS = (
    "train",
    "eval",
    "verify",
    "verl",
    "mismatch",
    "report",
    "show",
    "replay",
    "compare",
    "direction",
    "list",
    "config",
    "bench",
)

_EXTRAS = {
    "datasets": "math",
    "math_verify": "math",
    "matplotlib": "instruments",
    "numpy": "train",
    "peft": "lora",
    "pyarrow": "instruments",
    "reasoning_gym": "reasoning-gym",
    "safetensors": "train",
    "tensorboard": "tensorboard",
    "tomlkit": "train",
    "tqdm": "train",
    "transformers": "train",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 2 for a user's mistake, 130 when interrupted."""
    # Before torch is loaded: waiting threads sleep, for on a busy machine spinning ones are many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Large tensors lie on huge pages: of small ones, the first touch costs more than most of what is done on them.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader left, as `| head` does; the interpreter must not try to flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ImportError as error:
        package = _missing_package(error)
        if package is None:
            raise
        extra = _EXTRAS[package]
        return _fail(
            f"the package {package} is missing: install predmask[{extra}] (in a clone: pip install -e '.[{extra}]')"
        )
    except Exception as error:
        if not isinstance(error, _user_mistakes()):
            raise
        return _fail(str(error))


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if hasattr(args, "rest"):  # the verb takes a configuration (see cli/options.py)
        args.rest = rest
    elif rest:
        known = difflib.get_close_matches(rest[0], args.verb._option_string_actions, n=1)
        hint = f" (did you mean {known[0]}?)" if known else ""
        args.verb.error(f"unknown arguments: {' '.join(rest)}{hint}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that has no Ḋ is no error
    try:
        return args.run(args)
    finally:
        sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    from predmask import __version__

    parser = argparse.ArgumentParser(
        prog="predmask",
        description="Train language models by reinforcement learning with trust-region masks.",
        epilog="`predmask VERB --help` explains a verb.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"predmask {__version__}")
    subparsers = parser.add_subparsers(metavar="VERB", required=True)
    for verb in VERBS:
        module = importlib.import_module(f"predmask.cli.{verb}")
        verb_parser = module.add_parser(subparsers)
        verb_parser.allow_abbrev = False
        verb_parser.set_defaults(run=module.run, verb=verb_parser)
    return parser


def _missing_package(error: ImportError) -> str | None:
    """The optional package that is not installed, also where another error was raised from that."""
    for link in (error, error.__cause__):
        if isinstance(link, ModuleNotFoundError) and link.name and (package := link.name.partition(".")[0]) in _EXTRAS:
            return package
    return None


def _user_mistakes() -> tuple[type[Exception], ...]:
    """The errors whose text is meant for the user; anything else is a fault of this program."""
    from predmask.analysis import AnalysisError
    from predmask.bench import BenchError
    from predmask.plotting import FigureError
    from predmask.rollout import RolloutError
    from predmask.tasks.verifier import VerifierError
    from predmask.traces import TraceError
    from predmask.train.config import ConfigError

    return (
        AnalysisError,
        BenchError,
        ConfigError,
        FigureError,
        FileNotFoundError,
        RolloutError,
        TraceError,
        VerifierError,
    )


def _fail(message: str) -> int:
    from predmask.analysis.text import visible

    print("\n".join(map(visible, f"predmask: error: {message}".split("\n"))), file=sys.stderr)
    return 2
