"""Which processes a test has left, and waiting for those that it starts."""

import contextlib
import os
import time
from pathlib import Path

MARK = "PREDMASK_TEST"
"""The variable by which a test's own processes, and those that they start, are known."""


def offspring():
    """The ids of the processes that were started under this test's mark."""
    mark = f"{MARK}={os.environ[MARK]}\0".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def comes_true(condition, patience=15):
    """Whether the condition holds within so many seconds."""
    limit = time.monotonic() + patience
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def wait_for(running, seconds):
    """Wait for what `torch.multiprocessing.spawn(..., join=False)` started; no process is left behind."""
    deadline = time.monotonic() + seconds
    try:
        while not running.join(timeout=1):
            assert time.monotonic() < deadline, "the processes did not end"
    finally:
        for process in running.processes:
            if process.is_alive():
                process.kill()
            process.join()
