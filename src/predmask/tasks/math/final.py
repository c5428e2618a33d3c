r"""Where a response states its final answer, and that answer's text without its trimmings."""

from __future__ import annotations

import re

LONGEST = 1000
"""Characters of an answer; what is longer is none."""
_TAIL = 2000
"""Characters at the end of a response among which an answer without a box is looked for."""
_SHORT = 200
"""Characters up to which a response may be an answer and nothing else."""

_BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[-+]?[\d.,/]*\d")
_JOINT = re.compile(
    # Between two boxes that are parts of one answer: punctuation, "and", "or".
    r"[\s$,;.:&*\\()\[\]]*(?:\\text\{\s*)?(?:and|or)?(?:\s*\})?[\s$,;.:&*\\()\[\]]*"
)
_LONGEST_JOINT = 40

_STATED = re.compile(r"####|\b[Aa](?i:nswer)\b[^\n.:=$]{0,60}?(?:\bis\b|\bare\b|[:=])")
_LEAD = " \t\r\n*_:="
_MATH = r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]"
_STARTS_WITH_MATH = re.compile(_MATH, re.DOTALL)
_SENTENCE_END = re.compile(r"[.;!?](?=\s|$)|\n")
_EXPRESSION = re.compile(_MATH + r"|((?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?(?:\s*\\?%)?)", re.DOTALL)
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+[ ,]+(?=[A-Za-z])")

_SPACE = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u200b\ufeff]+")
_DELIMITERS = re.compile(r"\$\$(.*)\$\$|\$([^$]*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\*\*(.*)\*\*|`(.*)`", re.DOTALL)
_WRAPPER = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf|normal)|boldsymbol|bm|mbox)\s*\{([^{}]*)\}")
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\[,!;: ]|~|\{,\}| |\\thinspace ?)+,?\d{3}(?!\d))+")
_WITH_WORDS = re.compile(r"([-+]?(?:\\?\$)?\d[\d,]*(?:\.\d+)?(?:/\d+)?)((?: [A-Za-z]{3,})+)")
_NO_UNITS = re.compile(
    " (?:and|times|over|plus|minus|mod|choose|percent|percentage|pct|infinity|log|exp|sqrt|sin|cos|tan|cot|sec|csc"
    "|arc[a-z]+|alpha|beta|gamma|delta|epsilon|theta|lambda|sigma|tau|phi|omega)(?![a-z])"
)
_SCIENTIFIC = re.compile(r"(?<![\w.])([-+]?\d+(?:\.\d+)?)[eE]\+?(-?\d+)(?!\w)")


def final_answer(response: str) -> str | None:
    r"""The text of a response's final answer, None where it has none.

    It is, the first that there is:

    1. what the last \boxed{...} (or \fbox{...}) with anything in it holds. Boxes with nothing but punctuation, "and" or
       "or" between them are one answer of several parts, so that a row of candidates is not the last of them. A last
       box that is never closed was cut off: then there is no answer.
    2. what follows the last "answer is", "Answer:" (DAPO) or "####" (GSM8K): a formula, or the sentence or line.
    3. a short response as a whole, if it is one line without prose: an answer and nothing else.
    4. the last formula or number.

    Rules 2 and 4 look at the last 2,000 characters alone. An answer of more than 1,000 characters is none.
    """
    found = _boxed(response)
    if found is None:
        tail = response[-_TAIL:]
        found = _stated(tail)
        if found is None:
            line = tail.strip() if len(response) <= _SHORT else ""
            short = "" if "\n" in line else line
            found = short if short and not _PROSE.search(short) else _last_expression(tail) or short
    found = found.strip()
    return found if 0 < len(found) <= LONGEST else None


def boxed(text: str) -> str | None:
    r"""What the last \boxed{...} of a text holds; None for a text without a box."""
    return _boxed(text)


def plain(text: str) -> str:
    r"""An answer without what does not change it: spaces, $...$, \text{...} around all of it, a full stop after it.

    Digits that are grouped (1\,234, 1{,}234, 1 234) are joined. Words of three letters and more after a number go,
    unless they mean something in mathematics ("34 apples", but "2 sin x"). 1e5 is written as a power. Control
    characters become spaces.
    """
    text = _SPACE.sub(" ", text).replace("\u2212", "-").replace("\u2013", "-").strip()
    before = None
    while text != before:
        before = text
        if match := _DELIMITERS.fullmatch(text) or _WRAPPER.fullmatch(text):
            text = next((group for group in match.groups() if group is not None), "")
        text = re.sub(r"(?<=[\w}\])$%])[.,;:]+$", "", text.strip())
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    words = _WITH_WORDS.fullmatch(text)
    if words and not _NO_UNITS.search(words[2]):
        text = words[1]
    return _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)


def _boxed(text: str) -> str | None:
    parts: list[str] = []  # of the answer, from its last
    start = len(text)
    for match in reversed(list(_BOX.finditer(text))):
        held = _held(text, match.end())
        if held is None:
            if parts:
                break
            if text.startswith("{", match.end()):
                return ""  # it was cut off, or is too long to be an answer
            continue
        content, end = held
        if not content:
            continue
        if parts and not (end <= start <= end + _LONGEST_JOINT and _JOINT.fullmatch(text, end, start)):
            break
        if content not in parts:
            parts.append(content)
        if sum(map(len, parts)) > LONGEST:
            return ""
        start = match.start()
    return ", ".join(reversed(parts)) if parts else None


def _held(text: str, start: int) -> tuple[str, int] | None:
    """What a box that opens at `start` holds, and where it ends; a number may stand there without braces."""
    if not text.startswith("{", start):
        bare = _BARE.match(text, start)
        return (bare[0], bare.end()) if bare else None
    depth = 0
    for match in _BRACE.finditer(text, start, start + LONGEST + 2):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start + 1 : match.start()].strip(), match.end()
    return None


def _stated(tail: str) -> str | None:
    marks = list(_STATED.finditer(tail))
    if not marks:
        return None
    rest = tail[marks[-1].end() :].lstrip(_LEAD)
    formula = _STARTS_WITH_MATH.match(rest)
    if formula:
        return next(group for group in formula.groups() if group is not None)
    return _SENTENCE_END.split(rest, maxsplit=1)[0].strip(" *_`")


def _last_expression(tail: str) -> str:
    found = _EXPRESSION.findall(tail)
    return next(filter(None, found[-1])) if found else ""
