"""The ledger of a beat: which slots of its schedule were sent, and which message of each has run.

A row is one slot, ``(schedule, entry, due)``. The leader writes it before it sends, on the connection that
holds its lock: if it still leads afterwards, it did so meanwhile. It marks the row when the message is
out. A row that is not marked belongs to a leader who lost its lock or died in between: the former marks it
in a moment, and for the latter its successor sends the slot again. The first message of a slot that reaches
a worker puts its id into the row, and every other one is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone

import psycopg

from .errors import LockError, LockSetupError, LockUnavailable
from .requests import Statement
from .server import reason_of

__all__ = ["CLOCKS_DIFFER", "Ledger"]

#: The clocks of two hosts differ by seconds. What is said to be sent of a time still to come is the word of
#: one that is wrong: believed, it would keep every beat from sending until then.
CLOCKS_DIFFER = timedelta(seconds=60)
NOT_TO_COME = f"due <= clock_timestamp() + interval '{CLOCKS_DIFFER.total_seconds():g} seconds'"

CREATE = """
CREATE TABLE IF NOT EXISTS {table} (
    schedule text NOT NULL,
    entry text NOT NULL,
    due timestamptz NOT NULL,
    sent_at timestamptz,
    task_id text,
    PRIMARY KEY (schedule, entry, due)
)
"""

EXISTS = "SELECT to_regclass({name}) IS NOT NULL"

CLAIM = """
INSERT INTO {table} (schedule, entry, due) VALUES ({schedule}, {entry}, {due})
ON CONFLICT (schedule, entry, due) DO UPDATE SET due = excluded.due WHERE {table}.sent_at IS NULL
RETURNING true
"""

IN_DOUBT = """
SELECT true FROM {table}
WHERE (schedule, entry, due) = ({schedule}, {entry}, {due}) AND sent_at IS NULL
"""

RECORD = """
UPDATE {table} SET sent_at = clock_timestamp()
WHERE (schedule, entry, due) = ({schedule}, {entry}, {due})
"""

#: In UTC whatever the session's time zone. Of a slot that is still to come a claim knows.
LAST = """
SELECT entry, to_char(max(due) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US')
FROM {table} WHERE schedule = {schedule} AND sent_at IS NOT NULL AND {not_to_come}
GROUP BY entry
"""

#: Two statements at once are one transaction: the limit ends with it. Who asks holds the name of its task
#: meanwhile, and can ask again later.
RUN = """
SET LOCAL lock_timeout = '200ms';
INSERT INTO {table} (schedule, entry, due, task_id) VALUES ({schedule}, {entry}, {due}, {task_id})
ON CONFLICT (schedule, entry, due) DO UPDATE SET task_id = excluded.task_id
WHERE coalesce({table}.task_id, excluded.task_id) = excluded.task_id
RETURNING true
"""

#: The last slot of an entry stays, however old: it tells when the next one is due.
CLEAN = """
DELETE FROM {table} AS old
WHERE schedule = {schedule} AND due < clock_timestamp() - interval '1 day'
  AND (entry <> ALL (ARRAY[{entries}]::text[])
       OR due < (SELECT max(due) FROM {table} AS late
                 WHERE late.schedule = old.schedule AND late.entry = old.entry AND sent_at IS NOT NULL
                   AND {not_to_come}))
"""


class Ledger:
    """The rows of one schedule. Each method raises `LockUnavailable` or `LockSetupError`."""

    def __init__(self, table: str, schedule: str, perform: Callable[[Statement], object]) -> None:
        #: Quoted, here and where somebody is told what to run: capitals are part of the name.
        self._table = ".".join(identifier(part) for part in table.split("."))
        self.schedule = schedule
        self._perform = perform

    def create(self) -> None:
        """Create the table where it is missing, as far as the role may."""
        ((exists,),) = self._ask(EXISTS, name=as_sql(self._table))
        if exists != b"t":
            self._ask(CREATE)

    def last(self) -> dict[str, datetime]:
        """Return the last slot of each entry that was sent."""
        return {text(entry): moment(text(due)) for entry, due in self._ask(LAST)}

    def claim(self, entry: str, due: datetime) -> bool:
        """Tell whether a slot is still to be sent, and write down that it is about to be."""
        return bool(self._ask(CLAIM, entry=as_sql(entry), due=as_sql(due)))

    def is_in_doubt(self, entry: str, due: datetime) -> bool:
        """Tell whether a leader wrote down that a slot is about to be sent, and not that it was."""
        return bool(self._ask(IN_DOUBT, entry=as_sql(entry), due=as_sql(due)))

    def record(self, entry: str, due: datetime) -> None:
        """Write down that a slot was sent."""
        self._ask(RECORD, entry=as_sql(entry), due=as_sql(due))

    def run(self, entry: str, due: str, task_id: str) -> bool:
        """Tell whether the message with this id is the one that runs its slot: the first that asks."""
        return bool(self._ask(RUN, entry=as_sql(entry), due=as_sql(due), task_id=as_sql(task_id)))

    def clean(self, entries: Iterable[str]) -> None:
        """Delete what is older than a day, but for the last slot of each of these entries."""
        self._ask(CLEAN, entries=", ".join(as_sql(entry) for entry in entries))

    def _ask(self, template: str, **values: str) -> list[list[bytes | None]]:
        values |= {"table": self._table, "schedule": as_sql(self.schedule), "not_to_come": NOT_TO_COME}
        asked = Statement(template.format(**values))
        self._perform(asked)
        if isinstance(asked.error, LockError):
            raise asked.error
        if asked.error is not None:
            raise self._refusal(asked.error)
        if asked.rows is None:
            raise LockUnavailable("no answer")
        return asked.rows

    def _refusal(self, error: psycopg.Error) -> LockUnavailable | LockSetupError:
        """What can't pass by itself (no table and no right to make it), and what may."""
        if error.sqlstate is None or not error.sqlstate.startswith(("42", "3F")):
            return LockUnavailable(f"the ledger of the beats could not be asked: {reason_of(error)}")
        create = " ".join(CREATE.format(table=self._table).split())
        return LockSetupError(
            f"the ledger of pglock_beat_ledger can't be used: {reason_of(error)}. Let somebody who may run:"
            f" {create}; GRANT SELECT, INSERT, UPDATE, DELETE ON {self._table} TO <the role of the beats>;"
        )


def as_sql(value: str | datetime) -> str:
    """Quote a value: statements hold no parameters, see `sql`."""
    text = value if isinstance(value, str) else value.isoformat()
    escaped = text.replace("'", "''")
    return f"'{escaped}'" if "\\" not in text else "E'" + escaped.replace("\\", "\\\\") + "'"


def identifier(name: str) -> str:
    """Quote a name. Psycopg's own needs a connection, before 3.2."""
    return '"' + name.replace('"', '""') + '"'


def text(value: bytes | None) -> str:
    return (value or b"").decode()


def moment(written: str) -> datetime:
    return datetime.fromisoformat(written).replace(tzinfo=timezone.utc)
