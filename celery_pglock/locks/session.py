"""One PostgreSQL connection and the holds on it.

Facts that shaped it:

- A session lock lives as long as its connection. Closing the connection frees all that is on it, which is
  the answer to every doubt.
- Locks stack inside a session: PostgreSQL grants a held id again to the session that has it. So the table
  of holds, not the server, decides between the threads and greenlets of one process.
- One statement may carry many questions, one column for each, so that fifty of them cost one round trip.

It does not know threads: exactly one caller at a time, see `keeper`.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Iterable, Sequence

import psycopg

from .errors import LockError, LockSetupError
from .hold import Hold
from .holders import Expression, holder_query, id_from_pg_locks, read_holder, sign_of_life
from .keys import LockId
from .native import native_poll
from .requests import (
    Acquire,
    Answer,
    FindHolder,
    Ping,
    Release,
    Request,
    Statement,
)
from .server import (
    WHO_AM_I,
    Connection,
    SessionBroken,
    cancel,
    check_server,
    connect,
    cut,
    disown,
    hand_on_notifies,
    is_broken,
    query,
    query_prepared,
    reason_of,
    refusal_of,
    session_settings,
    set_statement,
    settings_to_server_of,
    take_answer,
    written_out,
)
from .settings import Settings
from .sql import (
    OWN_LOCKS,
    REFUSED,
    answer_of,
    if_locked,
    milliseconds,
    nobody_waits_for,
    queue_up,
    truth,
    try_lock,
    try_slot,
    unlock,
    unlock_id,
)

__all__ = ["Session"]

#: Seconds for the server to take back a wait that was interrupted.
TAKEN_BACK_WITHIN = 1.0


class Session:
    """One connection of the package's own, never pooled and never lent."""

    def __init__(self, settings: Settings, application_name: str) -> None:
        """Connect. Nothing works before `set_up`. Raises `LockUnavailable` or `LockSetupError`."""
        self._settings = settings
        #: Exclusive holds by what they occupy, and shared ones, of which many may have one id.
        self._holds: dict[LockId, Hold] = {}
        self._readers: dict[LockId, list[Hold]] = {}
        #: Holds whose unlock is part of the statement under way.
        self._leaving: list[Hold] = []
        #: Holds that are over, whose unlock rides on the next statement.
        self._owed: list[Hold] = []
        self._prepared: dict[str, bytes] = {}
        self._sent_at: float | None = None
        #: Until when the statement under way may stand in the queue; 0 for one that does not.
        self._queues_until = 0.0
        #: When somebody else saw it there last.
        self._seen_in_queue_at = -math.inf
        self._answered_at = time.monotonic()
        #: When it last answered more than a sign of life.
        self._worked_at = self._answered_at
        #: When somebody last looked whether the URL leads there, and which server it is, once that is known.
        self.located_at = time.monotonic()
        self.server: bytes | None = None
        #: Its process there, and settings that lead to this very server, whatever the URL leads to.
        self.pid: int | None = None
        self.settings_there = settings
        #: When its holds were given up although the connection stands, see `give_up`.
        self.given_up_at: float | None = None
        #: Whether that was for its silence.
        self.fell_silent = False
        self._connection = connect(settings, application_name, Connection)
        # Kept, since the watch may look at a session while somebody else closes it.
        self._socket: int = self._connection.fileno()
        # Where the end of a connection can't be watched for, it is asked for like a silent network.
        local = self._connection.info.host.startswith(("/", "@")) and hasattr(select, "POLLRDHUP")
        self._remote = not local

    def __repr__(self) -> str:
        if self._connection.closed:
            return "<Session [closed]>"
        return f"<Session pid={self._connection.info.backend_pid} [{len(self._all_holds())} held]>"

    def _all_holds(self) -> list[Hold]:
        # Copied in single steps in C: who gives a session up looks from another thread.
        held = [list(self._holds.values()), *map(list, list(self._readers.values()))]
        return [hold for holds in held for hold in holds]

    def set_up(self) -> None:
        """Check the server and tell it what it is to know. Raises `LockUnavailable` or `LockSetupError`."""
        try:
            [who] = self._query(WHO_AM_I)
            check_server(self._connection, who, self._settings)
            # In this order: a look that began earlier may have found the server before.
            self.located_at = time.monotonic()
            self.pid, self.server = int(who[0] or 0), who[2]
            self.settings_there = settings_to_server_of(self._connection, self._settings)
            self._query(set_statement(session_settings(self._settings)))
        except psycopg.Error as exc:
            raise refusal_of(exc) from exc

    @property
    def idle(self) -> bool:
        """Whether nobody works under it."""
        held = [hold for hold in self._all_holds() if hold.status is hold.Status.HELD]
        return all(hold in self._owed for hold in held)

    @property
    def socket(self) -> int:
        """The descriptor of the connection's socket, also of a closed one."""
        return self._socket

    @property
    def remote(self) -> bool:
        """Whether a network lies between here and the server, which may fall silent."""
        return self._remote

    @property
    def holds_something(self) -> bool:
        """Whether anything depends on this session."""
        return bool(self._holds or self._readers)

    @property
    def carries_work(self) -> bool:
        """Whether somebody works under it, and does not only wait."""
        return any(hold.is_for_work for hold in self._all_holds())

    @property
    def unseen_for(self) -> float:
        """Seconds since it was last known to stand in the server's queue; 0 where it does not."""
        # In this order, see `silent_for`.
        in_queue, sent_at = self._queues_until, self._sent_at
        if not in_queue or sent_at is None:
            return 0.0
        return time.monotonic() - max(sent_at, self._seen_in_queue_at)

    def seen_in_queue(self, at: float) -> None:
        """Take down that it was seen in the server's queue at a moment, by who could not ask it."""
        self._seen_in_queue_at = max(at, self._seen_in_queue_at)

    @property
    def silent_for(self) -> float:
        """Seconds since the question that is not answered yet was sent; 0 where there is none.

        In the queue they count from the moment when the wait's time is up, since it is silent until then.
        """
        # In this order: a wait that ends meanwhile must not pass for a question that was sent long ago.
        queues_until, sent_at = self._queues_until, self._sent_at
        return 0.0 if sent_at is None else max(0.0, time.monotonic() - max(sent_at, queues_until))

    def has_an_answer(self) -> bool:
        """Whether an answer lies in the socket: then it is this process that stands still, and no network."""
        poll = native_poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def quiet_for(self) -> float:
        """Seconds since the last answer."""
        return time.monotonic() - self._answered_at

    @property
    def used_since_located(self) -> bool:
        """Whether it holds something, is being asked, or was of use since it was located last."""
        return self.holds_something or self._sent_at is not None or self._worked_at > self.located_at

    @property
    def may_lead_elsewhere(self) -> bool:
        """Whether it lay idle for so long that nobody has looked: then a new one is as cheap as a look."""
        if self.used_since_located:
            return False
        pause = self._settings.locate_every
        return pause is not None and time.monotonic() - self.located_at > pause

    def owe(self, hold: Hold) -> None:
        """Release a hold with the next statement, whatever that will be."""
        self._owed.append(hold)

    def listen(self, channel: str, told: Callable[[str], object]) -> None:
        """Hand on what is told on a channel, before the answer to each statement and in `hear`.

        Raises `LockError`.
        """

        def hand_on(notify: psycopg.Notify) -> None:
            told(notify.payload)

        self._connection.add_notify_handler(hand_on)
        try:
            self._query(f'LISTEN "{channel}"')
        except psycopg.Error as exc:
            raise refusal_of(exc) from exc

    def hear(self) -> bool:
        """Take in what was told since the last statement, and do not wait. Tell whether anything was.

        Raises `SessionBroken`.
        """
        try:
            self._connection.pgconn.consume_input()
            return hand_on_notifies(self._connection)
        except psycopg.Error as exc:
            self.close(reason_of(exc))
            raise SessionBroken(reason_of(exc)) from exc

    def perform(self, requests: Sequence[Request]) -> None:
        """Answer a batch of requests with one statement.

        Raises `SessionBroken` when the connection is gone, and `LockError` when the server answered with an
        error; then nothing was granted and all that was to be released is.
        """
        first = requests[0]
        if isinstance(first, Ping) and len(requests) == 1:
            self._ask(requests, before=sign_of_life(time.monotonic() - self._worked_at) + " ")
            return
        if isinstance(first, Statement):
            self._run(first)
        elif isinstance(first, Acquire) and first.wait != 0 and len(requests) == 1:
            self._stand_in_queue(first)
        else:
            self._ask(requests)
        self._worked_at = time.monotonic()

    def leave_queue(self) -> bool:
        """Take back a wait that was interrupted, so that what else is held stays.

        False where nothing else is, or all of it is lost, where the interrupt came elsewhere than in the
        queue, and where PostgreSQL does not answer at once: then what it has granted is unknown.
        """
        in_queue = self._queues_until and self._sent_at is not None
        is_lost = self._connection.closed or self.given_up_at is not None
        if not in_queue or not self.holds_something or is_lost:
            return False
        try:
            if self._connection.info.transaction_status is psycopg.pq.TransactionStatus.ACTIVE:
                cancel(self._connection, TAKEN_BACK_WITHIN)
            if not take_answer(self._connection, TAKEN_BACK_WITHIN):
                return False
            self._queues_until = 0.0
            self._recover()
        except (psycopg.Error, SessionBroken):
            return False
        return True

    def _ask(self, requests: Sequence[Request], *, before: str = "") -> None:
        columns: list[Column] = []
        if self._owed:
            owed, self._owed = self._owed, []
            for hold in owed:
                columns += self._plan_release(hold)
        for request in requests:
            columns += self._plan(request)
        try:
            if columns:
                self._execute(columns, before)
        except psycopg.errors.LockNotAvailable:
            self._recover()
            refuse_waiting(requests)
        except psycopg.Error as exc:
            if not is_broken(self._connection, exc):
                self._recover()
                raise refusal_of(exc) from exc
            self.close(reason_of(exc))
            raise SessionBroken(reason_of(exc)) from exc
        except LockSetupError as exc:
            self.close(str(exc))
            raise

    def _run(self, request: Statement) -> None:
        """Run a statement of its own; its error is its asker's."""
        try:
            request.rows = self._query(request.text)
        except psycopg.Error as exc:
            self._sent_at = None
            if is_broken(self._connection, exc):
                self.close(reason_of(exc))
                raise SessionBroken(reason_of(exc)) from exc
            request.error = exc

    def give_up(self, reason: str) -> None:
        """Count all that is held as lost, and leave the connection as it is for now.

        Called while a statement may be waiting for its answer, from another thread.
        """
        self.given_up_at = time.monotonic()
        self._lose_all(reason)

    def _lose_all(self, reason: str) -> None:
        for hold in [*self._all_holds(), *self._leaving]:
            if hold.status is hold.Status.HELD:
                hold._lost(reason)

    def close(self, reason: str) -> None:
        """Close the connection, which frees all that is on it. What was still held counts as lost."""
        self._lose_all(reason)
        self._holds, self._readers, self._leaving, self._owed = {}, {}, [], []
        self._connection.close()

    def cut(self) -> None:
        """Shut the connection down under a statement that waits for an answer, so that it fails now."""
        cut(self._connection)

    def disown(self) -> None:
        """Give the connection up in a forked child, where nothing is held."""
        disown(self._connection)
        self._lose_all("its process was forked")

    # One statement: a column for each question, and what to do with its value.

    def _plan(self, request: Request) -> Sequence[Column]:
        if isinstance(request, Release):
            return self._plan_release(request.hold)
        if isinstance(request, Acquire):
            return self._plan_acquire(request)
        if isinstance(request, FindHolder):
            return self._plan_finding(request)
        return [(("true", ()), ignore)]

    def _plan_release(self, hold: Hold) -> Sequence[Column]:
        if not self._take_out(hold):
            return ()
        if hold.id in self._readers:
            hold._released()
            return ()
        self._leaving.append(hold)

        def settle(unlocked: bytes | None) -> None:
            if truth(unlocked):
                hold._released()
            else:
                hold._lost("PostgreSQL did not know it any more")

        return [(unlock(hold), settle)]

    def _take_out(self, hold: Hold) -> bool:
        """Take a hold out of the table, and tell whether it was there."""
        if self._holds.get(hold.occupied) is hold:
            del self._holds[hold.occupied]
            return True
        readers = self._readers.get(hold.id, [])
        if hold not in readers:
            return False
        readers.remove(hold)
        if not readers:
            del self._readers[hold.id]
        return True

    def _plan_acquire(self, request: Acquire) -> Sequence[Column]:
        hold, identity = request.hold, request.identity
        if identity is not None and identity.id in self._holds:
            request.answer = Answer.SAME_EXECUTION
            return ()
        question = self._question(request)
        if question is None and identity is None:
            request.answer = Answer.CONFLICT
            return ()

        def settle(value: bytes | None) -> None:
            if value is None:
                # The identity was refused, and the name not asked for.
                request.answer = Answer.SAME_EXECUTION if identity is not None else answer_of(value)
                return
            if identity is not None:
                self._enter(identity, slot=0)
            request.answer = answer_of(value)
            if request.answer is Answer.GRANTED:
                self._enter(hold, slot=int(value))

        question = question or REFUSED
        return [(question if identity is None else if_locked(identity, question), settle)]

    def _question(self, request: Acquire) -> Expression | None:
        """What to ask for a hold, in an expression that gives the slot it got, or -1.

        None where a hold of this session stands in the way: the server would grant what the session has.
        """
        hold = request.hold
        if hold.limit > 1:
            slots = map(hold.id.slot_of, [*self._holds, *self._readers])
            return try_slot(hold, [slot for slot in slots if 0 <= slot < hold.limit])
        if hold.id in self._holds or (hold.id in self._readers and not hold.shared):
            return None
        if hold.id in self._readers:
            return nobody_waits_for(hold.id)
        if request.wait != 0:
            return queue_up(hold)
        return try_lock(hold)

    def _enter(self, hold: Hold, slot: int) -> None:
        hold._granted(slot)
        if hold.shared:
            self._readers.setdefault(hold.id, []).append(hold)
        else:
            self._holds[hold.occupied] = hold

    def _plan_finding(self, request: FindHolder) -> Sequence[Column]:
        def settle(holder: bytes | None) -> None:
            request.holder = read_holder(holder)

        return [(holder_query(request.id, kindred=request.kindred), settle)]

    def _execute(self, columns: Sequence[Column], before: str) -> None:
        texts: list[str] = []
        values: list[object] = []
        for (text, its_values), _ in columns:
            texts.append(text)
            values += its_values
        # What one task asks comes again with the next; behind a pooler a name may be somebody else's.
        again = len(columns) <= 3 and not before and not self._settings.session_pooler
        [row] = self._query(f"{before}SELECT {', '.join(texts)}", values, again=again)
        if self.given_up_at is not None:
            raise psycopg.OperationalError("the answer came too late")
        for (_, settle), value in zip(columns, row, strict=True):
            settle(value)
        self._leaving.clear()

    def _stand_in_queue(self, request: Acquire) -> None:
        """Answer an `Acquire` that waits: PostgreSQL's own queue, first come, first served."""
        # What is owed is another statement's, so that an interrupt finds nothing but the wait in this one.
        self._ask([])
        self._queues_until = math.inf if request.wait is None else time.monotonic() + request.wait
        try:
            # Two statements at once are one transaction: the limit ends with it.
            self._ask([request], before=f"SET LOCAL lock_timeout = {milliseconds(request.wait)}; ")
        except (LockError, SessionBroken):
            self._queues_until = 0.0
            raise
        self._queues_until = 0.0

    def _query(
        self, text: str, values: Sequence[object] = (), *, again: bool = False
    ) -> list[list[bytes | None]]:
        self._sent_at = time.monotonic()
        if again:
            rows = query_prepared(self._connection, text, values, self._prepared)
        else:
            rows = query(self._connection, written_out(text, values) if values else text)
        self._sent_at, self._answered_at = None, time.monotonic()
        return rows

    def _recover(self) -> None:
        """Bring the server back to what the table says.

        A statement that failed, say on a full lock table, may have locked and unlocked half of its ids.
        """
        self._sent_at = None
        known = self._holds.keys() | self._readers.keys()
        try:
            for *where, shared in ([int(part or 0) for part in row] for row in self._query(OWN_LOCKS)):
                id = id_from_pg_locks(*where)
                if id not in known:
                    text, values = unlock_id(id, shared=bool(shared))
                    self._query(f"SELECT {text}", values)
        except psycopg.Error as exc:
            self.close(reason_of(exc))
            raise SessionBroken(reason_of(exc)) from exc
        for hold in self._leaving:
            hold._released()
        self._leaving.clear()


#: What is asked, and what to do with the answer.
Column = tuple[Expression, Callable[[bytes | None], None]]


def ignore(_: bytes | None) -> None:
    """Settle nothing: the answer as such is the sign of life."""


def refuse_waiting(requests: Iterable[Request]) -> None:
    """The time in the queue is over."""
    for request in requests:
        if isinstance(request, Acquire):
            request.answer = Answer.CONFLICT
