"""verl's SGLang server, which also returns the top-K that a request asks for.

Built from the sources of verl 0.9.1 and SGLang, and tested with a stand-in for SGLang's tokenizer manager: SGLang has
no build for CPUs, and this was not run against a real one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from verl.workers.rollout.sglang_rollout.async_sglang_server import (  # pyright: ignore[reportMissingImports]
    SGLangHttpServer,
    SGLangReplica,
)

from predmask.plugins.verl.payload import Request, asked, from_sglang, report

_REQUEST: ContextVar[Request | None] = ContextVar("predmask_sglang_request", default=None)
"""Each request runs in an asyncio task, and so in a context, of its own."""


class TopKServer(SGLangHttpServer):
    """verl's server; where `sampling_params["logprobs"]` is an int K above 0, it returns the top-K, too.

    `TokenOutput.extra_fields` then has `payload.TOP_K`, or `payload.PROBLEM`. `log_probs` stay those of the sampled
    tokens, and any other request is served as verl serves it.
    """

    @property
    def tokenizer_manager(self) -> Any:
        """SGLang's manager; within a request for a top-K, with its `generate_request` watched."""
        request = _REQUEST.get()
        return self._manager if request is None else _Watched(self._manager, request)

    @tokenizer_manager.setter
    def tokenizer_manager(self, manager: Any) -> None:
        self._manager = manager

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **arguments: Any
    ) -> Any:
        """As verl's, with a top-K where one is asked for."""
        count = asked(sampling_params)
        if not count:
            return await super().generate(prompt_ids, sampling_params, request_id, **arguments)
        sampling_params = {**sampling_params, "logprobs": True}
        request = Request(count)
        token = _REQUEST.set(request)
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id, **arguments)
        finally:
            _REQUEST.reset(token)
        report(output, lambda: from_sglang(output.token_ids, request.answer["meta_info"], count), count)
        return output


class TopKReplica(SGLangReplica):
    """verl's replica of `TopKServer`s."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.server_class = ray.remote(TopKServer)


class _Watched:
    """SGLang's tokenizer manager as one request sees it: asked for more, and its last answer kept."""

    def __init__(self, manager: Any, request: Request) -> None:
        self._manager = manager
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def generate_request(self, generate_request: Any, http_request: Any) -> AsyncIterator[Any]:
        generate_request.top_logprobs_num = self._request.count
        async for answer in self._manager.generate_request(generate_request, http_request):
            self._request.answer = answer
            yield answer
