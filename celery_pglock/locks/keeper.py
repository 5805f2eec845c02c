"""Which session serves whom in this process.

One `Keeper` for each database carries every session-scope hold of the process. It opens its session on
first use, replaces a broken one, and never hands it out. Facts that shaped it:

- An interrupt (a soft time limit, `gevent.Timeout`, a signal) may arrive inside a statement and leave a
  lock granted on a connection that looks fine. Where a process runs one body at a time, its keeper closes
  the session then, which frees all. Where many bodies share the session none of them talks to it: the
  *owner* does, one thread (a greenlet, where `threading` is monkey-patched), and gives back what its asker
  no longer waits for.
- A forked child must neither use nor end its parent's session.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .errors import LockError, LockUnavailable
from .hold import Hold, enter, leave
from .session import Acquire, Answer, Release, Request, Session, SessionBroken
from .settings import Settings

__all__ = ["Keeper", "close_all", "keeper_for", "name_this_process", "probe", "serve_one_at_a_time"]

#: Seconds that an owed unlock waits for a statement to ride on.
OWED_WITHIN = 0.2


class Keeper:
    """Acquires and releases holds on one session of this process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._session: Session | None = None
        #: One statement at a time.
        self._statement = threading.Lock()
        self._owner = Owner(self._answer)
        self._debts = Debts(self._pay)

    @contextmanager
    def under(self, hold: Hold) -> Iterator[None]:
        """Work under a hold that is acquired inside: released at the end, whatever happens.

        Raises `LockLost` if it was lost on the way, unless the block has an error of its own.
        """
        enter(hold)
        try:
            yield
        finally:
            leave(hold)
            self.release(hold)
        hold.check()

    def acquire(self, hold: Hold, identity: Hold | None = None) -> Acquire:
        """Try to acquire a hold, once and without waiting. The answer stands on what is returned.

        An identity is acquired first. It is kept whatever becomes of the hold, unless another session has
        it: until `release_soon`.
        """
        asked = Acquire(hold, identity)
        if _one_at_a_time:
            self._answer_in_place(asked)
        else:
            self._owner.ask(asked)
        return asked

    def release(self, hold: Hold) -> None:
        """Release a hold and wait until it is free; afterwards ``hold.lost`` is final.

        Does nothing for what is not held.
        """
        if hold.status is not hold.Status.HELD:
            return
        if _one_at_a_time:
            self._answer_in_place(Release(hold))
        else:
            self._owner.ask(Release(hold))

    def release_soon(self, hold: Hold) -> None:
        """Release a hold without waiting: a fraction of a second later at the latest."""
        if hold.status is not hold.Status.HELD:
            return
        if not _one_at_a_time:
            self._owner.post(Release(hold))
            return
        with self._statement:
            if self._session is not None:
                self._session.owe(hold)
        self._debts.note()

    def close(self) -> None:
        """Close the session, unless somebody still works under it: then the end of the process will."""
        with self._statement:
            if self._session is not None and self._session.idle:
                self._session.close()
                self._session = None

    def disown(self) -> None:
        """Give up what a forked child has inherited."""
        if self._session is not None:
            self._session.disown()

    def _answer_in_place(self, request: Request) -> None:
        try:
            self._answer([request])
        except BaseException:
            # Interrupted inside a statement: what the server made of it is unknown.
            with self._statement:
                self._drop_session("its task was interrupted while PostgreSQL was asked")
            raise

    def _answer(self, requests: Sequence[Request]) -> None:
        """Answer requests. Whatever goes wrong becomes the answer of those who asked."""
        with self._statement:
            try:
                self._perform(requests)
            except SessionBroken:
                # A server restart between two tasks costs nothing. Releases need no second try: what the
                # broken session held is free.
                self._perform_anew([request for request in requests if isinstance(request, Acquire)])

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
        if self._session is None and not any(isinstance(request, Acquire) for request in requests):
            return
        try:
            if self._session is None:
                self._session = Session(self._settings, application_name())
        except LockError as exc:
            refuse(requests, exc)
            return
        try:
            self._session.perform(requests)
        except SessionBroken:
            self._session = None
            raise
        except LockError as exc:
            if len(requests) <= 1:
                refuse(requests, exc)
                return
            # One of them met a limit of the server; the others need not share its fate.
            for request in requests:
                self._perform([request])

    def _pay(self) -> None:
        """Unlock what found no statement to ride on."""
        with self._statement:
            if self._session is not None and self._session.owes:
                try:
                    self._session.perform([])
                except SessionBroken:
                    self._session = None
                except LockError:
                    pass  # the session has put itself right

    def _drop_session(self, reason: str) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close(reason)


def refuse(requests: Sequence[Request], error: LockError) -> None:
    for request in requests:
        if isinstance(request, Acquire):
            request.answer, request.error = Answer.UNKNOWN, error


class Owner:
    """The one thread or greenlet that talks to a shared session, and sends pending requests together."""

    def __init__(self, answer: Callable[[Sequence[Request]], None]) -> None:
        self._answer = answer
        self._pending: deque[tuple[Request, threading.Event]] = deque()
        self._arrived = threading.Condition()
        self._thread: threading.Thread | None = None

    def ask(self, request: Request) -> None:
        """Wait for the answer. An asker that is interrupted gets nothing, and leaves nothing behind."""
        try:
            self.post(request).wait()
        except BaseException:
            if isinstance(request, Acquire):
                self.post(Release(request.hold))
            raise

    def post(self, request: Request) -> threading.Event:
        """Leave a request to the owner; the event is set when it is answered."""
        done = threading.Event()
        self._pending.append((request, done))
        with self._arrived:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name="pglock-owner", daemon=True)
                self._thread.start()
            self._arrived.notify()
        return done

    def _serve(self) -> None:
        while True:
            batch = self._next_batch()
            try:
                self._answer([request for request, _ in batch])
            finally:
                for _, done in batch:
                    done.set()

    def _next_batch(self) -> list[tuple[Request, threading.Event]]:
        with self._arrived:
            while not self._pending:
                # Bounded, since an asker may be interrupted between its append and its notify.
                self._arrived.wait(timeout=1.0)
            batch = list(self._pending)
            for _ in batch:
                self._pending.popleft()
            return batch


class Debts:
    """Sees to it that owed unlocks are paid where no further statement comes along."""

    def __init__(self, pay: Callable[[], None]) -> None:
        self._pay = pay
        self._noted = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="pglock-debts", daemon=True)
            self._thread.start()
        if not self._noted.is_set():
            self._noted.set()

    def _serve(self) -> None:
        while True:
            self._noted.wait()
            time.sleep(OWED_WITHIN)
            self._noted.clear()
            self._pay()


# This process.

_keepers: dict[Settings, Keeper] = {}
_opening = threading.Lock()
_one_at_a_time = False
_name = socket.gethostname()


def keeper_for(settings: Settings) -> Keeper:
    """Return this process's keeper for one database."""
    keeper = _keepers.get(settings)
    if keeper is None:
        with _opening:
            keeper = _keepers.setdefault(settings, Keeper(settings))
    return keeper


def probe(settings: Settings) -> None:
    """Connect once and check the server. Raises `LockSetupError` or `LockUnavailable`."""
    Session(settings, application_name()).close()


def serve_one_at_a_time() -> None:
    """Let whoever asks talk to the session himself: in a process that runs one body at a time."""
    global _one_at_a_time
    _one_at_a_time = True


def name_this_process(name: str) -> None:
    """Say what ``pg_stat_activity.application_name`` shows, together with the process id."""
    global _name
    _name = name


def application_name() -> str:
    # PostgreSQL cuts it at 63 bytes: the process id must not be what is lost.
    pid = str(os.getpid())
    return f"pglock {_name[: 55 - len(pid)]} {pid}"


@atexit.register
def close_all() -> None:
    """Close every session of this process that nobody works under."""
    for keeper in _keepers.values():
        keeper.close()


def _disown_all() -> None:
    global _keepers, _opening
    for keeper in _keepers.values():
        keeper.disown()
    _keepers, _opening = {}, threading.Lock()


os.register_at_fork(after_in_child=_disown_all)
