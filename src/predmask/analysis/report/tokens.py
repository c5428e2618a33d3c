"""The report's sections about single tokens, from a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from predmask.analysis.report import figures
from predmask.analysis.report.curves import thinned
from predmask.analysis.report.digest import DIVERGENCE_BINS, Digest, ProbabilityMap
from predmask.analysis.report.markup import Element, element, figure, number, table
from predmask.analysis.show import MARKS, Response
from predmask.analysis.text import percent, rule_text, visible
from predmask.core import Reason, Rule
from predmask.traces import TokenTrace, Trace, rule_settings

_MOST_MASKED = 20
_LONGEST = 600
"""Tokens of a response that are shown; of a longer one, the stretch with most dropped ones."""
_TABLE_ROWS = 60
_BINS_A_DECADE = 8
_TOP_K = (
    "It is drawn for the sampled token against all others. The top-K divergence is at least that, so tokens between "
    "the lines may be outside, too, because of what happened to other tokens. PPO's clip and DPPO drop A > 0 above the "
    "diagonal and A < 0 below it; the predictive mask may do otherwise, since its direction reads the other tokens' "
    "probabilities."
)
_BINARY = (
    "This trace has the sampled token alone (K = 0): the divergence is that of the token against all others, and the "
    "predictive mask, which needs top-K log-probs, cannot be asked."
)
_CLASSES = {reason: reason.name.lower().replace("_", "-") for reason in Reason}


def mask_section(trace: Trace, found: Digest) -> Element:
    """Which tokens were dropped, and how far they were."""
    return element(
        "section",
        element("h2", "What the mask did"),
        element("p", f"From the trace: {_covered(trace, found)}.", class_="note"),
        element("div", *_mask_figures(found), class_="grid"),
        *_most_masked(trace, found),
    )


def rules_section(trace: Trace, found: Digest) -> Element:
    """Where the tokens lie by mu and pi, and what other rules would drop of them."""
    known = found.known
    rows = [
        [
            _name(each),
            f"{each.dropped:,}",
            percent(each.dropped / known if known else None),
            f"{int(each.positive.sum()):,}",
            f"{int(each.negative.sum()):,}",
        ]
        for each in found.maps
    ]
    head = ["rule", "dropped", "of known tokens", "A > 0", "A < 0"]
    return element(
        "section",
        element("h2", "Probabilities, and the regions of the rules"),
        element(
            "p",
            "Each map shows every recorded token by the probability that the behaviour policy mu gave it when it was "
            "sampled, and the one that the policy pi gave it when it was trained on: the darker, the more tokens. Both "
            "axes are in log-odds, so that what happens near 1, where most tokens are, is seen as well as near 0. On "
            "the dotted diagonal the ratio r = pi/mu is 1. The solid line is the border of the rule's trust region; "
            "triangles are where it drops tokens, larger for more of them: ▲ A > 0, ▼ A < 0.",
        ),
        element(
            "p",
            "What to look at: the ratio's band is narrow for rare tokens, which it drops for changes that move next to "
            "no probability, and it has no upper end for likely ones. A divergence's border is the other way round. ",
            _TOP_K if trace.info.top_k else _BINARY,
        ),
        element("div", *(_map(found, place, each) for place, each in enumerate(found.maps)), class_="grid"),
        element("div", table(head, rows, caption="The same tokens under each rule"), class_="scroll"),
    )


def response_section(response: Response, path: Path) -> Element:
    """One response, each token marked by its reason."""
    tokens, facts = response.tokens, response.facts
    shown = _stretch(tokens)
    dropped = int(tokens.decision.dropped.sum())
    about = f"Step {response.step}, sample {response.sample}: {dropped:,} of {len(tokens):,} tokens dropped"
    about += ", and no response of this step has more." if dropped else ", as in all responses of this step."
    if facts is not None:
        about += f" Reward {number(facts.reward)}" + (
            f", right answer {visible(facts.reference)}." if facts.reference else "."
        )
    if len(shown) < len(tokens):
        about += f" Shown are positions {int(shown.position[0]):,} to {int(shown.position[-1]):,}."
    prompt = () if facts is None else facts.prompt[-_LONGEST:]
    spans = [element("span", *_lines(response.trace, token), class_="prompt") for token in prompt]
    spans += [_span(response.trace, shown, place) for place in range(len(shown))]
    legend = [element("span", name, class_=_CLASSES[reason]) for reason, name in _meanings()]
    if prompt:
        legend.append(element("span", "prompt", class_="prompt"))
    return element(
        "section",
        element("h2", "A response, token by token"),
        element("p", about),
        element("ul", *(element("li", one) for one in legend), class_="legend"),
        element("div", *spans, class_="tokens"),
        _dropped_tokens(response.trace, shown),
        element(
            "p",
            "Hold the pointer over a token for its numbers. ",
            element("code", f"predmask show {path} --step {response.step} --sample {response.sample}"),
            " shows this response in the terminal, and others.",
            class_="note",
        ),
    )


def coverage_section(trace: Trace, found: Digest) -> Element:
    """What the trace covers."""
    total = max(found.tokens, 1)
    counts = found.reasons.tolist()
    rows = [[name, f"{counts[reason]:,}", percent(counts[reason] / total)] for reason, name in _meanings()]
    return element(
        "section",
        element("h2", "What the trace covers"),
        element("p", f"{_covered(trace, found)}, under rule {rule_text(trace.info.rule)}."),
        element("div", table(["tokens by reason", "tokens", "share"], rows), class_="scroll"),
        element(
            "p",
            "Not trained on: the advantage is 0 (all rewards of the group were equal), or the policy did not sample "
            "the token. Unknown: a log-prob is missing or not finite; such tokens are outside loss, masks and means.",
            class_="note",
        ),
    )


def _covered(trace: Trace, found: Digest) -> str:
    first, last, count = trace.steps[0], trace.steps[-1], len(trace.steps)
    steps = f"step {first}" if count == 1 else f"{count} steps from {first} to {last}"
    known = "" if found.known == found.tokens else f", {found.known:,} of them response tokens with known log-probs"
    return f"{steps}, {found.tokens:,} tokens{known}"


def _mask_figures(found: Digest) -> Iterator[Element]:
    counts = found.reasons.tolist()
    steps = [number for number, step in found.steps.items() if step.known]
    if not steps:
        return
    if any(counts[reason] for reason in figures.OUTSIDE):
        yield _reasons(found, steps)
    unit = _unit(found.rule)
    threshold = figures.thresholds(found.rule)
    drawn = ", ".join(f"{name} = {value:g}" for name, value in threshold.items())
    healthy = (
        "Healthy: most tokens lie far left of the threshold, with a thin tail that crosses it. A threshold that cuts "
        "into the bulk masks noise; one beyond the last bar masks nothing."
        if threshold
        else "This rule has no threshold; the histogram shows where one would cut."
    )
    yield figure(
        figures.divergences(found, threshold, unit, "divergences"),
        title="How far tokens are",
        label=f"Histogram of the divergence in {unit}, for kept and dropped tokens; {drawn or 'no threshold'}",
        caption=f"The rule's own proximity value; tokens at or below 1e-8 are in the first bar. {healthy}",
        numbers=table(["divergence", "kept inside", "kept outside", "dropped"], _decades(found)),
    )


def _reasons(found: Digest, steps: Sequence[int]) -> Element:
    columns = [
        dict(thinned([(n, int(found.steps[n].reasons[reason]) / found.steps[n].known) for n in steps], _TABLE_ROWS))
        for reason in figures.OUTSIDE
    ]
    counts = found.reasons.tolist()
    said = "; ".join(f"{MARKS[reason].meaning}: {counts[reason]:,}" for reason in figures.OUTSIDE)
    return figure(
        figures.reasons(found, "reasons"),
        title="Tokens outside the trust region",
        label=f"Tokens outside the trust region by reason, over steps; {said}",
        caption=f"In all, {said}. Kept though outside: the update leads back (or the rule drops nothing). "
        "Healthy: a thin layer without a trend, both signs about alike.",
        numbers=table(
            ["step", *(MARKS[reason].meaning for reason in figures.OUTSIDE)],
            ([str(step), *(percent(column[step]) for column in columns)] for step in columns[0]),
        ),
    )


def _decades(found: Digest) -> Iterator[list[str]]:
    """Rows of the histogram, a decade each."""
    counts = found.divergences.reshape(len(Reason), -1, _BINS_A_DECADE).sum(-1)
    edges = DIVERGENCE_BINS[::_BINS_A_DECADE].tolist()
    dropped = counts[Reason.DROPPED_POSITIVE] + counts[Reason.DROPPED_NEGATIVE]
    columns = [counts[Reason.KEPT_INSIDE].tolist(), counts[Reason.KEPT_RETURNING].tolist(), dropped.tolist()]
    for place, row in enumerate(zip(*columns, strict=True)):
        if any(row):
            yield [f"{edges[place]:.0e} to {edges[place + 1]:.0e}", *(f"{count:,}" for count in row)]


def _name(each: ProbabilityMap) -> str:
    return f"{each.rule.name} (this run)" if each.recorded else each.rule.name


def _meanings() -> list[tuple[Reason, str]]:
    return [(reason, mark.meaning) for reason, mark in MARKS.items()]


def _unit(rule: Rule | None) -> str:
    """Of the rule's proximity value."""
    if rule is None:
        return "units of the rule"
    divergence = getattr(rule, "divergence", "kl" if rule.name == "none" else None)
    return {None: "|r - 1|", "tv": "total variation"}.get(divergence, "nats")


def _most_masked(trace: Trace, found: Digest) -> Iterator[Element]:
    yield element("h3", "Most-dropped tokens")
    if not found.masked:
        yield element("p", "No recorded token was dropped.")
        return
    first = found.masked[0]
    total = sum(row.count for row in found.masked)
    yield element(
        "p",
        "Dropped most often: ",
        element("code", visible(trace.text(first.id))),
        f" (id {first.id}), {first.count:,} of {total:,} ({percent(first.share, 0)}), {first.positive:,} of them with "
        f"A > 0 and {first.negative:,} with A < 0. Different ids that were dropped at all: {len(found.masked):,}.",
    )
    rows = []
    for row in found.masked[:_MOST_MASKED]:
        occurs = int(found.occurrences[row.id])
        rate = percent(row.count / occurs) if occurs else "–"
        cells = (
            str(row.id),
            f"{row.count:,}",
            percent(row.share, 1),
            f"{row.positive:,}",
            f"{row.negative:,}",
            f"{occurs:,}",
            rate,
        )
        rows.append([element("code", visible(trace.text(row.id))), *cells])
    head = ["token", "id", "dropped", "share", "A > 0", "A < 0", "sampled", "rate"]
    yield element("div", table(head, rows), class_="scroll")
    yield element(
        "p",
        "Share: of all dropped tokens. Rate: of the times that the id was sampled. Healthy: the table follows the "
        "language's own frequencies. One id that takes most of the share, or one whose rate is far above the others', "
        "is what the mask acts on; look at it in its responses (",
        element("code", "predmask show"),
        ") before changing delta.",
        class_="note",
    )


def _map(found: Digest, place: int, each: ProbabilityMap) -> Element:
    settings = rule_text(rule_settings(each.rule))
    positive, negative = int(each.positive.sum()), int(each.negative.sum())
    return figure(
        figures.probabilities(found, each, f"map{place}"),
        title=_name(each),
        label=f"Map of tokens by mu and pi with the border of {settings}, which drops {positive} with A > 0, "
        f"{negative} with A < 0",
        caption=f"{settings}: {each.rule.summary}. {'It dropped' if each.recorded else 'It would drop'} {positive:,} "
        f"tokens with A > 0 and {negative:,} with A < 0.",
    )


def _stretch(tokens: TokenTrace) -> TokenTrace:
    """At most `_LONGEST` tokens: those with most dropped ones among them."""
    if len(tokens) <= _LONGEST:
        return tokens
    dropped = tokens.decision.dropped.long().cumsum(0)
    before = dropped - tokens.decision.dropped.long()
    start = int((dropped[_LONGEST - 1 :] - before[: len(before) - _LONGEST + 1]).argmax())
    return tokens[slice(start, start + _LONGEST)]


def _span(trace: Trace, tokens: TokenTrace, place: int) -> Element:
    reason = Reason(int(tokens.decision.reason[place]))
    numbers = ", ".join(f"{name} {value}" for name, value in _numbers(tokens, place))
    title = f"{MARKS[reason].meaning}; {numbers}"
    return element("span", *_lines(trace, int(tokens.id[place])), class_=_CLASSES[reason], title=title)


def _numbers(tokens: TokenTrace, place: int) -> list[tuple[str, str]]:
    decision = tokens.decision
    return [
        ("position", str(int(tokens.position[place]))),
        ("id", str(int(tokens.id[place]))),
        ("mu", number(float(tokens.behaviour.logp[place, 0].exp()))),
        ("pi", number(float(tokens.policy.logp[place, 0].exp()))),
        ("D", number(float(decision.divergence[place]))),
        ("rate", number(float(decision.rate[place]))),
        ("A", number(float(tokens.advantage[place]))),
    ]


def _lines(trace: Trace, token: int) -> Sequence[Element | str]:
    """A token's text; after a line's end a real one."""
    text = trace.text(token)
    return (visible(text), element("br")) if "\n" in text else (visible(text),)


def _dropped_tokens(trace: Trace, tokens: TokenTrace) -> Element | None:
    places = tokens.decision.dropped.nonzero()[:_TABLE_ROWS, 0].tolist()
    if not places:
        return None
    rows = [
        [element("code", visible(trace.text(int(tokens.id[place])))), *(value for _, value in _numbers(tokens, place))]
        for place in places
    ]
    head = ["token", *(name for name, _ in _numbers(tokens, places[0]))]
    return element("div", table(head, rows, caption="Its dropped tokens"), class_="scroll")
