"""The arguments of every verb that takes a configuration: PRESET or MODEL, --config FILE and --OPTION VALUE."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
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


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Let a verb take models that it looks into, and a configuration under which it does."""
    parser.add_argument("--config", metavar="FILE", help="a TOML file of options, over those of the run")
    # Models are taken from the rest too: argparse would take an option's value for them.
    parser.set_defaults(rest=(), parser=parser)


def model_names(args: argparse.Namespace, *known: str) -> list[str]:
    """What comes before the first option, at least one name and at most one for each of `known`, MODEL first."""
    names: list[str] = []
    for argument in args.rest:
        if argument.startswith("-"):
            break
        names.append(argument)
    if not names:
        args.parser.error("say what to look into: MODEL comes first, such as 'embedded' or the directory of a run")
    if len(names) > len(known):
        verb = "are" if len(known) > 1 else "is"
        args.parser.error(
            f"{' and '.join(known)} {verb} all that comes before the options, but there are {len(names)} names"
        )
    return names


def given_layers(args: argparse.Namespace, names: Sequence[str]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The layers that the file and the options after the names give; ConfigError for an option --model."""
    from predmask.train.config import ConfigError
    from predmask.train.options import overrides, read_toml

    options = overrides(args.rest[len(names) :])
    if "model" in options:
        raise ConfigError("--model is not needed here: MODEL, which comes first, is the model")
    return {} if args.config is None else read_toml(args.config), options


def run_layer(name: str) -> Mapping[str, Any]:
    """The configuration of the run that a name is the directory of; empty for a model."""
    from predmask.train.options import read_toml

    return read_toml(Path(name) / "config.toml") if _is_run(name) else {}


def model_layer(name: str) -> Mapping[str, Any]:
    """What looking into a model means, whatever else was said: this model, and no update of it."""
    # Nothing is updated, so the responses need not be divided into steps.
    return {"model": model_of(name), "update": {"steps_per_rollout": 1}}


def model_of(name: str) -> str:
    """A model as the trainer loads it; of a run, its checkpoint."""
    from predmask.train.directory import find_checkpoint

    return str(find_checkpoint(Path(name))) if _is_run(name) else name


def _is_run(name: str) -> bool:
    return (Path(name) / "config.toml").is_file()


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
            default = "(must be set)" if option.default is None else f"(default: {option.default or 'empty'})"
            explained = _literal(f"{option.meaning} {default}".strip())
            group.add_argument(f"--{option.path}", metavar=option.type, help=explained)
    parser.print_help()


def _literal(text: str) -> str:
    return text.replace("%", "%%")
