"""One beat of many: ``celery -A proj beat -S pglock``, as often as you like.

A beat follows until it gets the lock of its schedule, then it leads until the lock is lost or it stops::

    FOLLOWER ──granted──▶ LEADER ──lost──▶ FOLLOWER
                             └──SIGTERM──▶ (handed over at once)

Facts that shaped it:

- Celery's service asks a scheduler for little: ``tick()``, ``max_interval``, ``should_sync()``,
  ``_do_sync()``, ``close()``, ``info``. So the schedule itself is kept by a scheduler of any class inside of
  this one. It is built when a term begins and dropped when it ends: a follower has none, and so no file and
  no table to write to.
- A follower must know what the leader has sent when it takes over. The leader tells it by NOTIFY after each
  send: what PostgreSQL has acknowledged there reaches all that listen before any of them gets the lock. One
  that has just come reads the leader's last statement in ``pg_stat_activity``, or waits for the next.
- The server ends a session that is silent for `WEDGED_AFTER` seconds, and only `ElectedScheduler.tick` speaks
  on the leader's. So a frozen process loses its lock, and so does one whose publishing hangs. Only while the
  inner scheduler is built, which sends nothing, others speak for it, for `BUILT_WITHIN` seconds at most.
- A signal handler that closes the scheduler may run inside of a tick. It does nothing there: the SystemExit
  that follows unwinds the tick, and the service closes the scheduler again.

Guaranteed: no entry is sent without a lock that PostgreSQL confirmed just before; what falls due is sent at
least once, whoever dies, and once but for one case: a leader who dies in the middle of a send, between the
broker's having it and its own next statement, leaves a slot that is sent again, with the same `pglock_slot`.
With a ledger locked tasks run it once. A leader that only loses its lock there says late what it has sent:
with a ledger the next one waits for that, without one it is in time where nobody leads yet.

Not guaranteed: without a ledger, what all beats slept through is known only as far as the inner scheduler
stores it, and a beat that lost its connection misses what is told meanwhile. A message that the broker
refused is logged and dropped, as by every beat.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from celery import Celery
from celery.beat import Scheduler
from celery.utils.imports import symbol_by_name

from celery_pglock.advisory import new_hold
from celery_pglock.config import beat_settings_of, settings_of
from celery_pglock.locks.candidate import WARN_EVERY, Candidate
from celery_pglock.locks.errors import LockError
from celery_pglock.locks.ledger import Ledger
from celery_pglock.locks.settings import Settings

from .progress import Progress
from .term import Term, utcnow

__all__ = ["ElectedScheduler"]

logger = logging.getLogger(__name__)

#: Seconds after which a leader that is frozen, or hangs, has lost its lock.
WEDGED_AFTER = 10.0

#: Seconds for which a beat keeps the lock while it builds its scheduler, which may read thousands of entries.
#: Who takes longer hangs, and another may have more luck.
BUILT_WITHIN = 60.0

#: Polls for which a beat that knows nothing listens: one until others look, one that they listen, one more.
NEWCOMER_LISTENS = 3


class ElectedScheduler:
    """A scheduler that sends while it leads, and follows while another does."""

    def __init__(
        self,
        app: Celery,
        schedule_filename: str | None = None,
        max_interval: float | None = None,
        lazy: bool = False,
        **options: Any,
    ) -> None:
        """Read the settings. Nothing is connected and nothing built before the first tick.

        A ``lazy`` one is asked by Celery's banner, and never ticks.
        """
        self.app = app
        self._settings = beat_settings_of(app)
        self._inner_class: type[Scheduler] = symbol_by_name(self._settings.scheduler)
        self._options = {"schedule_filename": schedule_filename, "max_interval": max_interval, **options}
        settings = with_freeze_timeout(settings_of(app))
        # A session that is asked more rarely is ended.
        longest = ((settings and settings.freeze_timeout) or WEDGED_AFTER) / 3
        self.max_interval = min(max_interval or self._settings.poll, self._settings.poll, longest)
        self.lock = new_hold(settings, self._settings.name).label
        self._candidate = Candidate(
            None if lazy else settings,
            lambda: new_hold(settings, self._settings.name),
            pings=False,
        )
        self._term: Term | None = None
        #: The one before, which may have something to record yet.
        self._last_term: Term | None = None
        #: What was sent, by this beat or by the leaders it followed.
        self._progress = Progress()
        self._candidate.listen(self._progress.hear)
        self._follows: str | None = None
        self._polls_to_listen = 0
        self._ticks = self._closed = False
        #: Whether this term was said to be one, and whether the last one failed or was over before that.
        self._announced = self._in_vain = False
        #: When each of the lines about that was logged last.
        self._said: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<ElectedScheduler {self.lock!r} [{'leads' if self._term else 'follows'}]>"

    @property
    def info(self) -> str:
        """What Celery's banner says of the scheduler."""
        return f"    . lock -> {self.lock}\n    . of -> {self._settings.scheduler}"

    @property
    def schedule(self) -> Mapping[str, Any]:
        """The entries, as far as this beat leads."""
        return self._term.inner.schedule if self._term is not None else {}

    def tick(self) -> float:
        """Send what is due if this beat leads, and return the seconds until it wants to be asked again."""
        self._ticks = True
        try:
            if self._term is None and not self._campaign():
                return self._candidate.rest(self.max_interval, patiently=self._knows_nothing)
            return self._lead()
        finally:
            self._ticks = False

    def should_sync(self) -> bool:
        """Whether the inner scheduler wants to write down what it knows."""
        return self._term is not None and self._candidate.leads and bool(self._term.inner.should_sync())

    def _do_sync(self) -> None:
        if self._term is None:
            return
        try:
            self._term.inner._do_sync()  # type: ignore[attr-defined]
        except Exception as exc:  # noqa: BLE001 - a full disk, say: another host may have room, and none may end here
            self._stand_down("its scheduler could not write down what it knows", exc)

    def close(self) -> None:
        """Hand over at once. Does nothing inside of a tick, whose end closes again."""
        if self._ticks or self._closed:
            return
        self._closed = True
        term, self._term = self._term, None
        try:
            if term is not None:
                term.end(still_leads=self._candidate.leads)
        except Exception:
            # A beat that is to end does so, and with 0.
            logger.exception("the scheduler of this beat could not write down what it knows")
        finally:
            self._candidate.close()

    def _campaign(self) -> bool:
        """Ask for the lock, and take over if it is granted.

        Those that heard what was sent have precedence: who was cut off listens for a poll's length first, and
        who has just come and knows nothing for as long as the former may take.
        """
        if not self._candidate.listens:
            self._look()
            return False
        self._polls_to_listen -= 1
        if self._knows_nothing:
            # Not in silence: the server ends a session that says nothing for as long as these polls may take.
            self._candidate.look()
            self._follow()
            return False
        if not self._candidate.campaign():
            self._follow()
            return False
        self._follows = None
        # From now on who has just come reads what this term has sent: nothing yet.
        self._candidate.tell(str(self._progress))
        try:
            self._term = self._new_term()
        except LockError as exc:
            self._in_vain = True
            self._candidate.warn(exc)
            self._candidate.resign()
            return False
        except Exception as exc:  # noqa: BLE001 - a schedule in a database that restarts: another may have more luck
            self._stand_down("its scheduler could not be built", exc)
            return False
        return True

    @property
    def _knows_nothing(self) -> bool:
        """Whether it has just come, and others may know more."""
        return self._polls_to_listen > 0 and self._progress.until is None

    def _look(self) -> None:
        self._candidate.look()
        if self._last_term is not None and self._candidate.listens:
            self._last_term.record_late()
        self._follow()
        self._polls_to_listen = NEWCOMER_LISTENS if self._progress.until is None else 1

    def _new_term(self) -> Term:
        ledger = self._open_ledger()
        began = utcnow()
        with self._candidate.kept_for(BUILT_WITHIN):
            inner = self._build()
            return Term(inner, self._candidate, ledger, self._progress, poll=self.max_interval, began=began)

    def _build(self) -> Scheduler:
        inner = self._inner_class(app=self.app, **self._options)
        # What a leader knows must outlive it. A ledger knows slots, and not how often an entry has run.
        inner.sync_every_tasks = inner.sync_every_tasks or 1
        return inner

    def _open_ledger(self) -> Ledger | None:
        if self._settings.ledger is None or not self._candidate.is_real:
            return None
        ledger = Ledger(self._settings.ledger, self.lock, self._candidate.run)
        ledger.create()
        return ledger

    def _follow(self) -> None:
        """Take down what the leader says, and log who it is, once."""
        rival = self._candidate.rival
        if rival is None:
            return
        if rival.words != self._follows and self._may_say("follows"):
            self._follows = rival.words
            logger.info("this beat follows: %s leads", rival.words)
        self._progress.read(rival.says)

    def _lead(self) -> float:
        term = self._term
        assert term is not None
        began = utcnow()
        try:
            wait = term.tick()
        except Exception as exc:  # noqa: BLE001 - whatever the inner scheduler may raise: the lock must not stay here
            self._stand_down("its scheduler failed", exc)
            return self.max_interval
        if wait > 0:
            # A term that is over keeps what it has sent, each by itself: the next one has it to count.
            if not term.behind and self._candidate.leads:
                self._progress.sent_until(term.sent_until(began))
            self._candidate.tell(str(self._progress))
        if not self._candidate.leads:
            self._stand_down("its lock was lost")
            self._look()
            return self._candidate.rest(self.max_interval)
        if not self._announced and self._may_say("leads"):
            self._announced = True
            logger.info("this beat leads: lock %r", self.lock)
        return min(wait, self.max_interval)

    def _stand_down(self, reason: str, error: Exception | None = None) -> None:
        """End the term, and write nothing: the inner scheduler's file and tables may be another's by now."""
        term, self._term = self._term, None
        if term is not None:
            term.end(still_leads=False)
            self._last_term = term
        self._candidate.resign()
        self._in_vain = error is not None or not self._announced
        self._announced = False
        if error is None and self._may_say("lost"):
            logger.warning("this beat leads no longer: %s", reason)
        elif error is not None and self._may_say("failed"):
            logger.error("this beat leads no longer: %s", reason, exc_info=error)

    def _may_say(self, what: str) -> bool:
        """Whether to log it now. Where beats take the lock in vain it passes between them at each poll."""
        now = time.monotonic()
        if self._in_vain and now - self._said.get(what, -WARN_EVERY) < WARN_EVERY:
            return False
        self._said[what] = now
        return True


def with_freeze_timeout(settings: Settings | None) -> Settings | None:
    if settings is None:
        return None
    return replace(settings, freeze_timeout=min(settings.freeze_timeout or WEDGED_AFTER, WEDGED_AFTER))
