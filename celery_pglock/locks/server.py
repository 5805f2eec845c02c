"""The server: a connection to it, whether it can lock at all, and what its errors mean.

It knows nothing of holds.
"""

from __future__ import annotations

import math
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.generators import execute

from .errors import LockDeadlock, LockError, LockSetupError, LockUnavailable
from .native import is_patched_by, native_poll
from .settings import Settings

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

__all__ = [
    "IN_RECOVERY",
    "WHO_AM_I",
    "Connection",
    "OnStandby",
    "SessionBroken",
    "cancel",
    "check_server",
    "connect",
    "cut",
    "disown",
    "hand_on_notifies",
    "is_broken",
    "patience",
    "query",
    "query_prepared",
    "reason_of",
    "refusal_of",
    "refuse_standby",
    "session_settings",
    "set_statement",
    "settings_to_server_of",
    "take_answer",
    "written_out",
]

Connection = psycopg.Connection[Any]
SomeConnection = TypeVar("SomeConnection", bound=Connection)

CONNECT_TIMEOUT = 5  # seconds: libpq's own default is to wait for ever

#: Limits that a role or a database may set, and that would end a quiet holder or a statement of ours.
#: Not every release has all of them.
ROLE_LIMITS = (
    "statement_timeout",
    "lock_timeout",
    "idle_session_timeout",
    "idle_in_transaction_session_timeout",
    "transaction_timeout",
)

#: Milliseconds between two moments of a wait at which a thread meets what is thrown into it.
LOOK_UP_EVERY = 100

#: A session's statements are few: these are for those that come with every task.
MOST_PREPARED = 16

IN_RECOVERY = "SELECT pg_is_in_recovery()"
#: The start of its postmaster tells a server from every other, and from its own copies. As a number, which
#: reads the same in each time zone: a role's or a database's may be changed at any time.
WHO_AM_I = "SELECT pg_backend_pid(), pg_is_in_recovery(), extract(epoch FROM pg_postmaster_start_time())"


class SessionBroken(Exception):
    """The connection is gone, and every hold on it. Nothing more is known about what was asked last."""


class OnStandby(LockUnavailable):
    """The server is a standby: a wrong setting, or a failover that is not over yet."""


def connect(settings: Settings, application_name: str, kind: type[SomeConnection]) -> SomeConnection:
    """Open a connection, in a bounded time. Raises `LockUnavailable`, `LockSetupError` for what is no URL."""
    try:
        given = conninfo_to_dict(settings.database_url)
    except psycopg.Error:
        # The driver's message would quote the URL, and with it a password.
        raise LockSetupError(
            "pglock_database_url is no PostgreSQL URL and no conninfo: write postgresql://..., with no driver"
        ) from None
    options: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT,
        "keepalives_idle": math.ceil(settings.loss_timeout / 3),
        "keepalives_interval": math.ceil(settings.loss_timeout / 3),
        "keepalives_count": 2,
        "tcp_user_timeout": math.ceil(settings.loss_timeout * 1000),
        **given,
    }
    if "," in str(given.get("host") or given.get("hostaddr") or os.environ.get("PGHOST", "")):
        # libpq 13 and older know no "primary".
        wanted = "primary" if psycopg.pq.version() >= 140000 else "read-write"
        options.setdefault("target_session_attrs", wanted)
    conninfo = make_conninfo(**options | {"application_name": application_name})
    try:
        return kind.connect(conninfo, autocommit=True, prepare_threshold=None)
    except psycopg.Error as exc:
        raise LockUnavailable(reason_of(exc)) from exc


def settings_to_server_of(connection: Connection, settings: Settings) -> Settings:
    """Settings that lead to the very server: no name is looked up for it, and no host tried that is dead."""
    info = connection.info
    url = make_conninfo(settings.database_url, host=info.host, hostaddr=info.hostaddr, port=info.port)
    return replace(settings, database_url=url)


def check_server(connection: Connection, who: Sequence[bytes | None], settings: Settings) -> None:
    """Refuse a server on which session locks would not hold. ``who`` is what it answered to `WHO_AM_I`."""
    pid, in_recovery, _ = who
    refuse_standby(in_recovery)
    if int(pid or 0) != connection.info.backend_pid and not settings.session_pooler:
        raise LockSetupError(
            "a connection pooler stands before the server of pglock_database_url, and session locks"
            " are shared or lost behind one in transaction or statement mode: name the server itself,"
            " or set pglock_session_pooler = True if the pooler is in session mode"
        )


def refuse_standby(in_recovery: bytes | None) -> None:
    """Raise `OnStandby` for a server that answered true to `IN_RECOVERY`."""
    if in_recovery == b"t":
        raise OnStandby(
            "pglock_database_url leads to a standby, whose locks the primary does not know:"
            " name the primary, or all hosts of the cluster"
        )


def session_settings(settings: Settings) -> dict[str, str]:
    """What the server is to know of the session.

    A backslash in what is told to others is nothing special.
    """
    freeze = settings.freeze_timeout or 0
    return {
        **dict.fromkeys(ROLE_LIMITS, "0"),
        **patience(settings),
        "idle_session_timeout": str(math.ceil(freeze * 1000)),
        "standard_conforming_strings": "on",
    }


def patience(settings: Settings) -> dict[str, str]:
    """How long the server takes a silent client for one that is alive.

    Half as long again as the client takes a silent server: an interrupted body has stopped before the name is
    free. What concerns TCP has no effect on a Unix socket.
    """
    bound = 1.5 * settings.loss_timeout
    return {
        "tcp_keepalives_idle": str(math.ceil(bound / 3)),
        "tcp_keepalives_interval": str(math.ceil(bound / 3)),
        "tcp_keepalives_count": "2",
        "tcp_user_timeout": str(math.ceil(bound * 1000)),
        # A backend that waits in the queue does not see otherwise that its client is gone.
        "client_connection_check_interval": "500",
    }


def set_statement(values: Mapping[str, str], *, local: bool = False) -> str:
    """Set what the server knows of, for the session or the transaction. Releases differ in what they know."""
    rows = ", ".join(f"('{name}', '{value}')" for name, value in values.items())
    return (
        f"SELECT set_config(name, value, {str(local).lower()}) FROM (VALUES {rows}) AS given (name, value)"
        " JOIN pg_settings USING (name)"
        # The one setting that a server may know and refuse: not every kernel tells that a client is gone.
        " WHERE name <> 'client_connection_check_interval' OR version() LIKE '%linux%'"
    )


def query(connection: Connection, statement: str) -> list[list[bytes | None]]:
    """Send one statement and return its rows as PostgreSQL wrote them.

    The steps of a psycopg cursor without the cursor, which costs as much as the round trip.
    """
    connection.pgconn.send_query(statement.encode())
    return rows_of(connection)


def query_prepared(
    connection: Connection, text: str, values: Sequence[object], prepared: dict[str, bytes]
) -> list[list[bytes | None]]:
    """Send a statement that comes again with other values, so that it is parsed and planned once.

    ``prepared`` belongs to the connection, and is bounded.
    """
    name = prepared.get(text)
    if name is None:
        if len(prepared) >= MOST_PREPARED:
            return query(connection, written_out(text, values))
        name = b"pglock%d" % len(prepared)
        connection.pgconn.send_prepare(name, numbered(text).encode())
        rows_of(connection)
        prepared[text] = name
    connection.pgconn.send_query_prepared(name, [str(value).encode() for value in values])
    return rows_of(connection)


def numbered(text: str) -> str:
    """Number the ``?`` of a text as PostgreSQL wants them."""
    first, *parts = text.split("?")
    return first + "".join(f"${number}{part}" for number, part in enumerate(parts, 1))


def written_out(text: str, values: Sequence[object]) -> str:
    """Write the values into a text: quoted, since the parser reads a bare minus as an operator."""
    first, *parts = text.split("?")
    return first + "".join(f"'{value}'{part}" for value, part in zip(values, parts, strict=True))


def rows_of(connection: Connection) -> list[list[bytes | None]]:
    """Wait for the answer to what was sent. Raises the driver's error for one of the server's."""
    result = answer_to(connection)
    if result.status not in (psycopg.pq.ExecStatus.TUPLES_OK, psycopg.pq.ExecStatus.COMMAND_OK):
        raise psycopg.errors.error_from_result(result)
    columns = range(result.nfields)
    return [[result.get_value(row, column) for column in columns] for row in range(result.ntuples)]


def answer_to(connection: Connection) -> PGresult:
    """Wait for the answer to what was sent, and return the last of its results.

    By a poll, which a signal ends at once. Psycopg's own wait costs as much as a third of a round trip;
    greenlets need it, and what the socket did not take at once.
    """
    pgconn = connection.pgconn
    result: PGresult | None = None
    if is_patched_by("gevent") or is_patched_by("eventlet") or pgconn.flush():
        [*_, result] = connection.wait(execute(pgconn))
        return result
    try:
        # The answer of a server near by is there already.
        pgconn.consume_input()
        while True:
            while pgconn.is_busy():
                poll = select.poll()
                poll.register(pgconn.socket, select.POLLIN)
                poll.poll(LOOK_UP_EVERY)
                pgconn.consume_input()
            further = pgconn.get_result()
            if further is None:
                break
            result = further
    except psycopg.Error:
        # Behind the farewell of a server that ends the session comes the end of the connection.
        if result is None or result.status is not psycopg.pq.ExecStatus.FATAL_ERROR:
            raise
    hand_on_notifies(connection)
    assert result is not None
    return result


def hand_on_notifies(connection: Connection) -> bool:
    """Let the connection's handler hear what was told and has arrived. Tell whether anything was."""
    pgconn, heard = connection.pgconn, False
    while (notify := pgconn.notifies()) is not None:
        heard = True
        if pgconn.notify_handler is not None:
            pgconn.notify_handler(notify)
    return heard


def cancel(connection: Connection, seconds: float) -> None:
    """Ask the server to end the statement under way, in a bounded time where libpq has a bound for that."""
    if hasattr(connection, "cancel_safe"):
        connection.cancel_safe(timeout=seconds)
    else:  # psycopg < 3.2: no other thread runs meanwhile
        connection.cancel()


def take_answer(connection: Connection, seconds: float) -> bool:
    """Take in what is left of an answer that nobody waits for any more, and tell whether it came in time."""
    pgconn, poll = connection.pgconn, native_poll()
    poll.register(connection.fileno(), select.POLLIN)
    until = time.monotonic() + seconds
    while True:
        while pgconn.is_busy():
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                return False
            pgconn.consume_input()
        if pgconn.get_result() is None:
            return True


def cut(connection: Connection) -> None:
    """Shut a connection down under a statement that waits for its answer, so that it fails now."""
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as handle:
        handle.shutdown(socket.SHUT_RDWR)


def disown(connection: Connection) -> None:
    """Give a connection up in a forked child, so that only the parent's end is left.

    A close in the child would end the parent's session, and a descriptor that stays open there would keep a
    dead parent's locks alive.
    """
    if connection.closed:
        return
    number = connection.fileno()
    with suppress(OSError):
        # First of all: at the limit of open files nothing else can be opened before.
        os.close(number)
        # libpq says goodbye to that number, and closes it: it must be nobody else's by then.
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)
    connection.close()


def is_broken(connection: Connection, exc: psycopg.Error) -> bool:
    """Whether an error means the end of the connection.

    ``closed`` alone does not tell: it stays False behind the farewell of a server that ends the session.
    """
    farewell = ("08", "57P", "25P03", "25P04")
    return connection.closed or exc.sqlstate is None or exc.sqlstate.startswith(farewell)


def refusal_of(exc: psycopg.Error) -> LockError:
    """What can't pass by itself (no such function, no right to call it), and what may."""
    if isinstance(exc, psycopg.errors.DeadlockDetected):
        return LockDeadlock(f"this session and another wait for each other's locks: {reason_of(exc)}")
    if exc.sqlstate is not None and exc.sqlstate.startswith("42"):
        return LockSetupError(f"the server of pglock_database_url lacks what locks need: {reason_of(exc)}")
    return LockUnavailable(reason_of(exc))


def reason_of(exc: BaseException) -> str:
    return str(exc).strip().partition("\n")[0] or type(exc).__name__
