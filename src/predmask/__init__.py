"""Predictive divergence masks for off-policy reinforcement learning of language models."""

from predmask.core import *  # noqa: F403
from predmask.core import __all__ as __all__

__version__ = "0.1.0"
