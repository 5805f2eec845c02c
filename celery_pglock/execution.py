"""One execution of a task under its lock: who it is, what it keeps back, what it tells.

Celery publishes the next task of a chain after the body's return, but ``retry()`` and ``replace()`` publish
inside the body, and the successor could meet the lock of its own predecessor. Their messages are kept back
until the name is free.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from celery.app.task import Context
from celery.canvas import Signature
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded, TaskPredicate

from . import signals
from .config import ledger_of
from .delivery import HEADER, SLOT_HEADER, Attempts, finished_before, generation
from .locks.errors import LockError, LockLost, LockUnavailable
from .locks.hold import Hold, covering, enter, leave
from .locks.interrupt import Interrupt, LockInterrupt
from .locks.keeper import OWED_WITHIN, keeper_for, scribe_for
from .locks.keys import LockId, id_of
from .locks.ledger import Ledger
from .locks.requests import Acquire, Answer
from .locks.transaction import Transaction

if TYPE_CHECKING:
    from .locks.settings import Settings
    from .options import LockOptions
    from .task import AdvisoryLockedTask

__all__ = ["Execution", "hold_for", "is_under_way", "kept_back_by", "settle", "unlocked"]

logger = logging.getLogger(__name__)

#: Where a request tells its execution. A task that calls itself sees a copy of it, with all that it knows.
MARK = "_pglock_execution"

#: Seconds in which an identity is let go once its result can be seen. A task id may be used again at once.
LET_GO_WITHIN = 2 * OWED_WITHIN

_unsettled: ContextVar[Execution | None] = ContextVar("celery_pglock_unsettled", default=None)


class Execution:
    """One execution. As a context manager it releases its lock, then publishes and tells."""

    def __init__(
        self,
        task: AdvisoryLockedTask,
        request: Context,
        options: LockOptions,
        settings: Settings,
        hold: Hold,
    ) -> None:
        self.task = task
        self.request = request
        self.options = options = options.asked_by(task.name, request.headers)
        self.settings = settings
        self.attempts = Attempts.of(request)
        self.scope = Transaction(settings) if options.in_transaction else keeper_for(settings)
        self.hold = hold
        self.identity = self._identity(settings.namespace)
        self._kept_back: deque[Callable[[], Any]] = deque()
        self._has_successor = False
        self._granted_by = self.scope
        self.too_many_waited = False
        self.seconds_in_queue = 0.0
        #: Among those who wait, while it does.
        self._place: Hold | None = None
        #: Whether the lock was told of, and whether the body was reached.
        self._started = self.began = False
        self._over = False
        self._interrupt: Interrupt | None = None
        self._goes_on = options.on_lost == "continue"
        if self.identity is not None:
            _unsettled.set(self)

    @property
    def has_the_hold_already(self) -> bool:
        """Whether an execution around this one, in the same process, holds the name."""
        return covering(self.hold) is not None

    @property
    def is_item(self) -> bool:
        """Whether this is an item of ``map``, ``starmap`` or ``chunks``, which has no message of its own."""
        return bool(self.request.called_directly)

    @property
    def waited(self) -> float:
        """Seconds since the first conflict, or since the question where there was none."""
        return self.attempts.waited or self.hold.seconds_waited

    def _identity(self, namespace: str) -> Hold | None:
        """What a second delivery of this message has in common with the first, and its successors have not.

        The messages of one task share the first half of it, by which they know each other.
        """
        request = self.request
        if self.is_item or request.is_eager:
            return None
        (task,) = id_of(f"<execution>:{namespace}:{request.id}")
        which = generation(request, self.attempts)
        # Nearly all are the first.
        message = zlib.crc32(repr(which).encode()) if any(which) else 0
        return Hold(LockId(task ^ message), label="this execution")

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Run under the hold of an outer execution."""
        self._mark()
        try:
            yield
        finally:
            self._unmark()

    def _mark(self) -> None:
        # Items have no request of their own: theirs is the task's, in all threads.
        if not self.is_item:
            vars(self.request)[MARK] = self

    def _unmark(self) -> None:
        # Copies of the request keep the mark. The request itself must not: the two would be garbage that
        # only a collection finds, once for each task.
        self._over = True
        vars(self.request).pop(MARK, None)

    def __enter__(self) -> None:
        self._mark()
        enter(self.hold)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A successor of its own must not meet what its predecessor leaves behind, and without a body there is
        # nothing to be kept apart from.
        self._end(success=error is None, linger=self._started and not self._has_successor)
        self.clean_up()
        # A body that did not begin lost nothing with its lock.
        if self.began and not self._goes_on:
            self.hold.check_after(error)

    def _end(self, *, success: bool, linger: bool) -> None:
        """Release the hold, and let what runs next in this thread or greenlet know nothing of it."""
        if self._interrupt is not None:
            self._interrupt.disarm()
        # A block inside of the body may have been interrupted at its door: it is given back by itself, and
        # must not cover anybody until then.
        leave(self.hold, with_inner=True)
        if self._place is not None:
            self.scope.release(self._place)
        self._granted_by.release(self.hold, success=success, linger=linger)
        self._unmark()

    def clean_up(self) -> None:
        """Do what is left of its end: all of it, where an interrupt came at the door of `__exit__`.

        A hold that stays in the context would let the next execution of its name run without a lock.
        """
        if not self._over:
            self._end(success=False, linger=False)
        if self._started:
            self._started = False
            self._tell_end()
        while self._kept_back:
            self._kept_back.popleft()()

    def acquire(self) -> Acquire:
        """Ask for the lock, and tell what came of it."""
        asked = self.scope.acquire(self.hold, self.identity)
        if asked.answer is Answer.SAME_EXECUTION:
            time.sleep(LET_GO_WITHIN)
            asked = self.scope.acquire(self.hold, self.identity)
        if asked.answer is Answer.CONFLICT and self.options.on_conflict == "wait":
            asked = self._wait()
        if self.attempts.redelivered and asked.answer in (Answer.GRANTED, Answer.CONFLICT):
            self._look_for_the_first(asked)
        if asked.answer is Answer.GRANTED:
            try:
                self._end_unless_first_of_its_slot()
            except LockError as exc:
                asked.answer, asked.error = Answer.UNKNOWN, exc
                return asked
            self._tell_start()
        return asked

    def _look_for_the_first(self, asked: Acquire) -> None:
        """See what became of the delivery before this one. Raises `Ignore` if it has done the work."""
        if self.identity is None:
            return
        if self._meets_its_own_kin(self.identity):
            asked.answer = Answer.SAME_EXECUTION
            return
        try:
            finished = finished_before(self.task, self.request, self.attempts)
        except Exception as exc:  # noqa: BLE001 - any backend, any error: ask again when it is back
            asked.answer = Answer.UNKNOWN
            asked.error = LockUnavailable(f"the result backend did not tell whether the task is done: {exc}")
            return
        if finished:
            logger.info("task %s is done: its second delivery is dropped", self.request.id, extra=self.extra)
            raise Ignore("a second delivery of an execution that is done")

    def _end_unless_first_of_its_slot(self) -> None:
        """Drop a second message of one slot of a beat's schedule. Raises `Ignore`, and `LockError`."""
        slot = (self.request.headers or {}).get(SLOT_HEADER)
        if not slot or "schedule" not in slot or self.request.is_eager:
            return
        table = ledger_of(self.task.app)
        if table is None:
            return
        ledger = Ledger(table, slot["schedule"], scribe_for(self.settings, "ledger").run)
        if not ledger.run(slot["entry"], slot["due"], self.request.id or ""):
            logger.info(
                "slot %s of entry %r was run by another message", slot["due"], slot["entry"], extra=self.extra
            )
            raise Ignore("a second message of one slot")

    def _wait(self) -> Acquire:
        """Wait for the hold in PostgreSQL's queue, with no more others than the task allows."""
        limit = self.options.max_waiters
        if limit is None:
            return self._stand_in_queue()
        place = self._place = Hold(id_of(f"<waiters>:{self.hold.name or self.hold.id}"), limit=limit)
        try:
            asked = self.scope.acquire(place)
            if asked.answer is Answer.GRANTED:
                return self._stand_in_queue()
            self.too_many_waited = asked.answer is Answer.CONFLICT
            return Acquire(self.hold, answer=asked.answer, error=asked.error)
        finally:
            self.scope.release(place)
            self._place = None

    def _stand_in_queue(self) -> Acquire:
        since = time.monotonic()
        # Known before it holds anything, so that an interrupt finds whom to give the hold back to.
        self._granted_by = self.scope.waiter()
        try:
            asked = self._granted_by.wait(self.hold, self.options.max_wait, self.identity)
        finally:
            self.seconds_in_queue = time.monotonic() - since
        return self._with_its_identity(asked)

    def _with_its_identity(self, asked: Acquire) -> Acquire:
        """Ask for the identity again where its session ended during the wait.

        A second delivery may have it by now: what came of the wait must not be written over that one.
        """
        if self.identity is None or not self.identity.lost:
            return asked
        # Known before it is held, so that `settle` gives it back however this ends.
        self.identity = Hold(self.identity.id, label=self.identity.label)
        again = self.scope.acquire(self.identity)
        if again.answer is Answer.GRANTED:
            return asked
        answer = Answer.SAME_EXECUTION if again.answer is Answer.CONFLICT else again.answer
        return Acquire(self.hold, answer=answer, error=again.error)

    def interruptible(self) -> AbstractContextManager[None]:
        """What the body runs in: it is stopped when the lock is lost, unless its task wants to go on."""
        if self._goes_on:
            # A running body goes on. None begins.
            self.hold.check()
            return nullcontext()
        self._interrupt = self._granted_by.interrupt_for(self.hold)
        return self._interrupt

    def ending(self, error: BaseException) -> BaseException:
        """The error that an execution ends with: an interrupt that came late ends as a loss too.

        One that is meant for an outer execution passes.
        """
        self.clean_up()
        return self.hold.loss() if self.hold.lost and isinstance(error, LockInterrupt) else error

    def runs_again_after(self, error: BaseException) -> bool:
        """Whether an execution that ended with this error lost its lock, and is to be published again.

        Not one that has published its own successor, or wants none, or whose body gave the lock away. Where
        the body did not begin nothing was done, and it always does.
        """
        if not self.began:
            return self.hold.lost and isinstance(error, LockLost)
        if self.options.on_lost != "retry" or not self.hold.lost or self.hold.lost_by_body:
            return False
        return not self._has_successor and not isinstance(error, (TaskPredicate, SoftTimeLimitExceeded))

    def keep_back_retry(self, signature: Signature) -> None:
        """Let a signature of this request wait for the release: ``retry()`` publishes it, or the body itself.

        Sent earlier, under the same task id, it would be taken for a second delivery and dropped. Given an id
        of its own it is another task, and goes at once.
        """
        headers = signature.options.get("headers") or {}
        # What the retry meets is another conflict than what this execution met.
        signature.options["headers"] = {key: value for key, value in headers.items() if key != HEADER}
        publish = signature.apply_async

        def publish_as_retry_does(*args: Any, **options: Any) -> None:
            try:
                publish(*args, **options)
            except Exception as exc:
                raise Reject(exc, requeue=False) from exc

        def publish_later(*args: Any, **options: Any) -> Any:
            if self._over or options.get("task_id", signature.id) != self.request.id:
                return publish(*args, **options)
            self.keep_back(partial(publish_as_retry_does, *args, **options))
            return self.task.AsyncResult(self.request.id or "")

        vars(signature)["apply_async"] = publish_later

    def keep_back(self, publish: Callable[[], Any]) -> None:
        """Call ``publish`` once the name is free."""
        self._has_successor = True
        self._kept_back.append(publish)

    def _meets_its_own_kin(self, identity: Hold) -> bool:
        """Whether a second delivery came late, and another message of its own task is under way.

        Asked before the backend is: that one goes when its result is stored. With early acks no message comes
        again that has ever begun.
        """
        return self.task.acks_late and self.scope.holder_of(identity.id, kindred=True) is not None

    def _tell_start(self) -> None:
        self._started = True
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("lock %r acquired", self.hold.label, extra=self.extra)
        if signals.lock_acquired.receivers:
            signals.lock_acquired.send(sender=self.task, lock=self.hold, waited=self.waited)

    def _tell_end(self) -> None:
        hold = self.hold
        if hold.lost:
            logger.warning(
                "task %s[%s]: lock %r was lost after %.1f s",
                self.task.name,
                self.request.id,
                hold.label,
                hold.seconds_held,
                extra=self.extra,
            )
            signals.lock_lost.send(sender=self.task, lock=hold, held=hold.seconds_held)
            return
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("lock %r released after %.3f s", hold.label, hold.seconds_held, extra=self.extra)
        if signals.lock_released.receivers:
            signals.lock_released.send(
                sender=self.task, lock=hold, waited=self.waited, held=hold.seconds_held
            )

    @property
    def extra(self) -> dict[str, Any]:
        """What every log line of an execution carries."""
        return {
            "task_name": self.task.name,
            "task_id": self.request.id,
            "lock": self.hold.label,
            "lock_id": self.hold.id,
        }


def hold_for(options: LockOptions, settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hold:
    """Return what one call is to hold. Raises `LockKeyError`."""
    name = options.named(settings.namespace, args, kwargs)
    if isinstance(name, LockId):
        id, text, label = name, None, repr(name)
    else:
        id, text, label = id_of(name), name, name
    if options.private:
        label = f"{settings.namespace}:{options.lock_name} ({id[0]})"
    return Hold(
        id,
        text,
        label=label,
        shared=options.shared,
        limit=options.limit,
        min_hold=options.min_hold,
        settings=settings,
    )


@contextmanager
def unlocked(options: LockOptions) -> Iterator[None]:
    """Run where locks are disabled: bodies find a hold there too. It holds nothing, and is never lost."""
    hold = Hold(id_of(options.lock_name), options.lock_name)
    enter(hold)
    try:
        yield
    finally:
        leave(hold, with_inner=True)


def kept_back_by(request: Context) -> Execution | None:
    """The running execution that keeps back what a request's task publishes in its own place."""
    return None if request.is_eager else running_of(request)


def is_under_way(request: Context) -> bool:
    """Whether a request's execution is already running: then its task is calling itself.

    A task that calls itself sees its own request, which still says that it was not called directly.
    """
    return running_of(request) is not None


def running_of(request: Context) -> Execution | None:
    execution: Execution | None = vars(request).get(MARK)
    return None if execution is None or execution._over else execution


def settle(task_id: str) -> None:
    """Give up the identity of an execution, now that its result is stored.

    The hold was released long before, unless an interrupt came between the body and its release.
    """
    execution = _unsettled.get()
    if execution is None or execution.request.id != task_id or execution.identity is None:
        return
    _unsettled.set(None)
    execution.clean_up()
    execution.scope.release_soon(execution.identity)
