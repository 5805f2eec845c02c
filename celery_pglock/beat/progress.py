"""How far a schedule has come, as far as one beat knows: by its own sends, and by what leaders tell.

A leader tells as soon as the broker has a slot, and at the end of each tick: the moment up to which all
were sent, and what was sent since. Both are true for ever, whoever leads: what is known is never unlearned.
It tells all of it each time, since who has just come reads its last statement and no other. Where that is
too long, who listens is told the one slot, and who has just come nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime, timezone

from celery_pglock.locks.ledger import CLOCKS_DIFFER

__all__ = ["Progress"]

#: Bytes that PostgreSQL passes on at once.
LONGEST = 7999

#: Said where there is more to say than fits.
NOTHING = json.dumps({"sent": {}})

STATEMENT = re.compile(r"NOTIFY \"[^\"]*\", '(.*)'")


class Progress:
    """What was sent of a schedule."""

    def __init__(self) -> None:
        #: All that fell due up to here was sent.
        self.until: datetime | None = None
        #: The last slot of each entry that is known to be sent, and not by that moment.
        self.last: dict[str, datetime] = {}

    def __str__(self) -> str:
        """What a leader tells of it: all, or nothing where that is too long."""
        whole = {"until": self.until and self.until.isoformat(), "sent": texts(self.last)}
        return words_of(whole) or NOTHING

    def sent(self, entry: str, due: datetime) -> str:
        """Take down one slot, and return what a leader tells of it."""
        self._take_down(entry, due)
        words = str(self)
        return words if words != NOTHING else words_of({"sent": texts({entry: due})}) or NOTHING

    def _take_down(self, entry: str, due: datetime) -> None:
        self.last[entry] = max(due, self.last.get(entry, due))

    def sent_until(self, moment: datetime) -> None:
        """Take down that all slots up to a moment were sent."""
        self.until = moment if self.until is None else max(self.until, moment)
        self.last = {entry: due for entry, due in self.last.items() if due > self.until}

    def hear(self, words: str) -> None:
        """Take down what a leader tells; anybody may say what is none of that."""
        try:
            told = json.loads(words)
            until = told.get("until") and moment(told["until"])
            slots = {entry: moment(due) for entry, due in told["sent"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return
        if until:
            self.sent_until(until)
        for entry, due in slots.items():
            self._take_down(entry, due)

    def read(self, statement: str) -> None:
        """Take down what a leader told with a statement, if it is one of those."""
        told = STATEMENT.fullmatch(statement)
        if told is not None:
            self.hear(told[1].replace("''", "'"))


def words_of(told: Mapping[str, object]) -> str | None:
    """What is told as PostgreSQL passes it on, None where it is too long for that."""
    words = json.dumps(told)
    return words if len(words) <= LONGEST else None


def texts(slots: dict[str, datetime]) -> dict[str, str]:
    return {entry: due.isoformat() for entry, due in slots.items()}


def moment(text: str) -> datetime:
    """Read a moment. Raises `ValueError`, also for one without a time zone, or that is still to come."""
    read = datetime.fromisoformat(text)
    if read.tzinfo is None:
        raise ValueError(f"{text} may be anywhere")
    if read > datetime.now(timezone.utc) + CLOCKS_DIFFER:
        raise ValueError(f"{text} is still to come")
    return read
