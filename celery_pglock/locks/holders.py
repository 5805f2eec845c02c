"""Who holds what: read from ``pg_locks`` and ``pg_stat_activity``, for people.

An answer is out of date when it arrives. Nothing is decided by it.
"""

from __future__ import annotations

from .keys import LockId

__all__ = ["Expression", "holder_query", "id_from_pg_locks", "matches", "statement_query"]

#: A text of SQL with a ``?`` for each value, and the values.
Expression = tuple[str, tuple[object, ...]]

HOLDER = """
    (SELECT {}
     FROM pg_locks JOIN pg_stat_activity USING (pid)
     WHERE granted AND {}
     LIMIT 1)
"""

IN_WORDS = "format('%s (pid %s%s)', nullif(application_name, ''), pid, ' from ' || client_addr)"

#: Locks of other databases are shown too, and are none of ours.
MATCHES = """
    (locktype = 'advisory' AND (classid, objid, objsubid) = (?, ?, ?)
     AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
"""


KINDRED = MATCHES.replace(
    "(classid, objid, objsubid) = (?, ?, ?)", "classid = ? AND objid <> ? AND objsubid = ?"
)


def holder_query(id: LockId, *, kindred: bool = False) -> Expression:
    """A column that tells in words which session holds an id, NULL if none does.

    With ``kindred`` it is any other 64-bit key with the same first half.
    """
    condition = KINDRED if kindred else MATCHES
    return HOLDER.format(IN_WORDS, condition), id_in_pg_locks(id)


def statement_query(id: LockId) -> Expression:
    """A column with the last statement of the session that holds an id, NULL if none does."""
    return HOLDER.format("query", MATCHES), id_in_pg_locks(id)


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
