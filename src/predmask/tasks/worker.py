"""A process that scores answers: what runs in it, and its handle in the process that asks."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import numbers
import os
import pickle
import reprlib
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from predmask.tasks.base import Problem, Task

# Far above any import; it only bounds the wait for a worker that never becomes ready.
STARTUP_SECONDS = 300.0


class Grade(NamedTuple):
    """What became of one response."""

    score: float | None
    """None: it could not be scored."""
    answer: str | None = None
    """The task's `answer(response)`; None where the task has no such method, the response no answer, or it failed."""
    kind: str = ""
    """Why there is no score, in one word (see `Verifier`); "" where there is one."""
    reason: str = ""
    """Why there is no score, in a sentence."""


class Worker:
    """One process, the line to it, and what it is doing: starting, idle, or scoring answer number `answer`."""

    def __init__(self, payload: bytes) -> None:
        # Spawned, not forked: the trainer has threads and a GPU context, neither of which survives a fork.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        with theirs:
            self.process = context.Process(target=_serve, args=(theirs, payload), name="predmask-verifier", daemon=True)
            # Until it has a group of its own, Ctrl-C would reach it, too, in the middle of its imports.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self.process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.starting = True
        self.answer: int | None = None
        self.due = time.monotonic() + STARTUP_SECONDS

    @property
    def idle(self) -> bool:
        """Whether it can be given an answer."""
        return not self.starting and self.answer is None

    def rest(self) -> None:
        """It has said what it had to say, and waits."""
        self.starting, self.answer, self.due = False, None, math.inf

    def give(self, index: int, payload: bytes, deadline: float) -> None:
        """Let it grade answer number `index`, a pickled problem and response, which is due in `deadline` seconds."""
        self.answer, self.due = index, time.monotonic() + deadline
        # If the process is gone, the next wait finds the line closed, as it does for any other death.
        with contextlib.suppress(OSError):
            self.connection.send_bytes(payload)

    def receive(self) -> Grade:
        """What it says: an answer's grade, or, while it is starting, whether it is ready."""
        # JSON, not pickle: untrusted text runs through the verifier, and what comes back is only data.
        return Grade(*json.loads(self.connection.recv_bytes()))

    def end(self) -> None:
        """Kill it, with all that it has started."""
        pid = self.process.pid
        if pid is not None and self.process.is_alive():
            # The group, for a verifier may have started processes; it is none yet if the worker is starting.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            self.process.kill()
        self.process.join(5.0)
        self.connection.close()


def _serve(connection: Connection, payload: bytes) -> None:
    """What a worker runs: take the task, say that it is ready, then grade one response after the other."""
    os.setsid()  # a group that can be killed whole, and that a terminal's Ctrl-C does not reach
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.dup2(2, 1)  # what verifiers print must not end up in the trainer's output
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        task: Any = pickle.loads(payload)  # noqa: S301 - from our own parent
        if hasattr(task, "prepare"):
            task.prepare()
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent reports it
        connection.send_bytes(_encoded(Grade(None, kind="start", reason=text_of(error))))
        return
    connection.send_bytes(_encoded(Grade(None)))
    with contextlib.suppress(EOFError):
        while True:
            message = connection.recv_bytes()
            try:
                problem, response = pickle.loads(message)  # noqa: S301 - from our own parent
            except Exception as error:  # noqa: BLE001
                grade = Grade(None, kind="raised", reason=text_of(error))
            else:
                grade = attempt(task, problem, response)
            connection.send_bytes(_encoded(grade))


def attempt(task: Task, problem: Problem, response: str) -> Grade:
    """Grade one response here and now, whatever the task's methods raise."""
    try:
        score = task.score(problem, response)
    except TimeoutError as error:
        return Grade(None, kind="late", reason=text_of(error))
    except Exception as error:  # noqa: BLE001 - a verifier may raise anything; the batch goes on
        return Grade(None, _answer(task, response), "raised", text_of(error))
    answer = _answer(task, response)
    if score is None:
        return Grade(None, answer, "declined", "its verifier returned None")
    if not isinstance(score, numbers.Real) or not math.isfinite(score):
        return Grade(None, answer, "not_a_number", f"its verifier returned {reprlib.repr(score)}")
    return Grade(float(score), answer)


def text_of(error: BaseException) -> str:
    """An error in one line of bounded length."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= 500 else text[:497] + "..."


def _answer(task: Any, response: str) -> str | None:
    if not hasattr(task, "answer"):
        return None
    try:
        answer = task.answer(response)
    except Exception:  # noqa: BLE001 - the score stands without it
        return None
    return None if answer is None else str(answer)


def _encoded(grade: Grade) -> bytes:
    return json.dumps(grade).encode()


def _end_with_parent() -> None:
    """Watch for a parent that was killed: a worker in an endless verifier would not notice otherwise."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
