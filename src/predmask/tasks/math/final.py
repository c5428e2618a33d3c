r"""Where a response states its final answer, and that answer's text without its trimmings."""

from __future__ import annotations

import re
from fractions import Fraction

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
_CONNECTING = re.compile(  # words before a number, a formula or a letter that leave it as it is
    r"(?:(?:therefore|thus|then|hence|so|obviously|clearly|simply|just|indeed|exactly|precisely|equal|equals|to|given|by"
    r"|found|be|is|the|an?|number|value|integer|fraction|total|of|about|approximately|we|get|that|it|of course)\b"
    r"[\s*_:=,]*)+(?=[-+\d$\\.(]|[A-Za-z](?![A-Za-z']))",
    re.IGNORECASE,
)
_ASIDE = re.compile(  # what explains an answer; not what corrects it, or names another
    r"\s*[,;:] +(?!(?:and|or|but|if|unless|maybe|perhaps|possibly|otherwise|not|sin|cos|tan|log|exp|sqrt|inf)\b)"
    r"[A-Za-z]{2}| +\((?=[A-Za-z]{2,} )| +(?:because|since|as|so|which|where|hence|thus|therefore|is|are)\b"
    r"|,? +and +(?:so|we|that|this|it|then|therefore)\b| +(?:in|on|by|with|from|per) +(?=[A-Za-z]{2})"
    r"|(?<!out) +of +(?:the|a|them|it)\b"
)
_MATH = r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]"
_STARTS_WITH_MATH = re.compile(_MATH, re.DOTALL)
_NEXT_PART = re.compile(rf"[ ,;&]*(?:and|or)?[ ,;&]*(?:{_MATH}|(-?\d[\d,.]*(?<=\d)))")
_SENTENCE_END = re.compile(r"[.;!?](?=\s|$)|\n")
_EXPRESSION = re.compile(_MATH + r"|((?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?(?:\s*\\?%)?)", re.DOTALL)
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+[ ,]+(?=[A-Za-z])")

_SPACE = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u200b\ufeff]+")
_DELIMITERS = re.compile(r"\$\$(.*)\$\$|\$([^$]*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\*\*(.*)\*\*|`(.*)`", re.DOTALL)
_TEXT = r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mbox)\s*\{"
_HELD_TEXT = re.compile(rf"{_TEXT}([^{{}}]*)\}}")
_SPEECH = re.compile(r"(?=.*[A-Za-z]{2})[A-Za-z][A-Za-z ,.'-]*")
_MATHEMATICAL = re.compile(
    r"\b(?:infinity|infty|percent|pi|arc[a-z]+|sqrt|sinh?|cosh?|tanh?|log|exp|alpha|beta|gamma|delta|epsilon|theta"
    r"|lambda|sigma|omega)\b",
    re.IGNORECASE,
)
_CONSTANT = re.compile(rf"{_TEXT}\s*([ie])\s*\}}")
_MULTIPLES = {
    "dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
_WRAPPER = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf|normal)|boldsymbol|bm|mbox)\s*\{([^{}]*)\}")
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\[,!;: ]|~|\{,\}| |\\thinspace ?)+,?\d{3}(?!\d))+")
_CHOICE = re.compile(
    rf"(?:{_TEXT}\s*)?\(([A-E])\)(?:\s*\}}(?:[~ ]|\\[ ,;:!]|\\q?quad)*|(?:\s|~|\\[ ,;:!]|\\q?quad)+(?=\d))(\S.*)"
)
_MULTIPLE = re.compile(
    rf"(?P<number>[-+]?(?:\\?\$)?\d[\d,]*(?:\.\d+)?)\$?(?:[ ~]|\\[ ,;:!])*(?P<open>{_TEXT}\s*)?"
    rf"(?P<multiple>{'|'.join(_MULTIPLES)})s?\b(?P<words>[A-Za-z ]*)(?(open)\}})"
)
_CHANGING = (  # what the word says changes what the number says
    rf"(?:{'|'.join(_MULTIPLES)})s?|factorial|half|halves|twice|than|least|most|not|maybe|perhaps|possibly|unless"
)
_CHANGES = re.compile(
    rf"(?<![A-Za-z\\])(?:{_CHANGING})(?![A-Za-z])|\d *(?:squared|cubed|or (?:more|less|fewer))\b", re.IGNORECASE
)
_CHANGES_IN_TEXT = re.compile(
    rf"\b(?:{_CHANGING}|and|or|times|over|plus|minus|mod|pi)\b|^ *(?:squared|cubed)\b", re.IGNORECASE
)
_WITH_WORDS = re.compile(r"([-+]?(?:\\?\$)?\d[\d,]*(?:\.\d+)?(?:/\d+)?)((?: [A-Za-z]{3,})+)")
_NO_UNITS = re.compile(
    " (?:and|times|over|plus|minus|mod|choose|percent|percentage|pct|infinity|log|exp|sqrt|sin|cos|tan|cot|sec|csc"
    "|arc[a-z]+|alpha|beta|gamma|delta|epsilon|theta|lambda|sigma|tau|phi|omega)(?![a-z])"
)
_ABOUT = re.compile(r"^(?:\\approx(?![A-Za-z])|\u2248)\s*")
_ARGUMENT = r"(\\(?!sqrt|[dt]?frac|text|math)[A-Za-z]+|\w)"
_BARE_FRACTION = re.compile(rf"\\([dt]?)frac ?(?=\\|\w ?\\){_ARGUMENT} ?{_ARGUMENT}")
r"""\frac\pi4: a command and a character, or the other way round."""
_SCIENTIFIC = re.compile(r"(?<![\w.])([-+]?\d+(?:\.\d+)?)[eE]\+?(-?\d+)(?!\w)")


def final_answer(response: str) -> str | None:
    r"""The text of a response's final answer, None where it has none.

    It is, the first that there is:

    1. what the last \boxed{...} (or \fbox{...}) with anything in it holds. Boxes with nothing but punctuation, "and" or
       "or" between them are one answer of several parts, so that a row of candidates is not the last of them. A last
       box that is never closed was cut off: then there is no answer.
    2. what follows the last "answer is", "Answer:" (DAPO) or "####" (GSM8K), and connecting words such as "therefore"
       after it: formulas, or the sentence or line up to what explains it (", since ...").
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
    unless they mean something in mathematics ("34 apples", but "2 sin x"). Words that multiply do so: "2 million" is
    2000000. 1e5 is written as a power. Control characters become spaces. Words that are in \text{...} stay there.
    """
    text = _SPACE.sub(" ", text).replace("\u2212", "-").replace("\u2013", "-").strip()
    before = None
    while text != before:
        before = text
        match = _DELIMITERS.fullmatch(text) or (None if words(text) else _WRAPPER.fullmatch(text))
        if match:
            text = next((group for group in match.groups() if group is not None), "")
        text = re.sub(r"(?<=[\w}\])$%])[.,;:]+$", "", _ABOUT.sub("", text.strip()))
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = _CONSTANT.sub(r" \1", _BARE_FRACTION.sub(r"\\\1frac{\2}{\3}", text)).strip()
    multiple = _MULTIPLE.fullmatch(text)
    if multiple and not _changes(multiple["words"]):
        return str(Fraction(re.sub(r"[\\$,]", "", multiple["number"])) * _MULTIPLES[multiple["multiple"]])
    unit = _WITH_WORDS.fullmatch(text)
    if unit and not _NO_UNITS.search(unit[2]) and not _changes(text):
        text = unit[1]
    return _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)


def words(text: str) -> str | None:
    r"""The words that an answer is, in lower case: \text{on}, or plain letters with four in a row; None for another.

    Fewer letters outside of \text{...} are a product (ab), and a single one is a symbol or a choice.
    """
    match = _HELD_TEXT.fullmatch(text)
    held = (match[1] if match else text).strip()
    if not _SPEECH.fullmatch(held) or _MATHEMATICAL.search(held):
        return None
    return held.casefold() if match or re.search("[A-Za-z]{4}", held) else None


def changes(text: str) -> bool:
    r"""Whether words change what the formula of an answer says, so that it is no formula: 17\text{ or more}."""
    return _changes(_HELD_TEXT.sub("", text)) or any(
        held.strip().casefold() not in ("and", "or") and _CHANGES_IN_TEXT.search(held) is not None
        for held in _HELD_TEXT.findall(text)
    )


def choice(text: str) -> tuple[str, str] | None:
    r"""The letter and the value of an answer to a question of several choices: (B) 17, \text{(B) }17."""
    match = _CHOICE.fullmatch(text)
    return (match[1], match[2]) if match else None


def _changes(text: str) -> bool:
    return _CHANGES.search(text) is not None


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
    rest = rest[match.end() :] if (match := _CONNECTING.match(rest)) else rest
    if formula := _STARTS_WITH_MATH.match(rest):
        parts, end = [_content(formula)], formula.end()
        while part := _NEXT_PART.match(rest, end):
            parts.append(_content(part))
            end = part.end()
        multiple = _MULTIPLE.match(rest)
        return multiple[0] if multiple and len(parts) == 1 else ", ".join(parts)
    sentence = _SENTENCE_END.split(rest, maxsplit=1)[0].strip(" *_`")
    aside = _ASIDE.search(sentence)
    if aside and re.search(r"[\d=\\]", sentence[: aside.start()]):
        sentence = sentence[: aside.start()].strip(" *_`")
    return sentence


def _content(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)


def _last_expression(tail: str) -> str:
    found = _EXPRESSION.findall(tail)
    return next(filter(None, found[-1])) if found else ""
