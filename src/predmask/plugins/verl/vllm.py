"""verl's vLLM server, which also returns the top-K that a request asks for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import numpy as np
import ray  # pyright: ignore[reportMissingImports]
from verl.workers.rollout.vllm_rollout.vllm_async_server import (  # pyright: ignore[reportMissingImports]
    vLLMHttpServer,
    vLLMReplica,
)

from predmask.plugins.verl.payload import from_vllm
from predmask.plugins.verl.servers import TopKRequests, Watched, watched
from predmask.rollout import RolloutError


class _Engine(Watched):
    """vLLM's `AsyncLLM`: asked for more, and what it answers kept."""

    async def generate(self, *, sampling_params: Any, **arguments: Any) -> AsyncIterator[Any]:
        with self._request.noting():
            self._ask(sampling_params)
        async with aclosing(self._engine.generate(sampling_params=sampling_params, **arguments)) as answers:
            async for answer in answers:
                with self._request.noting():
                    self._keep(answer)
                yield answer

    def _ask(self, sampling_params: Any) -> None:
        if self._request.problem is not None:
            return
        sampling_params.logprobs = self._request.count
        # A version without it answers with mappings, which are read as well, but more slowly.
        if hasattr(sampling_params, "flat_logprobs"):
            sampling_params.flat_logprobs = True
        # verl reads ids; vLLM would turn each of the K ids into text, at every token.
        sampling_params.detokenize = bool(sampling_params.stop)

    def _keep(self, answer: Any) -> None:
        if self._request.problem is not None or not answer.outputs:
            return
        completion = answer.outputs[0]
        self._request.records = completion.logprobs
        if answer.finished and hasattr(completion.logprobs, "start_indices"):
            # verl reads the sampled tokens' alone, and would have an object built for each of the others.
            completion.logprobs = _sampled_alone(completion.token_ids, completion.logprobs)


class TopKServer(TopKRequests, vLLMHttpServer):
    """verl's server, with the top-K of requests that ask for one."""

    engine = watched(_Engine)

    def _check_request(self, count: int, sampling_params: Mapping[str, Any]) -> None:
        cap = _cap(self.engine.model_config)
        if count > cap:
            raise RolloutError(
                f"policy_loss.top_k asks for {count} log-probs at each position, and vLLM's cap is max_logprobs={cap}; "
                f"set ++actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs={count}, or a lower top_k"
            )

    def _read(self, tokens: Any, records: Any, count: int) -> dict[str, np.ndarray]:
        return from_vllm(tokens, records, count)


class TopKReplica(vLLMReplica):
    """verl's replica of `TopKServer`s."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.server_class = ray.remote(TopKServer)


class _Sampled(NamedTuple):
    """What verl reads of vLLM's `Logprob`."""

    logprob: float


def _sampled_alone(tokens: Sequence[int], records: Any) -> list[dict[int, _Sampled]]:
    """The first entry at each position, which is the sampled token's; that it is is checked where the top-K is read."""
    return [
        {token: _Sampled(records.logprobs[start])} for token, start in zip(tokens, records.start_indices, strict=False)
    ]


def _cap(model_config: Any) -> int:
    """The most log-probs that vLLM returns at a position; -1 stands for the vocabulary."""
    return model_config.get_vocab_size() if model_config.max_logprobs == -1 else model_config.max_logprobs
