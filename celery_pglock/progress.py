"""How far a schedule has come, as far as one beat knows: by its own sends, and by what leaders tell.

A leader tells each slot that it has sent, as soon as the broker has it, and at the end of each tick the
moment up to which all of them were. Both are true for ever, whoever leads: what is known is never unlearned.
"""

from __future__ import annotations

import json
import re
from datetime import datetime

__all__ = ["Progress"]

#: Bytes that PostgreSQL passes on at once.
LONGEST = 7999

SENT = "sent "
#: Alone, or in the statement that tells it. Entries may have any name.
SENT_UNTIL = re.compile(r"(?:NOTIFY \"[^\"]*\", ')?sent until ([0-9T:.+-]+)'?")


class Progress:
    """What was sent of a schedule."""

    def __init__(self) -> None:
        #: All that fell due up to here was sent.
        self.until: datetime | None = None
        #: The last slot of each entry that is known to be sent, and not by that moment.
        self.last: dict[str, datetime] = {}

    def sent(self, entry: str, due: datetime) -> str:
        """Take down one slot, and return the words for others; "" where they have no room."""
        self.last[entry] = max(due, self.last.get(entry, due))
        words = SENT + json.dumps({"entry": entry, "due": due.isoformat()})
        return words if len(words) <= LONGEST else ""

    def sent_until(self, moment: datetime) -> None:
        """Take down that all slots up to a moment were sent."""
        self.until = moment if self.until is None else max(self.until, moment)
        self.last = {entry: due for entry, due in self.last.items() if due > self.until}

    def __str__(self) -> str:
        """What a leader tells at the end of a tick."""
        return "" if self.until is None else f"sent until {self.until.isoformat()}"

    def hear(self, words: str) -> bool:
        """Take down what a leader tells, or a statement in which he told it. False for anything else."""
        until = SENT_UNTIL.fullmatch(words)
        if until is not None:
            self.sent_until(datetime.fromisoformat(until[1]))
            return True
        if not words.startswith(SENT + "{"):
            return False
        slot = json.loads(words.removeprefix(SENT))
        self.sent(slot["entry"], datetime.fromisoformat(slot["due"]))
        return True
