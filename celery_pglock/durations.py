"""Seconds as people give them."""

from __future__ import annotations

import math
from datetime import timedelta

__all__ = ["seconds_of"]


def seconds_of(value: object, *, least: float = 0.0) -> float:
    """Read seconds or a timedelta. Raises `TypeError` for what is neither, `ValueError` out of bounds."""
    given = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"seconds or a timedelta, not {value!r}")
    if not least <= given < math.inf:
        raise ValueError(f"seconds >= {least:g}, not {value!r}")
    return float(given)
