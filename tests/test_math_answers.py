"""Mathematical answers: what of a response is its answer, what is equal, and what hostile answers cannot do."""

from __future__ import annotations

import contextlib
import re
import runpy
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("math_verify")

from helpers_tasks import QuickMath
from predmask.tasks import Problem
from predmask.tasks.math import Math, answers
from predmask.tasks.math.answers import answer, score
from predmask.tasks.math.final import final_answer, plain
from predmask.tasks.math.limits import limited
from predmask.tasks.verifier import Verifier, VerifierError

TASK = Math(heldout_data=("not-read.jsonl",))


def problems(*references: str) -> list[Problem]:
    return [Problem(id=f"problem {i}", prompt="", reference=gold) for i, gold in enumerate(references)]


# --- what of a response is its answer ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "found"),
    [
        (r"So we get \boxed{34}.", "34"),
        (r"First \boxed{12}, which is not yet what was asked. Then \boxed{34}", "34"),
        (r"\boxed{34} is it. (Put your answer in \boxed{}.)", "34"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{x, \text{ so } \boxed{34}}", "34"),
        (r"\fbox{34}", "34"),
        (r"\boxed 34", "34"),
        (r"In \boxed as you asked: Answer: 34", "34"),
        # Boxes side by side are one answer.
        (r"\boxed{1}, \boxed{2}", "1, 2"),
        (r"$\boxed{1}$ and $\boxed{2}$", "1, 2"),
        ("\\boxed{1}.\n\n\\boxed{2}", "1, 2"),
        (r"\boxed{34}. \boxed{34}", "34"),
        (r"\boxed{1} because it is smaller than \boxed{2}", "2"),
        # Cut off.
        (r"\boxed{12} is wrong, rather \boxed{34", None),
        (r"\boxed{\frac{1}{2}", None),
        # Without a box.
        ("x = 7, so\nAnswer: 34", "34"),
        ("**Answer:** $34$", "34"),
        ("The answer to this question is 34.5. Therefore we are done.", "34.5"),
        ("the final answer is:\n$$\n\\frac13\n$$\nI hope it is correct.", "\\frac13"),
        ("The answer is 7. No: the answer is 34", "34"),
        ("7 * 2 = 14\n#### 14", "14"),
        # Formulas side by side are one answer, too.
        ("Answer: $34$ or $35$", "34, 35"),
        ("Answer: $x = 34$ and $y=35$", "x = 34, y=35"),
        ("Answer: $34$ or 35", "34, 35"),
        ("Answer: $34$. So $x$ is even.", "34"),
        # In a sentence.
        ("The answer is therefore 17.", "17"),
        ("The answer is thus equal to **17**.", "17"),
        ("So the answer is: 17 (since 4+13=17).", "17"),
        ("The answer is 17, since 4+13=17.", "17"),
        ("Answer: 17 because 10+7", "17"),
        ("The answer is 42 apples because 7 is small.", "42 apples"),
        ("The answer is x = 17, so we are done.", "x = 17"),
        ("The answer is therefore $17$.", "17"),
        ("The answer is clearly (2, 3), as was claimed.", "(2, 3)"),
        ("The answer is a total of 17 apples.", "17 apples"),
        ("Answer: 60 miles per hour", "60 miles"),
        ("The answer is 3/4 of the cake", "3/4"),
        ("The answer is $17$ million.", "$17$ million"),
        ("The answer is therefore B.", "B"),
        ("The answer is New York, as you know", "New York, as you know"),
        # What corrects an answer, or makes another of it, stays.
        ("The answer is 33, or maybe 34", "33, or maybe 34"),
        ("The answer is 33, but perhaps 34", "33, but perhaps 34"),
        ("The answer is not 34", "not 34"),
        ("The answer is the square root of 34", "the square root of 34"),
        (r"we have $x = 3$ and so \(y = 34\), as was to be shown", "y = 34"),
        ("We count 12 cats, which leaves 34 dogs.", "34"),
        # An answer and nothing else.
        (r"\frac{2}{6}", r"\frac{2}{6}"),
        ("x^2 + 1", "x^2 + 1"),
        ("New York", "New York"),
        ("", None),
        (" \n", None),
        ("I do not know. Nobody does.\nNot even I.", None),
    ],
)
def test_the_final_answer(response: str, found: str | None) -> None:
    assert final_answer(response) == found


def test_an_answer_is_looked_for_near_the_end_and_has_a_length() -> None:
    assert final_answer("Answer: 34\n" + "Let me see. " * 300) is None
    assert final_answer(r"\boxed{34}" + " Let me see." * 3000) == "34"
    assert final_answer(rf"\boxed{{{'9' * 1000}}}") == "9" * 1000
    assert final_answer(rf"\boxed{{{'9' * 1001}}}") is None
    assert final_answer(" ".join(rf"\boxed{{{i}}}" for i in range(1000))) is None


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("$34$", "34"), ("$$34$$", "34"), (r"\(34\)", "34"), (r"\[ 34 \]", "34"), ("**34**", "34"), ("34.", "34"),
        (r"\text{A}", "A"), (r"\textbf{34}", "34"), (r"$\mathrm{B}$.", "B"), (r"1\,234", "1234"),
        (r"1{,}234{,}567", "1234567"), ("1 234", "1234"), (r"1\!,234", "1234"), ("34 apples", "34"),
        ("$34$ square feet", "$34$ square feet"), ("3 and 4", "3 and 4"), ("2 pi", "2 pi"),
        ("3 x", "3 x"), ("2 sin x", "2 sin x"), ("3 times 4", "3 times 4"), ("34 red apples", "34"),
        ("5 percent", "5 percent"), ("3 dozen eggs", "36"), (r"\$1.5\text{ million}", "1500000"), (r"\approx 17", "17"),
        ("17 or more", "17 or more"), ("17 factorial", "17 factorial"), (r"\text{on}", r"\text{on}"),
        (r"\text{34 apples}", "34"), (r"\frac\pi4", r"\frac{\pi}{4}"), (r"\dfrac 3\pi", r"\dfrac{3}{\pi}"),
        ("−3", "-3"), ("3\x00\n4", "3 4"), ("1e5", r"1 \cdot 10^{5}"), ("(1, 234)", "(1, 234)"), ("12345", "12345"),
        (r"1 & 2\\ 345", r"1 & 2\\ 345"), ("5!", "5!"),
    ],
)  # fmt: skip
def test_what_does_not_change_an_answer_goes(text: str, bare: str) -> None:
    assert plain(text) == bare


# --- what is right -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "gold"),
    [
        (r"\frac{2}{6}", "1/3"), ("0.5", r"\frac12"), ("0.333333", "1/3"), ("1,234", "1234"), ("034", "34"),
        ("-3", "−3"), (r"50\%", "50"), (r"50\%", "0.5"), (r"5\text{ cm}", "5"), ("5 cm", "5"), (r"90^\circ", "90"),
        (r"\$5.00", "5"), ("A", r"\text{A}"), ("(A)", "A"), ("tuesday", r"\text{Tuesday}"), ("x = 5", "5"),
        ("5", "x=5"), (r"2\sqrt{3}", r"\sqrt{12}"), ("(x+1)^2", "x^2+2x+1"), (r"\{2, 1\}", "1,2"), (r"\pm 3", "-3, 3"),
        ("[1, 2)", "[1,2)"), (r"(-\infty,3]\cup[5,\infty)", r"(-\infty, 3] \cup [5, \infty)"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"),
        (r"\left(\frac12, 3\right)", "(0.5, 3)"), ("10!", "3628800"), ("4i+3", "3+4i"), (r"33\frac13", "100/3"),
        ("34", "$34$"), ("34", r"\boxed{34}"), ("34", r"$\boxed{34}$"), ("2^{100}", "1267650600228229401496703205376"),
        (r"\text{New York}", "New York"), (r"0.\overline{3}", "1/3"), (r"-0.1\overline{6}", r"-\frac16"),
        ("1 1/2", "3/2"), ("-1 1/2", "-1.5"), (r"1 \frac12", "3/2"), ("0.083333", "1/12"), ("1.50", "1.5"),
        ("1.2e-7", r"1.2\times10^{-7}"), ("10^{-7}", "1/10000000"), (r"\text{On}", "on"), (r"\text{ab}", "ab"),
        ("ba", "ab"), ("infinity", r"\infty"), (r"\text{infinity}", r"\infty"), (r"17\text{ million}", "17000000"),
        (r"17\text{ or more}", r"17 \text{ or more}"), (r"3\text{ or }5", "5, 3"), ("5 percent", "5"),
        (r"1+\lambda", r"\lambda+1"),
        ("6:40", r"6:40\text{ a.m.}"), ("6:40 AM", r"6:40\text{ a.m.}"), ("11:00", r"11{:}00"), ("4:6", "2:3"),
        ("2/3", "2:3"), ("1/12", "5:60"), (r"\text{(B) }17", "B"), (r"\text{(B) }17", "17"), ("(B) 17", "17"),
        (r"\textbf{(B)}\ 17", "B"),
        (r"\frac\pi4", r"\frac{\pi}{4}"), (r"5\mathrm{i}", "5i"),
    ],
)  # fmt: skip
def test_right(given: str, gold: str) -> None:
    assert score(rf"It follows that \boxed{{{given}}}.", gold) == 1.0


@pytest.mark.parametrize(
    ("given", "gold"),
    [
        ("33", "34"), ("1 2", "12"),
        ("0.33", "1/3"), ("B", "A"), ("(1,2)", "[1,2)"), (r"\{1,2\}", "1,2,3"), (r"\pm 3", "3"),
        ("x = 5", "6"), (r"\Delta", r"\Gamma"), ("silent", "listen"), ("34 or 35", "34"), (r"34 \text{ and } 35", "34"),
        ("1/0", "0"), (r"\frac{0}{0}", "1"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
        ("34, 35", "34"), ("x", "34"), (r"\infty", "34"), (r"\mathbb{R}", "34"), (r"\frac{}", "34"), ("!", "34"),
        (r"\text{on}", r"\text{no}"), (r"\text{TOP}", r"\text{POT}"), ("on", r"\text{no}"), (r"\text{ba}", "ab"),
        (r"6:40\text{ a.m.}", r"6:40\text{ p.m.}"), ("3:20", "6:40"), ("1/6", "6:36"), ("1.2", "12 p.m."),
        ("6 p.m.", "6 a.m."), ("1.2e-7", r"1.3\times10^{-7}"), ("0.0000002", "1/10000000"), ("0.0000001", "0"),
        (r"6.02\times10^{-34}", r"6.63\times10^{-34}"), (r"0.\overline{3}", "0.3"), ("1 1/2", "1"), ("(C) 17", "B"),
        (r"\text{(C) }18", "17"), (r"5\text{ dollars and }30\text{ cents}", "5"), (r"5\mathrm{i}", "5"),
        (r"17\text{ million}", "17"), (r"17\text{ factorial}", "17"), (r"17\text{ pi}", "17"), (r"17\text{ i}", "17"),
        (r"17\text{ or more}", "17"), (r"17\text{ squared}", "17"), (r"17\text{ hundred thousand}", "17"),
        ("17 factorial", "17"), ("17 or more", "17"), ("17 squared", "17"), (r"3\text{ dozen}", "3"),
        (r"0 < x", "34"), (r"\{\}", "34"), (r"\text{any number}", "34"), (r"[0, 100]", "34"),
    ],
)  # fmt: skip
def test_wrong(given: str, gold: str) -> None:
    assert score(rf"It follows that \boxed{{{given}}}.", gold) == 0.0


@pytest.mark.parametrize("response", ["", "I am not sure.", r"\boxed{34", r"\boxed{}", "no answer"])
def test_no_answer_is_wrong(response: str) -> None:
    assert score(response, "34") == 0.0


@pytest.mark.parametrize(
    "cheat",
    [
        " ".join(rf"\boxed{{{i}}}" for i in range(100)),
        ", ".join(rf"\boxed{{{i}}}" for i in range(100, -1, -1)),
        "\n".join(rf"$\boxed{{{i}}}$" for i in range(34, 36)),
        rf"\boxed{{{','.join(map(str, range(100)))}}}",
        r"\boxed{33 \text{ or } 34}",
        r"\boxed{34 = 35}",
        r"\boxed{x = 34, x = 35}",
        "Answer: 33, 34, 35",
        "The answer is 33 or 34.",
        "The answer is 33, or maybe 34.",
        "Answer: $34$ or $33$",
        "Answer: $33$ or $34$",
        "Answer: $34$ or 33",
        r"The answer is $33$, \boxed{33}, \boxed{34}",
    ],
)
def test_many_candidates_are_not_the_one_that_is_right(cheat: str) -> None:
    assert score(cheat, "34") == 0.0


def test_what_cannot_be_scored_raises() -> None:
    for gold, message in [
        ("", "is empty"),
        ("$$", "is empty"),
        (r"\frac{1}{0}", "cannot be parsed"),
        (r"\{", "cannot"),
    ]:
        with pytest.raises(ValueError, match=message):
            score(r"\boxed{34}", gold)
    assert score(r"\boxed{\langle 1,2 \rangle}", r"\langle 1, 2\rangle") == 1.0  # the same text is equal, parsed or not


def test_a_comparison_that_takes_too_long_is_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SECONDS", 0.3)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"longer than 0\.3 s"):
        score(r"\boxed{(10^{10})!}", "34")
    assert time.monotonic() - start < 1.5
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert score(r"\boxed{34}", "34") == 1.0


def test_a_time_limit_holds_where_everything_is_caught() -> None:
    def deaf() -> None:
        for _ in range(3):
            with contextlib.suppress(BaseException):
                time.sleep(10)

    start = time.monotonic()
    with pytest.raises(TimeoutError), limited(0.1, 2**30):
        deaf()
    assert time.monotonic() - start < 2


def test_an_alarm_rings_in_the_body_alone() -> None:
    """On the way out, where the first alarm is caught, a second one would escape."""
    names: dict[str, Any] = {}
    exec(compile("def leave(ring, sys): ring(14, sys._getframe())", contextlib.__file__, "exec"), names)
    reached: list[str] = []

    def body() -> None:
        ring: Any = signal.getsignal(signal.SIGALRM)
        names["leave"](ring, sys)
        reached.append("the way out")
        ring(signal.SIGALRM, sys._getframe())
        reached.append("what follows the alarm")

    with pytest.raises(TimeoutError), limited(5.0, 2**30):
        body()
    assert reached == ["the way out"]


def test_deep_brackets_are_not_parsed() -> None:
    start = time.monotonic()
    assert score(r"\boxed{" + "(" * 41 + "1+x" + ")" * 41 + "}", "x+2") == 0.0
    assert time.monotonic() - start < 1


def test_a_memory_limit_ends_with_its_body() -> None:
    with pytest.raises(MemoryError), limited(5.0, 2**28):
        bytearray(2**29)
    assert len(bytearray(2**29)) == 2**29


def test_in_another_thread_it_scores_without_an_alarm() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(score, r"\boxed{\sqrt{12}}", r"2\sqrt3").result() == 1.0


# --- against independent values ------------------------------------------------------------------------------

NUMBERS = st.fractions(min_value=-2000, max_value=2000, max_denominator=60)


def spellings(number: Fraction) -> st.SearchStrategy[str]:
    top, bottom = number.numerator, number.denominator
    ways = [f"{2 * top}/{2 * bottom}", rf"\frac{{{top}}}{{{bottom}}}", rf"\dfrac{{{3 * top}}}{{{3 * bottom}}}"]
    if bottom == 1:
        ways += [str(top), f"{top:,}", f"${top}$"]
    if top < 0:
        ways.append(rf"-\frac{{{-top}}}{{{bottom}}}")
    return st.sampled_from(ways)


@given(st.data(), NUMBERS, NUMBERS, st.booleans())
@settings(deadline=None, max_examples=60)
def test_numbers_are_decided_as_by_fractions_and_as_by_math_verify(
    data: st.DataObject, gold: Fraction, other: Fraction, same: bool
) -> None:
    from math_verify import parse, verify

    found = gold if same else other
    response, reference = rf"Thus \boxed{{{data.draw(spellings(found))}}}.", data.draw(spellings(gold))
    given = score(response, reference)
    assert given == float(found == gold)
    expected = parse(f"${reference.strip('$')}$", parsing_timeout=0)
    assert given == verify(expected, parse(response, parsing_timeout=0), timeout_seconds=None)
    assert answer(response) == str(found)


# --- one answer, one text ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "same",
    [
        (r"\frac{2}{6}", "1/3", r"\dfrac13", r"\tfrac{1}{3}", r"$\frac13$", "x = 1/3"),
        ("1,234", "1234", r"1{,}234", "1234.0", r"1234\text{ m}", "1234 metres"),
        ("0.5", r"\frac12", ".50", "1/2"),
        (r"2\sqrt3", r"\sqrt{12}", r"2 \sqrt{3}"),
        ("(x+1)^2", "x^2+2x+1", "1 + 2x + x^2"),
        ("1, 2", r"\{2, 1\}", r"1 \text{ and } 2"),
        ("A", r"\text{A}", "(A)", "a"),
        ("New York", r"\text{New York}"),
    ],
)
def test_equal_answers_are_one_text(same: tuple[str, ...]) -> None:
    assert len({answer(rf"\boxed{{{text}}}") for text in same}) == 1


def test_different_answers_are_different_texts() -> None:
    numbers, words = (
        ("1/3", "1/4", "1.5", "6:40", "3:20", "3 dozen", r"3\text{ or more}"),
        ("A", "B", "x", "listen", "silent", r"\alpha", r"\text{on}", r"\text{no}"),
    )
    texts = (*numbers, *words, "(1,2)", "[1,2]", "1,2", r"\frac{}", "2^")
    assert len({answer(rf"\boxed{{{text}}}") for text in texts}) == len(texts)
    assert answer("I do not know.\nReally.") is None


def test_a_response_is_parsed_once() -> None:
    answers._expression.cache_clear()
    for _ in range(3):
        assert score(r"\boxed{\sqrt{8} + x}", r"x + 2\sqrt2") == 1.0
        answer(r"\boxed{\sqrt{8} + x}")
    assert answers._expression.cache_info().misses == 2  # the gold answer, and the response's


def test_an_answer_that_cannot_be_evaluated_is_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "CANONICAL_SECONDS", 0.2)
    assert answer(r"\boxed{(10^{10})!}") == "(10^{10})!"


# --- hostile answers -----------------------------------------------------------------------------------------

PROGRAM = "[[exit.__class__[12345]]for[exit.__class__.__class_getitem__]in[[print]]][0][0]"


@pytest.mark.parametrize(
    "answer_text",
    [
        rf"1, \sum_{{n=0}}^{{\infty}} (\text{{{PROGRAM}}}^n/n!), 5",
        rf"1, \sum_{{n=0}}^{{\infty}} (\te\!xt{{{PROGRAM}}}^n/n!), 5",
        rf"1, \sum_{{n=0}}^{{\infty}} (\mbox{{{PROGRAM}}}^n/n!), 5",
        rf"1, \sum_{{n=0}}^{{\infty}} (\mathrm {{{PROGRAM}}}^n/n!), 5",
        f"print({12345})",
        "__import__('os').system('echo 12345')",
    ],
)
def test_no_answer_runs_as_a_program(answer_text: str, capfd: pytest.CaptureFixture[str]) -> None:
    for gold in (r"\{1, 2, 3\}", "1", "x + 1"):
        assert score(rf"\boxed{{{answer_text}}}", gold) == 0.0
    answer(rf"\boxed{{{answer_text}}}")
    assert "12345" not in "".join(capfd.readouterr())


def test_names_that_could_be_programs_are_not_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_WORDS", re.compile("(?!)()()"))  # the first of the two guards is off
    answers._expression.cache_clear()
    assert answers._expression(rf"\text{{{PROGRAM}}}+1") is None
    assert not answers._is_harmless("lambda{x}")
    assert not answers._is_harmless("")
    assert not answers._is_harmless('x\\\n__import__("os")')
    assert answers._expression(r"x_{1} + \alpha + \bar{ab} + f(x)") is not None
    answers._expression.cache_clear()


HOSTILE = {
    "tower": r"\boxed{9^{9^{9^{9}}}}",
    "uninterruptible": r"\boxed{1E999999999}",
    "factorials": r"\boxed{((((9!)!)!)!)!}",
    "matrix": r"\boxed{\operatorname{zeros}(100000, 100000)}",
    "braces": r"\boxed{" + "{" * 100_000 + "1" + "}" * 100_000 + "}",
    "open braces": r"\boxed{" * 100_000,
    "parentheses": r"\boxed{" + "(" * 20 + "1" + ")" * 20 + "}",
    "fractions": r"\boxed{" + r"\frac{1}{1+" * 60 + "1" + "}" * 61,
    "boxes": r"\boxed{}" * 50_000,
    "delimiters": r"\(" * 50_000 + "answer is" * 10_000,
    "spaces": r"\boxed{1" + " " * 900 + "}" + " " * 100_000,
    "digits": "Answer: " + "9" * 900 + " 1" * 400,
    "words": r"\boxed{1 " + "a " * 450 + "1}",
    "one word": r"\boxed{1 " + "a" * 900 + "!}",
    "control": "\x00\x1b[2J\r\x0c\\boxed{\x00\x07}",
    "surrogate": "\\boxed{\ud800}",
    "megabyte": "x" * 1_000_000,
    "import": r"\boxed{__import__('os')._exit(1)}",
}


def test_hostile_answers_end_in_time_and_cost_nobody_else_a_score() -> None:
    hostile = list(HOSTILE.values())
    responses = [r"so \boxed{\frac{2}{6}}", *hostile, "Answer: 1/3", r"\boxed{0.3}"]
    golds = ["1/3", *["1/3"] * len(hostile), "1/3", "1/3"]
    start = time.monotonic()
    with Verifier(QuickMath(), workers=2, deadline=4.0) as verifier:
        grades = verifier.grade(problems(*golds), responses)
    assert time.monotonic() - start < 30
    assert [grades[0].score, grades[-2].score, grades[-1].score] == [1.0, 1.0, 0.0]
    assert [grades[0].answer, grades[-2].answer] == ["1/3", "1/3"]
    found = dict(zip(HOSTILE, grades[1:-2], strict=True))
    assert {name for name, grade in found.items() if grade.score not in (0.0, None)} == set()
    kinds = {name: grade.kind for name, grade in found.items() if grade.score is None}
    slow_to_parse = {name: kinds.pop(name, "late") for name in ("parentheses", "fractions", "words", "one word")}
    assert set(slow_to_parse.values()) == {"late"}
    # The alarm ends what it can, the kill the rest; nothing else goes without a score.
    assert kinds == {"tower": "late", "uninterruptible": "late", "factorials": "late", "matrix": "raised"}


# --- through the verifier ------------------------------------------------------------------------------------


def test_it_scores_from_a_thread_and_stops_when_nothing_can_be_scored() -> None:
    with Verifier(TASK, workers=1) as verifier, ThreadPoolExecutor(1) as pool:
        scores = pool.submit(verifier.score, problems("1/3", "1/3"), [r"\boxed{\frac{2}{6}}", r"\boxed{\frac{2}{5}}"])
        assert scores.result() == [1.0, 0.0]
        with pytest.raises(VerifierError, match=r"none of the 8 answers.*'problem 0': ValueError: the gold answer"):
            verifier.score(problems(r"\frac{1}{0}", *[r"\{"] * 7), ["1", *["2"] * 7])
        assert verifier.score(problems("1", r"\frac{1}{0}", "3", "4"), ["1", "2", "0", "0"]) == [1.0, None, 0.0, 0.0]
        assert "gold answer" in verifier.unscored["raised"].reason


def test_the_verifier_of_the_documentation() -> None:
    page = (Path(__file__).parent.parent / "docs" / "math.md").read_text()
    names: dict[str, Any] = {}
    exec(re.findall(r"```py\n(.*?)```", page, re.DOTALL)[-1], names)
    verifier = names["within_one_percent"]
    assert [verifier("it is 100.5", "100"), verifier("102", "100"), verifier("", "100")] == [1.0, 0.0, 0.0]


@pytest.mark.slow
def test_ordinary_answers_are_scored_fast() -> None:
    benchmark = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "verifier.py"))
    golds, responses = zip(*benchmark["ordinary"](2000, seed=0), strict=True)
    with Verifier(TASK, workers=2) as verifier:
        verifier.score(problems("1", "1"), ["1", "1"])
        start = time.monotonic()
        verifier.score(problems(*golds), responses)
        assert len(golds) / (time.monotonic() - start) > 100  # 350 on two busy cores
