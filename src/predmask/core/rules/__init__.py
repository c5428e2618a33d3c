"""The rules (trust-region masks), one file each, in one table."""

from predmask.core.rules.base import Criteria, MaskDecision, Reason, Rule
from predmask.core.rules.cispo import CISPO
from predmask.core.rules.dppo import DPPO
from predmask.core.rules.icepop import IcePop
from predmask.core.rules.none import NoMask
from predmask.core.rules.ppo_clip import PPOClip
from predmask.core.rules.predictive import Predictive

RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (NoMask, PPOClip, CISPO, IcePop, DPPO, Predictive)}
"""Every rule by name. To add one, write its file and add its class here; the property tests run over this table."""

__all__ = [
    "CISPO",
    "DPPO",
    "RULES",
    "Criteria",
    "IcePop",
    "MaskDecision",
    "NoMask",
    "PPOClip",
    "Predictive",
    "Reason",
    "Rule",
]
