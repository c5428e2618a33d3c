"""An engine in a process of its own, and the line that trainer and engine speak over.

An inference engine changes thread settings, seeds global generators and may crash: none of that reaches the
trainer. The process is started anew (not forked), leads a process group that a terminal's Ctrl-C does not reach, and
ends with its parent, however that ends (see `serve`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import Tensor

from predmask.rollout.records import RolloutError

_FAREWELL_SECONDS = 10.0
_LOG_LINES = 12
# Not -m: what an engine spawns imports the module that its parent ran once more.
_START = "from predmask.rollout.serve import main; main()"


class Line:
    """Messages of plain values (JSON) and tensors (safetensors): nothing is unpickled on either side."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send one message; raises OSError when the other side is gone."""
        from safetensors.torch import save

        self._connection.send_bytes(json.dumps(dict(message)).encode())
        self._connection.send_bytes(save({name: tensor.contiguous() for name, tensor in (tensors or {}).items()}))

    def receive(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Wait for one message; raises EOFError or OSError when the other side is gone."""
        from safetensors.torch import load

        message = json.loads(self._connection.recv_bytes())
        return message, load(self._connection.recv_bytes())

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


class EngineProcess:
    """The trainer's side: starts `predmask.rollout.serve` and asks it.

    Args:
        name: the engine's name, for messages.
        backend: `module:Class` of a `serve.Backend`, which is made with `settings`.
        settings: plain values.
        environment: variables that the process has besides this one's.

    Raises RolloutError, with the reason and the end of its log, when the process cannot start, fails or dies.
    """

    def __init__(self, *, name: str, backend: str, settings: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._name = name
        self._failed = False
        descriptor, path = tempfile.mkstemp(prefix=f"predmask-{name}-", suffix=".log")
        self._log = Path(path)
        ours, theirs = Pipe()
        self._line = Line(ours)
        # This very package, wherever it was imported from.
        search = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs, open(descriptor, "wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, under our own interpreter
                # -P: a folder of the user's that is called like a package must not be taken for it.
                [sys.executable, "-P", "-c", _START, str(theirs.fileno()), backend],
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(search)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        # Also for a close() that was forgotten.
        self.close = weakref.finalize(self, _end, self._line, self._process, self._log)
        """End the process and whatever it started; calling it twice is allowed."""
        try:
            self.ask(settings)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process's id, which is its group's too."""
        return self._process.pid

    def ask(
        self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Send one message and wait for its answer.

        Raises RolloutError for what the engine refuses, and when it fails or is gone. Interrupted while it waits,
        it ends the process: a late answer must not be taken for that to the next question.
        """
        if not self.close.alive:
            raise RolloutError(f"the {self._name} engine was closed")
        try:
            self._line.send(message, tensors)
            answer, found = self._line.receive()
        except (EOFError, OSError):
            reason = self._obituary() if self.close.alive else f"the {self._name} engine was closed"
            raise RolloutError(reason) from None
        except BaseException:
            _kill(self._process)
            self.close()
            raise
        if "refused" in answer:
            raise RolloutError(answer["refused"])
        if "failed" in answer:
            raise RolloutError(f"the {self._name} engine failed: {answer['failed']}\n{self._last_words()}")
        return answer, found

    def _obituary(self) -> str:
        """How the process ended, which it has or is about to."""
        words = self._last_words()
        self.close()
        code = self._process.returncode
        if code < 0:
            ending = f"was ended by {signal.Signals(-code).name}"
            ending += " (out of memory?)" if code == -signal.SIGKILL else ""
        else:
            ending = f"ended with exit code {code}"
        return f"the {self._name} engine's process {ending}\n{words}"

    def _last_words(self) -> str:
        """The end of its log, and where the whole of it is kept."""
        if not self._failed:
            self._failed = True
            self._log = self._log.rename(self._log.with_suffix(".failed.log"))
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join([*(f"  | {line}" for line in lines), f"its log is {self._log}"])


def _end(line: Line, process: subprocess.Popen[bytes], log: Path) -> None:
    line.close()  # which tells it to end
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_FAREWELL_SECONDS)
    _kill(process)
    log.unlink(missing_ok=True)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The whole group: what the process started may outlive it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_FAREWELL_SECONDS)
