"""Text of others on a terminal: shown, and never acted on."""

from __future__ import annotations

import unicodedata


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
