"""A hold that lives in an open transaction, which the body may use for its own work.

Success commits the work and frees the name in one step; every other end undoes both. A connection that is
lost has written nothing. Facts that shaped it:

- It works behind a pooler in transaction mode: nothing is prepared, nothing is set beyond the transaction,
  and all of it goes through one server connection because it is one transaction.
- A ``COMMIT`` or ``ROLLBACK`` of the body ends the lock while the body goes on. The methods are refused, and
  the SQL is noticed before the end: the lock is looked for once more before the commit.
- A try-lock in READ COMMITTED holds no snapshot, so that an idle transaction does not hold vacuum back.
"""

from __future__ import annotations

from typing import Any, NoReturn

import psycopg

from .errors import LockError, LockUnavailable
from .hold import Hold
from .holders import Expression, Holder, holder_query, matches, read_holder
from .interrupt import Interrupt
from .keys import LockId
from .line import RESET, Line, ask_once, keep_warm, warm_line
from .requests import Acquire, Answer
from .server import (
    Connection,
    is_broken,
    patience,
    query,
    reason_of,
    refusal_of,
    set_statement,
    written_out,
)
from .settings import Settings
from .sql import DRAW, answer_of, if_locked, milliseconds, queue_up, try_lock

__all__ = ["BodyConnection", "Transaction"]

#: READ WRITE is refused by a standby, and overrules a role's default.
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"

#: What else a body left on the connection is not the next one's either: a DISCARD ALL in parts, since that
#: runs in no transaction. They follow on BEGIN: some take a snapshot, behind which its modes are refused.
#: Behind a pooler it is all other clients'.
DISCARD = (
    "CLOSE ALL; DEALLOCATE ALL; UNLISTEN *; DISCARD TEMP; DISCARD SEQUENCES; SELECT pg_advisory_unlock_all()"
)

#: Limits that would end a transaction whose body is busy elsewhere.
UNLIMITED = {"idle_in_transaction_session_timeout": "0", "transaction_timeout": "0"}

#: The body's own limits, lifted while its task waits.
TIMEOUTS = ("lock_timeout", "statement_timeout")
SHOW = "SELECT current_setting('lock_timeout'), current_setting('statement_timeout')"

#: What a connection that is gone makes of the statements on it.
SIGNS_OF_LOSS = (psycopg.OperationalError, psycopg.InternalError)

ENDED_BY_BODY = "the body ended its transaction itself"


class BodyConnection(psycopg.Connection[Any]):
    """What ``self.lock.connection`` is: a connection whose transaction is its task's to end.

    One for each body, on a session that more of them may use: what it is told (adapters, handlers, a row
    factory) ends with it.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.pgconn)
        self.prepare_threshold = None

    def __del__(self, *_: Any) -> None:
        # Psycopg's own warns of a session that is still open: it is the line's to close.
        pass

    def __enter__(self) -> NoReturn:
        self.close()

    def close(self) -> NoReturn:
        raise TypeError(
            "this connection holds the task's lock and stays open: use it without a block of its own,"
            " or connection.transaction() for a savepoint"
        )

    def commit(self) -> NoReturn:
        raise TypeError("this transaction holds the task's lock: it is committed when the task succeeds")

    def rollback(self) -> NoReturn:
        raise TypeError(
            "this transaction holds the task's lock: raise to roll it back, or use connection.transaction()"
            " for a savepoint"
        )


class Transaction:
    """The scope of one hold: its transaction from the first statement to its end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._line: Line | None = None

    def acquire(self, hold: Hold, identity: Hold | None = None) -> Acquire:
        """Begin a transaction and try to lock, once. It is over again unless the lock was granted."""
        asked = Acquire(hold, identity)
        question = try_lock(hold, xact=True)
        if identity is not None:
            question = if_locked(identity, question, xact=True)
        self._ask(asked, question)
        return asked

    def waiter(self) -> Transaction:
        """The scope to `wait` at: itself, since it has a connection of its own."""
        return self

    def wait(self, hold: Hold, seconds: float | None, identity: Hold | None = None) -> Acquire:
        """Begin a transaction and take a turn in PostgreSQL's own queue; ``seconds`` None: for ever.

        The identity ended with the transaction of the first question, and is asked for again.
        """
        if seconds == 0:
            return self.acquire(hold, identity)
        asked, question = Acquire(hold, identity, wait=seconds), queue_up(hold, xact=True)
        if identity is not None:
            question = if_locked(identity, question, xact=True)
        self._ask(asked, question)
        return asked

    def release(self, hold: Hold, *, linger: bool = False, success: bool = True) -> None:  # noqa: ARG002
        """Commit with success, else roll back. Raises what the commit raises."""
        line = self._line
        if line is None:
            return
        try:
            self._end(line, hold, success=success)
        except BaseException as exc:
            # Also an interrupt: a line is either put back at the end of its transaction, or closed.
            if line.is_gone_by(exc):
                hold._lost(reason_of(exc))
            line.close()
            if success or not isinstance(exc, psycopg.Error):
                raise
        finally:
            self._line = None

    def _end(self, line: Line, hold: Hold, *, success: bool) -> None:
        if hold.lost:
            line.close()
            return
        failed = line.connection.info.transaction_status is psycopg.pq.TransactionStatus.INERROR
        try:
            # What failed can't be asked. It is rolled back, unless its body takes it for a success.
            if (success or not failed) and not still_held(line, hold):
                hold._lost(ENDED_BY_BODY, by_body=True)
        except psycopg.Error as exc:
            # Nothing was committed. Of a COMMIT without an answer nobody knows: there the error stays.
            if not line.is_gone_by(exc):
                raise
            hold._lost(reason_of(exc))
            line.close()
            return
        if success and not hold.lost:
            # In no bounded time: a deferred constraint or a synchronous standby may take any.
            query(line.connection, "COMMIT")
        else:
            line.ask("ROLLBACK")
        hold._released()
        keep_warm(line)

    def release_soon(self, hold: Hold) -> None:
        """Nothing is left to release: an identity ends with the transaction."""

    def interrupt_for(self, hold: Hold) -> Interrupt:
        """What stops the code that runs inside of it when the hold is lost. Raises `LockLost` then."""
        return Interrupt(hold, self._line.running if self._line is not None else set())

    def holder_of(self, id: LockId, *, kindred: bool = False) -> Holder | None:
        """Tell who holds an id at this moment; None if nobody does, or nobody could be asked.

        With ``kindred`` any other id with the same first half.
        """
        try:
            holder = ask_once(self._settings, "SELECT " + written_out(*holder_query(id, kindred=kindred)))
        except LockError:
            return None
        return read_holder(holder)

    def _ask(self, asked: Acquire, question: Expression) -> None:
        line = warm_line(self._settings)
        was_warm = line is not None
        try:
            line = line or Line(self._settings)
            try:
                self._try(line, asked, question)
            except LineLost:
                # A warm one may have ended while nobody used it: that costs nothing. On a silent network a
                # second try would be as long.
                if not was_warm or line.was_cut:
                    raise
                line = Line(self._settings)
                self._try(line, asked, question)
        except BaseException as exc:
            # Refused, broken or interrupted: nothing is to stay held on it.
            self._line = None
            if line is not None:
                line.close()
            if not isinstance(exc, (LineLost, LockError)):
                raise
            asked.answer = Answer.UNKNOWN
            asked.error = exc if isinstance(exc, LockError) else LockUnavailable(str(exc))

    def _try(self, line: Line, asked: Acquire, question: Expression) -> None:
        try:
            try:
                slot = self._lock(line, asked, question)
            except psycopg.errors.LockNotAvailable:
                slot = b"-1"
            self._settle(asked, line, slot)
        except psycopg.Error as exc:
            broken = is_broken(line.connection, exc)
            line.close()
            if broken:
                raise LineLost(line.why_broken(exc)) from exc
            raise refusal_of(exc) from exc

    def _lock(self, line: Line, asked: Acquire, question: Expression) -> bytes | None:
        unlimited = set_statement({**UNLIMITED, **patience(self._settings)}, local=True)
        lock = f"SELECT {written_out(*question)}, pg_backend_pid()"
        begin = [RESET, BEGIN, unlimited]
        if line.was_lent and line.is_direct:
            begin.insert(2, DISCARD)
        if asked.wait == 0:
            slot, pid = line.ask(*begin, lock)[0]
        else:
            before = line.ask(*begin, SHOW)[0]
            waits = dict(zip(TIMEOUTS, (milliseconds(asked.wait), "0"), strict=True))
            line.ask(set_statement(waits, local=True))
            slot, pid = line.ask(lock, waits=asked.wait)[0]
            line.ask(set_statement(dict(zip(TIMEOUTS, map(text, before), strict=True)), local=True))
        line.is_direct = int(pid or 0) == line.connection.info.backend_pid
        return slot

    def _settle(self, asked: Acquire, line: Line, slot: bytes | None) -> None:
        asked.answer = (
            Answer.SAME_EXECUTION if slot is None and asked.identity is not None else answer_of(slot)
        )
        if asked.answer is not Answer.GRANTED:
            try:
                line.ask("ROLLBACK")
            except psycopg.Error:
                line.close()
                return
            keep_warm(line)
            return
        if asked.identity is not None:
            asked.identity._granted(0)
        self._line, line.hold = line, asked.hold
        asked.hold._granted(0)
        line.was_lent = True
        asked.hold._connection = BodyConnection(line.connection)
        asked.hold._signs_of_loss = SIGNS_OF_LOSS
        asked.hold._token_source = self._token
        if line.ended:
            asked.hold._lost("PostgreSQL ended its session")

    def _token(self) -> int:
        line = self._line
        if line is None or line.hold is None:
            raise LockUnavailable("its transaction is over")
        try:
            # What is drawn in the open transaction is not written before its end.
            token = ask_once(self._settings, DRAW)
            # In this order: what was drawn before the end is below what the next holder draws.
            if not still_held(line, line.hold):
                line.hold._lost(ENDED_BY_BODY, by_body=True)
        except psycopg.Error as exc:
            if line.is_gone_by(exc):
                line.hold._lost(reason_of(exc))
                raise line.hold.loss() from exc
            raise LockUnavailable(reason_of(exc)) from exc
        except LockUnavailable:
            line.hold.check()
            raise
        return int(token or 0)


def still_held(line: Line, hold: Hold) -> bool:
    """Whether the transaction is still the one that took the lock. Raises for one that failed meanwhile."""
    status = line.connection.info.transaction_status
    if status is psycopg.pq.TransactionStatus.INERROR:
        raise psycopg.errors.InFailedSqlTransaction("the body went on after an error of its transaction")
    if status is psycopg.pq.TransactionStatus.IDLE:
        return False
    mine = f"granted AND pid = pg_backend_pid() AND {written_out(*matches(hold.id))}"
    return line.ask(f"SELECT EXISTS (SELECT FROM pg_locks WHERE {mine})")[0][0] == b"t"


class LineLost(Exception):
    """The connection broke before the lock was granted."""


def text(value: bytes | None) -> str:
    return (value or b"0").decode()
