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
"""verl's flag that makes an engine call the loss function with the logits, too, as its distillation wants it."""


class MaskedEngine:
    """A mixin for verl's language-model engines: with the loss `predmask`, the hook sees the logits.

    Any other loss, and a forward pass without one (reference and recomputed log-probs), is verl's own.
    """

    _predmask_progress: Progress | None = None
    _predmask_metrics: Metrics

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """As verl's, with figures `predmask/...` of all mini-batches among the metrics of a batch's last one."""
        settings = _settings(loss_function)
        if settings is None:
            return super().forward_backward_batch(data, loss_function, forward_only)  # pyright: ignore
        from verl.utils import tensordict_utils as tu  # pyright: ignore[reportMissingImports]

        group = self.get_data_parallel_group()  # pyright: ignore
        if self._predmask_progress is None:
            if tu.get_non_tensor_data(data, key="use_fused_kernels", default=False):
                raise ValueError("fused kernels form no logits; set actor_rollout_ref.model.use_fused_kernels=False")
            self._predmask_check()
            self._predmask_progress, self._predmask_metrics = Progress(settings, self), Metrics()
        _check_topk(data, group)
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
        self._predmask_metrics = self._predmask_metrics.merge(hook.metrics)
        if any(listed(data, "update_lr_scheduler")):
            whole = Metrics()
            for part in _gathered(self._predmask_metrics, group):
                whole = whole.merge(part)
            self._predmask_metrics = Metrics()
            if output:
                output["metrics"].update({f"{PREFIX}{name}": [value] for name, value in whole.compute().items()})
        return output

    def _predmask_check(self) -> None:
        """Raise ValueError for a setting of this engine that the plug-in cannot honour."""

    def _predmask_cut(self, values: Tensor, data: Any, data_format: str) -> Tensor:
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


def _check_topk(data: Any, group: Any) -> None:
    """Raise RuntimeError for responses whose top-K cannot be used: in all workers, or those without would wait."""
    extra = listed(data, "extra_fields")
    mine = [fields["predmask_problem"] for fields in extra if "predmask_problem" in fields]
    problems = [problem for part in _gathered(mine, group) for problem in part]
    if problems:
        raise RuntimeError(
            f"the rollout server's top-K of {len(problems)} responses of a mini-batch cannot be used: {problems[0]}"
        )


def _sampled_ids(engine: Any, settings: PolicyLossConfig) -> int:
    """How many ids the server samples from: verl masks what is beyond the tokenizer in vLLM, and in no other server."""
    model = engine.model_config
    if settings.host.get("rollout_name") == "vllm" and model.tokenizer is not None:
        return len(model.tokenizer)
    # Megatron pads the vocabulary.
    return model.hf_config.get_text_config().vocab_size


def _gathered(mine: Any, group: Any) -> list[Any]:
    """What each data-parallel worker has."""
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, mine, group=group)
    return parts
