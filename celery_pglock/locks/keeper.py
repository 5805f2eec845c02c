"""Which session serves whom in this process.

One `Keeper` for each database carries every session-scope hold of the process. It opens its session on
first use, replaces a broken one, and never hands it out. Facts that shaped it:

- An interrupt (a soft time limit, `gevent.Timeout`, a signal) may arrive inside a statement and leave a
  lock granted on a connection that looks fine. Where a process runs one body at a time, its keeper closes
  the session then, which frees all. A wait in the queue, where it may stand for hours under another lock, is
  taken back instead. Where many bodies share the session none of them talks to it: the *owner* does, one
  thread (a greenlet, where `threading` is monkey-patched), and gives back what its asker no longer waits for.
- A forked child must neither use nor end its parent's session.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from .errors import LockError, LockSetupError, LockUnavailable
from .hold import Hold
from .holders import Holder
from .interrupt import INTERRUPT_EVERY, Interrupt
from .keys import LockId
from .line import close_warm, disown_all
from .liveness import Liveness
from .owner import Owner
from .probe import prove_exclusion
from .process import application_name, serves_one_at_a_time
from .requests import (
    Acquire,
    Answer,
    FindHolder,
    Release,
    Request,
    Statement,
    batches,
    refuse,
)
from .server import SessionBroken, reason_of
from .session import Session
from .settings import Settings
from .sql import DRAW
from .watch import Watch

__all__ = ["OWED_WITHIN", "Keeper", "close_all", "keeper_for", "scribe_for"]

#: Seconds that an owed unlock waits for a statement to ride on.
OWED_WITHIN = 0.2

#: What a session is opened for. What it is to release is free where there is none.
NEED_A_SESSION = (Acquire, FindHolder, Statement)

#: Why who interrupts the code that talks to the session gets nothing of it.
ASKED_INSIDE = "a signal handler or a __del__ asked for it inside of another statement on the same session"

#: Seconds between two looks at a hold of our own session that stands in the way of a wait.
WAIT_FOR_OURSELVES = 0.05


class Keeper:
    """Acquires and releases holds on one session of this process."""

    def __init__(self, settings: Settings, *, shared: bool = True, pings: bool = True) -> None:
        """With ``shared`` False the keeper serves one asker alone, who talks to the session himself.

        With ``pings`` False nobody but the asker gives the server a sign of life: where he hangs, it ends
        the session after ``freeze_timeout``.
        """
        self._settings = settings
        self._shared = shared
        self._session: Session | None = None
        #: One statement at a time. It knows who is inside of one.
        self._statement: Any = threading.RLock()
        self._owner = Owner(self._answer)
        self._liveness = Liveness(settings, self._owner.post, pings=pings)
        self._watch = Watch(self._on_end, self._on_pause)
        self._running: set[Interrupt] = set()
        #: When owed unlocks have waited long enough.
        self._pay_at: float | None = None
        #: Holds whose bodies are over, and that stay taken until their time is up.
        self._lingering: list[tuple[float, Hold]] = []
        if not shared:
            _alone.add(self)

    def interrupt_for(self, hold: Hold, *, grace: float = 0.0) -> Interrupt:
        """What stops the code that runs inside of it when the hold is lost. Raises `LockLost` then.

        What ends within ``grace`` seconds of its beginning is not stopped, and goes on as if nothing had
        happened.
        """
        return Interrupt(hold, self._running, grace=grace)

    def acquire(self, hold: Hold, identity: Hold | None = None) -> Acquire:
        """Try to acquire a hold, once and without waiting. The answer stands on what is returned.

        An identity is acquired first. It is kept whatever becomes of the hold, unless another session has
        it: until `release_soon`.
        """
        asked = Acquire(hold, identity)
        hold._token_source = self._next_token
        self._ask(asked)
        return asked

    def waiter(self) -> Keeper:
        """The keeper to `wait` at, and to release at what was waited for.

        A session that many share can't wait for one of them, and no minimum hold ends while it waits: then it
        is a keeper of its own, which ends with its one hold.
        """
        alone = threading.current_thread() is threading.main_thread() and not self._lingering
        return self if self._asks_in_place and alone else Keeper(self._settings, shared=False)

    def wait(self, hold: Hold, seconds: float | None, identity: Hold | None = None) -> Acquire:  # noqa: ARG002
        """Take a turn in PostgreSQL's own queue, first come, first served, and be woken at once.

        ``seconds`` may be None, for ever. The identity is kept, unless its session ends.
        """
        if seconds == 0:
            return self.acquire(hold)
        until = None if seconds is None else time.monotonic() + seconds
        asked = Acquire(hold, wait=seconds)
        hold._token_source = self._next_token
        self._ask(asked)
        # A conflict before the time is up comes from this process: a hold on the same session.
        while asked.answer is Answer.CONFLICT and (until is None or time.monotonic() < until):
            time.sleep(WAIT_FOR_OURSELVES)
            asked.wait = None if until is None else max(0.0, until - time.monotonic())
            self._ask(asked)
        return asked

    def release(self, hold: Hold, *, linger: bool = True, success: bool = True) -> None:  # noqa: ARG002
        """Release a hold and wait until it is free; afterwards ``hold.lost`` is final.

        One with a minimum hold stays taken until that is over, unless it is not to linger. Does nothing for
        what is not held.
        """
        if hold.status is hold.Status.HELD:
            if linger and hold.min_hold and hold.seconds_held < hold.min_hold:
                self._linger(hold)
                return
            self._ask(Release(hold))
        # Also once more: an interrupt may have come behind the release, and left a session that nobody ends.
        if not self._shared and not self._lingering:
            self.retire()

    def _linger(self, hold: Hold) -> None:
        self._lingering.append((time.monotonic() + hold.min_hold - hold.seconds_held, hold))
        self._watch.wake()
        # Last of all: who is interrupted before lets it linger twice, which is no longer.
        hold._released()

    def run(self, statement: Statement) -> None:
        """Run a statement that is no question about locks."""
        self._ask(statement)

    def release_soon(self, hold: Hold) -> None:
        """Release a hold without waiting: a fraction of a second later at the latest."""
        if hold.status is not hold.Status.HELD:
            return
        if not self._asks_in_place:
            self._owner.post(Release(hold))
            return
        with self._statement:
            if self._session is not None:
                self._session.owe(hold)
        if self._pay_at is None:
            self._pay_at = time.monotonic() + OWED_WITHIN
            self._watch.wake()

    def _next_token(self) -> int:
        drawn, alive = Statement(DRAW), Statement("SELECT true")
        scribe_for(self._settings, "tokens").run(drawn)
        # In this order: a session that is alive afterwards had its locks when the token was drawn.
        self._ask(alive)
        for asked in (drawn, alive):
            if isinstance(asked.error, LockError):
                raise asked.error
            if asked.rows is None:
                raise LockUnavailable("no answer" if asked.error is None else reason_of(asked.error))
        [[token, *_]] = drawn.rows or [[None]]
        return int(token or 0)

    def holder_of(self, id: LockId, *, kindred: bool = False) -> Holder | None:
        """Tell who holds an id at this moment; None if nobody does, or nobody could be asked.

        With ``kindred`` any other id with the same first half.
        """
        question = FindHolder(id, kindred=kindred)
        self._ask(question)
        return question.holder

    def close(self) -> None:
        """Close the session, unless somebody still works under it: then the end of the process will."""
        # Not behind a statement that a silent server does not answer: the process is about to end.
        if not self._statement.acquire(timeout=1.0):
            return
        try:
            if self._session is not None and self._session.idle:
                self._drop_session("the process ended")
        finally:
            self._statement.release()

    def retire(self) -> None:
        """Close for good, when what was left to the owner is done."""
        _alone.discard(self)
        self._owner.stop(self.close)
        self._watch.stop()

    def disown(self) -> None:
        """Give up what a forked child has inherited, and begin anew: somebody may still have this keeper."""
        session, self._session = self._session, None
        if session is not None:
            session.disown()
        self._statement = threading.RLock()
        self._owner.disown()
        self._watch.disown()
        self._running.clear()
        self._lingering.clear()
        self._liveness.disown()
        self._pay_at = None

    # Questions and answers.

    @property
    def _asks_in_place(self) -> bool:
        return serves_one_at_a_time() or not self._shared

    def _ask(self, request: Request) -> None:
        # Garbage is collected in our own work, and a block that it held gives its lock back: who would wait
        # here would wait for himself. For a lock the answer would come when nobody is left to give it back.
        if self._statement._is_owned() or self._owner.ident == threading.get_ident():
            if isinstance(request, Release):
                self._owner.post(request)
            else:
                refuse([request], LockUnavailable(ASKED_INSIDE))
        elif self._asks_in_place:
            self._answer([request])
        else:
            self._owner.ask(request)

    def _answer(self, requests: Sequence[Request]) -> None:
        """Answer requests. Whatever goes wrong at the server becomes the answer of those who asked."""
        with self._statement:
            try:
                for batch in batches(requests):
                    self._answer_batch(batch)
            except BaseException:
                # Interrupted inside a statement: what the server made of it is unknown.
                left = False
                try:
                    left = self._session is not None and self._session.leave_queue()
                finally:
                    if not left:
                        self._drop_session("its task was interrupted while PostgreSQL was asked")
                raise

    def _answer_batch(self, requests: Sequence[Request]) -> None:
        try:
            self._perform(requests)
        except SessionBroken:
            # A server restart between two tasks costs nothing. Releases need no second try: what the
            # broken session held is free.
            self._perform_anew([request for request in requests if isinstance(request, Acquire)])

    @property
    def _asks_anew(self) -> bool:
        """Whether a question for one session may be asked on another: one that met its end, or lay idle."""
        return True

    def _perform_anew(self, requests: Sequence[Acquire]) -> None:
        try:
            self._perform(requests)
        except SessionBroken as exc:
            refuse(requests, LockUnavailable(str(exc)))
        for request in requests:
            # The broken session may live on for the server for a while, with the lock granted to it: a
            # refusal can come from ourselves, and must not pass for a conflict.
            if request.answer in (Answer.CONFLICT, Answer.SAME_EXECUTION):
                refuse([request], LockUnavailable("the connection broke while the lock was asked for"))

    def _perform(self, requests: Sequence[Request]) -> None:
        session = self._session
        if session is not None and session.may_lead_elsewhere and self._asks_anew:
            self._drop_session("it lay idle")
            session = None
        if session is None or session.given_up_at is not None:
            if not any(isinstance(request, NEED_A_SESSION) for request in requests):
                return
            try:
                session = self._new_session()
            except LockError as exc:
                refuse(requests, exc)
                return
        try:
            session.perform(requests)
        except SessionBroken as exc:
            self._drop_session(str(exc))
            # On a silent network a second try would have everybody wait for nothing.
            if not session.fell_silent and self._asks_anew:
                raise
            refuse(requests, LockUnavailable(str(exc)))
        except LockSetupError as exc:
            self._drop_session(str(exc))
            refuse(requests, exc)
        except LockError as exc:
            if len(requests) <= 1:
                refuse(requests, exc)
                return
            # One of them met a limit of the server; the others need not share its fate.
            for request in requests:
                self._perform([request])

    def _new_session(self) -> Session:
        """Open a session, in the place of one that was given up.

        Raises `LockUnavailable`, also while a body under the old one is being stopped, and `LockSetupError`.
        """
        if self._session is not None:
            if any(interrupt.due for interrupt in list(self._running)):
                raise LockUnavailable("its session was given up, and what ran under it is being stopped")
            self._drop_session("its session was given up")
        self._session = session = Session(self._settings, application_name())
        self._watch.look_at(session.socket, session)
        try:
            session.set_up()
            prove_exclusion(session, self._settings)
        except LockError as exc:
            self._drop_session(str(exc))
            raise
        return session

    def _drop_session(self, reason: str) -> None:
        session = self._session
        if session is not None:
            self._watch.look_away()
            session.close(reason)
            # Not before: who is interrupted above drops it once more.
            self._session = None
            # Only now the holds are lost, and bodies to stop.
            self._watch.wake()

    # What the watch sees.

    def _on_end(self, session: object) -> None:
        with self._statement:
            if self._session is session:
                self._drop_session("PostgreSQL ended its session")

    def _on_pause(self) -> float | None:
        """Do what is due, and tell when to come again."""
        now = time.monotonic()
        pauses, session = self._end_lingering(now), self._session
        if self._pay_at is not None and now < self._pay_at:
            pauses.append(self._pay_at - now)
        elif self._pay_at is not None:
            self._pay_at = None
            self._liveness.ask()
        if session is not None:
            pauses += self._liveness.look_at(session)
        if any(interrupt.due for interrupt in list(self._running)):
            for interrupt in list(self._running):
                interrupt.stop()
            pauses.append(INTERRUPT_EVERY)
        return min(pauses, default=None)

    def _end_lingering(self, now: float) -> list[float]:
        """Release what has lingered long enough, and return the seconds until the next is due."""
        entries = list(self._lingering)
        for until, hold in entries:
            if until > now:
                continue
            self._lingering.remove((until, hold))
            self._owner.post(Release(hold))
        if entries and not self._lingering and not self._shared:
            self.retire()
        return [until - now for until, _ in entries if until > now]


# All keepers of this process.

_keepers: dict[Settings, Keeper] = {}
#: Those whose sessions write and hold nothing, one for each purpose: a locked table, or a standby that a
#: commit waits for, must not cost what others hold.
_scribes: dict[tuple[Settings, str], Keeper] = {}
#: Those of one asker each, who waits or works under what he waited for.
_alone: set[Keeper] = set()
_opening = threading.Lock()


def keeper_for(settings: Settings) -> Keeper:
    """Return this process's keeper for one database."""
    keeper = _keepers.get(settings)
    if keeper is None:
        with _opening:
            keeper = _keepers.setdefault(settings, Keeper(settings))
    return keeper


def scribe_for(settings: Settings, purpose: str) -> Keeper:
    """Return this process's keeper for what is written to one database, which may take its time."""
    scribe = _scribes.get((settings, purpose))
    if scribe is None:
        with _opening:
            scribe = _scribes.setdefault((settings, purpose), Keeper(settings))
    return scribe


@atexit.register
def close_all() -> None:
    """Close every session of this process that nobody works under."""
    for keeper in [*_keepers.values(), *_scribes.values(), *_alone]:
        keeper.close()
    close_warm()


def _disown_all() -> None:
    global _keepers, _scribes, _opening
    keepers = [*_keepers.values(), *_scribes.values(), *_alone]
    _keepers, _scribes, _opening = {}, {}, threading.Lock()
    _alone.clear()
    # One that fails is told by Python, and keeps no other from its turn.
    with ExitStack() as all_of_them:
        all_of_them.callback(disown_all)
        for keeper in keepers:
            all_of_them.callback(keeper.disown)


os.register_at_fork(after_in_child=_disown_all)
