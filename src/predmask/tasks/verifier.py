"""Scoring a batch of answers whose verifier may hang, crash or raise."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import numbers
import os
import pickle
import reprlib
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

from predmask.tasks.base import Problem, Task

# Far above any import; it only bounds the wait for a worker that never becomes ready.
STARTUP_SECONDS = 300.0


class VerifierError(RuntimeError):
    """No answer of a batch could be scored, or a worker process cannot run the task at all."""


@dataclass(frozen=True)
class Unscored:
    """How many answers of a batch could not be scored for one kind of reason, and the first of them."""

    count: int
    problem_id: str
    reason: str


class _Outcome(NamedTuple):
    score: float | None
    kind: str = ""
    reason: str = ""


class Verifier:
    """Scores answers with a task's verifier; an answer that could not be scored is None, which is not 0.

    A task whose `inline_verifier` is true is called in this process. Any other is called in `workers`
    processes, in their main thread, because verifiers set alarms and only a main thread may. The processes
    start with the first batch, stay for the next ones and need a POSIX system. The task travels to them by
    pickle. If it has a method `prepare()`, each worker calls it once before its first answer: the place for
    slow imports, since it does not count towards the `deadline` of an answer (in seconds).

    An answer is None where its verifier passes the deadline (its process group is killed and replaced), ends
    the process, raises, or returns anything but a finite number. After each batch `unscored` counts these by
    kind: `late`, `died`, `raised`, `not_a_number`, `declined` (the task itself returned None).

    Raises `ValueError` for `workers` below 1 or a deadline that is not positive, and `VerifierError` for a
    task that cannot be pickled.
    """

    def __init__(self, task: Task, *, workers: int = 2, deadline: float = 10.0) -> None:
        if workers < 1:
            raise ValueError(f"workers is a number of processes, at least 1, not {workers}")
        if not (deadline > 0 and math.isfinite(deadline)):
            raise ValueError(f"deadline is a positive number of seconds an answer may take, not {deadline}")
        self.unscored: dict[str, Unscored] = {}
        self._task = task
        self._inline: bool = getattr(type(task), "inline_verifier", False)
        self._payload = b"" if self._inline else _pickled(task, f"the task {type(task).__name__}")
        self._limit = workers
        self._deadline = deadline
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
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
        """The score of each response, in order, None where it could not be scored.

        Takes at most about `deadline * ceil(len(responses) / workers)` and the start of the workers. Threads
        that call at the same time take turns.

        Raises `VerifierError`, with the first reason, if not a single answer could be scored or a worker
        cannot start, and `ValueError` if the two sequences differ in length.
        """
        if len(problems) != len(responses):
            raise ValueError(f"{len(problems)} problems but {len(responses)} responses")
        with self._lock:
            if self._inline:
                outcomes = [_attempt(self._task, *answer) for answer in zip(problems, responses, strict=True)]
            else:
                outcomes = self._score_in_workers(problems, responses)
            self.unscored = _summary(problems, outcomes)
        # A task that declines all answers by itself is not broken.
        broken = next((place for place, outcome in enumerate(outcomes) if outcome.kind not in ("", "declined")), None)
        if broken is not None and all(outcome.score is None for outcome in outcomes):
            raise VerifierError(
                f"none of the {len(outcomes)} answers could be scored by {type(self._task).__name__}; "
                f"the first that failed, to problem {problems[broken].id!r}: {outcomes[broken].reason}"
            )
        return [outcome.score for outcome in outcomes]

    def _score_in_workers(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[_Outcome]:
        outcomes: dict[int, _Outcome] = {}
        waiting = deque(range(len(problems)))
        for worker in [worker for worker in self._workers if not worker.process.is_alive()]:
            self._discard(worker)  # it died between two batches, which is no answer's fault
        try:
            while len(outcomes) < len(problems):
                unfinished = len(problems) - len(outcomes)
                while len(self._workers) < min(self._limit, unfinished):
                    self._workers.append(_Worker(self._payload))
                for worker in self._workers:
                    if waiting and worker.idle:
                        index = waiting[0]
                        answer = problems[index], responses[index]
                        worker.give(index, _pickled(answer, f"problem {answer[0].id!r}"), self._deadline)
                        waiting.popleft()
                outcomes.update(self._await_news())
        finally:
            # After an error or an interrupt, a busy worker would answer a question of this batch in the next.
            for worker in [worker for worker in self._workers if worker.answer is not None]:
                self._discard(worker)
        return [outcomes[index] for index in range(len(problems))]

    def _await_news(self) -> dict[int, _Outcome]:
        """Wait for a message, a death or a deadline, whichever is first, and act on all there are."""
        timeout = max(0.0, min(worker.due for worker in self._workers) - time.monotonic())
        connections = [worker.connection for worker in self._workers]
        speaking = multiprocessing.connection.wait(connections, None if math.isinf(timeout) else timeout)
        now = time.monotonic()
        news: dict[int, _Outcome] = {}
        for worker in list(self._workers):
            answer = worker.answer
            if worker.connection in speaking:
                outcome = self._receive(worker)
            elif worker.due <= now:
                outcome = self._overdue(worker)
            else:
                continue
            if answer is not None:
                news[answer] = outcome
        return news

    def _receive(self, worker: _Worker) -> _Outcome:
        try:
            # JSON, not pickle: untrusted text runs through the verifier, and what comes back is only data.
            outcome = _Outcome(*json.loads(worker.connection.recv_bytes()))
        except (EOFError, OSError):
            worker.process.join(1.0)  # it is ending by itself; its exit code is worth a moment
            self._discard(worker)
            ending = _ending(worker.process.exitcode)
            if worker.starting:
                raise VerifierError(
                    f"a worker process for {type(self._task).__name__} ended with {ending} before it was "
                    "ready, see its output; a script that is run directly needs its entry point behind "
                    'if __name__ == "__main__", for workers import it again'
                ) from None
            return _Outcome(None, "died", f"the verifier's process ended with {ending}")
        if worker.starting and outcome.reason:
            self._discard(worker)
            raise VerifierError(f"a worker process cannot run the task {type(self._task).__name__}: {outcome.reason}")
        worker.rest()
        return outcome

    def _overdue(self, worker: _Worker) -> _Outcome:
        self._discard(worker)
        if worker.starting:
            raise VerifierError(
                f"a worker process for {type(self._task).__name__} was not ready after {STARTUP_SECONDS:g} s"
            )
        return _Outcome(None, "late", f"the verifier took longer than the deadline of {self._deadline:g} s")

    def _discard(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.end()


class _Worker:
    """One process, the line to it, and what it is doing: starting, idle, or scoring answer number `answer`."""

    def __init__(self, payload: bytes) -> None:
        # Spawned, not forked: the trainer has threads and a GPU context, neither of which survives a fork.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        with theirs:
            self.process = context.Process(target=_serve, args=(theirs, payload), name="predmask-verifier", daemon=True)
            self.process.start()
        self.starting = True
        self.answer: int | None = None
        self.due = time.monotonic() + STARTUP_SECONDS

    @property
    def idle(self) -> bool:
        return not self.starting and self.answer is None

    def rest(self) -> None:
        self.starting, self.answer, self.due = False, None, math.inf

    def give(self, index: int, payload: bytes, deadline: float) -> None:
        self.answer, self.due = index, time.monotonic() + deadline
        # If the process is gone, the next wait finds the line closed, as it does for any other death.
        with contextlib.suppress(OSError):
            self.connection.send_bytes(payload)

    def end(self) -> None:
        pid = self.process.pid
        if pid is not None and self.process.is_alive():
            # The group, for a verifier may have started processes; it is none yet if the worker is starting.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            self.process.kill()
        self.process.join(5.0)
        self.connection.close()


def _end_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()


def _serve(connection: Connection, payload: bytes) -> None:
    """What a worker runs: take the task, say that it is ready, then score one answer after the other."""
    os.setsid()  # a group that can be killed whole, and that a terminal's Ctrl-C does not reach
    os.dup2(2, 1)  # what verifiers print must not end up in the trainer's output
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        task: Any = pickle.loads(payload)  # noqa: S301 - from our own parent
        if hasattr(task, "prepare"):
            task.prepare()
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent reports it
        connection.send_bytes(_encoded(_Outcome(None, "start", _text(error))))
        return
    connection.send_bytes(_encoded(_Outcome(None)))
    with contextlib.suppress(EOFError):
        while True:
            message = connection.recv_bytes()
            try:
                problem, response = pickle.loads(message)  # noqa: S301 - from our own parent
            except Exception as error:  # noqa: BLE001
                outcome = _Outcome(None, "raised", _text(error))
            else:
                outcome = _attempt(task, problem, response)
            connection.send_bytes(_encoded(outcome))


def _end_with_parent() -> None:
    """Watch for a parent that was killed: a worker in an endless verifier would not notice otherwise."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)


def _attempt(task: Task, problem: Problem, response: str) -> _Outcome:
    try:
        score = task.score(problem, response)
        if score is None:
            return _Outcome(None, "declined", "its verifier returned None")
        if not isinstance(score, numbers.Real) or not math.isfinite(score):
            return _Outcome(None, "not_a_number", f"its verifier returned {reprlib.repr(score)}")
        return _Outcome(float(score))
    except Exception as error:  # noqa: BLE001 - a verifier may raise anything; the batch goes on
        return _Outcome(None, "raised", _text(error))


def _summary(problems: Sequence[Problem], outcomes: Sequence[_Outcome]) -> dict[str, Unscored]:
    summary: dict[str, Unscored] = {}
    for problem, outcome in zip(problems, outcomes, strict=True):
        if outcome.score is None:
            first = summary.get(outcome.kind, Unscored(0, problem.id, outcome.reason))
            summary[outcome.kind] = replace(first, count=first.count + 1)
    return summary


def _pickled(value: Any, name: str) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise VerifierError(
            f"{name} cannot be sent to a verifier's process ({_text(error)}): "
            "define its class at the top level of a module, with fields that can be pickled"
        ) from error


def _encoded(outcome: _Outcome) -> bytes:
    return json.dumps(outcome).encode()


def _text(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= 500 else text[:497] + "..."


def _ending(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"signal {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"
