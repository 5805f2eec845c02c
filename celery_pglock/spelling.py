"""What to write instead of a name that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Collection

__all__ = ["advice_for"]


def advice_for(name: str, known: Collection[str], kind: str) -> str:
    """Name the one that was meant, or all where none is close. ``kind`` is what they are, in the plural."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"the {kind} are {', '.join(known)}"
