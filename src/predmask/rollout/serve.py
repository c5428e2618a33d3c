"""What an engine's process runs: `main`, with the line's descriptor and MODULE:CLASS of the backend as arguments."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch import Tensor

from predmask.rollout.engine import Sampling
from predmask.rollout.process import Line
from predmask.rollout.records import Rollout, RolloutError

_FAREWELL_SECONDS = 5.0


class Backend(Protocol):
    """An inference engine inside its own process; made with the settings that the trainer sent."""

    def __init__(self, **settings: Any) -> None: ...

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling, end_ids: Sequence[int]
    ) -> Rollout:
        """One response a prompt, each from a seed of its own, until one of `end_ids`, which belongs to it."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Answer with these weights from now on, named as in the model's checkpoint; forget what was cached.

        Raises RolloutError when that cannot be done.
        """
        ...


def pack_request(
    prompts: Sequence[Sequence[int]], seeds: Tensor, sampling: Sampling, end_ids: Iterable[int]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A request to generate, as a message."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
    tokens = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int64)
    message = {"do": "generate", "sampling": asdict(sampling), "end_ids": sorted(end_ids)}
    return message, {"tokens": tokens, "lengths": lengths, "seeds": seeds}


def unpack_rollout(prompts: Sequence[Sequence[int]], tensors: dict[str, Tensor], version: int) -> Rollout:
    """The rollout that answers a request."""
    versions = torch.full((len(tensors["tokens"]),), version, dtype=torch.int64)
    return Rollout(prompts=tuple(map(tuple, prompts)), version=versions, **tensors)


def main() -> None:
    """Make the backend, then answer until the trainer hangs up."""
    descriptor, backend_name = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(descriptor, False)  # of all processes here, this one alone holds the line
    threading.Thread(target=_end_with_parent, args=(descriptor,), daemon=True).start()
    line = Line(Connection(descriptor))
    with contextlib.suppress(EOFError, OSError):
        backend = _start(line, backend_name)
        while backend is not None:
            _answer(line, backend)
    sys.stdout.flush()
    sys.stderr.flush()
    # At once, with all that it started: what an engine does at an interpreter's end takes seconds, and is not needed.
    os.killpg(0, signal.SIGKILL)


def _start(line: Line, name: str) -> Backend | None:
    """The backend, or None where it could not start."""
    settings, _ = line.receive()
    with _reported(line):
        module, _, cls = name.partition(":")
        backend = getattr(importlib.import_module(module), cls)(**settings)
        line.send({})
        return backend
    return None


def _answer(line: Line, backend: Backend) -> None:
    message, tensors = line.receive()
    with _reported(line):
        if message["do"] == "load":
            from safetensors import safe_open

            with safe_open(message["file"], framework="pt") as file:
                backend.load((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            line.send({})
        else:
            prompts = [part.tolist() for part in tensors["tokens"].split(tensors["lengths"].tolist())]
            sampling = Sampling(**message["sampling"])
            rollout = backend.generate(prompts, tensors["seeds"].tolist(), sampling, message["end_ids"])
            line.send({}, _tensors(rollout))


def _tensors(rollout: Rollout) -> dict[str, Tensor]:
    """Its arrays; prompts and version are known to who asked."""
    values = {field.name: getattr(rollout, field.name) for field in fields(rollout) if field.name != "version"}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@contextlib.contextmanager
def _reported(line: Line) -> Iterator[None]:
    """What goes wrong is told to the trainer, who decides whether to go on; its traceback goes to the log."""
    try:
        yield
    except RolloutError as error:
        line.send({"refused": str(error)})
    except Exception as error:  # noqa: BLE001 - whatever it is, the trainer reports it
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        line.send({"failed": f"{type(error).__name__}: {error}"})


def _end_with_parent(descriptor: int) -> None:
    """Once the trainer has hung up or was killed, end, with all of this group, busy or not."""
    poll = select.poll()
    poll.register(descriptor, 0)  # no event but the other side's closing, which is always told
    poll.poll()
    time.sleep(_FAREWELL_SECONDS)  # for an orderly end, if the main thread is idle
    os.killpg(0, signal.SIGKILL)
