"""The report's sections about single tokens, from a trace."""

from __future__ import annotations

from collections.abc import Iterator

from predmask.analysis.report import figures
from predmask.analysis.report.curves import Points, thinned, thinning
from predmask.analysis.report.digest import DIVERGENCE_BINS, Digest, ProbabilityMap
from predmask.analysis.report.markup import Element, element, figure, table
from predmask.analysis.show import MARKS, token_text
from predmask.analysis.text import percent, rule_text
from predmask.core import Predictive, Reason, Rule
from predmask.traces import Trace, rule_settings

_MOST_MASKED = 20
_BINS_A_DECADE = 8
_NO_TOP_K = (
    " This trace has the sampled token alone (K = 0), so the predictive mask, which needs top-K log-probs, cannot be "
    "asked."
)


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
    head = ["rule", "dropped", "share", "A > 0", "A < 0"]
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
            "no probability, and it has no upper end for likely ones. A divergence's border is the other way round.",
            None if trace.info.top_k else _NO_TOP_K,
        ),
        element("div", *(_map(found, place, each) for place, each in enumerate(found.maps)), class_="grid"),
        element("div", table(head, rows, caption="The same tokens under each rule"), class_="scroll"),
        element(
            "p",
            f"Share: of all {known:,} known response tokens of the trace together. A mean over steps weighs each step "
            "alike; ",
            element("code", "predmask replay"),
            " gives shares of the trainable tokens alone, those with A ≠ 0.",
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
        element("div", table(["tokens by reason", "tokens", "of all tokens"], rows), class_="scroll"),
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
    if not found.known:
        return
    if any(counts[reason] for reason in figures.NOTABLE):
        yield _reasons(found)
    unit = _unit(found.rule)
    threshold = figures.thresholds(found.rule)
    drawn = ", ".join(f"{name} = {value:g}" for name, value in threshold.items()) or "no threshold"
    yield figure(
        figures.divergences(found, threshold, unit, "divergences"),
        title="How far tokens are",
        label=f"Histogram of the divergence in {unit}, for kept and dropped tokens; {drawn}",
        caption=f"The rule's own proximity value; tokens at or below 1e-8 are in the first bar. {_healthy(found.rule)}",
        numbers=table(["divergence", "kept inside", "kept outside", "dropped"], _decades(found)),
    )


def _healthy(rule: Rule | None) -> str:
    """What to look at in the histogram of divergences."""
    if rule is None:
        return "Where this rule cuts is not drawn, since this version of predmask does not know it."
    if not figures.thresholds(rule):
        return "This rule has no threshold; the histogram shows where one would cut."
    return (
        "Healthy: most tokens lie far left of the threshold, with a thin tail that crosses it. A threshold that cuts "
        "into the bulk masks noise; one beyond the last bar masks nothing."
    )


def _reasons(found: Digest) -> Element:
    meanings = {reason.name: MARKS[reason].meaning for reason in figures.NOTABLE}
    shares: Points = {
        reason.name: [(n, int(step.reasons[reason]) / step.known) for n, step in found.steps.items() if step.known]
        for reason in figures.NOTABLE
    }
    rows = thinned(shares)
    counts = found.reasons.tolist()
    said = "; ".join(f"{MARKS[reason].meaning}: {counts[reason]:,}" for reason in figures.NOTABLE)
    return figure(
        figures.reasons(rows, "reasons"),
        title="Dropped tokens, and those kept outside",
        label=f"Dropped tokens and those kept outside the trust region, over steps; {said}",
        caption=f"In all, {said}. Kept though outside the trust region: the update leads back (or the rule drops "
        f"nothing). Healthy: a thin layer without a trend, both signs about alike.{thinning(rows)}",
        numbers=table(
            ["step", *meanings.values()],
            ([row.name, *(percent(row.values[name]) for name in meanings)] for row in rows),
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
        element("code", token_text(trace, first.id)),
        f" (id {first.id}), {first.count:,} of {total:,} ({percent(first.share, 0)}), {first.positive:,} of them with "
        f"A > 0 and {first.negative:,} with A < 0. Different ids that were dropped at all: {len(found.masked):,}.",
    )
    rows = []
    for row in found.masked[:_MOST_MASKED]:
        occurs = found.occurrences[row.id]
        rate = percent(row.count / occurs) if occurs else "–"
        cells = (
            str(row.id),
            f"{row.count:,}",
            percent(row.share, 1),
            f"{row.positive:,}",
            f"{row.negative:,}",
            rate,
        )
        rows.append([element("code", token_text(trace, row.id)), *cells])
    head = ["token", "id", "dropped", "share", "A > 0", "A < 0", "rate"]
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


def _border(rule: Rule) -> str:
    """What the border in a rule's map says of a token, whose other probabilities the map does not show."""
    if not rule.needs_topk:
        return "The border is exact: this rule reads no other token's probability."
    lower_bound = (
        "The border is drawn for the token against all others. The rule's top-K divergence is at least that, so tokens "
        "between the lines may be outside, too."
    )
    if not isinstance(rule, Predictive):
        return lower_bound
    return (
        f"{lower_bound} Its direction reads the other tokens, too: either sign may be dropped on either side of r = 1."
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
        f"tokens with A > 0 and {negative:,} with A < 0. {_border(each.rule)}",
    )
