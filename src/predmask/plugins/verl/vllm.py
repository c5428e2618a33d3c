"""verl's vLLM server, which also returns the top-K that a request asks for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from verl.workers.rollout.vllm_rollout.vllm_async_server import (  # pyright: ignore[reportMissingImports]
    vLLMHttpServer,
    vLLMReplica,
)

from predmask.plugins.verl.payload import PROBLEM, Request, asked, from_vllm, report

_REQUEST: ContextVar[Request | None] = ContextVar("predmask_vllm_request", default=None)
"""Each request runs in an asyncio task, and so in a context, of its own."""


class TopKServer(vLLMHttpServer):
    """verl's server; where `sampling_params["logprobs"]` is an int K above 0, it returns the top-K, too.

    `TokenOutput.extra_fields` then has `payload.TOP_K`, or `payload.PROBLEM`. `log_probs` stay those of the sampled
    tokens, and any other request is served as verl serves it.
    """

    @property
    def engine(self) -> Any:
        """vLLM's `AsyncLLM`; within a request for a top-K, with its `generate` watched."""
        request = _REQUEST.get()
        return self._engine if request is None else _Watched(self._engine, request)

    @engine.setter
    def engine(self, engine: Any) -> None:
        self._engine = engine

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **arguments: Any
    ) -> Any:
        """As verl's, with a top-K where one is asked for."""
        count = asked(sampling_params)
        if not count:
            return await super().generate(prompt_ids, sampling_params, request_id, **arguments)
        sampling_params = {**sampling_params, "logprobs": True}
        cap = _cap(self._engine.model_config)
        if count > cap:
            output = await super().generate(prompt_ids, sampling_params, request_id, **arguments)
            output.extra_fields[PROBLEM] = (
                f"policy_loss.top_k asks for {count} log-probs at each position, and vLLM's cap is max_logprobs={cap}; "
                f"set +actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs={count}, or a lower top_k"
            )
            return output
        request = Request(count)
        token = _REQUEST.set(request)
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id, **arguments)
        finally:
            _REQUEST.reset(token)
        report(output, lambda: from_vllm(output.token_ids, request.answer.outputs[0].logprobs, count), count)
        return output


class TopKReplica(vLLMReplica):
    """verl's replica of `TopKServer`s."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.server_class = ray.remote(TopKServer)


class _Watched:
    """vLLM's engine as one request sees it: asked for more, and its last answer kept."""

    def __init__(self, engine: Any, request: Request) -> None:
        self._engine = engine
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *, sampling_params: Any, **arguments: Any) -> AsyncIterator[Any]:
        sampling_params.logprobs = self._request.count
        sampling_params.flat_logprobs = True
        # verl reads ids; vLLM would turn each of the K ids into text, at every token.
        sampling_params.detokenize = bool(sampling_params.stop)
        async with aclosing(self._engine.generate(sampling_params=sampling_params, **arguments)) as answers:
            async for answer in answers:
                self._request.answer = answer
                yield answer


def _cap(model_config: Any) -> int:
    """The most log-probs that vLLM returns at a position; -1 stands for the vocabulary."""
    return model_config.get_vocab_size() if model_config.max_logprobs == -1 else model_config.max_logprobs
