"""The method: pure functions on tensors, torch alone."""

from predmask.core.advantages import Advantages, group_advantages
from predmask.core.divergences import DIVERGENCES, Divergence, get_divergence
from predmask.core.loss import policy_loss, token_losses, token_weights
from predmask.core.metrics import MaskedToken, Metrics, mask_metrics, masked_tokens, merge_masked_tokens
from predmask.core.rates import TAILS, Tail, divergence_rate, full_kl_rate_bracket, get_tail
from predmask.core.rules import (
    CISPO,
    DPPO,
    RULES,
    IcePop,
    MaskDecision,
    NoMask,
    PPOClip,
    Predictive,
    Reason,
    Rule,
)
from predmask.core.support import BehaviourSupport, PolicySupport

__all__ = [
    "CISPO",
    "DIVERGENCES",
    "DPPO",
    "RULES",
    "TAILS",
    "Advantages",
    "BehaviourSupport",
    "Divergence",
    "IcePop",
    "MaskDecision",
    "MaskedToken",
    "Metrics",
    "NoMask",
    "PPOClip",
    "PolicySupport",
    "Predictive",
    "Reason",
    "Rule",
    "Tail",
    "divergence_rate",
    "full_kl_rate_bracket",
    "get_divergence",
    "get_tail",
    "group_advantages",
    "mask_metrics",
    "masked_tokens",
    "merge_masked_tokens",
    "policy_loss",
    "token_losses",
    "token_weights",
]
