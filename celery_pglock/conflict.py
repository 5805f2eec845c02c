"""What becomes of an execution that did not get its lock: skipped, published again, or failed."""

from __future__ import annotations

import logging
import math
import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from celery import Task, states
from celery.canvas import _chain, group
from celery.exceptions import Ignore, ImproperlyConfigured, Retry, TaskRevokedError
from celery.utils.time import get_exponential_backoff_interval

from . import signals
from .delivery import ignores_result, publish_again
from .execution import Execution
from .locks.errors import LockError, LockNotAcquired, LockSetupError, LockUnavailable
from .locks.keys import LockId
from .locks.requests import Acquire, Answer
from .options import DECISIONS, UNSET

__all__ = ["Conflict", "is_skipped", "resolve"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conflict:
    """Somebody else holds the name. What a callable ``lock_on_conflict`` and `lock_conflict` are handed."""

    #: What logs call the lock.
    lock: str
    id: LockId
    task_name: str
    task_id: str | None
    #: Conflicts of this execution so far, with this one.
    conflicts: int
    #: Seconds since the first of them.
    waited: float
    #: Who holds it, in words, as far as PostgreSQL could tell at that moment.
    holder: str | None = None
    #: Seconds that it has been held for at least, as far as PostgreSQL could tell.
    held_for: float | None = None


def resolve(execution: Execution, asked: Acquire) -> Any:
    """Return what a task returns that did not get its lock, or raise what ends it."""
    if asked.answer is Answer.CONFLICT:
        return resolve_conflict(execution)
    if asked.answer is Answer.SAME_EXECUTION:
        return put_back(execution)
    return ask_again(execution, asked.error or LockUnavailable("no answer"))


def resolve_conflict(execution: Execution) -> Any:
    attempts, hold = execution.attempts.after_conflict(), execution.hold
    holder = execution.scope.holder_of(hold.id)
    conflict = Conflict(
        lock=hold.label,
        id=hold.id,
        task_name=execution.task.name,
        task_id=execution.request.id,
        conflicts=attempts.conflicts,
        waited=max(attempts.waited, execution.seconds_in_queue),
        holder=holder and holder.words,
        held_for=holder and holder.held_for,
    )
    decision = decide(execution, conflict)
    signals.lock_conflict.send(sender=execution.task, lock=hold, conflict=conflict, decision=decision)
    signals.send_event(execution.task, "task-lock-conflict", lock=hold.label, decision=decision)
    if decision == "skip":
        return skip(execution, conflict)
    if decision == "raise" or execution.is_item or execution.request.is_eager:
        tell_conflict(execution, conflict, "failing")
        raise LockNotAcquired(hold.label, conflict.waited, conflict.conflicts)
    return retry(execution, conflict)


def decide(execution: Execution, conflict: Conflict) -> str:
    policy = execution.options.on_conflict
    if policy == "wait":
        # It has waited: for as long as it may, or not at all behind too many others.
        return "skip" if execution.too_many_waited else "raise"
    if isinstance(policy, str):
        return policy
    decision = policy(conflict)
    if decision not in DECISIONS:
        raise ImproperlyConfigured(
            f"task {conflict.task_name!r}: lock_on_conflict returned {decision!r}: it must return one of"
            f" {', '.join(map(repr, DECISIONS))}"
        )
    return decision


# Skipped.


def marker_of(conflict: Conflict) -> dict[str, Any]:
    """What a skipped task returns: plain JSON, so that it looks the same from every result backend."""
    return {"pglock": "skipped", "lock": conflict.lock, "holder": conflict.holder}


def is_skipped(result: object) -> bool:
    """Tell whether a task's result is the marker of a skipped execution."""
    return isinstance(result, dict) and result.get("pglock") == "skipped"


def skip(execution: Execution, conflict: Conflict) -> Any:
    result = execution.options.skip_result
    if result is not UNSET:
        tell_conflict(execution, conflict, "skipped, going on with lock_skip_result")
        return result
    if not something_follows(execution):
        tell_conflict(execution, conflict, "skipped")
        return marker_of(conflict)
    tell_conflict(execution, conflict, "skipped, and what follows with it")
    return revoke(execution)


def something_follows(execution: Execution) -> bool:
    """Whether the result is about to be fed to another task."""
    request = execution.request
    return bool(request.chain or request.callbacks or (request.is_eager and eager_chain_goes_on()))


def eager_chain_goes_on() -> bool:
    """Whether an eager chain has a next task. Celery tells a task so nowhere but on the stack."""
    frame: FrameType | None = sys._getframe()
    applied = 0
    while frame is not None and applied <= 1:
        code = frame.f_code
        if code is _chain.apply.__code__ and frame.f_locals["task"] is not frame.f_locals["self"].tasks[-1]:
            return True
        if code is group.apply.__code__:
            # What follows a group gets the marker in its list.
            return False
        # Beyond a second Task.apply lies the chain of somebody else, whose body applied this task: unless it
        # did so to be replaced by it.
        applied += code.co_name == "apply" and "task_id" in code.co_varnames
        applied -= code is Task.replace.__code__
        frame = frame.f_back
    return False


def revoke(execution: Execution) -> NoReturn:
    """End as REVOKED, with all that follows: the one end besides success and failure that hangs nobody."""
    task, request = execution.task, execution.request
    reason = TaskRevokedError(f"skipped: lock {execution.hold.label!r} is held by another")
    if request.is_eager:
        raise reason
    task.backend.mark_as_failure(
        request.id or "",
        reason,
        request=request,
        # What follows in a chain is marked by the same flag, and somebody may wait for that.
        store_result=bool(request.chain) or not ignores_result(task, request),
        call_errbacks=False,
        state=states.REVOKED,
    )
    signals.send_event(task, "task-revoked", terminated=False, signum=None, expired=False)
    raise Ignore(str(reason))


# Published again.


def retry(execution: Execution, conflict: Conflict) -> NoReturn:
    options, attempts = execution.options, execution.attempts.after_conflict()
    refusal = LockNotAcquired(conflict.lock, conflict.waited, conflict.conflicts)
    countdown = backoff(execution, attempts.conflicts)
    if options.max_wait is not None:
        left = options.max_wait - conflict.waited
        if left <= 0:
            tell_conflict(execution, conflict, f"giving up after {conflict.waited:.0f} s")
            raise refusal
        countdown = min(countdown, max(1, math.ceil(left)))
    tell_conflict(execution, conflict, f"trying again in {countdown} s")
    signature = publish_again(execution.task, attempts, countdown)
    raise Retry(exc=refusal, when=countdown, sig=signature)  # type: ignore[arg-type]


def ask_again(execution: Execution, error: LockError) -> NoReturn:
    """PostgreSQL could not be asked: what may pass by itself is tried again for as long as it takes."""
    if isinstance(error, LockSetupError):
        raise ImproperlyConfigured(str(error)) from error
    if execution.is_item or execution.request.is_eager:
        raise error
    attempts = execution.attempts.after_failure()
    countdown = backoff(execution, attempts.failures)
    warn_now_and_then("%s: tasks wait until it can be", error)
    signature = publish_again(execution.task, attempts, countdown)
    raise Retry(exc=error, when=countdown, sig=signature)  # type: ignore[arg-type]


def run_again(execution: Execution, error: BaseException) -> NoReturn:
    """The lock was lost: before the body began, or under one whose ``lock_on_lost`` is "retry"."""
    if execution.is_item or execution.request.is_eager:
        raise error
    attempts = execution.attempts.after_failure()
    countdown = backoff(execution, attempts.failures)
    signature = publish_again(execution.task, attempts, countdown)
    raise Retry(exc=error, when=countdown, sig=signature) from error  # type: ignore[arg-type]


def put_back(execution: Execution) -> NoReturn:
    """The message of an execution that is under way came a second time.

    The first may still die, so with late acks a copy stays in the queue until it is over. Neither a result
    nor a state of the first is touched.
    """
    if not execution.task.acks_late:
        tell_second_delivery(execution, "dropped")
        raise Ignore("a second delivery of an execution under way")
    attempts = execution.attempts.after_meeting_itself()
    countdown = backoff(execution, attempts.copies)
    tell_second_delivery(execution, f"put back for {countdown} s")
    publish_again(execution.task, attempts, countdown)
    raise Ignore("a second delivery of an execution under way: put back until the first is over")


def backoff(execution: Execution, tries: int) -> int:
    """Whole seconds >= 1 until the next try: some brokers count in seconds, and refuse 0."""
    options = execution.options
    interval = get_exponential_backoff_interval(
        factor=options.backoff,
        # The exponent is bounded too: nobody needs the two-thousandth power of two.
        retries=min(tries - 1, 30),
        maximum=longest_countdown(execution),
        full_jitter=options.jitter,
    )
    return max(1, interval)


def longest_countdown(execution: Execution) -> int:
    """The task's own bound, and half of the broker's ``visibility_timeout`` where that is set.

    A message that waits longer in a worker than the broker is patient is delivered again, and multiplies.
    """
    bound = execution.options.backoff_max
    patience = (execution.task.app.conf.broker_transport_options or {}).get("visibility_timeout")
    return bound if patience is None else min(bound, max(1, int(patience) // 2))


# What is said about it.


def tell_conflict(execution: Execution, conflict: Conflict, outcome: str) -> None:
    extra = {
        **execution.extra,
        "conflicts": conflict.conflicts,
        "holder": conflict.holder,
        "held_for": conflict.held_for,
    }
    age = "" if conflict.held_for is None else f" for {int(conflict.held_for)} s or longer"
    logger.info(
        "task %s[%s]: lock %r is held by %s%s: %s",
        conflict.task_name,
        conflict.task_id,
        conflict.lock,
        conflict.holder or "another",
        age,
        outcome,
        extra=extra,
    )


def tell_second_delivery(execution: Execution, outcome: str) -> None:
    logger.info(
        "task %s is under way elsewhere: its second delivery is %s",
        execution.request.id,
        outcome,
        extra=execution.extra,
    )


WARN_EVERY = 10.0  # seconds: a server that is down meets every message of a queue

_warned_at = -math.inf


def warn_now_and_then(message: str, *args: object) -> None:
    global _warned_at
    if time.monotonic() - _warned_at >= WARN_EVERY:
        _warned_at = time.monotonic()
        logger.warning(message, *args)
