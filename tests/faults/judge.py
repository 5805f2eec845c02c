"""What PostgreSQL says about locks and sessions, asked from a session of the test's own.

The server computes the ids itself, by the rule that the documentation gives, so the package is not asked.
"""

from __future__ import annotations

import psycopg

from .fleet import wait_for

#: The name of a lock of the shop.
NAME = "celery:shop:{}"

HOLDERS = """
    WITH wanted AS (
        SELECT ('x' || left(encode(sha256(convert_to(%s, 'UTF8')), 'hex'), 16))::bit(64)::bigint AS id
    )
    SELECT pid FROM pg_locks, wanted
    WHERE locktype = 'advisory' AND granted AND objsubid = 1
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND (classid::bigint << 32 | objid::bigint) = id
"""

TAKE = """
    SELECT pg_advisory_lock(('x' || left(encode(sha256(convert_to(%s, 'UTF8')), 'hex'), 16))::bit(64)::bigint)
"""

LOCKS = """
    SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

SESSIONS = """
    SELECT application_name FROM pg_stat_activity
    WHERE datname = current_database() AND application_name LIKE 'pglock %'
"""


def take(observer: psycopg.Connection, name: str) -> None:
    """Hold one of the shop's names in the test's own session, as any other program could."""
    observer.execute(TAKE, [NAME.format(name)])


def holders(observer: psycopg.Connection, name: str) -> list[int]:
    """The server processes that hold one of the shop's names."""
    return [pid for (pid,) in observer.execute(HOLDERS, [NAME.format(name)]).fetchall()]


def locks(observer: psycopg.Connection) -> int:
    """How many advisory locks are held in this database, identities of executions included."""
    row = observer.execute(LOCKS).fetchone()
    return row[0] if row else 0


def waiting(observer: psycopg.Connection) -> int:
    """How many wait for an advisory lock in this database."""
    row = observer.execute(LOCKS.replace("AND granted", "AND NOT granted")).fetchone()
    return row[0] if row else 0


def sessions(observer: psycopg.Connection) -> list[int]:
    """The worker processes that have a session, once for each session."""
    return [int(name.split()[-1]) for (name,) in observer.execute(SESSIONS).fetchall()]


def wait_free(observer: psycopg.Connection, name: str, timeout: float = 1.0) -> None:
    """Wait until nobody holds a name: the promise is one second after its holder is gone."""
    wait_for(lambda: not holders(observer, name), f"the name {name!r} free", timeout)


def wait_no_locks(observer: psycopg.Connection, timeout: float = 2.0) -> None:
    """Wait until nothing is held at all."""
    wait_for(lambda: locks(observer) == 0, lambda: f"no lock left, but {locks(observer)} are", timeout)
