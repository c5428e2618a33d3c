r"""Scoring of mathematical answers by math-verify: `score` and `answer`.

Call them on untrusted text in a process that can be killed only, as `Verifier` does: computer algebra may run into an
operation that nothing interrupts. That it does not run text as a program is seen to here. math-verify 0.9 with SymPy
1.14 can be made to: the words of a \text{...} become the name of a symbol, and SymPy puts names as they are into a
function that it compiles to evaluate an infinite sum. So only letters, digits and spaces of such words reach the
parser, no name that could be a program reaches an evaluation, and math-verify's own search for expressions in a
response, which passes what it finds to `eval`, is not used.
"""

from __future__ import annotations

import functools
import itertools
import keyword
import logging
import re
from fractions import Fraction
from typing import Any

from predmask.tasks.math.final import LONGEST, boxed, changes, choice, final_answer, plain, words
from predmask.tasks.math.limits import limited

SECONDS = 5.0
"""That a comparison may take, well within a verifier's default deadline: an alarm costs nothing, a kill a process."""
CANONICAL_SECONDS = 1.0
"""That it may take to find an answer's canonical text."""
MEMORY = 2**30
"""Bytes that either may take."""

_WORDS = re.compile(r"(\\(?:text[a-z]*|math[a-z]*|mbox)\s*\{)([^}]*)")
_TIME = re.compile(r"(\d{1,2})(?::([0-5]\d))?([ap]m)?")
_TIME_MARKS = re.compile(r"\\(?:text[a-z]*|mathrm|mbox)|\\[ ,;:!]|[{}~]|(?<!\d)\s|\s(?!\d)|(?<=[apm])\.", re.IGNORECASE)
_DEEPEST = 40
"""Brackets in brackets that are parsed: the parser's time grows with them beyond any bound."""
_HARMLESS = re.compile(r"(\w*)(?:[{\\].*)?", re.DOTALL)
_REPEATS = re.compile(r"\\(?:overline|bar|dot)")
_HALF_DIGIT = Fraction(1, 2 * 10**6)
_INTEGER = r"[-+]?\d{1,3}(?:,\d{3})+|[-+]?\d{1,50}"
_POWER = r"10\s*\^\s*(?:\{\s*(?P<exponent>[-+]?\d{1,3})\s*\}|(?P<digit>\d))"
_NUMBER = re.compile(
    rf"(?:(?P<factor>[-+]?\d{{1,50}}(?:\.\d{{1,50}})?)\s*(?:\\cdot|\\times|\*|×)\s*)?{_POWER}"
    r"|(?P<start>[-+]?\d{0,50}\.\d{0,50})\\(?:overline|bar|dot)\s*\{?\s*(?P<repeated>(?<=\{)\d{1,50}(?=\s*\})|\d)\s*\}?"
    r"|(?P<whole>[-+]?\d{1,50})\s+(?P<part>\d{1,50})\s*/\s*(?P<parts>\d{1,50})"
    rf"|(?P<integer>{_INTEGER})|(?P<decimal>[-+]?\d{{0,50}}\.\d{{1,50}})"
    r"|(?P<top>[-+]?\d{1,50})\s*/\s*(?P<bottom>\d{1,50})"
    r"|(?P<sign>[-+]?)\\[dt]?frac\s*(?:\{\s*(?P<upper>-?\d{1,50})\s*\}\s*\{\s*(?P<lower>\d{1,50})\s*\}|(?P<digits>\d\d))"
)


def score(response: str, reference: str) -> float | None:
    r"""1.0 if the final answer of a response (see `final.final_answer`) equals the gold answer, else 0.0.

    Equal is what math-verify holds equal, in its strict mode with six digits after the point. Numbers are compared
    without it: exactly where both are integers or fractions, and otherwise to six digits after the point and to a
    10,000th of the gold answer. The same text is equal. Words (\text{on}; or four letters in a row, and nothing but
    letters) are compared as words, without regard to case; times of day as such; words that change a number ("or
    more") as text. An answer that is missing or that cannot be parsed is wrong. What cannot be decided raises:
    ValueError for a gold answer that cannot be parsed, TimeoutError after 5 seconds, whatever math-verify raises.
    """
    _library()
    gold = plain(boxed(reference) or reference)
    if not gold:
        raise ValueError("the gold answer is empty")
    found = final_answer(response)
    if found is None:
        return 0.0
    with limited(SECONDS, MEMORY):
        return float(_equal(gold, plain(found)))


def answer(response: str) -> str | None:
    r"""A canonical text of a response's final answer, by which a majority is formed; None for a response without one.

    \frac{2}{6}, 1/3 and \dfrac13 are all "1/3", and x = 5 is "5". Where two texts differ though math-verify holds the
    answers equal (rounded decimals, identities that only a proof shows), they count apart.
    """
    found = final_answer(response)
    if found is None:
        return None
    text = plain(found)
    number = _number(text)
    if number is not None:
        return str(number)
    if (said := words(text)) is not None:
        return said
    if _time(text) or changes(text):
        return _folded(text)
    _library()
    try:
        with limited(CANONICAL_SECONDS, MEMORY):
            expression = _expression(text)
            return _folded(text) if expression is None else _canonical(expression)
    except Exception:  # noqa: BLE001 - whatever computer algebra raises, the text is there
        return _folded(text)


def _equal(gold: str, found: str) -> bool:
    if _folded(gold) == _folded(found):
        return True
    if options := choice(found):
        letter, value = options
        return gold.strip("()").upper() == letter or (choice(gold) is None and _equal(gold, plain(value)))
    if (time := _time(gold)) is not None:
        return _same_time(time, _time(found, plain_hour=True))
    numbers = _number(gold), _number(found)
    if numbers[0] is not None and numbers[1] is not None:
        if _is_rounded(gold) or _is_rounded(found):
            return abs(numbers[0] - numbers[1]) <= min(_HALF_DIGIT, abs(numbers[0]) / 10_000)
        return numbers[0] == numbers[1]
    said = words(gold), words(found)
    if said != (None, None):
        return _folded(said[0] or gold) == _folded(said[1] or found)
    if changes(gold) or changes(found):
        return False  # math-verify drops words after a number, whatever they say
    expected = _expression(gold)
    if expected is None:
        raise ValueError(f"the gold answer {gold[:100]!r} cannot be parsed")
    given = _expression(found)
    if given is None:
        return False
    from math_verify import verify

    return verify(expected, given, timeout_seconds=None, raise_on_error=True)


def _folded(text: str) -> str:
    """Without spaces, but those between digits, and in lower case unless there are commands, whose case matters."""
    text = re.sub(r" (?!\d)|(?<!\d) ", "", text)
    return text if "\\" in text else text.casefold()


def _time(text: str, plain_hour: bool = False) -> tuple[int, int, str | None] | None:
    """Hour, minute, and am or pm where it is said, of a time of day such as 6:40; None for anything else."""
    match = _TIME.fullmatch(_TIME_MARKS.sub("", text).casefold())
    if match is None or int(match[1]) > 24 or not (match[2] or match[3] or plain_hour):
        return None
    return int(match[1]), int(match[2] or 0), match[3]


def _same_time(gold: tuple[int, int, str | None], found: tuple[int, int, str | None] | None) -> bool:
    return found is not None and gold[:2] == found[:2] and (None in (gold[2], found[2]) or gold[2] == found[2])


def _is_rounded(number: str) -> bool:
    """Whether a number is a decimal or a power of ten, and not one that repeats, which is exact."""
    return ("." in number or "^" in number) and not _REPEATS.search(number)


def _number(text: str) -> Fraction | None:
    r"""An integer (1,234 is one), decimal (1.5, 0.1\overline{6}, 1.2 \cdot 10^{-7}), fraction of integers or 1 1/2."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    if match["exponent"] or match["digit"]:
        return Fraction(match["factor"] or 1) * Fraction(10) ** int(match["exponent"] or match["digit"])
    if match["repeated"]:
        start, repeated = match["start"], match["repeated"]
        tail = Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(start.partition(".")[2]))
        return Fraction(f"{start}0" if start.endswith(".") else start) + (-tail if start.startswith("-") else tail)
    if match["integer"] or match["decimal"]:
        return Fraction(text.replace(",", ""))
    if match["whole"]:
        whole, part, parts = (int(match[name]) for name in ("whole", "part", "parts"))
        return whole + Fraction(-part if text[0] == "-" else part, parts) if parts else None
    top, bottom = match["top"] or match["upper"] or match["digits"][0], match["bottom"] or match["lower"]
    top, bottom = int(top), int(bottom or match["digits"][1])
    return Fraction(-top if match["sign"] == "-" else top, bottom) if bottom else None


@functools.lru_cache(maxsize=4096)
def _expression(text: str) -> Any:
    """What a text means, as SymPy has it; None for what cannot be parsed and for what is not defined (1/0)."""
    import sympy
    from latex2sympy2_extended.math_normalization import normalize_latex
    from math_verify.parser import LatexExtractionConfig, parse_latex_cached

    if not 0 < len(text) <= LONGEST or _depth(text) > _DEEPEST:
        return None
    try:
        latex = normalize_latex(text, LatexExtractionConfig().normalization_config)
        # After the normalisation, which can put together what was apart.
        expression = parse_latex_cached(_WORDS.sub(lambda match: match[1] + re.sub(r"[^\w ]|_", "", match[2]), latex))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the parser has no errors of its own
        return None
    if isinstance(expression, sympy.MatrixBase):
        expression = sympy.ImmutableMatrix(expression)
    if not isinstance(expression, sympy.Basic) or expression in (sympy.nan, sympy.zoo):
        return None
    return expression if all(map(_is_harmless, _names(expression))) else None


def _depth(text: str) -> int:
    return max(itertools.accumulate((bracket in "([{") - (bracket in ")]}") for bracket in text), default=0)


def _names(expression: Any) -> set[str]:
    import sympy
    from sympy.core.function import AppliedUndef

    return {atom.name for atom in expression.atoms(sympy.Symbol)} | {
        atom.func.__name__ for atom in expression.atoms(AppliedUndef)
    }


def _is_harmless(name: str) -> bool:
    """Whether no Python program can begin with a name: a word, or a word and a brace or backslash (x_{1}, \\alpha)."""
    match = _HARMLESS.fullmatch(name)
    if match is None or not name.isprintable():  # a backslash before a line's end is a space to Python
        return False
    if name == match[1]:  # a keyword alone, such as lambda, is no program, and SymPy gives it another name
        return name != ""
    return not keyword.iskeyword(match[1]) and not (match[1] == "" and name[:1] != "\\")


def _canonical(expression: Any) -> str:
    import sympy
    from math_verify.grader import is_assignment_relation, take_last_relation

    if is_assignment_relation(expression):
        return _canonical(take_last_relation(expression).rhs)
    if isinstance(expression, sympy.FiniteSet):
        return "{" + ", ".join(sorted(map(_canonical, expression.args))) + "}"
    if isinstance(expression, sympy.Tuple):
        return "(" + ", ".join(map(_canonical, expression.args)) + ")"
    value = expression.doit()
    if isinstance(value, sympy.Expr):
        value = sympy.expand(sympy.nsimplify(value, rational=True) if value.has(sympy.Float) else value)
    return str(value)


@functools.cache
def _library() -> None:
    """Import math-verify, which is slow, and keep it from warning that time is bounded elsewhere."""
    import math_verify  # noqa: F401

    logging.getLogger("math_verify").setLevel(logging.ERROR)
