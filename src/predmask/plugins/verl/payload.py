"""The top-K of a response on its way from verl's rollout server to its batch: asked for, read, checked, laid out.

A server answers with `TOP_K` or `PROBLEM` among its extra fields; the agent loop makes batch fields of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from predmask.rollout import Rollout, RolloutError, Sampling, rollout_from_entries
from predmask.rollout.sglang import rollout_from_sglang
from predmask.rollout.vllm import rollout_from_vllm

TOP_K = "predmask_topk"
"""A server's extra field, of the T tokens that it returns: {"ids": int32 [T, K], "logp": float32 [T, K]}, the K
likeliest of the distribution that each was sampled from, likeliest first."""
PROBLEM = "predmask_problem"
"""In its place, and in the batch: why there is no top-K. It is not raised, since verl drops a response whose agent loop
raises, and goes on."""
_ANY_ID = torch.iinfo(torch.int32).max


def asked(sampling_params: Mapping[str, Any]) -> int:
    """K, where a server is asked for a top-K; 0 where `logprobs` has one of verl's own values (True, False)."""
    count = sampling_params.get("logprobs")
    return 0 if count is None or isinstance(count, bool) else int(count)


def from_vllm(tokens: Sequence[int], logprobs: Any, count: int) -> dict[str, np.ndarray]:
    """The top-K of T tokens from vLLM's `FlatLogprobs`, or from its mappings id -> `Logprob`, one a token.

    The sampled token is found by its id. Raises RolloutError for what `Rollout.check` refuses: wrong lengths, fewer
    than K finite entries, repeated ids, a mass above 1, a sampled token that does not fit them.
    """
    if isinstance(logprobs, list):
        entries = [{token: entry.logprob for token, entry in position.items()} for position in logprobs]
        return _checked(rollout_from_entries([()], [tokens], [entries], top_k=count), count)
    answer = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason="length")
    record = SimpleNamespace(prompt_token_ids=(), outputs=[answer])
    return _checked(rollout_from_vllm([()], [record], columns=count, top_k=count), count)


def from_sglang(tokens: Sequence[int], meta_info: Mapping[str, Any], count: int) -> dict[str, np.ndarray]:
    """The top-K of T tokens from SGLang's `meta_info`: lists of (log-prob, id, text).

    Raises RolloutError as `from_vllm` does.
    """
    meta_info = {**meta_info, "prompt_tokens": 0, "finish_reason": {"type": "length"}}
    rollout = rollout_from_sglang(
        [()],
        [{"output_ids": tokens, "meta_info": meta_info}],
        sampling=Sampling(temperature=1.0, max_new_tokens=len(tokens), top_k=count),
        vocabulary_size=_ANY_ID,
        end_ids=frozenset(),
    )
    return _checked(rollout, count)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The sampled tokens of a response, with the top-K of each."""

    tokens: tuple[int, ...]
    """T ids."""
    ids: np.ndarray
    """[T, K] int32."""
    logp: np.ndarray
    """[T, K] float32."""

    @classmethod
    def of(cls, pieces: Sequence[tuple[Sequence[int], Mapping[str, Any]]], top_k: int) -> Recorded:
        """The pieces in which a response was sampled, each as its tokens and the server's extra fields.

        Raises RolloutError for a piece with a problem, without top-K, or with another number of them.
        """
        found = [no_topk(top_k)]
        for tokens, fields in pieces:
            if PROBLEM in fields:
                raise RolloutError(fields[PROBLEM])
            if tokens:
                found.append(_of_piece(fields.get(TOP_K), (len(tokens), top_k)))
        return cls(
            tokens=tuple(token for tokens, _ in pieces for token in tokens),
            ids=np.concatenate([piece["ids"] for piece in found]),
            logp=np.concatenate([piece["logp"] for piece in found]),
        )

    def rows(self, prompt_length: int, response: Sequence[int], mask: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Ids int32 and log-probs float32 [P + T', K]: row t has the distribution that token t + 1 was sampled from.

        `response` and `mask` [T'] are the host's response: it may be cut, and hold tokens that were not sampled
        (mask 0). All rows but those of sampled tokens have id -1 and log-prob NaN. Raises RolloutError where the
        tokens of mask 1 are not the first that were sampled.
        """
        places = [place for place, kept in enumerate(mask) if kept]
        sampled = tuple(response[place] for place in places)
        if sampled != self.tokens[: len(sampled)]:
            raise RolloutError(
                f"verl's response has {len(sampled)} sampled tokens, which are not the first of the {len(self.tokens)} "
                "that the server returned; does a tokenizer or another agent loop rewrite responses?"
            )
        if len(sampled) and not prompt_length:
            raise RolloutError("an empty prompt has no position that the first token's top-K could stand at")
        ids, logp = blank_rows(prompt_length + len(response), self.ids.shape[1])
        index = torch.tensor(places, dtype=torch.int64) + prompt_length - 1
        ids[index] = torch.from_numpy(self.ids[: len(sampled)])
        logp[index] = torch.from_numpy(self.logp[: len(sampled)])
        return ids, logp


def blank_rows(length: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Rows [length, K] without a distribution: id -1 and log-prob NaN."""
    return torch.full((length, top_k), -1, dtype=torch.int32), torch.full((length, top_k), torch.nan)


def no_topk(count: int) -> dict[str, np.ndarray]:
    """The top-K of no tokens."""
    return _arrays(np.empty((0, count)), np.empty((0, count)))


def problem(error: Exception) -> str:
    """The text for `PROBLEM`."""
    return str(error) if isinstance(error, RolloutError) else f"{type(error).__name__}: {error}"


def _of_piece(fields: Any, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    if fields is None:
        raise RolloutError(
            f"top-K missing: {shape[1]} log-probs were asked for at each position, and the rollout server returned "
            "the sampled token's alone, so it is not predmask's; is predmask installed on every node? A rule that "
            "reads no top-K runs with actor_rollout_ref.actor.policy_loss.top_k=0"
        )
    for name in ("ids", "logp"):
        if fields[name].shape != shape:
            raise RolloutError(f"{TOP_K}[{name!r}] has shape {fields[name].shape}, where {shape} was asked for")
    return fields


def _checked(rollout: Rollout, count: int) -> dict[str, np.ndarray]:
    rollout.check(top_k=count, vocabulary_size=_ANY_ID)
    return _arrays(rollout.topk_ids.numpy(), rollout.topk_logp.numpy())


def _arrays(ids: np.ndarray, logp: np.ndarray) -> dict[str, np.ndarray]:
    return {"ids": ids.astype(np.int32), "logp": logp.astype(np.float32)}
