"""Fields of a batch that are no tensors of tokens."""

from __future__ import annotations

from typing import Any


def listed(data: Any, key: str) -> list[Any]:
    """A field of a batch as a list; empty where it is not there."""
    found = data.get(key, None)
    if found is None:
        return []
    if hasattr(found, "tolist"):
        found = found.tolist()
    return list(found) if isinstance(found, list | tuple) else [getattr(found, "data", found)]
