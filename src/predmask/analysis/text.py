"""How the instruments say things: rules, shares, and text of others, which is shown and never acted on."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any


def visible(text: str) -> str:
    """The text without characters that would act instead of being seen: `⏎` for a newline, escapes for the others.

    Control sequences, marks of direction, line separators and whatever else Unicode calls unprintable.
    """
    return "".join(
        "⏎" if sign == "\n" else sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii")
        for sign in text
    )


def columns(text: str) -> int:
    """Columns that a text takes on a terminal: two for wide characters, none for combining ones."""
    return sum(
        0 if unicodedata.combining(sign) else 1 + (unicodedata.east_asian_width(sign) in ("W", "F")) for sign in text
    )


def rule_text(settings: Mapping[str, Any]) -> str:
    """A rule's settings (`rule_settings`) in one line: its name and its fields."""
    others = ", ".join(f"{name} {value}" for name, value in settings.items() if name != "name" and value is not None)
    name = str(settings.get("name", "?"))
    return visible(f"{name} ({others})" if others else name)


def percent(share: object, digits: int = 2) -> str:
    """A share in percent: a dash where there is none, 0 % and 100 % only where they are exact."""
    if not isinstance(share, int | float):
        return "–"
    least = 10.0 ** -(digits + 2)
    if 0 < share < least:
        return f"<{least:.{digits}%}"
    if 1 - least < share < 1:
        return f">{1 - least:.{digits}%}"
    return f"{share:.{digits}%}"
