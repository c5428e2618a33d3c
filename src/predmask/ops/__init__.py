"""The operator: hidden states to statistics and masked policy loss in one pass, without the logits of a whole batch."""

from predmask.ops.logits import logits_statistics
from predmask.ops.operator import Backend, MaskedPolicyLoss, masked_policy_loss, support_statistics
from predmask.ops.shard import Shard

__all__ = ["Backend", "MaskedPolicyLoss", "Shard", "logits_statistics", "masked_policy_loss", "support_statistics"]
