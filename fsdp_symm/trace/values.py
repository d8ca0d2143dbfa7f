"""Checked readings of values that a trace may hold in any shape."""

from __future__ import annotations

import math
from typing import Any

_LIMIT = 1 << 62  # ids and counts stay below this, so that they fit the arrays of 64-bit integers


def number(value: Any) -> float | None:
    """A finite number, also from a numeric string; None for everything else, NaN and booleans included."""
    if type(value) is float:  # the common case; NaN fails the comparison
        return value if -math.inf < value < math.inf else None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def count(value: Any) -> int | None:
    """A whole number from 0 to 2**62; None for everything else."""
    if type(value) is int:  # the common case, kept exact
        return value if 0 <= value < _LIMIT else None
    found = number(value)
    if found is None or found != int(found) or not 0 <= found < _LIMIT:
        return None
    return int(found)


def text(value: Any) -> str:
    """A string, or the decimal form of a whole number; empty for everything else."""
    if isinstance(value, str):
        return value
    return str(value) if type(value) is int else ""
