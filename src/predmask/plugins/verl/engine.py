"""verl's engines with the hook in between: only `forward_backward_batch` is overridden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from predmask.core import Metrics
from predmask.ops import Shard
from predmask.plugins.verl.batch import listed
from predmask.plugins.verl.hook import Hook
from predmask.plugins.verl.progress import Progress
from predmask.plugins.verl.settings import PolicyLossConfig

PREFIX = "predmask/"
"""Of the metrics; verl puts `actor/` before it."""
_FLAG = "distillation_use_topk"


class MaskedEngine:
    """A mixin for verl's language-model engines: with the loss `predmask`, the hook sees the logits.

    Any other loss, and a forward pass without one (reference and recomputed log-probs), is verl's own.
    """

    _predmask_progress: Progress | None = None

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """As verl's, with figures `predmask/...` among the metrics."""
        settings = _settings(loss_function)
        if settings is None:
            return super().forward_backward_batch(data, loss_function, forward_only)  # pyright: ignore
        from verl.utils import tensordict_utils as tu  # pyright: ignore[reportMissingImports]

        _check(data, tu.get_non_tensor_data(data, key="use_fused_kernels", default=False))
        if self._predmask_progress is None:
            self._predmask_progress = Progress(settings, self)
        tu.assign_non_tensor(data, **{_FLAG: True})
        with self._predmask_progress.minibatch(data):
            hook = Hook(
                loss_function,
                settings,
                cut=self._predmask_cut,
                shard=self._predmask_shard,
                vocabulary_size=_sampled_ids(self, settings),
                progress=self._predmask_progress,
            )
            output = super().forward_backward_batch(data, hook, forward_only)  # pyright: ignore
        figures = _together(hook.metrics, self.get_data_parallel_group()).compute()  # pyright: ignore
        if output:
            output["metrics"].update({f"{PREFIX}{name}": [value] for name, value in figures.items()})
        return output

    def _predmask_cut(self, values: Tensor, data_format: str) -> Tensor:
        """What of nested [B, P + T] is in this process, as the logits are cut."""
        raise NotImplementedError

    def _predmask_shard(self, logits: Tensor) -> Shard | None:
        """Which columns of the vocabulary the logits are; None for all of them."""
        raise NotImplementedError


def _settings(loss_function: Any) -> PolicyLossConfig | None:
    """This plug-in's settings, where the loss is its own: verl hands over a partial with the actor's configuration."""
    config = getattr(loss_function, "keywords", {}).get("config")
    settings = getattr(config, "policy_loss", None)
    return settings if isinstance(settings, PolicyLossConfig) else None


def _check(data: Any, use_fused_kernels: bool) -> None:
    """Raise for what only shows in the worker: ValueError for the host's doing, RuntimeError for a server's."""
    if use_fused_kernels:
        raise ValueError("fused kernels form no logits; set actor_rollout_ref.model.use_fused_kernels=False")
    extra = listed(data, "extra_fields")
    problems = [fields["predmask_problem"] for fields in extra if "predmask_problem" in fields]
    if problems:
        raise RuntimeError(
            f"the rollout server's top-K of {len(problems)} of {len(extra)} responses cannot be used: {problems[0]}"
        )


def _sampled_ids(engine: Any, settings: PolicyLossConfig) -> int | None:
    """How many ids the server samples from: verl masks what is beyond the tokenizer in vLLM, and in no other server."""
    tokenizer = engine.model_config.tokenizer
    return len(tokenizer) if tokenizer is not None and settings.host.get("rollout_name") == "vllm" else None


def _together(metrics: Metrics, group: Any) -> Metrics:
    """The metrics of all data-parallel workers."""
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, metrics, group=group)
    whole = Metrics()
    for part in parts:
        whole = whole.merge(part)
    return whole
