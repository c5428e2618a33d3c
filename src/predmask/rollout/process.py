"""An engine in a process of its own, from the trainer's side.

An inference engine changes thread settings, seeds global generators and may crash: none of that reaches the
trainer. The process is started anew (not forked), leads a process group that a terminal's Ctrl-C does not reach, and
ends with its parent, however that ends (see `serve`); its files go with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from torch import Tensor

from predmask.rollout.messages import Channel
from predmask.rollout.records import RolloutError

_CLOSE_SECONDS = 10.0
_LOG_LINES = 12
# Not -m: what an engine spawns imports the module that its parent ran once more.
_START = "from predmask.rollout.serve import main; main()"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a private directory is made in it


class EngineProcess:
    """Starts `predmask.rollout.serve`, and asks it.

    Args:
        name: the engine's name, for messages.
        backend: `module:Class` of a `serve.Backend`, which is made with `settings`.
        settings: plain values.
        environment: variables that the process has besides this one's.

    Raises RolloutError, with the reason and the end of its log, when the process cannot start, fails or dies.
    """

    def __init__(self, *, name: str, backend: str, settings: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._name = name
        self.directories = _private_directories(name)
        """Its own, for files: in shared memory where there is some, and in the usual temporary place."""
        self._log = self.directories[-1] / "engine.log"
        ours, theirs = Pipe()
        self._channel = Channel(ours)
        # This very package, wherever it was imported from.
        search = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(search), "TMPDIR": str(self.directories[-1])}
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, under our own interpreter
                # -P: a folder of the user's that is called like a package must not be taken for it.
                [sys.executable, "-P", "-c", _START, str(theirs.fileno()), backend, *map(str, self.directories)],
                env={**os.environ, **environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        # Also for a close() that was forgotten.
        self.close = weakref.finalize(self, _end, self._channel, self._process, self.directories)
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

    def check_open(self) -> None:
        """RolloutError after `close`."""
        if not self.close.alive:
            raise RolloutError(f"the {self._name} engine was closed")

    def ask(
        self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Send one message and wait for its answer.

        Raises RolloutError for what the engine refuses, and when it fails or is gone. Interrupted while it waits,
        it ends the process: a late answer must not be taken for that to the next question.
        """
        self.check_open()
        try:
            self._channel.send(message, tensors)
            answer, found = self._channel.receive()
        except (EOFError, OSError):
            self.check_open()  # another thread may have closed it meanwhile
            raise RolloutError(self._ending()) from None
        except BaseException:
            _kill(self._process)
            self.close()
            raise
        if "refused" in answer:
            raise RolloutError(answer["refused"])
        if "failed" in answer:
            raise RolloutError(f"the {self._name} engine failed: {answer['failed']}\n{self._log_tail()}")
        return answer, found

    def _ending(self) -> str:
        """How the process ended, which it has or is about to."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_SECONDS)
        code = self._process.returncode
        log = self._log_tail()
        self.close()
        if code is None:
            ending = "hung up"
        elif code == -signal.SIGKILL:
            # Its log says nothing of that.
            ending, log = "was ended by SIGKILL (out of memory?)", log.rpartition("\n")[2]
        elif code < 0:
            ending = f"was ended by {signal.Signals(-code).name}"
        else:
            ending = f"ended with exit code {code}"
        return f"the {self._name} engine's process {ending}\n{log}"

    def _log_tail(self) -> str:
        """The end of its log, and where the whole of it is kept."""
        kept = self.directories[-1].with_suffix(".failed.log")
        shutil.copyfile(self._log, kept)
        lines = kept.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join([*(f"  | {line}" for line in lines), f"its log is {kept}"])


def _private_directories(name: str) -> list[Path]:
    """New directories that are readable for this user alone, the fastest first."""
    places = [_SHARED_MEMORY] if os.access(_SHARED_MEMORY, os.W_OK) else []
    return [Path(tempfile.mkdtemp(prefix=f"predmask-{name}-", dir=place)) for place in (*places, None)]


def _end(channel: Channel, process: subprocess.Popen[bytes], directories: Sequence[Path]) -> None:
    channel.close()  # which tells it to end
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_CLOSE_SECONDS)
    _kill(process)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The whole group: what the process started may outlive it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_CLOSE_SECONDS)
