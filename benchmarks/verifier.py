"""How many mathematical answers a second are scored: each kind of answer for itself, and all through worker processes.

    OMP_NUM_THREADS=1 python benchmarks/verifier.py

A response is 500 to 4,000 characters of reasoning with an answer in a box at its end; every second one is wrong, and
hardly any answer comes twice. Of 20 answers 12 are integers, 3 fractions, 1 a decimal and 4 one of the other kinds.
CPU time is that of all processes that score, without their start, which has a line of its own.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections.abc import Callable

from predmask.tasks import Problem
from predmask.tasks.math import Math
from predmask.tasks.verifier import Verifier

TASK = Math(heldout_data=("none.jsonl",))

# An answer as the gold has it, and as a response may write it, of two numbers.
KINDS: dict[str, Callable[[int, int], tuple[str, str]]] = {
    "integer": lambda a, b: (f"{a * b}", f"{a * b:,}"),
    "fraction": lambda a, b: (f"{a}/{b + 1}", rf"\frac{{{2 * a}}}{{{2 * b + 2}}}"),
    "decimal": lambda a, b: (f"{a}.{b}", f"{a}.{b}0"),
    "root": lambda a, b: (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{b}}} \cdot {a}"),
    "multiple of pi": lambda a, b: (rf"\frac{{{a}\pi}}{{{b}}}", rf"{a}\pi/{b}"),
    "polynomial": lambda a, b: (f"{a}x^2 + {b}x", f"x({a}x + {b})"),
    "set": lambda a, b: (f"{a}, {b}, {a + b}", rf"\{{{b}, {a}, {a + b}\}}"),
    "point": lambda a, b: (f"({a}, {b})", rf"\left({a},{b}\right)"),
    "power": lambda a, b: (f"{a}^{{{b}}} - 1", f"-1 + {a}^{{{b}}}"),
}
MIX = ("integer",) * 12 + ("fraction",) * 3 + ("decimal",)
PHRASES = (
    "we have that",
    "so the sum of x and 12 is",
    "then, by $y = 3$,",
    "which gives, for all n > 1,",
    "a square of 7.",
)


def pairs(kinds: list[str], seed: int) -> list[tuple[str, str]]:
    """A gold answer and a response of each kind; every second response is wrong."""
    stream = random.Random(seed)
    found: list[tuple[str, str]] = []
    for place, kind in enumerate(kinds):
        numbers = stream.randint(2, 99), stream.randint(2, 99)
        gold, right = KINDS[kind](*numbers)
        _, wrong = KINDS[kind](numbers[0] + 1, numbers[1])
        reasoning = " ".join(stream.choices(PHRASES, k=stream.randint(27, 190)))
        found.append((gold, rf"{reasoning}. The answer is $\boxed{{{wrong if place % 2 else right}}}$."))
    return found


def ordinary(count: int, seed: int) -> list[tuple[str, str]]:
    """Gold answers and responses of the mixture that the module's text describes."""
    others = list(KINDS)[3:]
    stream = random.Random(seed)
    return pairs([stream.choice([*MIX, *[stream.choice(others) for _ in range(4)]]) for _ in range(count)], seed)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=4000, help="answers of the mixture (default: 4000)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    args = parser.parse_args()

    print("| answers | processes | answers/s, by the clock | answers per CPU-second |")
    print("|---|---|---|---|")
    start = time.perf_counter()
    TASK.prepare()
    startup = time.perf_counter() - start
    for kind in KINDS:
        rate, cpu_rate = here(pairs([kind] * 200, 1))
        print(f"| {kind} | this one | {rate:,.0f} | {cpu_rate:,.0f} |")
    rate, cpu_rate = in_workers(ordinary(args.answers, 2), args.workers)
    print(f"| all, in the mixture | {args.workers} | {rate:,.0f} | {cpu_rate:,.0f} |")
    print(f"\nImports of a process take {startup:.1f} s before its first answer.")


def here(found: list[tuple[str, str]]) -> tuple[float, float]:
    """Answers a second in this process, by the clock and by CPU time."""
    clock, cpu = time.perf_counter(), time.process_time()
    for gold, response in found:
        TASK.score(Problem("", "", gold), response)
        TASK.answer(response)
    return len(found) / (time.perf_counter() - clock), len(found) / (time.process_time() - cpu)


def in_workers(found: list[tuple[str, str]], workers: int) -> tuple[float, float]:
    """The same through a verifier's processes."""
    problems = [Problem(str(place), "", gold) for place, (gold, _) in enumerate(found)]
    responses = [response for _, response in found]
    warm = [Problem("warm", "", r"\sqrt{2}")] * 4 * workers
    cpu: list[float] = []
    for measured in (False, True):
        before = _cpu_of_children()
        with Verifier(TASK, workers=workers) as verifier:
            verifier.score(warm, [r"\boxed{\sqrt{3}}"] * len(warm))
            clock = time.perf_counter()
            if measured:
                scores = verifier.score(problems, responses)
                assert scores == [1.0 - place % 2 for place in range(len(found))], "a score is wrong"
            seconds = time.perf_counter() - clock
        cpu.append(_cpu_of_children() - before)
    return len(found) / seconds, len(found) / (cpu[1] - cpu[0])


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
