"""What is being done, on stderr: a bar on a terminal, else plain lines."""

from __future__ import annotations

import sys
import time

_SECONDS = 10.0
"""From one plain line of a stage to the next, at least."""


class Progress:
    """Shows the stages of long work, and how many of how many units a stage has done."""

    def __init__(self, unit: str) -> None:
        self._unit = unit

    def __enter__(self) -> Progress:
        from tqdm import tqdm

        self._bar = tqdm(unit=self._unit, leave=False, dynamic_ncols=True, disable=None)
        self._stage = ""
        self._said = 0.0
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show a stage; a `total` of 0 is not known."""
        if self._bar.disable:
            self._line(stage, done, total)
        self._stage = stage
        self._bar.total = total or None
        self._bar.set_description(stage)
        self._bar.update(done - self._bar.n)

    def _line(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._say(f"{stage}{f' {self._units(total)}' if total else ''}")
        elif 0 < done < total and time.monotonic() - self._said > _SECONDS:
            self._say(f"{stage} {done} of {self._units(total)}")

    def _units(self, count: int) -> str:
        return f"{count} {self._unit}{'' if count == 1 else 's'}"

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        self._said = time.monotonic()
