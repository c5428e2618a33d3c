"""The file of the direction study: what every seed came to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from predmask.analysis import AnalysisError
from predmask.analysis.direction.outcomes import Tallies

FILE = "direction.json"
ENDS = ("seeds", "failed")
"""How a run ended: with counts, or in a failed training with the reason."""
_KINDS = ("counts", "steps")


def load(path: Path) -> dict[str, Any]:
    """What FILE holds: `protocol`; by variant and seed, `seeds` as `run_seed` gives them, and why others `failed`."""
    try:
        study = json.loads(path.read_text(encoding="utf-8"))
        keys = study.pop("keys")
        study.setdefault("failed", {name: {} for name in study["seeds"]})
        for seeds in study["seeds"].values():
            for seed in seeds.values():
                seed.update({kind: dict(zip(keys[kind], seed[kind], strict=True)) for kind in _KINDS})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise AnalysisError(f"{path} cannot be read as a direction study: {error!r}") from error
    return study


def pooled(study: Mapping[str, Any], variant: str) -> tuple[Tallies, Tallies]:
    """The counts of a variant's seeds, each seed a cluster: those of tokens outside, and of single logit steps."""
    seeds = [study["seeds"][variant][seed] for seed in sorted(study["seeds"][variant], key=int)]
    counts, steps = ({key: np.array([seed[kind][key] for seed in seeds]) for key in seeds[0][kind]} for kind in _KINDS)
    return counts, steps


def write(path: Path, study: Mapping[str, Any]) -> None:
    """A seed a line, the keys of its counts but once; renamed to its place, so that no reader meets half a file."""
    keys: dict[str, list[str]] = {}
    variants = []
    for name, seeds in study["seeds"].items():
        rows = []
        for seed in sorted(seeds, key=int):
            keys = {kind: list(seeds[seed][kind]) for kind in _KINDS}
            packed = seeds[seed] | {kind: list(seeds[seed][kind].values()) for kind in _KINDS}
            rows.append(f'"{seed}": {json.dumps(packed, separators=(",", ":"))}')
        variants.append(f"{json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n}")
    head = f'{{"protocol": {json.dumps(study["protocol"])},\n"keys": {json.dumps(keys)},\n"seeds": {{'
    partial = path.with_suffix(".partial")
    tail = f'}},\n"failed": {json.dumps(study["failed"])}}}\n'
    partial.write_text(head + ",\n".join(variants) + tail, encoding="utf-8")
    partial.rename(path)
