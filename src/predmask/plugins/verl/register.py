"""What verl imports at its start, through the entry point `verl.plugins`: everything is registered here.

verl logs a plug-in that fails to import at DEBUG only. A worker without it is found out all the same: its
configuration names `predmask.plugins.verl.settings`, which imports this module, or fails loudly.
"""

from __future__ import annotations

from verl.trainer.ppo.core_algos import register_policy_loss  # pyright: ignore[reportMissingImports]
from verl.utils.device import get_device_name, get_vendor  # pyright: ignore[reportMissingImports]
from verl.workers import engine as host  # pyright: ignore[reportMissingImports]
from verl.workers.rollout import replica  # pyright: ignore[reportMissingImports]

from predmask.plugins.verl import LOSS_MODE
from predmask.plugins.verl.fsdp import MaskedFSDPEngine
from predmask.plugins.verl.loss import policy_loss


def _vllm() -> type:
    from predmask.plugins.verl.vllm import TopKReplica

    return TopKReplica


def _sglang() -> type:
    replica._load_sglang()  # what verl does before it can import SGLang
    from predmask.plugins.verl.sglang import TopKReplica

    return TopKReplica


def _register_engines() -> None:
    """Under (device, vendor), which verl prefers to its own engines' device alone."""
    place = {"model_type": "language_model", "device": get_device_name(), "vendor": get_vendor()}
    host.EngineRegistry.register(backend=["fsdp", "fsdp2"], **place)(MaskedFSDPEngine)
    # On other devices than GPUs, verl has another engine of this name.
    if get_device_name() == "cuda" and getattr(host, "MegatronEngineWithLMHead", None) is not None:
        from predmask.plugins.verl.megatron import MaskedMegatronEngine

        host.EngineRegistry.register(backend="megatron", **place)(MaskedMegatronEngine)


register_policy_loss(LOSS_MODE)(policy_loss)
_register_engines()
replica.RolloutReplicaRegistry.register("vllm", _vllm)
replica.RolloutReplicaRegistry.register("sglang", _sglang)
