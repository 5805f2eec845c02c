"""When the entries of a schedule fall due: their slots. Pure functions of a schedule and a moment.

A slot is a moment that every beat works out alike, on whichever machine it leads:

- An interval's slots are the multiples of its length since 1970 in UTC. A plain beat counts from its own
  start instead, which its successor does not know.
- A crontab's, and those of every other schedule, are what ``remaining_estimate`` says, asked as if it were
  the moment of the slot before. Behind a change of the clocks a crontab's depend on that slot: an hour that
  comes twice has slots the first time alone, and what falls into one that is left out follows it. So there
  the slots are counted from before the change.
- The Sun's are found by a search, which ends some milliseconds off if it begins at another moment: so it
  begins at one that follows from its end.
"""

from __future__ import annotations

import copy
from datetime import datetime, timedelta, timezone
from typing import Any

from celery.schedules import crontab, schedule, solar

__all__ = ["due", "floor", "following", "pending"]

#: After a gap each slot of so long a time is sent, and of what fell due before that the last one alone.
CATCH_UP = timedelta(seconds=60)

#: Clocks are put on or back by less.
LONGEST_CHANGE = timedelta(hours=3)

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def due(plan: Any, after: datetime, now: datetime) -> datetime | None:
    """Return the slot that is to be sent of a schedule which says that it is due.

    With rules of its own it may say so at any moment, which then is a slot. None where it is mistaken, as
    Celery's own are in an hour that the clock on the wall shows twice: asked about a last run in it they say
    so again and again.
    """
    slot = pending(plan, after, now)
    if not is_later(slot, now):
        return slot
    # django-celery-beat's clocked ones have a single slot, however late they are asked.
    clocked_time: datetime | None = getattr(plan, "clocked_time", None)
    if clocked_time is not None:
        return clocked_time.astimezone(timezone.utc)
    return now if has_rules_of_its_own(plan) else None


def pending(plan: Any, after: datetime, now: datetime) -> datetime | None:
    """Return the slot that is to be sent next, given that all up to ``after`` were.

    It lies in the future where nothing is due; None where nothing ever will be.
    """
    window = CATCH_UP
    while after < now - window and is_later(following(plan, now - window), now):
        window *= 2
    slot = following(plan, max(after, now - window))
    if window == CATCH_UP:
        return slot
    while slot is not None and not is_later(next_slot := following(plan, slot), now):
        slot = next_slot
    return slot


def following(plan: Any, moment: datetime) -> datetime | None:
    """Return the first slot after a moment, None where there is none."""
    if is_interval(plan):
        beyond: datetime = floor(plan, moment) + plan.run_every
        return beyond
    if isinstance(plan, solar):
        return following_event(plan, moment)
    try:
        slot = ask(plan, moment) if not isinstance(plan, crontab) else on_the_clock(plan, moment)[1]
    except NotImplementedError:
        # Celery's beat never asks for it.
        return None
    return slot if slot > moment else None


def on_the_clock(plan: crontab, moment: datetime) -> tuple[datetime, datetime]:
    """Return a moment from which a crontab goes on as from this one, and its first slot after this one.

    The former is this one but where the clocks have just changed: then it is the slot before, or no slot lies
    between.
    """
    last = before_the_change(plan, moment)
    slot = ask(plan, last)
    while last < slot <= moment:
        last, slot = slot, ask(plan, slot)
    return last, slot


def before_the_change(plan: crontab, moment: datetime) -> datetime:
    """Return the moment itself, or one before the clocks changed if they just did."""
    tz: Any = plan.tz

    def offset(moment: datetime) -> timedelta:
        return moment.astimezone(tz).utcoffset() or timedelta()

    before = moment - abs(offset(moment) - offset(moment - LONGEST_CHANGE))
    return before if offset(before) != offset(moment) else moment


def following_event(plan: solar, moment: datetime) -> datetime | None:
    """Return the first slot of the Sun's after a moment."""
    # From the slot itself the search may find it once more, and miss it from a millisecond before.
    for begin in (moment - MINUTE, moment + MINUTE):
        found = ask(plan, begin)
        slot = ask(plan, found.replace(minute=0, second=0, microsecond=0) - HOUR)
        if slot > moment:
            return slot
    return None


def ask(plan: Any, moment: datetime) -> datetime:
    """Return when a schedule that ran at a moment wants to run again."""
    asked, before, slot = copy.copy(plan), moment, moment
    # More than once: older releases of Celery count by the clock on the wall. Asked at the slot itself they
    # tell how far it lies off where the clocks change on the way. One that no clock shows lies off for ever,
    # before the change and behind it in turns: it is the one behind.
    for _ in range(3):
        now = slot.astimezone(plan.tz)
        asked.nowfun = lambda now=now: now
        before, slot = slot, slot + asked.remaining_estimate(moment.astimezone(plan.tz))
        if slot == before:
            break
    return max(before, slot)


def floor(plan: Any, moment: datetime) -> datetime:
    """Return an interval's last slot up to a moment; of every other schedule the moment itself.

    Or an earlier one, from which it goes on alike: what a crontab says of a last run just behind a change of
    the clocks is wrong.
    """
    if isinstance(plan, crontab) and before_the_change(plan, moment) != moment:
        return on_the_clock(plan, moment)[0]
    if not is_interval(plan):
        return moment
    past: timedelta = (moment - EPOCH) % plan.run_every
    return moment - past


def is_interval(plan: Any) -> bool:
    """Whether a schedule is Celery's plain interval, and no class of the user's with rules of its own."""
    return (
        isinstance(plan, schedule)
        and not has_rules_of_its_own(plan)
        and not plan.relative
        and plan.seconds > 0
    )


def has_rules_of_its_own(plan: Any) -> bool:
    """Whether a schedule is none of Celery's, and no crontab, as those of django-celery-beat are."""
    return not isinstance(plan, (crontab, solar)) and type(plan).is_due is not schedule.is_due


def is_later(slot: datetime | None, now: datetime) -> bool:
    return slot is None or slot > now
