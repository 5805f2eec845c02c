"""One PostgreSQL connection and the holds on it. All SQL on session locks stands here.

Facts that shaped it:

- A session lock lives as long as its connection. Closing the connection frees all that is on it, which is
  the answer to every doubt.
- Locks stack inside a session: PostgreSQL grants a held id again to the session that has it. So the table
  of holds, not the server, decides between the threads and greenlets of one process.
- One statement may carry many questions, one column for each, so that fifty of them cost one round trip.
- Statements hold literal numbers and no parameters: nothing is prepared on the server, which poolers would
  lose.

It does not know threads: exactly one caller at a time, see `keeper`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

import psycopg

from .errors import LockError, LockSetupError
from .hold import Hold
from .holders import holder_query, id_from_pg_locks
from .keys import LockId
from .server import (
    WHO_AM_I,
    SessionBroken,
    check_server,
    connect,
    is_broken,
    query,
    reason_of,
    refusal_of,
    session_settings,
    set_statement,
)
from .settings import Settings

__all__ = ["Acquire", "Answer", "FindHolder", "NextToken", "Ping", "Release", "Request", "Session"]

#: The pair space's first key of the lock that proves exclusion, so that it meets no named lock.
PROOF_SUBSYSTEM = 0x70676C6B

OWN_LOCKS = """
    SELECT classid::bigint, objid::bigint, objsubid FROM pg_locks
    WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted
"""


class Answer(Enum):
    """What came of one `Acquire`."""

    GRANTED = "granted"
    #: Somebody else holds the name.
    CONFLICT = "conflict"
    #: This very execution is under way elsewhere: its message came a second time.
    SAME_EXECUTION = "same execution"
    #: Nobody could say: ``Acquire.error`` tells why.
    UNKNOWN = "unknown"


@dataclass(eq=False)
class Acquire:
    """Ask for a hold, together with the identity of the execution that asks.

    The identity is asked for first and kept whatever becomes of the name.
    """

    hold: Hold
    identity: Hold | None = None
    answer: Answer = Answer.UNKNOWN
    error: LockError | None = None


@dataclass(eq=False)
class FindHolder:
    """Ask who holds an id, in words."""

    id: LockId
    holder: str | None = None


@dataclass(eq=False)
class NextToken:
    """Ask for a number that is greater than every one before, in the whole cluster."""

    token: int | None = None


@dataclass(eq=False)
class Ping:
    """Ask for a sign of life. Owed unlocks ride along."""


@dataclass(eq=False)
class Release:
    """Give a hold back. Does nothing for one that is not held."""

    hold: Hold


Request = Acquire | Release | FindHolder | NextToken | Ping


class Session:
    """One connection of the package's own, never pooled and never lent."""

    def __init__(self, settings: Settings, application_name: str) -> None:
        """Connect. Nothing works before `set_up`. Raises `LockUnavailable` or `LockSetupError`."""
        self._settings = settings
        self._holds: dict[LockId, Hold] = {}
        #: Holds whose unlock is part of the statement under way.
        self._leaving: list[Hold] = []
        #: Holds that are over, whose unlock rides on the next statement.
        self._owed: list[Hold] = []
        self._sent_at: float | None = None
        self._answered_at = time.monotonic()
        #: When its holds were given up although the connection stands, see `give_up`.
        self.given_up_at: float | None = None
        self._connection = connect(settings, application_name)

    def __repr__(self) -> str:
        state = "closed" if self._connection.closed else f"{len(self._holds)} held"
        return f"<Session pid={self._connection.info.backend_pid if state != 'closed' else None} [{state}]>"

    def set_up(self) -> None:
        """Check the server and tell it what it is to know. Raises `LockUnavailable` or `LockSetupError`."""
        try:
            check_server(self._connection, self._query(WHO_AM_I)[0], self._settings)
            self._query(set_statement(session_settings(self._settings)))
        except psycopg.Error as exc:
            raise refusal_of(exc) from exc

    @property
    def idle(self) -> bool:
        """Whether nobody works under it."""
        return all(hold in self._owed for hold in self._holds.values())

    @property
    def socket(self) -> int:
        """The descriptor of the connection's socket."""
        return self._connection.fileno()

    @property
    def remote(self) -> bool:
        """Whether a network lies between here and the server, which may fall silent."""
        return not self._connection.info.host.startswith(("/", "@"))

    @property
    def holds_something(self) -> bool:
        """Whether anything depends on this session."""
        return bool(self._holds)

    @property
    def silent_for(self) -> float:
        """Seconds since the question that is not answered yet was sent; 0 where there is none."""
        sent_at = self._sent_at
        return 0.0 if sent_at is None else time.monotonic() - sent_at

    @property
    def quiet_for(self) -> float:
        """Seconds since the last answer."""
        return time.monotonic() - self._answered_at

    def prove_exclusion(self, other: Session) -> None:
        """Let another session try what this one holds. Raises `LockSetupError` if it gets it.

        Some servers that speak PostgreSQL's protocol answer true to everybody.
        """
        hold, rival = (Acquire(Hold(LockId(PROOF_SUBSYSTEM, os.getpid() % 2**31))) for _ in range(2))
        self.perform([hold])
        other.perform([rival])
        self.perform([Release(hold.hold)])
        if hold.answer is Answer.GRANTED and rival.answer is not Answer.CONFLICT:
            raise LockSetupError(
                "the advisory locks of the server of pglock_database_url do not exclude: it granted one"
                " lock to two sessions. Name a PostgreSQL server"
            )

    def owe(self, hold: Hold) -> None:
        """Release a hold with the next statement, whatever that will be."""
        self._owed.append(hold)

    def perform(self, requests: Sequence[Request]) -> None:
        """Answer all requests with one statement.

        Raises `SessionBroken` when the connection is gone, and `LockUnavailable` or `LockSetupError` when
        the server answered with an error; then nothing was granted and all that was to be released is.
        """
        owed, self._owed = self._owed, []
        columns = [self._plan_release(hold) for hold in owed]
        columns += [self._plan(request) for request in requests]
        try:
            self._execute([column for column in columns if column is not None])
        except psycopg.Error as exc:
            if not is_broken(self._connection, exc):
                self._sent_at = None
                self._reconcile()
                raise refusal_of(exc) from exc
            self.close(reason_of(exc))
            raise SessionBroken(reason_of(exc)) from exc
        except LockSetupError as exc:
            self.close(str(exc))
            raise

    def give_up(self, reason: str) -> None:
        """Count all that is held as lost, and leave the connection as it is for now.

        Called while a statement may be waiting for its answer, from another thread.
        """
        self.given_up_at = time.monotonic()
        for hold in [*self._holds.values(), *self._leaving]:
            if hold.status is hold.Status.HELD:
                hold._lost(reason)

    def close(self, reason: str) -> None:
        """Close the connection, which frees all that is on it. What was still held counts as lost."""
        self.give_up(reason)
        self._holds, self._leaving, self._owed = {}, [], []
        self._connection.close()

    def cut(self) -> None:
        """Shut the connection down under a statement that waits for an answer, so that it fails now."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.socket)) as handle:
            handle.shutdown(socket.SHUT_RDWR)

    def disown(self) -> None:
        """Give the connection up in a forked child, so that only the parent's end is left.

        A close in the child would end the parent's session, and a descriptor that stays open there would
        keep a dead parent's locks alive.
        """
        if self._connection.closed:
            return
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, self._connection.fileno())
        os.close(null)
        self._connection.close()

    # One statement: a column for each question, and what to do with its value.

    def _plan(self, request: Request) -> Column | None:
        if isinstance(request, Release):
            return self._plan_release(request.hold)
        if isinstance(request, Acquire):
            return self._plan_acquire(request)
        if isinstance(request, FindHolder):
            return self._plan_finding(request)
        if isinstance(request, NextToken):
            return self._plan_token(request)
        return "true", ignore

    def _plan_release(self, hold: Hold) -> Column | None:
        if self._holds.get(hold.id) is not hold:
            return None
        del self._holds[hold.id]
        self._leaving.append(hold)

        def settle(unlocked: bytes | None) -> None:
            if truth(unlocked):
                hold._released()
            else:
                hold._lost("PostgreSQL did not know it any more")

        return f"pg_advisory_unlock({sql(hold.id)})", settle

    def _plan_acquire(self, request: Acquire) -> Column | None:
        hold, identity = request.hold, request.identity
        if identity is not None and identity.id in self._holds:
            request.answer = Answer.SAME_EXECUTION
            return None
        taken = hold.id in self._holds
        if taken and identity is None:
            request.answer = Answer.CONFLICT
            return None
        # Entered before the answer, so that the next question of this statement meets it.
        asked = [each for each in (identity, None if taken else hold) if each is not None]
        self._holds.update((each.id, each) for each in asked)

        def settle(value: bytes | None) -> None:
            granted = truth(value) if identity is None or value is not None else None
            request.answer = ANSWERS[granted]
            if identity is not None and granted is not None:
                identity._granted()
            if granted:
                hold._granted()
            self._forget_ungranted(asked)

        question = "false" if taken else f"pg_try_advisory_lock({sql(hold.id)})"
        if identity is not None:
            question = f"CASE WHEN pg_try_advisory_lock({sql(identity.id)}) THEN {question} END"
        return question, settle

    def _plan_finding(self, request: FindHolder) -> Column:
        def settle(holder: bytes | None) -> None:
            request.holder = None if holder is None else holder.decode(errors="replace")

        return holder_query(request.id), settle

    def _plan_token(self, request: NextToken) -> Column:
        def settle(token: bytes | None) -> None:
            request.token = None if token is None else int(token)

        return "pg_current_xact_id()", settle

    def _execute(self, columns: Sequence[Column]) -> None:
        if columns:
            row = self._query("SELECT " + ", ".join(column for column, _ in columns))[0]
            for (_, settle), value in zip(columns, row, strict=True):
                settle(value)
        self._leaving.clear()

    def _query(self, statement: str) -> list[list[bytes | None]]:
        self._sent_at = time.monotonic()
        rows = query(self._connection, statement)
        self._sent_at, self._answered_at = None, time.monotonic()
        return rows

    def _forget_ungranted(self, holds: Iterable[Hold]) -> None:
        for hold in holds:
            if hold.status is not hold.Status.HELD and self._holds.get(hold.id) is hold:
                del self._holds[hold.id]

    def _reconcile(self) -> None:
        """Bring the server back to what the table says.

        A statement that failed, say on a full lock table, may have locked and unlocked half of its ids.
        """
        self._forget_ungranted(list(self._holds.values()))
        try:
            own = {id_from_pg_locks(*(int(half or 0) for half in row)) for row in self._query(OWN_LOCKS)}
            for id in own - self._holds.keys():
                self._query(f"SELECT pg_advisory_unlock({sql(id)})")
        except psycopg.Error as exc:
            self.close(reason_of(exc))
            raise SessionBroken(reason_of(exc)) from exc
        for hold in self._leaving:
            hold._released()
        self._leaving.clear()


Column = tuple[str, Callable[[bytes | None], None]]


def truth(value: bytes | None) -> bool:
    """Read a boolean. Raises `LockSetupError` for anything else, which must not pass for a refusal."""
    if value not in (b"t", b"f"):
        raise LockSetupError(f"the server's advisory locks answer {value!r}: name a PostgreSQL server")
    return value == b"t"


def ignore(_: bytes | None) -> None:
    """Settle nothing: the answer as such is the sign of life."""


#: What the value of an `Acquire`'s column means. NULL: the identity was refused, the name not asked for.
ANSWERS = {True: Answer.GRANTED, False: Answer.CONFLICT, None: Answer.SAME_EXECUTION}


def sql(id: LockId) -> str:
    """An id as the arguments of PostgreSQL's functions, whose number tells the two key spaces apart.

    Quoted, since a bare negative number is an operator at work for the parser.
    """
    return ", ".join(f"'{key}'" for key in id)
