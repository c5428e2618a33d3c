"""Time and peak memory of the operator, side by side with peers: rounds, results and their table."""

from __future__ import annotations

import json
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch

from predmask.bench.cases import BenchError, Case, Inputs
from predmask.bench.memory import available, peak, peak_in_new_process
from predmask.bench.peers import Outcome
from predmask.bench.variants import BOUND, FULL, PLAIN, VARIANTS, Variant, why_not

Clock = Literal["wall", "cpu"]
Progress = Callable[[str, bool], None]
"""Told what comes next, and whether that is a line worth keeping."""


class Ratio(NamedTuple):
    """A quotient of times that were measured in the same rounds."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        if self.least == self.most:
            return f"{self.median:.2f}"
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one variant."""

    name: str
    label: str
    returns: str
    wall: list[float]
    """Seconds of each round; the first one is for warming up, and counts only where it is the only one."""
    cpu: list[float]
    """CPU seconds of all threads, likewise."""
    peak_bytes: int | None
    """Beyond inputs and gradients; None where it was not measured."""
    logp_error: float | None
    """Largest distance to the log-prob of the sampled token in float64."""

    @property
    def rounds(self) -> int:
        """How many count."""
        return max(1, len(self.wall) - 1)

    def seconds(self, clock: Clock) -> float:
        """The median."""
        return median(self._times(clock)[-self.rounds :])

    def over(self, other: Row, clock: Clock) -> Ratio:
        """The median of the ratios to another variant, over the rounds that both have."""
        first = min(1, len(self.wall) - 1, len(other.wall) - 1)
        mine, others = self._times(clock)[first:], other._times(clock)[first:]
        ratios = [a / b for a, b in zip(mine, others, strict=False)]
        return Ratio(median(ratios), min(ratios), max(ratios))

    def _times(self, clock: Clock) -> list[float]:
        return self.wall if clock == "wall" else self.cpu


@dataclass(frozen=True, kw_only=True)
class Result:
    """One configuration."""

    case: Case
    machine: str
    versions: dict[str, str]
    """Of Python and the packages that were measured."""
    rows: list[Row]
    left_out: dict[str, str]
    """Variants that were not measured, and why."""

    def row(self, name: str) -> Row | None:
        """The row of a variant, if there is one."""
        return next((row for row in self.rows if row.name == name), None)

    def ratio(self, row: Row, clock: Clock) -> Ratio:
        """To the bound."""
        bound = self.row(BOUND)
        assert bound is not None  # noqa: S101  (it is always measured)
        return row.over(bound, clock)

    def statistics_cost(self, clock: Clock) -> Ratio | None:
        """The operator over the same pass without statistics."""
        full, plain = self.row(FULL), self.row(PLAIN)
        return None if full is None or plain is None else full.over(plain, clock)

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON has it; with the ratios, for reading."""
        found = asdict(self)
        for entry, row in zip(found["rows"], self.rows, strict=True):
            entry["ratio"] = {clock: self.ratio(row, clock)._asdict() for clock in ("wall", "cpu")}
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Result:
        """What `to_json` wrote."""
        rows = [Row(**{key: value for key, value in row.items() if key != "ratio"}) for row in found["rows"]]
        return cls(**{**found, "case": Case(**found["case"]), "rows": rows})


def measure(
    case: Case,
    names: Sequence[str] | None = None,
    *,
    rounds: int,
    limit: float | None = None,
    memory: bool = True,
    progress: Progress = lambda text, keep: None,
) -> Result:
    """Measure variants side by side.

    Every round runs each variant once, in another order, so that what disturbs the machine disturbs all.

    Args:
        case: the configuration.
        names: of `VARIANTS`; all usual ones if None. The bound is always measured.
        rounds: how many count; one before them does not.
        limit: seconds of one variant after which it is left out of further rounds; the bound never is.
        memory: whether to measure the peak memory, too.
        progress: is told what is being done.

    Raises BenchError for an unknown name.
    """
    progress(f"{case.title}: loading", False)
    chosen, left_out = _choose(case, names)
    progress(f"{case.title}: preparing the batch", True)
    inputs = case.inputs()
    exact = inputs.exact_logp()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    errors: dict[str, float | None] = {}
    for index in range(rounds + 1):
        slow = {name for name in chosen if limit is not None and sum(wall for wall, _ in times[name]) > limit}
        due = [name for name in _shuffled(chosen, index) if name == BOUND or name not in slow]
        if due == [BOUND] != chosen:
            break
        progress(f"{case.title}: {f'round {index} of {rounds}' if index else 'warming up'}", True)
        for name in due:
            progress(f"{case.title}: round {index} of {rounds}, {VARIANTS[name].label}", False)
            outcome, taken = _timed(VARIANTS[name], inputs)
            times[name].append(taken)
            if not index:
                errors[name] = _error(VARIANTS[name], inputs, outcome, exact)
    # What was too slow for a second run is not run a third time.
    again = [name for name in chosen if memory and (len(times[name]) > 1 or rounds == 0 or limit is None)]
    peaks = _peaks(case, again, inputs, progress) if again else {}
    rows = [
        Row(
            name=name,
            label=VARIANTS[name].label,
            returns=VARIANTS[name].returns,
            wall=[wall for wall, _ in times[name]],
            cpu=[cpu for _, cpu in times[name]],
            peak_bytes=peaks.get(name),
            logp_error=errors[name],
        )
        for name in chosen
    ]
    packages = ["torch", *(VARIANTS[name].needs.partition(">")[0] for name in chosen if VARIANTS[name].needs)]
    versions = {"Python": platform.python_version(), **{package: _version(package) for package in packages}}
    return Result(case=case, machine=_machine(case), versions=versions, rows=rows, left_out=left_out)


def _choose(case: Case, names: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
    """What can be measured, and what not and why."""
    unknown = [name for name in names or () if name not in VARIANTS]
    if unknown:
        raise BenchError(f"unknown variant {unknown[0]!r}; choose from {', '.join(VARIANTS)}, with spaces between them")
    chosen, left_out = [], {}
    free = available(case.device)
    for name, variant in VARIANTS.items():
        if names is None and not variant.usual:
            left_out[name] = f"very slow; ask for it with --only {name}"
        elif name == PLAIN and case.device == "cuda":
            left_out[name] = "it is a plain torch sweep, and the operator's on a GPU is Triton's"
        elif names is None or name in names or name == BOUND:
            held = 4 * 4 * case.tokens * case.vocabulary * variant.dense
            if free is not None and held > free:
                left_out[name] = f"needs about {held / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
            elif reason := why_not(name, case.device):
                left_out[name] = reason
            else:
                chosen.append(name)
    if names and chosen == [BOUND] and BOUND not in names:
        raise BenchError("; ".join(f"{name} cannot be measured: {left_out[name]}" for name in names))
    return chosen, left_out


def _shuffled(names: list[str], seed: int) -> list[str]:
    """The names in an order of their own, so that no variant always runs after the same one."""
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))
    return [names[int(index)] for index in order]


def _timed(variant: Variant, inputs: Inputs) -> tuple[Outcome, tuple[float, float]]:
    """The outcome, wall and CPU seconds."""
    inputs.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peers
        _wait(inputs)
        wall, cpu = time.perf_counter(), time.process_time()
        outcome = variant.run(inputs)
        _wait(inputs)
        taken = time.perf_counter() - wall, time.process_time() - cpu
    inputs.clear()
    return outcome, taken


def _wait(inputs: Inputs) -> None:
    if inputs.hidden.is_cuda:
        torch.cuda.synchronize()


def _error(variant: Variant, inputs: Inputs, outcome: Outcome, exact: torch.Tensor) -> float | None:
    """Largest distance of the log-probs to float64."""
    logp = outcome.logp
    if variant.logp is not None:
        with torch.no_grad():
            logp = variant.logp(inputs)
    return None if logp is None else float((logp.double() - exact).abs().max())


def _peaks(case: Case, names: list[str], inputs: Inputs, progress: Progress) -> dict[str, int | None]:
    """Peak memory of each."""
    progress(f"{case.title}: peak memory", True)
    if inputs.hidden.is_cuda:
        return {name: peak(VARIANTS[name], inputs) for name in names}
    found: dict[str, int | None] = {}
    with tempfile.TemporaryDirectory(prefix="predmask-bench-") as folder:
        inputs.save(Path(folder))
        inputs.release()
        for name in names:
            progress(f"{case.title}: peak memory, {VARIANTS[name].label}", False)
            try:
                found[name] = peak_in_new_process(name, Path(folder))
            except BenchError as error:  # the times are worth keeping
                progress(f"{case.title}: {error}", True)
                found[name] = None
    return found


def _machine(case: Case) -> str:
    """Where this was measured."""
    if case.device == "cuda":
        return torch.cuda.get_device_name()
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def heading(results: Sequence[Result]) -> str:
    """A line on where and with what the results were measured."""
    machines = dict.fromkeys(result.machine for result in results)
    versions = dict(pair for result in results for pair in result.versions.items())
    packages = ", ".join(f"{package} {number}" for package, number in versions.items())
    return f"Measured on {' and '.join(machines)}, with {packages}."


def table(result: Result, clock: Clock = "wall") -> str:
    """A Markdown table of one configuration, with a line on what the statistics cost and on what is not in it."""
    unit = "time, s" if clock == "wall" else "CPU time, s"
    cells = [["variant", "returns", unit, "× bound", "rounds", "peak, GB", "largest error of log-prob"]]
    for row in result.rows:
        cells.append(
            [
                row.label,
                row.returns,
                f"{row.seconds(clock):.3g}",
                str(result.ratio(row, clock)),
                str(row.rounds) if len(row.wall) > 1 else "warm-up",
                "–" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.2f}",
                "–" if row.logp_error is None else f"{row.logp_error:.1e}",
            ]
        )
    lines = [f"### {result.case.title}", "", *_aligned(cells)]
    if cost := result.statistics_cost(clock):
        lines += ["", f"Statistics and mask over the same pass with the log-prob alone: {cost}."]
    if result.left_out:
        reasons = dict.fromkeys(result.left_out.values())
        grouped = (", ".join(name for name, why in result.left_out.items() if why == reason) for reason in reasons)
        lines += [
            "",
            f"Not measured: {'; '.join(f'{names} ({why})' for names, why in zip(grouped, reasons, strict=True))}.",
        ]
    return "\n".join(lines)


def _aligned(cells: list[list[str]]) -> list[str]:
    """A Markdown table whose columns are also straight in a terminal: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    words = 2
    rule = ["-" * width if index < words else "-" * (width - 1) + ":" for index, width in enumerate(widths)]

    def line(row: list[str]) -> str:
        padded = (
            text.ljust(width) if index < words else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    return [line(cells[0]), line(rule), *map(line, cells[1:])]


def write_json(path: Path, results: Sequence[Result]) -> None:
    """Write every number."""
    path.write_text(json.dumps({"results": [result.to_json() for result in results]}, indent=1) + "\n")


def read_json(path: Path) -> list[Result]:
    """What `write_json` wrote."""
    return [Result.from_json(found) for found in json.loads(path.read_text())["results"]]
