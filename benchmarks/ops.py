"""The fused operator side by side with its peers: the published tables and figure.

    python benchmarks/ops.py

D = 1024, V = 151,936 (Qwen3) and K = 20; about 25 minutes on two CPU cores when all peers are installed
(pip install liger-kernel trl verl). Numbers go to benchmarks/ops.json after each configuration, and --resume goes on
where an interrupted run was; then benchmarks/ops.md and docs/figures/ops.svg are written from them.
`predmask bench ops --help` says what is measured, and measures anything else.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# As the command line sets it: waiting threads sleep, large tensors lie on huge pages.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from predmask.bench import VARIANTS, Case, Result, figure, heading, measure, read_json, table, write_json
from predmask.plotting import check_path

FOLDER = Path(__file__).parent
DATA = FOLDER / "ops.json"
TABLES = FOLDER / "ops.md"
CLOCK = "cpu"
"""CPU time: what else a shared machine does disturbs it less than wall time."""
FIGURE = FOLDER.parent / "docs" / "figures" / "ops.svg"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A configuration, and what is measured of it."""

    dtype: str
    tokens: int
    names: tuple[str, ...]
    limit: float
    """Seconds of one variant, after which it is left out of further rounds."""


USUAL = tuple(name for name, variant in VARIANTS.items() if variant.usual)
FEW = ("predmask", "predmask-logp", "dense")
PLANS = (
    # With its own chunks (2 tokens here), torch takes 16 times the bound: it runs once, to say so.
    Plan(dtype="float32", tokens=512, names=(*USUAL, "torch"), limit=60),
    Plan(dtype="bfloat16", tokens=512, names=USUAL, limit=60),
    Plan(dtype="float32", tokens=2048, names=FEW, limit=95),
    Plan(dtype="bfloat16", tokens=2048, names=FEW, limit=95),
)


def run(plans: tuple[Plan, ...], shape: dict[str, Any], rounds: int, data: Path) -> list[Result]:
    """The results of all plans; those that are in `data` already are not measured again."""
    results = read_json(data) if data.exists() else []
    for plan in plans:
        case = Case(tokens=plan.tokens, dtype=plan.dtype, **shape)
        if any(result.case == case for result in results):
            print(f"{case.title}: measured already", file=sys.stderr)
            continue
        result = measure(case, plan.names, rounds=rounds, limit=plan.limit, progress=_progress)
        unmeasured = {
            name: "for want of time" for name in VARIANTS if name not in plan.names and result.row(name) is None
        }
        results.append(replace(result, left_out=unmeasured | result.left_out))
        write_json(data, results)
        print(f"\n{table(results[-1], CLOCK)}\n", flush=True)
    return results


def _progress(text: str, keep: bool) -> None:
    if keep:
        print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure what is missing, and write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: 7)")
    parser.add_argument("--resume", action="store_true", help="keep what benchmarks/ops.json has of this machine")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be 1 or more")
    try:
        check_path(FIGURE)
    except ModuleNotFoundError as error:
        parser.error(f"{error}: pip install 'predmask[instruments]'")
    if not args.resume:
        DATA.unlink(missing_ok=True)
    results = run(PLANS, {}, args.rounds, DATA)
    figure.draw(results, FIGURE, CLOCK)
    parts = ["# The fused operator and its peers", heading(results), *(table(result, CLOCK) for result in results)]
    TABLES.write_text("\n\n".join(parts) + "\n")
    print(f"wrote {TABLES.name}, {DATA.name} and {FIGURE.name}")


if __name__ == "__main__":
    main()
