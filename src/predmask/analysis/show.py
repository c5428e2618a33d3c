"""The text of one recorded response, each token marked by what the mask decided."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from predmask.analysis import AnalysisError
from predmask.analysis.text import columns, rule_text, visible
from predmask.core import Reason
from predmask.traces import SampleTrace, TokenTrace, Trace
from predmask.traces.reader import ranges
from predmask.traces.schema import OPTIONAL

_UNREAD = tuple(OPTIONAL)
_TEXT_WIDTH = 20
"""Columns of a token's text in the table."""


class Mark(NamedTuple):
    """How a token looks: between two signs where there are no colours, else in a style (ANSI SGR codes)."""

    before: str
    after: str
    style: str
    meaning: str


# Styles that differ in more than their colour, on backgrounds of their own: blue is dark, orange is light.
MARKS: Mapping[Reason, Mark] = {
    Reason.DROPPED_POSITIVE: Mark("[+", "+]", "1;38;5;231;48;5;25", "dropped, A > 0"),
    Reason.DROPPED_NEGATIVE: Mark("[-", "-]", "4;38;5;16;48;5;214", "dropped, A < 0"),
    Reason.KEPT_RETURNING: Mark("(", ")", "4", "kept outside"),
    Reason.KEPT_INSIDE: Mark("", "", "", "kept inside"),
    Reason.UNKNOWN: Mark("?", "?", "1;7", "unknown"),
    Reason.NOT_TRAINABLE: Mark("{", "}", "3", "not trained on"),
}
PROMPT = Mark("", "", "2", "prompt")


@dataclass(frozen=True)
class Response:
    """A recorded response in one pass over its rollout, and what else there is to look at."""

    trace: Trace
    tokens: TokenTrace
    """In the order of their positions."""
    facts: SampleTrace | None
    """None where responses were not recorded."""
    samples: list[int]
    """The samples that were recorded of this step."""
    epochs: list[int]
    """The passes in which this one was."""

    @property
    def step(self) -> int:
        """The rollout's number."""
        return int(self.tokens.step[0])

    @property
    def sample(self) -> int:
        """The response's number within its step."""
        return int(self.tokens.sample[0])

    @property
    def epoch(self) -> int:
        """The pass over the rollout."""
        return int(self.tokens.epoch[0])

    @property
    def reasons(self) -> list[Reason]:
        """Of each token."""
        return [Reason(reason) for reason in self.tokens.decision.reason.tolist()]


def find_response(
    trace: Trace, *, step: int | None = None, sample: int | None = None, epoch: int | None = None
) -> Response:
    """A response of a trace, in one pass: by default of the last step, the one with most dropped tokens.

    Of those that a `sample` and an `epoch` leave; the first of equals.

    Raises TraceError for a step that was not recorded, AnalysisError for such a sample or epoch.
    """
    step = trace.steps[-1] if step is None else step
    dropped: Counter[tuple[int, int]] = Counter()
    for chunk in trace.tokens([step], without=_UNREAD):
        for *place, count in _count(chunk.sample, chunk.epoch, chunk.decision.dropped):
            dropped[place[0], place[1]] += count
    epochs: dict[int, list[int]] = {}
    for number, passed in sorted(dropped):
        epochs.setdefault(number, []).append(passed)
    if not epochs:
        raise AnalysisError(f"step {step} has no tokens")
    if sample is not None and sample not in epochs:
        raise AnalysisError(f"sample {sample} was not recorded; step {step} has samples {ranges(list(epochs))}")
    places = sorted(place for place in dropped if sample in (None, place[0]) and epoch in (None, place[1]))
    if not places:
        of, passes = f"step {step}", sorted({place[1] for place in dropped})
        if sample is not None:
            of, passes = f"sample {sample} of {of}", epochs[sample]
        raise AnalysisError(f"epoch {epoch} was not recorded; {of} has epochs {ranges(passes)}")
    sample, epoch = max(places, key=lambda place: dropped[place])
    parts = [
        chunk[(chunk.sample == sample) & (chunk.epoch == epoch)] for chunk in trace.tokens([step], without=_UNREAD)
    ]
    tokens = TokenTrace.cat([part for part in parts if len(part)])
    facts = next((facts for facts in trace.samples(step) if facts.sample == sample), None)
    return Response(trace, tokens[tokens.position.argsort(stable=True)], facts, list(epochs), epochs[sample])


def text(response: Response, *, colour: bool, width: int = 100) -> str:
    """The response with its prompt, under a header and a legend, in lines of about `width` columns."""
    trace = response.trace
    marks = [MARKS[reason] for reason in response.reasons]
    cells = [_cell(token_text(trace, token), mark, colour) for token, mark in zip(_ids(response), marks, strict=True)]
    parts = ["\n".join(_header(response)), _legend(response, colour, width)]
    if response.facts is not None:
        prompt = (_cell(token_text(trace, token), PROMPT, colour) for token in response.facts.prompt)
        parts.append("prompt\n" + _wrapped(prompt, width))
    parts.append("response\n" + _wrapped(cells, width))
    return "\n\n".join(parts)


def table(response: Response) -> str:
    """A line a token: both policies' probabilities, and what the rule read and decided."""
    tokens = response.tokens
    mu, pi = tokens.behaviour.logp[:, 0], tokens.policy.logp[:, 0]
    numbers = (mu.exp(), pi.exp(), (pi - mu).exp(), tokens.decision.divergence, tokens.decision.rate)
    rows = zip(
        tokens.position.tolist(),
        _ids(response),
        response.reasons,
        *(column.tolist() for column in numbers),
        strict=True,
    )
    lines = [_row("position", "id", "token", ("mu", "pi", "ratio", "D", "rate"), "decision")]
    for position, token, reason, *values in rows:
        shown = [f"{value:.4g}" for value in values]
        lines.append(_row(position, token, token_text(response.trace, token), shown, MARKS[reason].meaning))
    return "\n".join(lines)


def token_text(trace: Trace, token: int) -> str:
    """A token as it can be shown: its text, `visible`, or its id where there is none."""
    return visible(trace.text(token) or f"⟨{token}⟩")


def _count(sample: Tensor, epoch: Tensor, dropped: Tensor) -> list[list[int]]:
    """Rows of (sample, epoch, dropped tokens)."""
    places, index = torch.unique(torch.stack([sample, epoch], dim=1), dim=0, return_inverse=True)
    counts = torch.zeros(len(places), dtype=torch.int64).index_add_(0, index, dropped.long())
    return torch.cat([places, counts[:, None]], dim=1).tolist()


def _ids(response: Response) -> list[int]:
    return response.tokens.id.tolist()


def _header(response: Response) -> Iterator[str]:
    trace, tokens, facts = response.trace, response.tokens, response.facts
    dropped = int(tokens.decision.dropped.sum())
    yield (
        f"step {response.step} (recorded: {ranges(trace.steps)}), sample {response.sample} (recorded: "
        f"{ranges(response.samples)}), group {int(tokens.group[0])}"
    )
    if facts is not None:
        reward = "not scored" if math.isnan(facts.reward) else f"{facts.reward:g}"
        yield f"problem {visible(facts.problem) or '-'}, reference answer {visible(facts.reference) or '-'}"
        yield f"reward {reward}, advantage {_span(tokens.advantage, '+.3g')}"
        end = "finished" if facts.finished else "cut at the length limit"
        part = "" if len(tokens) == facts.length else f", of which {len(tokens)} were recorded"
        yield f"{facts.length} tokens{part}, {end}; {dropped} dropped"
    else:
        yield f"advantage {_span(tokens.advantage, '+.3g')}, {len(tokens)} tokens; {dropped} dropped"
        yield "prompt, reward and reference answer were not recorded"
    more = f" (recorded: {ranges(response.epochs)})" if len(response.epochs) > 1 else ""
    yield (
        f"epoch {response.epoch}{more}, minibatch {_span(tokens.minibatch)}, staleness {_span(tokens.staleness)} "
        "optimiser steps"
    )
    yield f"rule {rule_text(trace.info.rule)}"
    if not trace.vocabulary:
        yield "the trace has no vocabulary: tokens are shown as their ids"


def _span(values: Tensor, form: str = "") -> str:
    """The value that all tokens have, or from the least to the largest."""
    low, high = format(values.min().item(), form), format(values.max().item(), form)
    return low if low == high else f"{low} to {high}"


def _legend(response: Response, colour: bool, width: int) -> str:
    counts = Counter(response.reasons)
    cells = []
    for reason, mark in MARKS.items():
        sample, size = _cell("token", mark, colour)
        label = f" {mark.meaning}: {counts[reason]}   "
        cells.append((sample + label, size + len(label)))
    return "\n".join(map(str.rstrip, _wrapped(cells, width).split("\n")))


def _cell(text: str, mark: Mark, colour: bool) -> tuple[str, int]:
    """A token's visible text with its mark, and the columns that it takes."""
    if not colour:
        text = f"{mark.before}{text}{mark.after}"
        return text, columns(text)
    return (f"\x1b[{mark.style}m{text}\x1b[0m" if mark.style else text), columns(text)


def _wrapped(cells: Iterable[tuple[str, int]], width: int) -> str:
    """Cells in lines: a new one before a cell that does not fit, and after one that shows a newline."""
    lines, used = [""], 0
    for cell, size in cells:
        if used and used + size > width:
            lines.append("")
            used = 0
        lines[-1] += cell
        used += size
        if "⏎" in cell:
            lines.append("")
            used = 0
    return "\n".join(lines).rstrip("\n")


def _row(position: object, token: object, text: str, numbers: Sequence[str], decision: str) -> str:
    while columns(text) > _TEXT_WIDTH:
        text = text[:-2] + "…"
    padded = text + " " * (_TEXT_WIDTH - columns(text))
    return f"{position:>8} {token:>8}  {padded}" + "".join(f"{number:>12}" for number in numbers) + f"  {decision}"
