"""One term of a beat's leadership: a scheduler built for it, each send of which is asked for first.

Every scheduler asks ``is_due()``, ``reserve()`` and ``apply_async()`` of itself. A term puts itself in front
of these three, and of nothing else:

- ``is_due``: an entry is due if it says so, and PostgreSQL that this beat still leads, and the ledger that
  its slot was not sent.
- ``reserve``: it goes on after its slot, and not after now. So it does not drift, and what was late is sent
  slot by slot.
- ``apply_async``: the message says which slot it is, and is not published any more when the lock is lost:
  PostgreSQL is asked once more by the last hook before it leaves. What the scheduler writes down behind it
  waits until the slot is recorded.

The lock may be lost while a message is on its way: the broker may have it, and its answer is still to come.
So a publish is left alone for its first `GRACE` seconds. If it ends in them, the slot was sent, and is
recorded late, on a new session. Who was frozen in one wakes with these behind it, and is interrupted as soon
as the loss is found: some milliseconds later. If it was frozen between that last question and the broker's
socket, less than a millisecond, the message may leave in these. And the next leader does not send at once
what another had begun to send: it asks again when the first `IN_DOUBT_FOR` seconds of its term are over.
"""

from __future__ import annotations

import heapq
import logging
import shelve
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from typing import Any

from celery.beat import Scheduler
from celery.schedules import schedstate
from celery.signals import before_task_publish
from celery.utils.time import maybe_make_aware

from celery_pglock.delivery import SLOT_HEADER
from celery_pglock.locks.candidate import Candidate
from celery_pglock.locks.errors import LockError, LockLost
from celery_pglock.locks.interrupt import LockInterrupt
from celery_pglock.locks.ledger import CLOCKS_DIFFER, Ledger
from celery_pglock.locks.process import signals_put_off

from . import slots
from .progress import Progress

__all__ = ["Term", "utcnow"]

logger = logging.getLogger(__name__)

#: Seconds between two cleanings of the ledger.
CLEAN_EVERY = 3600.0

#: Seconds that a publish may take although its lock is lost meanwhile. A broker that is well answers in less,
#: and for one that hangs nobody need wait longer.
GRACE = 0.5

#: Seconds of a term in which another may still record what it had begun to send: its grace, and as much to
#: notice the loss, to connect and to write.
IN_DOUBT_FOR = 2 * GRACE

INSTANT = timedelta(microseconds=1)


class Term:
    """One term of leadership: an inner scheduler, each send of which is asked for first."""

    def __init__(
        self,
        inner: Scheduler,
        candidate: Candidate,
        ledger: Ledger | None,
        progress: Progress,
        *,
        poll: float,
        began: datetime,
    ) -> None:
        """``began``: when the inner scheduler was about to be built."""
        self.inner = inner
        #: Whether something is due that could not be sent.
        self.behind = False
        self._candidate = candidate
        self._ledger = ledger
        self._progress = progress
        self._poll = poll
        #: The slot that each entry may send now, and the last one that it has.
        self._granted: dict[str, datetime] = {}
        self._sent: dict[str, datetime] = {}
        #: The slot after that one, as far as it is known.
        self._next: dict[str, datetime] = {}
        #: What the broker has and the ledger has not.
        self._unrecorded: dict[str, datetime] = {}
        self._clean_at = 0.0
        self._in_doubt_until = time.monotonic() + IN_DOUBT_FOR
        self._its_is_due, self._its_reserve = inner.is_due, inner.reserve
        self._its_apply_async = inner.apply_async
        vars(inner).update(is_due=self._is_due, reserve=self._reserve, apply_async=self._apply_async)
        self._take_up(began)

    def tick(self) -> float:
        """Let the inner scheduler send what is due."""
        self.behind = False
        if self._ledger is not None and time.monotonic() >= self._clean_at:
            self._clean_at = time.monotonic() + CLEAN_EVERY
            self._clean(self._ledger)
        wait = self.inner.tick()
        return self._poll if wait is None else float(wait)

    def _clean(self, ledger: Ledger) -> None:
        try:
            ledger.clean(self.inner.schedule)
        except LockError as exc:
            self._candidate.warn(exc)

    def sent_until(self, began: datetime) -> datetime:
        """Return the moment up to which all slots were sent, when a tick that began then sent no more.

        The inner scheduler counts from the end of a publish, so a slot may be due before it looks again.
        """
        for name, due in list(self._next.items()):
            if due <= began and not self._is_still_due(name):
                del self._next[name]
        return min([began, *(due - INSTANT for due in self._next.values())])

    def _is_still_due(self, name: str) -> bool:
        """Whether an entry is there and due: schedules change."""
        entry: Any = self.inner.schedule.get(name)
        return entry is not None and bool(self._its_is_due(entry)[0])

    def end(self, *, still_leads: bool) -> None:
        """Let the inner scheduler write down what it knows, if that is still its to write."""
        if still_leads:
            self.inner.close()
        else:
            abandon(self.inner)

    def _take_up(self, began: datetime) -> None:
        """Let each entry go on after the last slot that was sent."""
        recorded = self._ledger.last() if self._ledger is not None else {}
        sent_until = self._progress.until
        entries: dict[str, Any] = dict(self.inner.schedule)
        for name, entry in entries.items():
            stored = last = as_utc(entry.last_run_at)
            # An entry that has never run says that it ran while it was built, which may take long.
            is_stored = (began - stored).total_seconds() > self._poll
            if last > began + CLOCKS_DIFFER:
                # In a table that beats of many hosts share, by one whose clock is wrong.
                last = began
            if name in recorded:
                last = recorded[name]
            elif sent_until is not None:
                last = max(last, sent_until) if is_stored else sent_until
            if name in self._progress.last:
                # Also with a ledger: a session may end between a send and its record.
                last = max(last, self._progress.last[name])
            self._go_on_after(entry, last)
            if name in recorded or name in self._progress.last:
                self._count(entry, last, stored if is_stored else slots.EPOCH)

    def _count(self, entry: Any, sent: datetime, counted: datetime) -> None:
        """Count a slot that was sent by a leader who did not live to do so: it may be the only one."""
        if counted < sent:
            self._go_on_after(self._its_reserve(entry), sent)

    def _go_on_after(self, entry: Any, last: datetime) -> None:
        slot = self._sent[entry.name] = slots.floor(entry.schedule, last)
        # Older releases of Celery compare a crontab's hours as they stand here.
        entry.last_run_at = slot.astimezone(entry.schedule.tz)
        model = getattr(entry, "model", None)
        if model is not None:
            # What django-celery-beat stores: naive where its project is.
            model.last_run_at = slot if model.last_run_at.tzinfo is not None else slot.replace(tzinfo=None)

    # What the inner scheduler asks of itself.

    def _is_due(self, entry: Any) -> schedstate:
        """Whether an entry is due by its own rules, and this beat may send it."""
        due, wait = self._its_is_due(entry)
        if not due:
            return schedstate(due, wait)
        now = utcnow()
        last = max(as_utc(entry.last_run_at), self._sent.get(entry.name, slots.EPOCH), before_start(entry))
        slot = slots.due(entry.schedule, last, now)
        if slot is None:
            return self._goes_on_after(entry, last)
        # Not to be told as sent, even if it can't be sent now: a tick need not come by here again.
        self._next[entry.name] = slot
        try:
            doubt = self._in_doubt_for(entry, slot)
            if doubt:
                self.behind = True
                return schedstate(False, doubt)
            if self._was_sent(entry, slot):
                return self._counts_as_sent(entry, slot)
        except LockError as exc:
            self._candidate.warn(exc)
            self.behind = True
        if self.behind or not self._candidate.leads:
            self.behind = True
            return schedstate(False, self._poll)
        self._granted[entry.name] = slot
        after = slots.following(entry.schedule, slot)
        if after is None:
            del self._next[entry.name]
        else:
            self._next[entry.name] = after
        # Behind a moment of its own rules nothing is late.
        if after is not None and slot != now:
            wait = max(0.0, (after - now).total_seconds())
        return schedstate(True, wait)

    def _goes_on_after(self, entry: Any, slot: datetime) -> schedstate:
        """Nothing is to be sent up to a slot: let the inner scheduler look at all entries anew, at once."""
        self._next.pop(entry.name, None)
        before = entry.last_run_at, self._sent.get(entry.name)
        self._go_on_after(entry, slot)
        if before == (entry.last_run_at, self._sent[entry.name]):
            # It would say the same of itself again, at once and for ever.
            return self._put_aside(entry)
        vars(self.inner)["_heap"] = None
        return schedstate(False, 0)

    def _counts_as_sent(self, entry: Any, slot: datetime) -> schedstate:
        """A leader before this one has sent a slot, but did not live to count it."""
        told = self._goes_on_after(entry, slot)
        self._count(entry, slot, slots.EPOCH)
        return told

    def _put_aside(self, entry: Any) -> schedstate:
        """Let one entry wait for a poll. Older releases of Celery would let it keep all others waiting."""
        heap = getattr(self.inner, "_heap", None)
        if heap and heap[0].entry is entry:
            at = self.inner._when(entry, self._poll)  # type: ignore[attr-defined]
            heapq.heapreplace(heap, heap[0]._replace(time=at))
        return schedstate(False, self._poll)

    def _in_doubt_for(self, entry: Any, slot: datetime) -> float:
        """Return the seconds for which the leader before may still say that it has sent a slot."""
        left = self._in_doubt_until - time.monotonic()
        in_doubt = self._ledger is not None and left > 0 and self._ledger.is_in_doubt(entry.name, slot)
        return left if in_doubt else 0.0

    def _was_sent(self, entry: Any, slot: datetime) -> bool:
        """Ask PostgreSQL, and so whether this beat still leads."""
        if self._ledger is None:
            self._candidate.confirm(str(self._progress))
            return False
        return not self._ledger.claim(entry.name, slot)

    def _reserve(self, entry: Any) -> Any:
        """Advance an entry: to its slot, not to now, or it would drift and leave out what was late."""
        advanced = self._its_reserve(entry)
        if entry.name in self._granted:
            self._go_on_after(advanced, self._granted[entry.name])
        return advanced

    def _apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **options: Any) -> Any:
        """Publish an entry with its slot. A publishing that hangs is interrupted when the lock is lost."""
        # A scheduler with a tick of its own may not have asked.
        if entry.name not in self._granted and not self._is_due(entry).is_due:
            return None
        if advance:
            self._reserve(entry)
        slot = self._granted.pop(entry.name)
        sent = with_slot(entry, slot, self._ledger)
        # What ends a beat between a send and its record has the next leader send it again.
        with signals_put_off(), self._sync_put_off(), self._asked_again(sent, producer):
            try:
                with self._candidate.interruptible(GRACE):
                    result = self._its_apply_async(sent, producer=producer, advance=False, **options)
            except LockLost:
                logger.warning("entry %r: its publishing was stopped, since the lock was lost", entry.name)
                # A tick of the scheduler's own may go on, and must not end as one that has sent all.
                self.behind = True
                return None
            words = self._progress.sent(entry.name, slot)
            if self._ledger is not None:
                self._record(self._ledger, entry.name, slot)
            else:
                self._candidate.tell(words)
        return result

    @contextmanager
    def _asked_again(self, sent: Any, producer: Any) -> Iterator[None]:
        """Ask PostgreSQL once more when the message is about to leave, or to leave on a new connection.

        However soon that is: who was frozen meanwhile need not see it, as a paused machine's clock may have
        stood still. The slot needs no second claim: while this beat leads no other makes one.
        """
        header = sent.options["headers"][SLOT_HEADER]

        def ask() -> None:
            if not self._candidate.confirm(str(self._progress)):
                # No `Exception`: Celery would log what a receiver raises, and publish.
                raise LockInterrupt

        def on_publish(headers: Any = None, **_: Any) -> None:
            # What else is published meanwhile, by another thread or beside the message, is none of ours.
            if (headers or {}).get(SLOT_HEADER) == header:
                ask()

        def revive(channel: Any) -> None:
            its_revive(channel)
            ask()

        # Connected just now, it is called last: the other receivers may take their time.
        before_task_publish.connect(on_publish, weak=False)
        if producer is not None:
            # Kombu calls it when it has connected anew, and then tries again.
            its_revive, producer.revive = producer.revive, revive
        try:
            yield
        finally:
            before_task_publish.disconnect(on_publish)
            if producer is not None:
                del producer.revive

    @contextmanager
    def _sync_put_off(self) -> Iterator[None]:
        """Put off what the inner scheduler writes down at the end of a send until that is recorded.

        Its disk may be full. What is raised then must not hide that the broker has the message. If the lock
        went meanwhile it writes nothing: the next term counts what was sent.
        """
        wanted: list[bool] = []
        vars(self.inner)["_do_sync"] = lambda: wanted.append(True)
        try:
            yield
        finally:
            del vars(self.inner)["_do_sync"]
            if wanted and self._candidate.leads:
                self.inner._do_sync()  # type: ignore[attr-defined]

    def _record(self, ledger: Ledger, name: str, slot: datetime) -> None:
        # The message is out. If the lock goes with the answer, the next leader would send the slot again.
        self._unrecorded[name] = slot
        try:
            ledger.record(name, slot)
        except LockError as exc:
            self._candidate.warn(exc)
        else:
            del self._unrecorded[name]

    def record_late(self) -> None:
        """Record what could not be recorded in time, on a later session, or tell it where there is no ledger.

        Where a restart of PostgreSQL has ended all sessions, nobody leads before a poll has passed.
        """
        if self._ledger is None:
            self._candidate.tell_late(str(self._progress))
            return
        for name, slot in list(self._unrecorded.items()):
            self._record(self._ledger, name, slot)


def with_slot(entry: Any, slot: datetime, ledger: Ledger | None) -> Any:
    """An entry for one send, whose message says which slot it is. The scheduler's own stays as it is."""
    # Not copy.copy(), for which entries leave out what they can't pickle.
    sent = object.__new__(type(entry))
    vars(sent).update(vars(entry))
    header = {"entry": entry.name, "due": slot.isoformat()}
    if ledger is not None:
        header["schedule"] = ledger.schedule
    headers = {**(entry.options.get("headers") or {}), SLOT_HEADER: header}
    sent.options = {**entry.options, "headers": headers}
    return sent


def before_start(entry: Any) -> datetime:
    """The last moment before an entry of django-celery-beat may run at all."""
    start = getattr(getattr(entry, "model", None), "start_time", None)
    return slots.EPOCH if start is None else as_utc(start) - INSTANT


def abandon(inner: Scheduler) -> None:
    """Drop a scheduler that must write nothing any more, neither now nor when its process ends.

    What Celery's own writes on its way out lies in the cache of its shelf, what django-celery-beat's does
    in a set of names.
    """
    store = getattr(inner, "_store", None)
    if isinstance(store, shelve.Shelf):
        store.cache.clear()  # type: ignore[attr-defined]
        # Some files are written to when they are closed, and their disk may be full.
        with suppress(OSError):
            store.close()
    dirty = getattr(inner, "_dirty", None)
    if isinstance(dirty, set):
        dirty.clear()
    connection = vars(inner).pop("connection", None)
    if connection is not None:
        # Without a farewell, for which a broker that hangs would have to answer.
        connection.collect()


def as_utc(moment: datetime) -> datetime:
    return maybe_make_aware(moment).astimezone(timezone.utc)


def utcnow() -> datetime:
    return datetime.now(timezone.utc)
