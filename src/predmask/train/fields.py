"""The fields of a configuration's dataclasses: what they mean, and reading and writing their values.

A field is a bool, an int, a float, a str, a Literal of these, a tuple of these, or any of them or None. `none`
spells None everywhere, so that an optional text cannot be the word none.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from typing_extensions import Doc

from predmask.train.config import ConfigError

_SCALARS: tuple[type, ...] = (bool, int, float, str)


class Text(str):
    """A value as it was typed: it is read as its field's type. Any other value must already have that type."""


class Field(NamedTuple):
    """A field of a dataclass, as configurations see it."""

    name: str
    hint: Any
    default: Any
    """MISSING where it must be given."""
    meaning: str

    @property
    def type(self) -> str:
        """What it takes, in words, alternatives separated by bars; ConfigError if no configuration can hold it."""
        try:
            return _type_text(self.hint)
        except TypeError:
            raise ConfigError(
                f"the field {self.name} is {self.hint}, which a configuration cannot hold: take bool, int, float, "
                "str, a Literal or tuple of these, or one of them | None"
            ) from None

    @property
    def choices(self) -> str:
        """The alternatives, where there are some worth naming."""
        return self.type if "|" in self.type and self.hint is not bool else ""

    def read(self, value: Any, path: str) -> Any:
        """The value in the field's type, or a ConfigError that names `path`."""
        try:
            return _convert(value, self.hint)
        except (ValueError, OverflowError):
            shown = "true (or was given no value)" if value is True else repr(value)
            raise ConfigError(f"{path} is {shown}; expected {self.type}") from None


def fields(cls: Any) -> dict[str, Field]:
    """The fields of a dataclass by name; raises ConfigError for annotations that cannot be read."""
    try:
        hints = get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise ConfigError(f"the annotations of {cls.__name__} cannot be read: {error}") from error
    found: dict[str, Field] = {}
    for field in dataclasses.fields(cls):
        hint, meaning = hints[field.name], ""
        if get_origin(hint) is Annotated:
            hint, *notes = get_args(hint)
            meaning = " ".join(" ".join(note.documentation for note in notes if isinstance(note, Doc)).split())
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.init:
            found[field.name] = Field(field.name, hint, default, meaning)
    return found


def spell(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, tuple | list):
        return ",".join(map(spell, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def plain(value: Any) -> Any:
    """A value as TOML takes it."""
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return "none" if value is None else value


def _type_text(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if hint is bool:
        return "true|false"
    if hint in _SCALARS:
        return hint.__name__
    if origin is Literal and all(type(choice) in _SCALARS for choice in args):
        return "|".join(map(spell, args))
    if origin in (Union, UnionType) and len(args) == 2 and NoneType in args:
        return f"{_type_text(_but_none(args))}|none"
    if origin is tuple and args:
        return f"list of {', '.join(_type_text(item) for item in args if item is not Ellipsis)}"
    raise TypeError(hint)


def _but_none(args: tuple[Any, ...]) -> Any:
    return args[0] if args[1] is NoneType else args[1]


def _convert(value: Any, hint: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return None if value == "none" else _convert(value, _but_none(args))
    if origin is Literal:
        for choice in args:
            if (type(value), value) == (type(choice), choice) or (isinstance(value, Text) and value == spell(choice)):
                return choice
    elif origin is tuple:
        items = value
        if isinstance(value, Text):
            items = [Text(item.strip()) for item in value.split(",")] if value else []
        if isinstance(items, list | tuple):
            hints = args[:1] * len(items) if args[-1] is Ellipsis else args
            return tuple(_convert(item, of) for item, of in zip(items, hints, strict=True))
    elif isinstance(value, Text) and hint is bool:
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
    elif isinstance(value, Text) or type(value) is hint or (hint is float and type(value) is int):
        return hint(value)
    raise ValueError(value)
