"""How a dry run looks."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from predmask.analysis.text import visible
from predmask.train.config import Config
from predmask.train.options import to_toml
from predmask.train.plan import DryRun
from predmask.train.plan.memory import Place
from predmask.train.plan.needs import size_text
from predmask.train.plan.remedies import Remedy
from predmask.train.presets import LEGEND, Preset

_WIDTH = 40
_COLUMNS = 100
_SOURCES = 46
"""The column at which a value's source stands."""
_STANDS = {True: "fits", False: "DOES NOT FIT", None: "free memory is not known here"}


def plan_lines(found: DryRun, preset: Preset | None) -> list[str]:
    """Configuration, memory, what is needed, and the verdict."""
    return [
        *_configuration(found.config, preset),
        "",
        *_memory(found),
        *_remedies(found),
        "",
        *_needs(found),
        "",
        _verdict(found),
    ]


def _configuration(config: Config, preset: Preset | None) -> Iterator[str]:
    """As `predmask config` prints it; where a preset says where its values come from, that stands beside them."""
    sources = {} if preset is None else preset.sources
    if not sources:
        yield from to_toml(config).splitlines()
        return
    set_by_preset = {} if preset is None else preset.values
    section = ""
    for line in to_toml(config, comments=False).splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        key, equals, _ = line.partition(" = ")
        path = f"{section}.{key}" if section else key
        values = set_by_preset.get(section, {}) if section else set_by_preset
        if key == "name" and not _same(line, key, values):
            set_by_preset = {**set_by_preset, section: {}}  # what was said of another rule's fields is not about these
        elif equals and path in sources and _same(line, key, values):
            line = f"{line.ljust(_SOURCES - 2)}  # {sources[path]}"
        yield line
    yield ""
    yield "# Sources"
    for phrase, meaning in LEGEND.items():
        yield from textwrap.wrap(f"# - {phrase}: {meaning}", 98, subsequent_indent="#   ")


def _same(line: str, key: str, values: Mapping[str, Any]) -> bool:
    """Whether the value is still the preset's."""
    return tomllib.loads(line)[key] == values.get(key)


def _memory(found: DryRun) -> Iterator[str]:
    for place in found.places:
        name = found.machine.name if place == "accelerator" else "main memory"
        worst = found.memory.worst(place)
        yield f"Memory: {name}"
        for item in found.memory.items:
            if item.place == place:
                when = "" if item.phase == "always" else f"{item.phase}: "
                line = f"  {item.name.ljust(_WIDTH)}{size_text(item.bytes):>10}  {when}{item.how}"
                yield from _wrapped(line, _WIDTH + 14)
        total = f"at most, in phase {worst!r}".ljust(_WIDTH)
        mark = "!" if found.fits(place) is False else " "
        yield f"{mark} {total}{size_text(found.memory.peak(place)):>10}  {_stands(found, place)}"
        if place != found.places[-1]:
            yield ""


def _stands(found: DryRun, place: Place) -> str:
    free = found.machine.free(place)
    verdict = _STANDS[found.fits(place)]
    if free is None:
        return "DOES NOT FIT: this machine has no GPU" if place == "accelerator" else verdict
    return f"of {size_text(free)} free: {verdict}"


def _remedies(found: DryRun) -> Iterator[str]:
    """What would make the plan fit: each change alone, and together where none does alone."""
    place = found.places[0]
    if found.fits(place) is not False:
        return
    alone = [remedy for remedy in found.remedies if remedy.effect != "all of these"]
    enough = [remedy for remedy in alone if found.fits(place, remedy.plan)]
    shown: Sequence[Remedy] = alone if enough else found.remedies
    yield ""
    yield "What lowers it"
    for remedy in shown:
        fits = ", which fits" if found.fits(place, remedy.plan) else ""
        yield from _wrapped(f"  {remedy.options}", 6)
        yield f"      to {size_text(remedy.plan.peak(place))}{fits}: {remedy.effect}"
    if found.machine.gpu and found.gpus is not None:
        many = f"{found.gpus} GPU{'' if found.gpus == 1 else 's'} of this size"
        yield f"  {many}, in a trainer that shards weights and optimiser state, such as verl"
        yield "      predmask trains on one GPU"


def _needs(found: DryRun) -> Iterator[str]:
    yield f"Needed (sizes of the model are {found.model.source})"
    for need in found.needs:
        mark = " " if need.met else "!"
        line = f"{mark} {need.kind:<9}{need.name}: {need.state}{f' ({need.detail})' if need.detail else ''}"
        yield from _wrapped(visible(line), 11)


def _verdict(found: DryRun) -> str:
    if found.ready:
        return "dry run: this can run here"
    marked = sum(not need.met for need in found.needs) + sum(found.fits(place) is False for place in found.places)
    return f"dry run: this cannot run here as it is; see the {marked} line{'s' if marked > 1 else ''} marked !"


def _wrapped(line: str, indent: int) -> list[str]:
    """At spaces alone, for names and options are copied from here."""
    return textwrap.wrap(line, _COLUMNS, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
