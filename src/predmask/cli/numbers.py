"""Numbers as the command line takes them: an error says what was expected."""

from __future__ import annotations

from argparse import ArgumentTypeError


def natural(text: str) -> int:
    """A whole number of 0 or more."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def above_zero(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return value
