"""Write the tables of docs/recipes.md anew, from the presets and their memory plans.

    python scripts/make_recipe_tables.py

Each lies between two comments that name it; a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from predmask.train.config import Config
from predmask.train.fields import spell
from predmask.train.options import overrides, resolve
from predmask.train.plan.architectures import Architecture
from predmask.train.plan.memory import checkpoint_bytes, plan_memory
from predmask.train.presets import LEGEND, PRESETS

PAGE = Path(__file__).parent.parent / "docs" / "recipes.md"
RECIPES = ("qwen3-4b-dapo", "qwen3-8b-dapo", "qwen3-30b-a3b-dapo", "qwen3-30b-a3b-dapo-fp8")
LORA = "--lora.base_dtype bfloat16"
PLANS = (
    ("qwen3-4b-dapo", ""),
    ("qwen3-4b-dapo", "--engine.kv_cache_gb 6"),
    ("qwen3-4b-dapo", LORA),
    ("qwen3-8b-dapo", ""),
    ("qwen3-8b-dapo", LORA),
    ("qwen3-30b-a3b-dapo", ""),
    ("qwen3-30b-a3b-dapo", LORA),
    ("qwen3-30b-a3b-dapo-fp8", ""),
    ("qwen3-30b-a3b-dapo-fp8", LORA),
    ("qwen3-30b-a3b-dapo-fp8", f"{LORA} --engine.kv_cache_gb 4"),
)
"""Recipes and options whose memory the page shows."""


def presets() -> Iterator[str]:
    """Every recipe with its baselines."""
    yield "| predictive mask | DPPO, TopK-KL | GRPO, clip-higher | model | rollouts |"
    yield "|---|---|---|---|---|"
    for name in RECIPES:
        config = resolve(PRESETS[name].values)
        names = " | ".join(f"`{name}{ending}`" for ending in ("", "-dppo", "-grpo"))
        yield f"| {names} | {config.model} | {config.engine.numerics} |"


def values() -> Iterator[str]:
    """Every value that a recipe sets, with its source."""
    yield "| option | value | source |"
    yield "|---|---|---|"
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, preset in PRESETS.items():
        for path, source in preset.sources.items():
            section, _, key = path.rpartition(".")
            value = preset.values[section][key] if section else preset.values[key]
            rows.setdefault((path, spell(value), source), []).append(name)
    recipes = sum(bool(preset.sources) for preset in PRESETS.values())
    for (path, value, source), names in sorted(rows.items(), key=lambda row: _place(row[0][0])):
        where = "" if len(names) == recipes else f" ({_where(names)})"
        yield f"| `{path}` | `{value}`{where} | {source} |"


def _place(path: str) -> int:
    """Options in the configuration's order."""
    section, _, key = path.rpartition(".")
    sections = list(Config.__dataclass_fields__)
    return sections.index(section or key)


def _where(names: list[str]) -> str:
    """Which of the presets are meant: their models, or their rules."""
    rules = {"dppo": "DPPO", "grpo": "GRPO"}
    by_rule = {rules.get(name.rpartition("-")[2], "predictive") for name in names}
    if len(by_rule) < 3:
        return ", ".join(sorted(by_rule, reverse=True))
    models = {"FP8" if "-fp8" in name else name.split("-")[1].upper() for name in names}
    return "FP8" if models == {"FP8"} else ", ".join(sorted(models - {"FP8"}))


def sources() -> Iterator[str]:
    """What the sources' words mean."""
    for phrase, meaning in LEGEND.items():
        yield f"- **{phrase}**: {meaning}"


def memory() -> Iterator[str]:
    """What the plan comes to on a GPU, in GB."""
    yield "| run | GPU | weights, gradients, AdamW | engine | the rest, at its worst | main memory | checkpoint |"
    yield "|---|---|---|---|---|---|---|"
    for name, options in PLANS:
        config = resolve(PRESETS[name].values, overrides(options.split()))
        model = Architecture.of(config.model)
        plan = plan_memory(config, model, gpu=True)
        peak = plan.peak("accelerator")
        engine = sum(
            item.bytes for item in plan.items if item.name.startswith("engine: ") and item.place == "accelerator"
        )
        figures = (
            peak,
            plan.state,
            engine,
            peak - plan.state - engine,
            plan.peak("host"),
            checkpoint_bytes(config, model),
        )
        yield f"| `{f'{name} {options}'.strip()}` | {' | '.join(f'{figure / 1e9:.0f}' for figure in figures)} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "presets": presets,
    "values": values,
    "sources": sources,
    "memory": memory,
}


def updated(text: str) -> str:
    """The page with its tables as they should be."""
    for name, rows in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        table = "\n".join([begin, *rows(), "", end])
        place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", flags=re.DOTALL)
        text, count = place.subn(lambda _, table=table: table, text)
        if count != 1:
            raise ValueError(
                f"{PAGE.name} has {count} places for the table {name!r}, between {begin.strip()} and {end}"
            )
    return text


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
