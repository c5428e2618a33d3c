"""`predmask list`: what there is to choose from."""

from __future__ import annotations

import argparse
import inspect
import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING
from typing import Any, NamedTuple

_SUM_SQUARES = "the policy's sum of squares"


class Entry(NamedTuple):
    """A choice: its name, what it is, and further rows by their label (empty ones are left out)."""

    name: str
    summary: str
    rows: dict[str, str]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the verb."""
    parser = subparsers.add_parser(
        "list",
        help="list rules, divergences, tails, engines, tasks and presets",
        description="List what there is to choose from: formula, source, and what each needs and takes.",
    )
    parser.add_argument("section", nargs="?", choices=SECTIONS, metavar="SECTION", help=f"only {', '.join(SECTIONS)}")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the sections."""
    sections = [args.section] if args.section else list(SECTIONS)
    print("\n\n".join(_section(name) for name in sections))
    return 0


def _section(name: str) -> str:
    usage, entries = SECTIONS[name]
    found = [*entries()]
    indent = " " * (max(len(entry.name) for entry in found) + 4)
    width = max(60, shutil.get_terminal_size().columns)
    lines = [f"{name.capitalize()} ({usage})"]
    for entry in found:
        margin = f"  {entry.name}".ljust(len(indent))
        for text in (entry.summary, *(f"{label}: {text}" for label, text in entry.rows.items() if text)):
            lines += textwrap.wrap(
                text, width, initial_indent=margin, subsequent_indent=indent + "  ", break_on_hyphens=False
            )
            margin = indent
    return "\n".join(lines)


def _rules() -> Iterator[Entry]:
    from predmask.core import RULES
    from predmask.train.fields import fields

    for name, cls in RULES.items():
        rule = cls()
        needed = {"top-K log-probs (rollout.top_k)": rule.needs_topk, _SUM_SQUARES: rule.needs_sum_squares}
        needs = ", ".join(what for what, is_needed in needed.items() if is_needed)
        yield Entry(name, cls.summary, {"source": cls.source, "needs": needs, "options": ", ".join(fields(cls))})


def _divergences() -> Iterator[Entry]:
    from predmask.core import DIVERGENCES

    for name, divergence in DIVERGENCES.items():
        yield Entry(name, divergence.formula, {"rate from": divergence.derivative, "source": divergence.source})


def _tails() -> Iterator[Entry]:
    from predmask.core import TAILS

    for name, tail in TAILS.items():
        needs = _SUM_SQUARES if tail.needs_sum_squares else ""
        yield Entry(name, tail.formula, {"source": tail.source, "needs": needs})


def _engines() -> Iterator[Entry]:
    from predmask.rollout import ENGINES
    from predmask.train.fields import fields

    for name, cls in ENGINES.items():
        yield Entry(name, cls.summary, {"needs": cls.needs, "options": ", ".join(fields(cls))})


def _tasks() -> Iterator[Entry]:
    from predmask.tasks import TASKS
    from predmask.train.fields import fields

    for name, cls in TASKS.items():
        required = [f"--task.{field.name}" for field in fields(cls).values() if field.default is MISSING]
        needs = ", ".join([*required, *([cls.needs] if hasattr(cls, "needs") else [])])
        summary = (inspect.getdoc(cls) or "").partition("\n")[0]
        yield Entry(name, summary, {"needs": needs, "options": ", ".join(fields(cls))})


def _presets() -> Iterator[Entry]:
    from predmask.train.presets import PRESETS

    for name, preset in PRESETS.items():
        yield Entry(name, preset.summary, {})


SECTIONS: dict[str, tuple[str, Callable[[], Iterator[Entry]]]] = {
    "rules": ("--rule NAME", _rules),
    "divergences": ("--rule.divergence NAME", _divergences),
    "tails": ("--rule.tail NAME", _tails),
    "engines": ("--engine NAME", _engines),
    "tasks": ("--task NAME, or --task package.module:Class for your own", _tasks),
    "presets": ("predmask train NAME", _presets),
}
