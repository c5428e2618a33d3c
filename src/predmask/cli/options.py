"""The arguments of every verb that takes a configuration: PRESET, --config FILE and --OPTION VALUE."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from predmask.train.config import Config


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Let a verb take a configuration; its parser is made with `add_help=False`, since the help depends on it."""
    parser.usage = "%(prog)s [PRESET] [--config FILE] [--OPTION VALUE ...]"
    parser.add_argument("-h", "--help", action="store_true", help="show this, for the choices made so far, and exit")
    parser.add_argument("--config", metavar="FILE", help="a TOML file of options, over the preset")
    # Options are not argparse's: which there are depends on the task, rule and engine that are chosen.
    parser.set_defaults(rest=(), parser=parser)


def load_config(args: argparse.Namespace) -> Config:
    """The configuration that the arguments give; with --help, print the options under them and exit.

    Raises ConfigError for whatever is wrong with them.
    """
    from predmask.train.options import overrides, preset_layer, read_toml, resolve

    rest = list(args.rest)
    layers: list[Mapping[str, Any]] = []
    if rest and not rest[0].startswith("-"):
        layers.append(preset_layer(rest.pop(0)))
    if args.config is not None:
        layers.append(read_toml(args.config))
    layers.append(overrides(rest))
    if args.help:
        _print_help(args.parser, layers)
        args.parser.exit()
    return resolve(*layers)


def _print_help(parser: argparse.ArgumentParser, layers: Sequence[Mapping[str, Any]]) -> None:
    from predmask.train.options import SECTIONS, describe
    from predmask.train.presets import PRESETS

    group = parser.add_argument_group("presets", "where to start from; a preset comes first on the command line")
    for name, preset in PRESETS.items():
        group.add_argument(name, help=_literal(preset.summary))
    group = parser.add_argument_group("run")
    for option in describe(*layers):
        if option.path in SECTIONS:
            group = parser.add_argument_group(option.path, None if option.type else option.meaning)
        if option.type:
            default = f"(default: {option.default})" if option.default else "(must be set)"
            explained = _literal(f"{option.meaning} {default}".strip())
            group.add_argument(f"--{option.path}", metavar=option.type, help=explained)
    parser.print_help()


def _literal(text: str) -> str:
    return text.replace("%", "%%")
