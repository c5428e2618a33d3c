"""Predictive divergence masks for off-policy reinforcement learning of language models.

The names of `predmask.core` can be used from here: `predmask.Predictive`, `predmask.policy_loss`, ...
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from predmask.core import *  # noqa: F403
    from predmask.core import __all__ as __all__

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Not at import: the core imports torch, which `predmask --help` and a verifier's process do without.
    if name == "__all__" or not name.startswith("_"):
        core = importlib.import_module("predmask.core")
        if name == "core":
            return core
        if name == "__all__" or name in core.__all__:
            return getattr(core, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *importlib.import_module("predmask.core").__all__])
