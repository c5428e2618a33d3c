"""Scoring a batch of answers whose verifier may hang, crash or raise."""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from predmask.tasks.base import Problem, Task
from predmask.tasks.worker import STARTUP_SECONDS, Grade, Worker, attempt, text_of

__all__ = ["Grade", "Unscored", "Verifier", "VerifierError"]


_FEW = 8
"""Problems that may all be faulty, or hard, under a verifier that works."""


class VerifierError(RuntimeError):
    """No answer of a batch could be scored, or a worker process cannot run the task at all."""

    def __init__(self, message: str, grades: Sequence[Grade] = ()) -> None:
        super().__init__(message)
        self.grades = grades
        """What became of each answer, where it came to that."""


@dataclass(frozen=True)
class Unscored:
    """How many answers of a batch could not be scored for one kind of reason, and the first of them."""

    count: int
    problem_id: str
    reason: str


class Verifier:
    """Grades answers with a task's verifier; an answer that could not be scored has the score None, which is not 0.

    A task whose `inline_verifier` is true is called in this process. Any other is called in `workers`
    processes, in their main thread, because verifiers set alarms and only a main thread may. The processes
    start with the first batch, stay for the next ones and need a POSIX system. The task travels to them by
    pickle. If it has a method `prepare()`, each worker calls it once before its first answer: the place for
    slow imports, since it does not count towards the `deadline` of an answer (in seconds). If it has a method
    `answer(response)`, that is called there too, under the same deadline.

    `batch_deadline` bounds a whole batch, in seconds from when a worker is ready; infinity is no bound. When it
    is over, workers that are busy are killed, and what is left is not scored.

    After each batch `unscored` counts the answers without a score by kind:

    | `late` | past the deadline (its process group was killed and replaced), or `score` raised TimeoutError |
    | `batch_late` | not reached, or not finished, before the batch's deadline |
    | `died` | the process ended |
    | `raised` | `score` raised an error |
    | `not_a_number` | `score` returned anything but a finite number |
    | `declined` | `score` returned None |

    Raises `ValueError` for `workers` below 1 or a deadline that is not positive, and `VerifierError` for a
    task that cannot be pickled.
    """

    def __init__(self, task: Task, *, workers: int = 2, deadline: float = 10.0, batch_deadline: float = 600.0) -> None:
        if workers < 1:
            raise ValueError(f"workers is a number of processes, at least 1, not {workers}")
        if not (deadline > 0 and math.isfinite(deadline)):
            raise ValueError(f"deadline is a positive number of seconds an answer may take, not {deadline}")
        if not batch_deadline > 0:
            raise ValueError(f"batch_deadline is a positive number of seconds a batch may take, not {batch_deadline}")
        self.unscored: dict[str, Unscored] = {}
        self._task = task
        self._name = getattr(task, "name", type(task).__name__)
        self._inline: bool = getattr(type(task), "inline_verifier", False)
        self._payload = b"" if self._inline else _pickled(task, f"the task {type(task).__name__}")
        self._limit = workers
        self._deadline = deadline
        self._batch_deadline = batch_deadline
        self._proven = False
        """Whether it has scored anything yet."""
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        # For a close() that was forgotten: at exit, multiprocessing runs this before it waits for its processes,
        # which it only asks to end. In a forked copy of this process it does nothing.
        multiprocessing.util.Finalize(self, _end_all, args=(self._workers,), exitpriority=1)

    def __enter__(self) -> Verifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes; a later `score` would start new ones."""
        with self._lock:
            _end_all(self._workers)

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float | None]:
        """The score of each response, in order, None where it could not be scored; see `grade`."""
        return [grade.score for grade in self.grade(problems, responses)]

    def grade(
        self,
        problems: Sequence[Problem],
        responses: Sequence[str],
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[Grade]:
        """What became of each response, in order; `progress` is told how many are done.

        Takes at most about `deadline * ceil(len(responses) / workers)`, never more than about `batch_deadline`, and the
        start of the workers. Threads that call at the same time take turns.

        Raises `VerifierError`, with the first reason, if a worker cannot start or not a single answer could be scored,
        and `ValueError` if the two sequences differ in length. Once it has scored an answer, a batch without a score
        is an error only if it is of eight problems or more (fewer may all be faulty, or hard) and the task did not
        decline all of it.
        """
        if len(problems) != len(responses):
            raise ValueError(f"{len(problems)} problems but {len(responses)} responses")
        with self._lock:
            grades = (self._grade_inline if self._inline else self._grade_in_workers)(problems, responses, progress)
            self.unscored = _summary(problems, grades)
            if any(grade.score is not None for grade in grades):
                self._proven = True
            elif grades and not self._may_score_nothing(problems, grades):
                raise self._broken(problems, grades)
        return grades

    def _may_score_nothing(self, problems: Sequence[Problem], grades: Sequence[Grade]) -> bool:
        count = len({problem.id for problem in problems})
        if all(grade.kind == "declined" for grade in grades):
            return self._proven or count == 1
        return self._proven and count < _FEW

    def _broken(self, problems: Sequence[Problem], grades: list[Grade]) -> VerifierError:
        """The error for a batch without a single score."""
        name = f"the task {self._name}"
        failed = [place for place, grade in enumerate(grades) if grade.kind != "batch_late"]
        failed.sort(key=lambda place: grades[place].kind == "declined")  # what failed says more
        first = f", to problem {problems[failed[0]].id!r}: {grades[failed[0]].reason}" if failed else ""
        if len(failed) < len(grades):
            before = f"; before that, {len(failed)} failed, the first{first}" if failed else ""
            return VerifierError(
                f"the batch_deadline of {self._batch_deadline:g} s passed before any of the {len(grades)} answers was "
                f"scored by {name}{before}; raise it, or use more workers",
                grades,
            )
        return VerifierError(
            f"none of the {len(grades)} answers could be scored by {name}; the first that failed{first}", grades
        )

    def _grade_inline(
        self, problems: Sequence[Problem], responses: Sequence[str], progress: Callable[[int], None]
    ) -> list[Grade]:
        over = time.monotonic() + self._batch_deadline
        grades: list[Grade] = []
        for problem, response in zip(problems, responses, strict=True):
            grades.append(attempt(self._task, problem, response) if time.monotonic() < over else self._batch_late())
            progress(len(grades))
        return grades

    def _grade_in_workers(
        self, problems: Sequence[Problem], responses: Sequence[str], progress: Callable[[int], None]
    ) -> list[Grade]:
        grades: dict[int, Grade] = {}
        waiting = deque(range(len(problems)))
        over = math.inf
        for worker in [worker for worker in self._workers if not worker.process.is_alive()]:
            self._discard(worker)  # it died between two batches, which is no answer's fault
        try:
            while len(grades) < len(problems) and time.monotonic() < over:
                unfinished = len(problems) - len(grades)
                while len(self._workers) < min(self._limit, unfinished):
                    self._workers.append(Worker(self._payload))
                for worker in self._workers:
                    if waiting and worker.idle:
                        index = waiting[0]
                        answer = problems[index], responses[index]
                        worker.give(index, _pickled(answer, f"problem {answer[0].id!r}"), self._deadline)
                        waiting.popleft()
                        # From the first answer on: the start of workers has a bound of its own.
                        over = min(over, time.monotonic() + self._batch_deadline)
                grades.update(self._await_news(over))
                progress(len(grades))
        finally:
            # Whatever ended the batch, a busy worker would answer a question of this batch in the next.
            for worker in [worker for worker in self._workers if worker.answer is not None]:
                self._discard(worker)
        return [grades.get(index) or self._batch_late() for index in range(len(problems))]

    def _batch_late(self) -> Grade:
        return Grade(
            None,
            kind="batch_late",
            reason=f"the batch_deadline of {self._batch_deadline:g} s passed before it was scored",
        )

    def _await_news(self, over: float) -> dict[int, Grade]:
        """Wait for a message, a death or a deadline, whichever is first, and act on all there are."""
        timeout = max(0.0, min(over, *(worker.due for worker in self._workers)) - time.monotonic())
        connections = [worker.connection for worker in self._workers]
        speaking = multiprocessing.connection.wait(connections, None if math.isinf(timeout) else timeout)
        now = time.monotonic()
        news: dict[int, Grade] = {}
        for worker in list(self._workers):
            answer = worker.answer
            if worker.connection in speaking:
                grade = self._receive(worker)
            elif worker.due <= now:
                grade = self._overdue(worker)
            else:
                continue
            if answer is not None:
                news[answer] = grade
        return news

    def _receive(self, worker: Worker) -> Grade:
        try:
            grade = worker.receive()
        except (EOFError, OSError):
            worker.process.join(1.0)  # it is ending by itself; its exit code is worth a moment
            self._discard(worker)
            ending = _ending(worker.process.exitcode)
            if worker.starting:
                raise VerifierError(
                    f"a worker process for the task {self._name} ended with {ending} before it was "
                    "ready, see its output; a script that is run directly needs its entry point behind "
                    'if __name__ == "__main__", for workers import it again'
                ) from None
            return Grade(None, kind="died", reason=f"the verifier's process ended with {ending}")
        if worker.starting and grade.reason:
            self._discard(worker)
            raise VerifierError(f"a worker process cannot run the task {self._name}: {grade.reason}")
        worker.rest()
        return grade

    def _overdue(self, worker: Worker) -> Grade:
        self._discard(worker)
        if worker.starting:
            raise VerifierError(f"a worker process for the task {self._name} was not ready after {STARTUP_SECONDS:g} s")
        return Grade(None, kind="late", reason=f"the verifier took longer than the deadline of {self._deadline:g} s")

    def _discard(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.end()


def _end_all(workers: list[Worker]) -> None:
    while workers:
        workers.pop().end()


def _summary(problems: Sequence[Problem], grades: Sequence[Grade]) -> dict[str, Unscored]:
    summary: dict[str, Unscored] = {}
    for problem, grade in zip(problems, grades, strict=True):
        if grade.score is None:
            first = summary.get(grade.kind, Unscored(0, problem.id, grade.reason))
            summary[grade.kind] = replace(first, count=first.count + 1)
    return summary


def _pickled(value: Any, name: str) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise VerifierError(
            f"{name} cannot be sent to a verifier's process ({text_of(error)}): "
            "define its class at the top level of a module, with fields that can be pickled"
        ) from error


def _ending(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"signal {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"
