"""What travels in a task's message: how often it was tried, and all that a new copy of it must keep."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from celery import states
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from celery.canvas import Signature
from celery.exceptions import Reject
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.serialization import registry  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from .task import AdvisoryLockedTask

__all__ = ["Attempts", "finished_before", "generation", "ignores_result", "publish_again"]

#: The header that holds `Attempts`.
HEADER = "pglock"

#: The header in which the worker's main process tells its children how the message was serialized.
CONTENT_TYPE_HEADER = "pglock_content_type"


#: The header in which a beat says which slot of its schedule a message is.
SLOT_HEADER = "pglock_slot"


@dataclass(frozen=True)
class Attempts:
    """The tries of one execution that did not reach the body. Travels in the message, in wall-clock time."""

    #: How often somebody else held the name.
    conflicts: int = 0
    #: When that was first so, in seconds since the epoch.
    since: float | None = None
    #: How often in a row the server could not be asked.
    failures: int = 0
    #: When this was last so: the time from then to the next try does not count as waiting for the lock.
    failed_at: float | None = None
    #: How often this copy of an execution under way elsewhere was put back.
    copies: int = 0
    #: Whether the broker delivered this message, or one that it is a copy of, a second time.
    redelivered: bool = False

    @classmethod
    def of(cls, request: Context) -> Attempts:
        header = (request.headers or {}).get(HEADER)
        redelivered = bool((request.delivery_info or {}).get("redelivered"))
        if not header:
            return AGAIN if redelivered else FIRST
        # A newer release may have more to say, while old and new workers run together.
        attempts = cls(**{field.name: header[field.name] for field in fields(cls) if field.name in header})
        if redelivered:
            attempts = replace(attempts, redelivered=True)
        if attempts.failed_at is None or attempts.since is None:
            return attempts
        return replace(attempts, since=attempts.since + time.time() - attempts.failed_at, failed_at=None)

    @property
    def waited(self) -> float:
        """Seconds since the first conflict, less those in which the server could not be asked."""
        return 0.0 if self.since is None else max(0.0, time.time() - self.since)

    def after_conflict(self) -> Attempts:
        since = time.time() if self.since is None else self.since
        return Attempts(conflicts=self.conflicts + 1, since=since, redelivered=self.redelivered)

    def after_failure(self) -> Attempts:
        return replace(self, failures=self.failures + 1, failed_at=time.time())

    def after_meeting_itself(self) -> Attempts:
        return replace(self, copies=self.copies + 1, redelivered=True)


#: No try came to nothing yet.
FIRST = Attempts()
AGAIN = Attempts(redelivered=True)

#: What RabbitMQ writes into a message on its way through its delayed delivery. A copy that carried it
#: further would end its way as a circle: https://www.rabbitmq.com/docs/dlx#effects
DEATHS = ("x-death", "x-first-death-", "x-last-death-")


def publish_again(task: AdvisoryLockedTask, attempts: Attempts, countdown: int) -> Signature:
    """Publish the running message once more, with everything that it came with.

    Task.retry keeps most of it, but counts the try and leaves out how the message was written.
    """
    request = task.request
    kept = {name: value for name, value in (request.headers or {}).items() if not name.startswith(DEATHS)}
    headers = {**kept, HEADER: asdict(attempts)}
    signature = task.signature_from_request(
        request,
        headers=headers,
        countdown=countdown,
        retries=request.retries,
        ignore_result=ignores_result(task, request),
        add_to_parent=False,
        **written_as(headers.pop(CONTENT_TYPE_HEADER, None), request),
    )
    try:
        signature.apply_async()
    except Exception as exc:
        # The broker did not take it. What is not acknowledged yet can go back to where it came from.
        if task.acks_late:
            raise Reject(exc, requeue=True) from exc
        raise
    return signature


def written_as(content_type: str | None, request: Context) -> dict[str, Any]:
    """The options of a message that are not Celery's but its envelope's."""
    options = {
        "serializer": registry.type_to_name.get(content_type),
        "compression": request.get("compression"),
        "argsrepr": request.get("argsrepr"),
        "kwargsrepr": request.get("kwargsrepr"),
    }
    return {name: value for name, value in options.items() if value is not None}


def ignores_result(task: AdvisoryLockedTask, request: Context) -> bool:
    """The caller's own ``ignore_result``, or the task's. The class-level False of `Context` is neither."""
    given = vars(request).get("ignore_result")
    return bool(task.ignore_result if given is None else given)


def finished_before(task: AdvisoryLockedTask, request: Context, attempts: Attempts) -> bool:
    """Whether a message that came a second time has nothing left to do.

    Only a persistent result backend knows; without one a redelivered task runs again. Must be asked with
    the execution's identity held: before that, the first may be storing its result right now.
    """
    backend = task.backend
    if isinstance(backend, DisabledBackend) or not backend.persistent or ignores_result(task, request):
        return False
    meta = backend.get_task_meta(request.id or "")
    state = meta["status"]
    # Of the first of its messages: then a later one was published before this was stored.
    has_successor = state == states.RETRY and not any(generation(request, attempts))
    return has_successor or (state in states.READY_STATES and not was_stored_before(request, meta))


def was_stored_before(request: Context, meta: dict[str, Any]) -> bool:
    """Whether a result is older than the message's ``eta``: an earlier message of the task stored it.

    One clock tells both: that of the worker that ran this message, if one did. A copy of a second delivery
    has an eta of its own, and tells nothing of the first.
    """
    if not request.eta or ((request.headers or {}).get(HEADER) or {}).get("redelivered"):
        return False
    done, eta = utc(meta.get("date_done")), utc(str(request.eta))
    if done is None or eta is None:
        return False
    # MySQL keeps whole seconds.
    return done < (eta if done.microsecond else eta.replace(microsecond=0))


def utc(time: str | datetime | None) -> datetime | None:
    """Read a text as Celery's worker does: in UTC, where it has no zone.

    None for what a database has in a column without one: Celery stores the app's or the server's time there.
    """
    if isinstance(time, datetime):
        return time if time.tzinfo is not None else None
    read = maybe_iso8601(time)
    return None if read is None else maybe_make_aware(read)


def generation(request: Context, attempts: Attempts) -> tuple[int, ...]:
    """Which of the messages of one task this is: retries, replacements and later tries reuse its id."""
    return request.retries or 0, attempts.conflicts, attempts.failures, request.replaced_task_nesting or 0
