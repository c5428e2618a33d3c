"""What users name by import path: `package.module:NAME`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def imported(path: str, kind: str) -> Any:
    """What `package.module:NAME` names, None if the module has no such name.

    The module is looked for in the current directory first. Raises ValueError, which calls it a `kind`, for a module
    that cannot be imported.
    """
    module, _, name = path.partition(":")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # a console script, unlike `python -m`, does not look here
    try:
        return getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{kind} {path!r}: the module {module!r} cannot be imported ({error}); run from its directory or install it"
        ) from error
