"""The report's section about one response, each token marked by what the mask decided."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from predmask.analysis.report.markup import Element, element, number, table
from predmask.analysis.show import MARKS, Response, token_text
from predmask.core import Reason
from predmask.traces import TokenTrace, Trace

_LONGEST = 600
"""Tokens of a response that are shown; of a longer one, the stretch with most dropped ones."""
_MOST_DROPPED = 60
_CLASSES = {reason: reason.name.lower().replace("_", "-") for reason in Reason}


def response_section(response: Response, path: Path) -> Element:
    """One response, each token marked by its reason."""
    tokens, facts = response.tokens, response.facts
    shown = _stretch(tokens)
    dropped = int(tokens.decision.dropped.sum())
    which = {"step": response.step, "sample": response.sample}
    if len(response.epochs) > 1:
        which["epoch"] = response.epoch
    place = ", ".join(f"{name} {value}" for name, value in which.items()).capitalize()
    about = f"{place}: {dropped:,} of {len(tokens):,} tokens dropped"
    about += ", and no response of this step has more." if dropped else ", as in all responses of this step."
    if facts is not None:
        reward = "not scored" if math.isnan(facts.reward) else f"reward {number(facts.reward)}"
        answer = f", right answer {facts.reference}" if facts.reference else ""
        about += f" {reward.capitalize()}{answer}."
    if len(shown) < len(tokens):
        about += f" Shown are positions {int(shown.position[0]):,} to {int(shown.position[-1]):,}."
    prompt = () if facts is None else facts.prompt[-_LONGEST:]
    if facts is not None and len(prompt) < len(facts.prompt):
        about += f" Of the prompt, the last {_LONGEST:,} of {len(facts.prompt):,} tokens are shown."
    text = [part for token in prompt for part in _token(response.trace, token, class_="prompt")]
    for place, (token, reason) in enumerate(zip(shown.id.tolist(), shown.decision.reason.tolist(), strict=True)):
        numbers = ", ".join(f"{name} {value}" for name, value in _numbers(shown, place).items())
        title = f"{MARKS[Reason(reason)].meaning}; position {int(shown.position[place])}, id {token}, {numbers}"
        text += _token(response.trace, token, class_=_CLASSES[Reason(reason)], title=title)
    legend = [element("span", mark.meaning, class_=_CLASSES[reason]) for reason, mark in MARKS.items()]
    if prompt:
        legend.append(element("span", "prompt", class_="prompt"))
    return element(
        "section",
        element("h2", "A response, token by token"),
        element("p", about),
        element("ul", *(element("li", one) for one in legend), class_="legend"),
        element("div", *text, class_="tokens"),
        _dropped_tokens(response.trace, shown),
        element(
            "p",
            "Hold the pointer over a token for its numbers. ",
            element("code", f"predmask show {path}" + "".join(f" --{name} {value}" for name, value in which.items())),
            " shows this response in the terminal, and others.",
            class_="note",
        ),
    )


def _stretch(tokens: TokenTrace) -> TokenTrace:
    """At most `_LONGEST` tokens: those with most dropped ones among them."""
    if len(tokens) <= _LONGEST:
        return tokens
    dropped = tokens.decision.dropped.long().cumsum(0)
    before = dropped - tokens.decision.dropped.long()
    start = int((dropped[_LONGEST - 1 :] - before[: len(before) - _LONGEST + 1]).argmax())
    return tokens[slice(start, start + _LONGEST)]


def _token(trace: Trace, token: int, **attributes: str) -> Iterator[Element]:
    """A token's text, and a real line's end after one that is shown."""
    yield element("span", token_text(trace, token), **attributes)
    if "\n" in trace.text(token):
        yield element("br")


def _numbers(tokens: TokenTrace, place: int) -> dict[str, str]:
    decision = tokens.decision
    return {
        "mu": number(float(tokens.behaviour.logp[place, 0].exp())),
        "pi": number(float(tokens.policy.logp[place, 0].exp())),
        "D": number(float(decision.divergence[place])),
        "rate": number(float(decision.rate[place])),
        "A": number(float(tokens.advantage[place])),
    }


def _dropped_tokens(trace: Trace, tokens: TokenTrace) -> Element | None:
    places = tokens.decision.dropped.nonzero()[:, 0].tolist()
    if not places:
        return None
    first = f"the first {_MOST_DROPPED} of " if len(places) > _MOST_DROPPED else ""
    rows = [
        [
            element("code", token_text(trace, int(tokens.id[place]))),
            str(int(tokens.position[place])),
            *_numbers(tokens, place).values(),
        ]
        for place in places[:_MOST_DROPPED]
    ]
    head = ["token", "pos.", *_numbers(tokens, places[0])]
    return element("div", table(head, rows, caption=f"Dropped tokens above: {first}{len(places)}"), class_="scroll")
