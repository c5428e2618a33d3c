"""Does an engine answer with the weights that the trainer has? Asked after every transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from predmask.rollout.engine import Sampling, evaluation_mode
from predmask.rollout.records import Rollout, RolloutError
from predmask.rollout.weights import base_model

_PROMPTS = 8
_LENGTH = 160
"""More than a block of any engine's prefix cache, so that a cache which was not emptied is seen, too."""
_TOP_K = 16
_MARGIN = 2.0
"""Random prompts are harder than real ones: how many times the engine's usual rounding they may be off."""
_MOVED = 0.25
"""The share of the policy's move that counts as a move of the engine, and the share of the engine's rounding that the
policy must have moved by before an engine that did not move is at fault."""
_SMALLEST_MOVE = 1e-5
"""In nats; below this, float32 itself could hide that the policy moved."""


@dataclass(frozen=True)
class _Answers:
    """Next-token log-probs [P, V] of engine (NaN where it named none) and policy, under the same weights."""

    engine: Tensor
    policy: Tensor

    @property
    def gap(self) -> Tensor:
        """[M] log mu - log pi where the engine named an entry."""
        gap = self.engine - self.policy
        return gap[~gap.isnan()]

    def moves_since(self, earlier: _Answers) -> tuple[Tensor, Tensor]:
        """[M] how far engine and policy moved, at the entries that the engine named both times."""
        engine, policy = self.engine - earlier.engine, self.policy - earlier.policy
        named = ~engine.isnan()
        return engine[named], policy[named]


class Probe:
    """Compares engine and policy on fixed random prompts.

    Engines start from random weights, so the first comparison shows that those of the policy arrive and that both
    compute one model. Later ones see to it that the engine follows: its answers must move when the policy's do. Moves
    that the engine's rounding may swallow add up until they are too large for that.

    Args:
        vocabulary_size: ids of the prompts are drawn from all of it.
        context: tokens that engine and model can take.
        tolerance: mean |Δ log-prob| that the engine's numerics explain, in nats.
    """

    def __init__(self, *, vocabulary_size: int, context: int, tolerance: float) -> None:
        length = max(1, min(_LENGTH, context - 1))
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(vocabulary_size, (_PROMPTS, length), generator=generator)
        self._tolerance = tolerance
        self._reference: _Answers | None = None
        self.prompts: list[list[int]] = self._ids.tolist()
        self.sampling = Sampling(temperature=1.0, max_new_tokens=1, top_k=min(_TOP_K, vocabulary_size))

    def check(self, model: Any, rollout: Rollout, version: int) -> None:
        """Compare the engine's answers to `prompts`, sampled as `sampling` says, with those of the model.

        Raises RolloutError when the engine does not have the model's weights.
        """
        policy = self._policy(model)
        rollout.check(top_k=self.sampling.top_k, vocabulary_size=policy.shape[1])
        if not (torch.isfinite(rollout.logp).all() and torch.isfinite(rollout.topk_logp).all()):
            raise RolloutError(f"the engine answers random prompts with NaN (version {version}): look at its weights")
        engine = torch.full_like(policy, torch.nan).scatter_(1, rollout.topk_ids, rollout.topk_logp)
        answers = _Answers(engine, policy)
        self._check_gap(answers, version)
        self._check_move(answers, version)

    @torch.no_grad()
    def _policy(self, model: Any) -> Tensor:
        """[P, V] float32 log-probs of the token after each prompt."""
        with evaluation_mode(model):
            ids = self._ids.to(next(model.parameters()).device)
            logits = base_model(model)(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        return logits.float().log_softmax(-1).cpu()

    def _check_gap(self, answers: _Answers, version: int) -> None:
        mean = float(answers.gap.abs().mean())
        if not mean <= _MARGIN * self._tolerance:
            raise RolloutError(
                f"the engine does not answer with the policy's weights (version {version}): its log-probs of random "
                f"prompts are {mean:.3g} nats from the policy's in the mean, and its numerics explain "
                f"{self._tolerance:g}. Weights were not delivered, not all of them, or its cache is stale; or the "
                "engine computes this model otherwise than transformers does"
            )

    def _check_move(self, answers: _Answers, version: int) -> None:
        if self._reference is None:
            self._reference = answers
            return
        engine, policy = map(_size, answers.moves_since(self._reference))
        if engine > _MOVED * policy:
            self._reference = answers
        elif policy > max(_MOVED * _size(self._reference.gap), _SMALLEST_MOVE):
            raise RolloutError(
                f"the engine still answers with old weights (version {version}): on random prompts the policy's "
                f"log-probs moved by {policy:.3g} nats, the engine's by {engine:.3g}; its weights were not replaced"
            )


def _size(values: Tensor) -> float:
    """Root mean square."""
    return float(values.square().mean().sqrt())
