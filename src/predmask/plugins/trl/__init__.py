"""Predictive divergence masks in TRL: a small subclass of its GRPOTrainer.

`capture` records the top-K while completions are generated, `head` lets the model return a masked loss instead of
logits, `trainer` overrides four methods of TRL's, `host` says what is refused.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from predmask.plugins.trl.config import PredmaskGRPOConfig
    from predmask.plugins.trl.trainer import PredmaskGRPOTrainer

__all__ = ["PredmaskGRPOConfig", "PredmaskGRPOTrainer"]


def __getattr__(name: str) -> Any:
    # TRL is imported with them, and not before.
    if name == "PredmaskGRPOConfig":
        from predmask.plugins.trl.config import PredmaskGRPOConfig

        return PredmaskGRPOConfig
    if name == "PredmaskGRPOTrainer":
        from predmask.plugins.trl.trainer import PredmaskGRPOTrainer

        return PredmaskGRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
