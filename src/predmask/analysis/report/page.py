"""A run on one self-contained page: HTML with inline SVG, without scripts, fonts or anything else from elsewhere."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from predmask.analysis import AnalysisError
from predmask.analysis.report import figures
from predmask.analysis.report.curves import CHARTS, Chart, Points, points, thinned, thinning
from predmask.analysis.report.digest import Digest, digest, known_rule, late_step
from predmask.analysis.report.markup import Element, element, figure, number, render, table
from predmask.analysis.report.response import response_section
from predmask.analysis.report.tokens import coverage_section, mask_section, rules_section
from predmask.analysis.runs import Run
from predmask.analysis.show import find_response
from predmask.analysis.text import percent, rule_text
from predmask.plotting import need_matplotlib

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_NO_CURVES = "There are no steps in metrics.jsonl: none was completed yet, or the file is lost."


def write_report(run: Run, path: Path, progress: Callable[[int], object] | None = None) -> None:
    """Write a run's report; `progress` is called with the number of tokens of each chunk of the trace.

    AnalysisError where the file cannot be written, TraceError for a trace that cannot be read.
    """
    if not path.absolute().parent.is_dir():
        raise AnalysisError(f"{path}: there is no directory {path.parent}; make it, or name another --output")
    need_matplotlib()
    page = report(run, progress)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise AnalysisError(f"{path} cannot be written ({error.strerror}); name another file with --output") from error


def report(run: Run, progress: Callable[[int], object] | None = None) -> str:
    """The page as text; whatever comes from the run, a trace or a tokenizer is shown as text."""
    found = None if run.trace is None else digest(run.trace, progress)
    body = [
        element("h1", f"predmask: {run.name}"),
        _headline(run, found),
        _facts(run, found),
        _curves_section(run, found),
        *_trace_sections(run, found),
        *_settings_section(run),
    ]
    style = element("style")
    style.text = resources.files("predmask.analysis.report").joinpath("report.css").read_text("utf-8")
    return render(
        element(
            "html",
            element(
                "head",
                element("meta", charset="utf-8"),
                element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
                element("meta", name="viewport", content="width=device-width, initial-scale=1"),
                element("link", rel="icon", href="data:,"),
                element("title", f"predmask: {run.name}"),
                style,
            ),
            element("body", element("main", *body), _footer()),
            lang="en",
        )
    )


def _headline(run: Run, found: Digest | None) -> Element:
    """The few figures that matter first."""
    tiles = list(_accuracy(run))
    metrics, over = _overall(run, found)
    if "mask_frac" in metrics:
        split = f"A > 0: {percent(metrics.get('mask_frac_pos'))}, A < 0: {percent(metrics.get('mask_frac_neg'))}"
        tiles.append(("Masked tokens", percent(metrics["mask_frac"]), f"of known response tokens, {over}; {split}"))
    if "behaviour_kl" in metrics:
        tiles.append(("KL(mu‖pi)", number(metrics["behaviour_kl"]), f"nats per token; {over}"))
    if "mismatch_kl" in metrics:
        tiles.append(("Mismatch of engine and trainer", number(metrics["mismatch_kl"]), f"nats per token; {over}"))
    if "unknown_logprob_count" in metrics:
        overflow = metrics.get("overflow_count", 0.0)
        tiles.append(
            ("Unknown log-probs", f"{metrics['unknown_logprob_count']:,.0f}", f"tokens; {overflow:,.0f} overflows")
        )
    parts = [
        element("div", element("dt", name), element("dd", value), element("dd", note)) for name, value, note in tiles
    ]
    return element("dl", *parts, class_="tiles")


def _accuracy(run: Run) -> Iterator[tuple[str, str, str]]:
    if len(run.evaluations) < 2:
        return
    first, last = run.evaluations[0], run.evaluations[-1]

    def both(name: str) -> str:
        return f"{percent(first.get(name), 1)} → {percent(last.get(name), 1)}"

    yield (
        "Held-out accuracy",
        both("sampled"),
        f"sampled, step {first['step']} to {last['step']}; greedy {both('greedy')}",
    )


def _overall(run: Run, found: Digest | None) -> tuple[Mapping[str, float], str]:
    """The figures of the whole run, and what they are means of; of a trace alone, those of its tokens."""
    if not run.steps:
        return ({} if found is None else found.metrics.compute()), "all recorded tokens"
    columns: dict[str, list[float]] = {}
    for record in run.steps:
        for name, value in record.items():
            if isinstance(value, int | float) and math.isfinite(value):
                columns.setdefault(name, []).append(value)
    totals = {name: sum(values) for name, values in columns.items() if name.endswith("_count")}
    means = {name: sum(values) / len(values) for name, values in columns.items()}
    return means | totals, "mean over steps" if len(run.steps) > 1 else "one step"


def _facts(run: Run, found: Digest | None) -> Element:
    """What this run is."""
    config, summary, trace = run.config, run.summary or {}, run.trace
    facts: dict[str, str] = {}
    if config:
        engine = _part(config, "engine")
        facts["task"] = str(_part(config, "task").get("name", "?"))
        facts["model"] = str(config.get("model", "?"))
        facts["engine"] = ", ".join(str(engine[name]) for name in ("name", "numerics") if name in engine)
        facts["rule"] = rule_text(_part(config, "rule"))
        facts["seed"] = str(config.get("seed", "?"))
        facts["steps"] = f"{_completed(run)} of {config.get('steps', '?')}"
        facts["status"] = run.status
        if "seconds" in summary:
            facts["status"] += f", {number(summary['seconds'])} s"
    elif trace is not None:
        facts["run"] = trace.info.run
        facts["rule"] = rule_text(trace.info.rule)
        facts["sampling"] = (
            f"top-K of {trace.info.top_k}" if trace.info.top_k else "log-prob of the sampled token alone (K = 0)"
        )
        facts["sampling"] += f", temperature {trace.info.temperature:g}, vocabulary of {trace.info.vocabulary_size:,}"
    if trace is not None and found is not None:
        recorded = f"{len(trace.steps):,} step{'s' if len(trace.steps) > 1 else ''}, {found.tokens:,} tokens"
        facts["token trace"] = recorded
    pairs = [part for name, value in facts.items() for part in (element("dt", name), element("dd", value))]
    return element("dl", *pairs, class_="facts")


def _completed(run: Run) -> object:
    """Steps that were completed; where their metrics are lost, those that the summary counts."""
    return len(run.steps) if run.steps or run.summary is None else run.summary.get("steps", "unknown")


def _curves_section(run: Run, found: Digest | None) -> Element:
    curves = points(run, found)
    rule = known_rule(_part(run.config, "rule")) if found is None else found.rule
    drawn = []
    for place, chart in enumerate(CHARTS):
        if any(line.figure in curves for line in chart.lines):
            threshold = figures.thresholds(rule) if "divergence_kept_mean" in _names(chart) else {}
            drawn.append(_chart(chart, curves, threshold, f"curve{place}"))
    if not drawn:
        return element("section", element("h2", "Curves"), element("p", _NO_CURVES))
    source = "metrics.jsonl, every step" if run.steps else "the recorded tokens"
    return element(
        "section",
        element("h2", "Curves"),
        element(
            "p",
            f"From {source}. The numbers of each curve are below it. Known response tokens: those that the policy "
            "sampled, and whose log-probs both engine and trainer know.",
            class_="note",
        ),
        element("div", *drawn, class_="grid"),
    )


def _chart(chart: Chart, curves: Points, threshold: Mapping[str, float], name: str) -> Element:
    lines = [line for line in chart.lines if line.figure in curves]
    show = percent if chart.percent else number
    described = "; ".join(
        f"{line.label} from {show(curves[line.figure][0][1])} to {show(curves[line.figure][-1][1])}" for line in lines
    )
    rows = thinned({line.figure: curves[line.figure] for line in lines})
    numbers = ([row.name, *(show(row.values.get(line.figure)) for line in lines)] for row in rows)
    missing = sum(not math.isfinite(value) for line in lines for _, value in curves[line.figure])
    return figure(
        figures.chart(chart, rows, threshold, name),
        title=chart.title,
        label=f"{chart.title}, {chart.unit}, over steps: {described}",
        caption=chart.note + thinning(rows, lines) + _not_drawn(missing),
        numbers=table(["step", *(line.label for line in lines)], numbers),
    )


def _not_drawn(values: int) -> str:
    if not values:
        return ""
    return f" {values:,} value{' is' if values == 1 else 's are'} not finite and not drawn."


def _trace_sections(run: Run, found: Digest | None) -> Iterator[Element]:
    if run.trace is None or found is None:
        yield element(
            "section",
            element("h2", "Tokens"),
            element(
                "p",
                "This run has no token trace, so there is nothing here about single tokens: which ones the mask "
                "dropped, how far they were, what other rules would have done. Record one with ",
                element("code", "predmask train PRESET --traces"),
                "; from a trainer of your own, write one with ",
                element("code", "predmask.traces"),
                ".",
            ),
        )
        return
    yield mask_section(run.trace, found)
    yield rules_section(run.trace, found)
    if (step := late_step(found)) is not None:
        yield response_section(find_response(run.trace, step=step), run.path)
    yield coverage_section(run.trace, found)


def _settings_section(run: Run) -> Iterator[Element]:
    tables = []
    if run.config:
        # A run's own directory is not in its configuration, so that it can be run again.
        plain = {
            name: value for name, value in run.config.items() if name != "output" and not isinstance(value, Mapping)
        }
        sections = {name: value for name, value in run.config.items() if isinstance(value, Mapping)}
        tables += [_settings("run", plain), *(_settings(name, values) for name, values in sections.items())]
    if versions := _versions(run.path / "versions.json"):
        tables.append(_settings("versions", versions))
    if tables:
        yield element("section", element("h2", "Configuration"), element("div", *tables, class_="settings"))


def _settings(name: str, values: Mapping[str, Any]) -> Element:
    rows = (
        [key, element("code", str(value).lower() if isinstance(value, bool) else str(value))]
        for key, value in values.items()
    )
    return table([], rows, caption=name)


def _versions(file: Path) -> Mapping[str, Any]:
    """What the run was made with; empty where it was not written down."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _footer() -> Element:
    from predmask import __version__

    return element(
        "footer", element("p", f"Made by predmask {__version__}. The page needs no network and has no scripts.")
    )


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of the configuration; empty where there is none."""
    part = config.get(name, {})
    return part if isinstance(part, Mapping) else {"name": part}


def _names(chart: Chart) -> set[str]:
    return {line.figure for line in chart.lines}
