"""Tasks for the tests, in a module of their own so that worker processes can import them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from predmask.tasks.base import Problem, Split
from predmask.tasks.math import Math

PROBLEMS = (Problem(id="only", prompt="", reference="1/3"),)


@dataclass(frozen=True, kw_only=True)
class Scripted:
    """A verifier that does what the response says: a number is its score, a word is a fault."""

    def problems(self, split: Split) -> Sequence[Problem]:
        return PROBLEMS if split == "train" else ()

    def score(self, problem: Problem, response: str) -> float | None:
        word, _, argument = response.partition(" ")
        match word:
            case "sleep":
                time.sleep(1000)
            case "parent":  # hangs, and has started a process of its own
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
                Path(argument).write_text(str(child.pid))
                time.sleep(1000)
            case "deaf":  # returns, but SIGTERM no longer ends the process
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                return 1.0
            case "wait":
                time.sleep(float(argument))
                return float(argument)
            case "exit":
                os._exit(3)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "raise":
                raise ZeroDivisionError(argument)
            case "timeout":
                raise TimeoutError(argument)
            case "none":
                return None
            case "text":
                return "1.0"  # type: ignore[return-value]
            case "print":
                print("noise " * 10_000, flush=True)
                os.write(1, b"more noise")
                return 1.0
            case "pid":
                return float(os.getpid())
        return float(word)


@dataclass(frozen=True, kw_only=True)
class Answering(Scripted):
    """Its answer is what follows "=", and a task's `answer` may fail as well."""

    def answer(self, response: str) -> str | None:
        if "=" not in response:
            return None
        answer = response.partition("=")[2]
        if answer == "hang":
            time.sleep(1000)
        return str(1 // int(answer)) if answer == "0" else answer


@dataclass(frozen=True, kw_only=True)
class Inline(Scripted):
    inline_verifier: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class CannotPrepare(Scripted):
    def prepare(self) -> None:
        raise ImportError("no module named 'sandbox'")


@dataclass(frozen=True, kw_only=True)
class CannotStart(Scripted):
    def prepare(self) -> None:
        os._exit(7)


@dataclass(frozen=True, kw_only=True)
class MathVerify:
    """math-verify sets alarms, which only a process's main thread may."""

    def problems(self, split: Split) -> Sequence[Problem]:
        return PROBLEMS if split == "train" else ()

    def prepare(self) -> None:
        import math_verify  # noqa: F401

    def score(self, problem: Problem, response: str) -> float:
        from math_verify import parse, verify

        return float(verify(parse(problem.reference), parse(response)))


@dataclass(frozen=True, kw_only=True)
class QuickMath(Math):
    """The task of mathematics, in a hurry."""

    heldout_data: tuple[str, ...] = ("not-read.jsonl",)

    def prepare(self) -> None:
        from predmask.tasks.math import answers

        answers.SECONDS = 1.0
        super().prepare()


class NotADataclass:
    def problems(self, split: Split) -> Sequence[Problem]:
        return ()

    def score(self, problem: Problem, response: str) -> float:
        return 0.0


@dataclass
class NotFrozen(NotADataclass):
    pass


@dataclass(frozen=True)
class NoScore:
    def problems(self, split: Split) -> Sequence[Problem]:
        return ()


@dataclass(frozen=True)
class NoProblems:
    def score(self, problem: Problem, response: str) -> float:
        return 0.0
