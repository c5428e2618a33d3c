"""verl's single-turn agent loop, which asks for the top-K and makes batch fields of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import PrivateAttr
from torch import Tensor
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput  # pyright: ignore[reportMissingImports]
from verl.experimental.agent_loop.single_turn_agent_loop import (  # pyright: ignore[reportMissingImports]
    SingleTurnAgentLoop,
)
from verl.workers.rollout.llm_server import (  # pyright: ignore[reportMissingImports]
    FullyAsyncLLMServerClient,
    LLMServerClient,
)
from verl.workers.rollout.replica import TokenOutput  # pyright: ignore[reportMissingImports]

from predmask.plugins.verl.packed import TOPK_IDS, TOPK_LOGP
from predmask.plugins.verl.payload import PROBLEM, TOP_K, Recorded, asked, blank_rows, problem

_PIECES = "predmask_pieces"
"""Between client and loop: each piece's tokens, and the server's extra fields."""
_ABORTED = ("abort", "aborted")
_PAUSE = 1.0
"""Seconds until an aborted response is resumed, as verl waits."""


class TopKAgentLoop(SingleTurnAgentLoop):
    """verl's loop with two batch fields more: the top-K ids and log-probs [P + T, K] (see `payload.Recorded.rows`).

    K is `actor_rollout_ref.actor.policy_loss.top_k`. Where it is 0, and for prompts that are sampled otherwise than
    those that are trained on (greedy baselines, most validations), it is verl's loop. verl does not tell a loop what a
    prompt is for: a validation that samples as training does is asked for its top-K, too, which nothing reads.
    Nothing is raised for a faulty top-K, since verl drops a response whose loop raises: its rows are blank, and
    `payload.PROBLEM` says why.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._top_k = int(self.config.actor_rollout_ref.actor.policy_loss.top_k)
        self.server_manager = _Client(self.server_manager, self.response_length)

    async def run(self, sampling_params: dict[str, Any], **prompt: Any) -> Any:
        """As verl's."""
        if not self._top_k or not self._sampled_as_trained(sampling_params):
            return await super().run(sampling_params, **prompt)
        output = await super().run({**sampling_params, "logprobs": self._top_k}, **prompt)
        fields, prompt_length = output.extra_fields, len(output.prompt_ids)
        try:
            recorded = Recorded.of(fields.pop(_PIECES), self._top_k)
            rows = recorded.rows(prompt_length, output.response_ids, output.response_mask)
        except Exception as error:  # noqa: BLE001 - whatever it is, the actor raises it
            fields[PROBLEM] = problem(error)
            rows = blank_rows(prompt_length + len(output.response_ids), self._top_k)
        return _Output.of(output, *rows)

    def _sampled_as_trained(self, sampling_params: dict[str, Any]) -> bool:
        names = ("temperature", "top_p", "top_k")
        return all(sampling_params.get(name) == self.rollout_config[name] for name in names)


class _Output(AgentLoopOutput):
    """verl's output, with the top-K beside `extra_fields`: those verl also sends to the reward functions."""

    _topk: dict[str, Tensor] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls, output: AgentLoopOutput, ids: Tensor, logp: Tensor) -> _Output:
        """`output` with rows [P + T, K]."""
        made = cls.model_construct(_fields_set=output.model_fields_set, **dict(output))
        made._topk = {TOPK_IDS: ids, TOPK_LOGP: logp}
        return made

    def as_dict(self) -> dict[str, Any]:
        """What goes into the batch."""
        return super().as_dict() | self._topk


class _Client:
    """verl's client of rollout servers, which also keeps what the server said of each piece of a response.

    The client of the asynchronous trainers resumes a response that was aborted for new weights, and drops the extra
    fields on the way: here it is resumed likewise, piece by piece.
    """

    def __init__(self, client: Any, response_length: int) -> None:
        self._client = client
        self._response_length = response_length

    async def generate(self, request_id: str, *, sampling_params: dict[str, Any], **more: Any) -> Any:
        if not asked(sampling_params):
            return await self._client.generate(request_id, sampling_params=sampling_params, **more)
        if isinstance(self._client, FullyAsyncLLMServerClient):
            return await self._resumed(request_id, sampling_params=sampling_params, **more)
        output = await self._client.generate(request_id, sampling_params=sampling_params, **more)
        output.extra_fields[_PIECES] = [(output.token_ids, {**output.extra_fields})]
        output.extra_fields.pop(TOP_K, None)
        return output

    async def _resumed(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **more: Any
    ) -> Any:
        pieces: list[Any] = []
        tokens: list[int] = []
        while not pieces or (pieces[-1].stop_reason in _ABORTED and len(tokens) < self._response_length):
            if pieces:
                await asyncio.sleep(_PAUSE)
            piece = await LLMServerClient.generate(
                self._client,
                request_id,
                prompt_ids=[*prompt_ids, *tokens],
                sampling_params={**sampling_params, "max_tokens": self._response_length - len(tokens)},
                **more,
            )
            pieces.append(piece)
            tokens += piece.token_ids
        return _joined(pieces)


def _joined(pieces: Sequence[Any]) -> Any:
    """The pieces as one `TokenOutput`, put together as verl's resuming client does."""
    first, last = pieces[0].extra_fields, pieces[-1].extra_fields
    experts = [
        piece.routed_experts if i == 0 else piece.routed_experts[-len(piece.token_ids) :]
        for i, piece in enumerate(piece for piece in pieces if piece.routed_experts is not None and piece.token_ids)
    ]
    return TokenOutput(
        token_ids=[token for piece in pieces for token in piece.token_ids],
        log_probs=[value for piece in pieces for value in piece.log_probs or ()],
        routed_experts=np.concatenate(experts) if experts else None,
        stop_reason=pieces[-1].stop_reason,
        num_preempted=sum(piece.num_preempted or 0 for piece in pieces),
        extra_fields={
            "global_steps": last.get("global_steps"),
            "min_global_steps": first.get("global_steps"),
            "max_global_steps": last.get("global_steps"),
            "num_cached_tokens": first.get("num_cached_tokens"),
            _PIECES: [(piece.token_ids, piece.extra_fields) for piece in pieces],
        },
    )
