"""TRL's GRPOConfig with a rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl.trainer.grpo_config import GRPOConfig

from predmask.core import Predictive, Rule
from predmask.plugins.trl.host import refuse


@dataclass
class PredmaskGRPOConfig(GRPOConfig):
    """Options of `PredmaskGRPOTrainer`: TRL's, and what decides which tokens are trained.

    TRL's `epsilon`, `epsilon_high` and `delta` must be left alone: the rule has thresholds of its own. Raises
    ValueError for options under which another objective than the rule's would be trained.
    """

    rule: Rule = field(default_factory=Predictive, metadata={"help": "Which tokens are dropped."})
    behaviour_top_k: int = field(
        default=20,
        metadata={
            "help": "K, the likeliest ids that are recorded at each position when completions are sampled; 0 is enough "
            "for rules of the sampled token alone. (`top_k` is TRL's own: it truncates sampling, and must be 0.)"
        },
    )
    ratio_cap: float | None = field(
        default=5.0, metadata={"help": "C, the cap of the detached importance weight; None for no cap."}
    )
    traces: str | None = field(
        default=None,
        metadata={
            "help": "A directory; tokens are recorded there for `predmask report`, where it is not empty in a folder "
            "of its own."
        },
    )
    traces_every: int = field(default=1, metadata={"help": "Record every so many generations."})
    traces_responses: int = field(
        default=64,
        metadata={"help": "Completions of each generation that are recorded, over all processes; 0: all."},
    )
    traces_max_mb: float = field(default=2000.0, metadata={"help": "Size at which every second step is deleted."})
    vllm_importance_sampling_correction: bool = field(
        default=False,
        metadata={"help": "Must be False: the rule's ratio is taken against the policy that sampled already."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(self)

    def to_dict(self) -> dict[str, Any]:
        """For loggers and checkpoints; the rule as its name and fields."""
        from predmask.traces import rule_settings

        return {**super().to_dict(), "rule": rule_settings(self.rule)}
