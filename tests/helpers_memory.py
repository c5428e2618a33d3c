"""Peak memory, as Linux counts it: `ru_maxrss` begins with that of the process that started this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


def peak_growth(work: Callable[[], object]) -> int:
    """Bytes by which this process grew at most while it worked; skips the test where that is not counted."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # from now on the peak counts from here
        before = _status("VmRSS")
        work()
        return _status("VmHWM") - before
    except OSError:
        pytest.skip("this system does not count peak memory")


def _status(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
