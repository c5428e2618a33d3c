"""What an engine's process runs: `main`, whose arguments are the channel's descriptor, MODULE:CLASS of the backend,
and the directories that are the process's own."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from predmask.rollout.engine import Sampling
from predmask.rollout.messages import Channel, pack_rollout, unpack_request
from predmask.rollout.records import Rollout, RolloutError

_CLOSE_SECONDS = 5.0


class Backend(Protocol):
    """An inference engine inside its own process; made with the settings that the trainer sent.

    RolloutErrors are what it refuses, and it can go on; the trainer takes any other error for a failure.
    """

    def __init__(self, **settings: Any) -> None: ...

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling, end_ids: Sequence[int]
    ) -> Rollout:
        """One response a prompt, each from a seed of its own, until one of `end_ids`, which belongs to it."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Answer with these weights from now on, named as in the model's checkpoint; forget what was cached.

        Raises RolloutError when that cannot be done; then the engine is of no use until it could be.
        """
        ...


def model_directory(config: str) -> str:
    """A directory with a model's configuration, the text of config.json, by which engines build it."""
    directory = Path(tempfile.mkdtemp())
    (directory / "config.json").write_text(config, encoding="utf-8")
    return str(directory)


def main() -> None:
    """Make the backend, then answer until the trainer hangs up."""
    descriptor, backend_name, *directories = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)  # of all processes here, this one alone holds the channel
    threading.Thread(target=_end_with_parent, args=(int(descriptor), directories), daemon=True).start()
    channel = Channel(Connection(int(descriptor)))
    with contextlib.suppress(EOFError, OSError):
        backend = _start(channel, backend_name)
        while True:
            _answer(channel, backend)
    _end(directories)


def _start(channel: Channel, name: str) -> Any:
    """The backend; None where it could not start, which the trainer was told."""
    settings, _ = channel.receive()
    with _reported(channel):
        module, _, cls = name.partition(":")
        backend = getattr(importlib.import_module(module), cls)(**settings)
        channel.send({})
        return backend
    return None


def _answer(channel: Channel, backend: Backend) -> None:
    message, tensors = channel.receive()  # where the backend could not start, no more than that the trainer hangs up
    with _reported(channel):
        if message["do"] == "load":
            from safetensors import safe_open

            with safe_open(message["file"], framework="pt") as file:
                backend.load((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            channel.send({})
        else:
            channel.send({}, pack_rollout(backend.generate(*unpack_request(message, tensors))))


@contextlib.contextmanager
def _reported(channel: Channel) -> Iterator[None]:
    """What goes wrong is told to the trainer, who decides whether to go on; its traceback goes to the log."""
    try:
        yield
    except RolloutError as error:
        channel.send({"refused": str(error)})
    except Exception as error:  # noqa: BLE001 - whatever it is, the trainer reports it
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        channel.send({"failed": f"{type(error).__name__}: {error}"})


def _end_with_parent(descriptor: int, directories: Sequence[str]) -> None:
    """Once the trainer has hung up or was killed, end, busy or not."""
    poll = select.poll()
    poll.register(descriptor, 0)  # no event but the other side's closing, which is always told
    poll.poll()
    time.sleep(_CLOSE_SECONDS)  # for an orderly end, if the main thread is idle
    _end(directories)


def _end(directories: Sequence[str]) -> None:
    """At once, with all that was started: what an engine does at an interpreter's end takes seconds for nothing."""
    sys.stdout.flush()
    sys.stderr.flush()
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
