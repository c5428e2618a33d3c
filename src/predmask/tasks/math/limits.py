"""Bounds on the time and the memory that a piece of code may take."""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_OWN_FILES = (__file__, contextlib.__file__)
_STATM = Path("/proc/self/statm")


class _Alarm(BaseException):
    """Not an Exception: computer algebra catches those, and would take an alarm for an answer that is not equal."""


@contextlib.contextmanager
def limited(seconds: float, memory: int) -> Iterator[None]:
    """Raise TimeoutError for a body that runs longer, and MemoryError (there) for one that takes more bytes.

    The alarm works in a main thread only, elsewhere time is not bounded; and it waits for a single operation of C to
    end, such as a power of huge integers. Memory is bounded on Linux, and what lies below is free to catch the error.
    """
    with _memory(memory):
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        rang = done = False

        def ring(_: int, frame: FrameType | None) -> None:
            nonlocal rang
            rang = True
            # Not on the way out of the body, where a second alarm would escape: there the first one is caught.
            if not done and (frame is None or frame.f_code.co_filename not in _OWN_FILES):
                raise _Alarm

        before = signal.signal(signal.SIGALRM, ring)
        # Again and again: code may catch even this, and go on.
        signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
        try:
            yield
            done = True
        except _Alarm:
            pass
        finally:
            done = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
        if rang:
            raise TimeoutError(f"it took longer than {seconds:g} s")


@contextlib.contextmanager
def _memory(limit: int) -> Iterator[None]:
    """Let the address space grow by at most `limit` bytes."""
    if not _STATM.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bounds = [int(_STATM.read_text().split()[0]) * resource.getpagesize() + limit]
    bounds += [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
