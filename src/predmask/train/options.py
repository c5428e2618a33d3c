"""Between text and configuration: presets, TOML files and command lines as layers over the defaults.

A layer is a nested dict, as TOML gives it: fields of `Config`, and a dict for each section. `task`, `engine` and
`rule` are chosen by the key `name`; a bare string is short for it.
"""

from __future__ import annotations

import difflib
import itertools
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from predmask.core import RULES
from predmask.rollout import ENGINES
from predmask.tasks import TASKS, parse_task
from predmask.train.config import Config, ConfigError
from predmask.train.fields import Field, Text, fields, plain, spell
from predmask.train.presets import PRESETS

_DEFAULTS: dict[str, type] = {name: type(value) for name, value in vars(Config()).items() if is_dataclass(value)}
_TABLES: dict[str, Mapping[str, type]] = {"task": TASKS, "engine": ENGINES, "rule": RULES}

_MEANINGS = {name: field.meaning for name, field in fields(Config).items()}
_COMMENT_COLUMN = 32
_TRUNCATIONS = ("top_p", "min_p")

SECTIONS = tuple(_DEFAULTS)
"""The sections of a configuration, in order; what is in no section comes before them."""


class Option(NamedTuple):
    """What can be set. A section that has nothing to choose is a mere heading: its type is ""."""

    path: str
    """As the command line spells it: `seed`, `rule`, `rule.delta`."""
    type: str
    default: str | None
    """As the command line spells it; None where it must be given."""
    meaning: str


def resolve(*layers: Mapping[str, Any]) -> Config:
    """The configuration that the layers give, later ones over earlier ones, all over the defaults.

    A layer that changes a `name` keeps what earlier layers set for fields that the new choice has too, and drops
    the rest: rule dppo over rule predictive keeps delta and forgets tail. Raises ConfigError, with the remedy.
    """
    stack = _stack(layers)
    sections = {name: _build(name, stack[name]) for name in SECTIONS}
    return _build("", stack[""], **sections)


def preset_layer(name: str) -> Mapping[str, Any]:
    """The layer of a preset, or a ConfigError that lists the presets."""
    if name not in PRESETS:
        raise _unknown("preset", name, PRESETS, "; a file is given by --config FILE")
    return PRESETS[name].values


def read_toml(path: str | Path) -> dict[str, Any]:
    """The layer in a TOML file, or a ConfigError that says why there is none."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def overrides(args: Sequence[str]) -> dict[str, Any]:
    """The layer in `--rule.delta 0.15 --seed=3 --update.autocast`; the last of repeated options counts.

    An option that the next option follows, or nothing, is true. Raises ConfigError for a value without an option.
    """
    layer: dict[str, Any] = {}
    rest = list(args)
    while rest:
        option = rest.pop(0)
        if not option.startswith("--"):
            raise ConfigError(f"{option!r} belongs to no option: a preset comes first, then --OPTION VALUE")
        path, equals, text = option[2:].partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            equals, text = "=", rest.pop(0)
        value = Text(text) if equals else True
        section, dot, key = path.partition(".")
        if path in SECTIONS and _short_for(path) is None:
            raise _not_a_section(path, value)
        if section in SECTIONS:
            layer.setdefault(section, {})[key if dot else _short_for(section)] = value
        else:
            layer[path] = value
    return layer


def describe(*layers: Mapping[str, Any]) -> Iterator[Option]:
    """Every option in order, of the classes that the layers choose, with the layers' values as defaults."""
    for name, section in _stack(layers).items():
        if name:
            yield Option(name, _choices(name), _name_of(name, section.cls), _MEANINGS[name])
        for field in _fields(section.cls).values():
            value = section.values.get(field.name, field.default)
            yield Option(_path(name, field.name), field.type, None if value is MISSING else spell(value), field.meaning)


def to_toml(config: Config, *, comments: bool = True) -> str:
    """The configuration as TOML that `resolve` reads back; comments say what each field means."""
    import tomlkit

    document = tomlkit.document()
    for name in ("", *SECTIONS):
        part = getattr(config, name) if name else config
        table: Any = tomlkit.table() if name else document
        rows = [(f.name, getattr(part, f.name), f.meaning, f.choices) for f in _fields(type(part)).values()]
        if name in _TABLES:
            rows.insert(0, ("name", _name_of(name, type(part)), "", _choices(name)))
        for key, value, meaning, choices in rows:
            item = tomlkit.item(plain(value))
            comment = f"{meaning} [{choices}]" if choices else meaning
            if comments and comment:
                item.comment(comment.strip())
                item.trivia.comment_ws = " " * max(2, _COMMENT_COLUMN - len(f"{key} = {item.as_string()}"))
            table.add(key, item)
        if name:
            if comments:
                table.comment(_MEANINGS[name])
            document.add(name, table)
    return tomlkit.dumps(document)


@dataclass
class _Section:
    """A class, and the values that layers set for its fields."""

    cls: type
    values: dict[str, Any]


def _stack(layers: Iterable[Mapping[str, Any]]) -> dict[str, _Section]:
    """The layers on top of each other, by section; "" is what is in none."""
    stack = {"": _Section(Config, {})} | {name: _Section(cls, {}) for name, cls in _DEFAULTS.items()}
    for layer in layers:
        _put(stack, "", {key: value for key, value in layer.items() if key not in SECTIONS})
        for name in SECTIONS:
            if name in layer:
                _put(stack, name, layer[name])
    return stack


def _put(stack: dict[str, _Section], name: str, layer: Any) -> None:
    section = stack[name]
    short_for = _short_for(name)
    if short_for is not None and isinstance(layer, str if name in _TABLES else bool):
        layer = {short_for: layer}
    if not isinstance(layer, Mapping):
        raise _not_a_section(name, layer)
    if short_for == "enabled" and layer:  # whoever sets how it is done wants it done
        layer = {"enabled": True, **layer}
    if name in _TABLES and "name" in layer:
        section.cls, implied = _choose(name, layer["name"])
        kept = _fields(section.cls)
        section.values = {key: value for key, value in section.values.items() if key in kept}
        layer = implied | {key: value for key, value in layer.items() if key != "name"}
    for key in layer:
        if key not in _fields(section.cls):
            raise _unknown_option(stack, name, key)
    section.values |= layer


def _short_for(section: str) -> str | None:
    """The key that a section's bare name stands for: the name of what is chosen, or whether it is on at all."""
    if section in _TABLES:
        return "name"
    return "enabled" if section and "enabled" in _fields(_DEFAULTS[section]) else None


def _unknown_option(stack: Mapping[str, _Section], name: str, key: str) -> ConfigError:
    paths = {
        part: [_path(part, field) for field in (*(["name"] if part in _TABLES else []), *_fields(section.cls))]
        for part, section in stack.items()
    }
    if name:
        known = candidates = paths[name]
    else:
        known, candidates = [*paths[""], *SECTIONS], [*itertools.chain(*paths.values()), *SECTIONS]
    if key in _TRUNCATIONS or (name, key) == ("engine", "top_k"):
        raise ConfigError(
            f"unknown option {_path(name, key)!r}: truncated sampling is refused, since the engine would draw from "
            "fewer tokens than the policy that is trained has, and every mask would see a distance that is none "
            "(rollout.top_k is how many tokens are recorded, not a truncation)"
        )
    owner = f"{name} {_name_of(name, stack[name].cls)}".strip() or "a run"
    return ConfigError(f"unknown option {_path(name, key)!r}{_hint(key, candidates)}; {owner} has {', '.join(known)}")


def _choose(section: str, name: Any) -> tuple[type, dict[str, Any]]:
    """The class that a name chooses, and the values that the name implies."""
    table = _TABLES[section]
    if section == "task" and isinstance(name, str):
        try:
            cls, implied = parse_task(name)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        types = {field.name: field.type for field in fields(cls).values()}  # an unfit type is an error here
        if "name" in types:
            raise ConfigError(f"task {name!r} has a field called name, which chooses the task: call it otherwise")
        return cls, implied
    if not isinstance(name, str) or name not in table:
        raise _unknown(section, name, table)
    return table[name], {}


def _build(name: str, section: _Section, **parts: Any) -> Any:
    values = dict(parts)
    for field in _fields(section.cls).values():
        path = _path(name, field.name)
        if field.name in section.values:
            values[field.name] = field.read(section.values[field.name], path)
        elif field.default is MISSING:
            raise ConfigError(f"{path} must be set, it has no default: {field.meaning or field.type}")
    try:
        return section.cls(**values)
    except ValueError as error:
        named = not name or f"{name}." in str(error)
        raise ConfigError(str(error) if named else f"{name}: {error}") from error


def _fields(cls: type) -> dict[str, Field]:
    """The fields of a section's class; of `Config`, those that are no sections."""
    return {name: field for name, field in fields(cls).items() if cls is not Config or name not in SECTIONS}


def _path(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _choices(section: str) -> str:
    return "|".join(_TABLES.get(section, ()))


def _name_of(section: str, cls: type) -> str:
    """The name that chooses a class; "" in a section that has nothing to choose."""
    if section not in _TABLES:
        return ""
    names = [name for name, known in _TABLES[section].items() if known is cls]
    return names[0] if names else f"{cls.__module__}:{cls.__qualname__}"


def _not_a_section(name: str, value: Any) -> ConfigError:
    fields_of = ", ".join(_path(name, key) for key in _fields(_DEFAULTS[name]))
    return ConfigError(f"{name} is {value!r}, but it is a section; set one of {fields_of}")


def _unknown(kind: str, name: Any, names: Collection[str], more: str = "") -> ConfigError:
    return ConfigError(f"unknown {kind} {name!r}{_hint(str(name), names)}; choose one of {', '.join(names)}{more}")


def _hint(word: str, names: Collection[str]) -> str:
    """A guess at what was meant, by the whole name or by what follows its last dot."""
    known = {name.rpartition(".")[2]: name for name in names} | {name: name for name in names}
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {known[close[0]]!r}?)" if close else ""
