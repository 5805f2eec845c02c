"""How far a schedule has come, as far as one beat knows: by its own sends, and by what leaders tell.

A leader tells each slot that it has sent, as soon as the broker has it, and with it, and at the end of each
tick, the moment up to which all of them were. Both are true for ever, whoever leads: what is known is never
unlearned. Its last statement holds the latter at any time, for those who have just come.
"""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta, timezone

__all__ = ["Progress"]

#: The clocks of two hosts differ by seconds. What is told of a time still to come is the word of one that is
#: wrong: believed, it would keep every beat from sending until then.
CLOCKS_DIFFER = timedelta(seconds=60)

#: Bytes that PostgreSQL passes on at once.
LONGEST = 7999

STATEMENT = re.compile(r"NOTIFY \"[^\"]*\", '(.*)'")


class Progress:
    """What was sent of a schedule."""

    def __init__(self) -> None:
        #: All that fell due up to here was sent.
        self.until: datetime | None = None
        #: The last slot of each entry that is known to be sent, and not by that moment.
        self.last: dict[str, datetime] = {}

    def __str__(self) -> str:
        """What a leader tells of it."""
        return json.dumps({"until": self.until and self.until.isoformat()})

    def sent(self, entry: str, due: datetime) -> str:
        """Take down one slot, and return what a leader tells of it."""
        self.last[entry] = max(due, self.last.get(entry, due))
        words = json.dumps({**json.loads(str(self)), "entry": entry, "due": due.isoformat()})
        # A name without end is told at the end of the tick.
        return words if len(words) <= LONGEST else str(self)

    def sent_until(self, moment: datetime) -> None:
        """Take down that all slots up to a moment were sent."""
        self.until = moment if self.until is None else max(self.until, moment)
        self.last = {entry: due for entry, due in self.last.items() if due > self.until}

    def hear(self, words: str) -> None:
        """Take down what a leader tells; anybody may say what is none of that."""
        try:
            told = json.loads(words)
            until = None if told["until"] is None else moment(told["until"])
            slot = (str(told["entry"]), moment(told["due"])) if "entry" in told else None
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        if until is not None:
            self.sent_until(until)
        if slot is not None:
            self.sent(*slot)

    def read(self, statement: str) -> None:
        """Take down what a leader told with a statement, if it is one of those."""
        told = STATEMENT.fullmatch(statement)
        if told is not None:
            self.hear(told[1].replace("''", "'"))


def moment(text: str) -> datetime:
    """Read a moment. Raises `ValueError`, also for one without a time zone, or that is still to come."""
    read = datetime.fromisoformat(text)
    if read.tzinfo is None:
        raise ValueError(f"{text} may be anywhere")
    if read > datetime.now(timezone.utc) + CLOCKS_DIFFER:
        raise ValueError(f"{text} is still to come")
    return read
