"""verl's SGLang server, which also returns the top-K that a request asks for.

Built from the sources of verl 0.9.1 and SGLang, and tested with a stand-in for SGLang's tokenizer manager: SGLang has
no build for CPUs, and this was not run against a real one.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
import ray  # pyright: ignore[reportMissingImports]
from verl.workers.rollout.sglang_rollout.async_sglang_server import (  # pyright: ignore[reportMissingImports]
    SGLangHttpServer,
    SGLangReplica,
)

from predmask.plugins.verl.payload import from_sglang
from predmask.plugins.verl.servers import TopKRequests, Watched, watched
from predmask.rollout import RolloutError

_ORIGINAL = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""Where it is true, SGLang reports log-probs of its logits before the temperature divides them."""
_TRUE = ("1", "true", "yes", "y")
"""What SGLang reads as true."""


class _Manager(Watched):
    """SGLang's tokenizer manager: asked for more, and what it answers kept."""

    async def generate_request(self, generate_request: Any, http_request: Any) -> AsyncIterator[Any]:
        if self._request.problem is None:
            with self._request.noting():
                generate_request.top_logprobs_num = self._request.count
        async for answer in self._engine.generate_request(generate_request, http_request):
            with self._request.noting():
                self._request.records = answer["meta_info"]
            yield answer


class TopKServer(TopKRequests, SGLangHttpServer):
    """verl's server, with the top-K of requests that ask for one."""

    tokenizer_manager = watched(_Manager)

    def _check_request(self, count: int, sampling_params: Mapping[str, Any]) -> None:
        value, temperature = os.environ.get(_ORIGINAL, ""), sampling_params.get("temperature", 1.0)
        if value.lower() in _TRUE and temperature != 1.0:
            raise RolloutError(
                f"{_ORIGINAL}={value} has SGLang report log-probs before the temperature, and tokens are sampled at "
                f"{temperature}; unset it where the servers run, or set actor_rollout_ref.rollout.temperature=1"
            )

    def _read(self, tokens: Any, records: Any, count: int) -> dict[str, np.ndarray]:
        return from_sglang(tokens, records, count)


class TopKReplica(SGLangReplica):
    """verl's replica of `TopKServer`s."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.server_class = ray.remote(TopKServer)
