"""Who holds what: read from ``pg_locks`` and ``pg_stat_activity``, for people.

An answer is out of date when it arrives. Nothing is decided by it.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from .keys import LockId

__all__ = [
    "Expression",
    "Holder",
    "holder_query",
    "id_from_pg_locks",
    "matches",
    "read_holder",
    "sign_of_life",
]

#: A text of SQL with a ``?`` for each value, and the values.
Expression = tuple[str, tuple[object, ...]]

#: The fields of a `Holder`. PostgreSQL keeps no time of a grant, but that of the end of a session's last
#: statement: the one that was granted the lock, or one that came later. Statements and transactions may begin
#: with a long wait for it. What others say may look like our signs of life, but in its midst.
HOLDER = """
    (SELECT json_build_array(
        format(
            '%s (pid %s%s)',
            coalesce(nullif(application_name, ''), 'a session without a name'),
            pid,
            ' from ' || host(client_addr)
        ),
        extract(epoch FROM clock_timestamp() - state_change)
            + coalesce(substring(query FROM '^/[*] quiet for ([0-9]{{1,9}}) s [*]/')::int, 0),
        query
     )
     FROM pg_locks JOIN pg_stat_activity USING (pid)
     WHERE granted AND {}
     LIMIT 1)
"""

#: Locks of other databases are shown too, and are none of ours.
MATCHES = """
    (locktype = 'advisory' AND (classid, objid, objsubid) = (?, ?, ?)
     AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
"""


KINDRED = MATCHES.replace(
    "(classid, objid, objsubid) = (?, ?, ?)", "classid = ? AND objid <> ? AND objsubid = ?"
)


class Holder(NamedTuple):
    """Who holds a lock."""

    #: Its application, process and address.
    words: str
    #: Seconds that it has had the lock at least, None where its statements are not for this role to see.
    held_for: float | None
    #: Its last statement.
    says: str


def sign_of_life(quiet_for: float) -> str:
    """What a session says that was quiet for so many seconds: its last statement lies so far back."""
    return f"/* quiet for {int(quiet_for)} s */"


def holder_query(id: LockId, *, kindred: bool = False) -> Expression:
    """A column that tells which session holds an id, for `read_holder`; NULL if none does.

    With ``kindred`` it is any other 64-bit key with the same first half.
    """
    condition = KINDRED if kindred else MATCHES
    return HOLDER.format(condition), id_in_pg_locks(id)


def read_holder(told: bytes | None) -> Holder | None:
    """Read what `holder_query` asked for; None also where it can't be read.

    It quotes a statement of anybody's, and in some of a client's encodings half a letter is a backslash.
    """
    if told is None:
        return None
    try:
        return Holder(*json.loads(told.decode(errors="replace")))
    except ValueError:
        return None


def matches(id: LockId) -> Expression:
    """A condition on ``pg_locks`` that an id fulfils."""
    return MATCHES, id_in_pg_locks(id)


def id_in_pg_locks(id: LockId) -> tuple[int, int, int]:
    """An id as the ``classid``, ``objid`` and ``objsubid`` of ``pg_locks``, which shows unsigned halves.

    ``objsubid`` tells one 64-bit key (1) from a pair (2). Source: the documentation of ``pg_locks``.
    """
    half = 1 << 32
    if len(id) == 1:
        return id[0] % (half * half) // half, id[0] % half, 1
    return id[0] % half, id[1] % half, 2


def id_from_pg_locks(classid: int, objid: int, objsubid: int) -> LockId:
    """The way back."""
    if objsubid == 1:
        return LockId(signed(classid << 32 | objid, 64))
    return LockId(signed(classid, 32), signed(objid, 32))


def signed(number: int, bits: int) -> int:
    """Read an unsigned number as a signed one."""
    return number - (1 << bits) if number >> (bits - 1) else number
