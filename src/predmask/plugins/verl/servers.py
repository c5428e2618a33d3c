"""What verl's rollout servers share, whichever engine they have: a request that asks for a top-K, and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from predmask.plugins.verl.payload import PROBLEM, TOP_K, asked, no_topk, problem
from predmask.rollout import RolloutError


@dataclass
class Request:
    """A request under way that asks for a top-K."""

    count: int
    """K."""
    records: Any = None
    """The log-probs in the engine's last answer, in its own structure."""
    problem: str | None = None
    """Why there is no top-K."""

    @contextmanager
    def noting(self) -> Iterator[None]:
        """What is raised in here becomes the problem: verl drops a group where a server raises, and goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the actor raises it
            self.problem = self.problem or problem(error)

    async def report(self, output: Any, read: Callable[[Any, Any, int], dict[str, np.ndarray]]) -> None:
        """Add the top-K to a server's `TokenOutput`, or the problem; `read` makes it of tokens, records and K.

        It is read in a thread, while the server's other requests go on; no tokens need no reading.
        """
        with self.noting():
            if self.problem is None:
                output.extra_fields[TOP_K] = await self._read(output.token_ids, read)
        if self.problem is not None:
            output.extra_fields[PROBLEM] = self.problem

    async def _read(self, tokens: Any, read: Callable[[Any, Any, int], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        if not tokens:
            return no_topk(self.count)
        if self.records is None:
            raise RolloutError("top-K missing: the rollout server's engine answered without log-probs")
        return await asyncio.to_thread(read, tokens, self.records, self.count)


_REQUEST: ContextVar[Request | None] = ContextVar("predmask_request", default=None)
"""Each request runs in an asyncio task, and so in a context, of its own."""


class Watched:
    """A server's engine as one request sees it; subclasses override what verl calls to generate."""

    def __init__(self, engine: Any, request: Request) -> None:
        self._engine = engine
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def watched(kind: type[Watched]) -> property:
    """The attribute in which verl's server has its engine; within a request for a top-K, the engine as a `kind`."""

    def get(server: Any) -> Any:
        request = _REQUEST.get()
        return server._engine if request is None else kind(server._engine, request)

    def put(server: Any, engine: Any) -> None:
        server._engine = engine

    return property(get, put)


class TopKRequests:
    """A base before verl's server: where `sampling_params["logprobs"]` is an int K above 0, the top-K is returned, too.

    `TokenOutput.extra_fields` then has `payload.TOP_K`, or `payload.PROBLEM`. `log_probs` stay those of the sampled
    tokens, and any other request is served as verl serves it.
    """

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **arguments: Any
    ) -> Any:
        """As verl's, with a top-K where one is asked for."""
        serve = super().generate  # pyright: ignore[reportAttributeAccessIssue]
        count = asked(sampling_params)
        if not count:
            return await serve(prompt_ids, sampling_params, request_id, **arguments)
        request = Request(count)
        with request.noting():
            self._check_request(count, sampling_params)
        token = _REQUEST.set(request)
        try:
            output = await serve(prompt_ids, {**sampling_params, "logprobs": True}, request_id, **arguments)
        finally:
            _REQUEST.reset(token)
        await request.report(output, self._read)
        return output

    def _check_request(self, count: int, sampling_params: Mapping[str, Any]) -> None:
        """Raise RolloutError where the engine cannot report the K likeliest of what it samples from."""
        raise NotImplementedError

    def _read(self, tokens: Any, records: Any, count: int) -> dict[str, np.ndarray]:
        """The top-K from the engine's records (see `payload.TOP_K`)."""
        raise NotImplementedError
