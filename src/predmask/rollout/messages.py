"""What trainer and engine process say to each other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from predmask.rollout.engine import Sampling
from predmask.rollout.records import Rollout


class Channel:
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


def pack_request(
    prompts: Sequence[Sequence[int]], seeds: Tensor, sampling: Sampling, end_ids: Iterable[int]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A request to answer B prompts, each from its own of the seeds [B]."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
    tokens = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int64)
    message = {"do": "generate", "sampling": asdict(sampling), "end_ids": sorted(end_ids)}
    return message, {"tokens": tokens, "lengths": lengths, "seeds": seeds}


def unpack_request(
    message: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[list[list[int]], list[int], Sampling, list[int]]:
    """Prompts, seeds, sampling and end ids of a request."""
    prompts = [part.tolist() for part in tensors["tokens"].split(tensors["lengths"].tolist())]
    return prompts, tensors["seeds"].tolist(), Sampling(**message["sampling"]), message["end_ids"]


def pack_rollout(rollout: Rollout) -> dict[str, Tensor]:
    """The arrays of a rollout; its prompts and version are known to who asked."""
    values = {field.name: getattr(rollout, field.name) for field in fields(rollout) if field.name != "version"}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def unpack_rollout(prompts: Sequence[Sequence[int]], tensors: Mapping[str, Tensor], version: int) -> Rollout:
    """The rollout that answers a request."""
    versions = torch.full((len(tensors["tokens"]),), version, dtype=torch.int64)
    return Rollout(prompts=tuple(map(tuple, prompts)), version=versions, **tensors)
