"""The slots of a schedule: what every beat works out alike."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import celery
import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedstate, schedule, solar

from celery_pglock.beat import slots

SECOND = timedelta(seconds=1)
BERLIN = ZoneInfo("Europe/Berlin")


@pytest.fixture
def app() -> Celery:
    app = Celery(set_as_current=False)
    app.conf.timezone = "Europe/Berlin"
    return app


def at(text: str, zone: timezone | ZoneInfo = timezone.utc) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=zone).astimezone(timezone.utc)


def every(seconds: float, app: Celery) -> schedule:
    return schedule(timedelta(seconds=seconds), app=app)


def test_an_interval_s_slots_are_the_same_whenever_a_beat_started(app: Celery) -> None:
    moments = [at("2026-11-30T12:00:01") + timedelta(seconds=offset / 7) for offset in range(60)]
    assert {slots.following(every(10, app), moment) for moment in moments} == {at("2026-11-30T12:00:10")}
    assert slots.floor(every(10, app), at("2026-11-30T12:00:09.999")) == at("2026-11-30T12:00:00")


def test_a_crontab_s_slots_are_on_the_clock_of_its_time_zone(app: Celery) -> None:
    daily = crontab(hour=4, minute=0, app=app)
    slot = slots.following(daily, at("2026-11-30T12:00:00"))
    assert slot == at("2026-12-01T04:00:00", BERLIN)


@pytest.mark.parametrize(
    ("before", "next_slot"),
    [("2026-03-28T04:00:00", "2026-03-29T04:00:00"), ("2026-10-24T04:00:00", "2026-10-25T04:00:00")],
    ids=["spring", "autumn"],
)
def test_a_crontab_follows_the_clocks_when_they_change(app: Celery, before: str, next_slot: str) -> None:
    daily = crontab(hour=4, minute=0, app=app)
    assert slots.following(daily, at(before, BERLIN)) == at(next_slot, BERLIN)


SPRING, AUTUMN = at("2026-03-29T01:00:00"), at("2026-10-25T01:00:00")


@pytest.mark.parametrize("change", [SPRING, AUTUMN], ids=["spring", "autumn"])
@pytest.mark.parametrize(
    "when",
    [{"minute": "*"}, {"minute": "*/15"}, {"hour": 2, "minute": 30}, {"minute": 0}, {"hour": "1-3"}],
    ids=str,
)
def test_a_crontab_s_slots_are_the_same_from_whatever_moment_near_a_change_of_the_clocks(
    app: Celery, change: datetime, when: dict[str, Any]
) -> None:
    """Also its last one, from which Celery works out by itself when the next is due."""
    plan = crontab(**when, app=app)
    found = [slots.following(plan, change - timedelta(hours=30))]
    while found[-1] < change + timedelta(hours=30):
        found.append(slots.following(plan, found[-1]))
    for minutes in range(-130, 130, 7):
        moment = change + timedelta(minutes=minutes, seconds=1)
        after = min(slot for slot in found if slot > moment)
        assert slots.following(plan, moment) == after
        last = slots.floor(plan, moment)
        assert slots.following(plan, last) == after
        plan.nowfun = lambda now=after: now.astimezone(BERLIN)
        assert plan.is_due(last.astimezone(BERLIN)).is_due
        assert slots.due(plan, last, after) == after
        assert slots.due(plan, last, after - SECOND) is None


def test_an_hour_that_comes_twice_has_slots_the_first_time_alone(app: Celery) -> None:
    """As with a plain beat. One that begins in that hour sends without an end."""
    plan = crontab(minute="*/15", app=app)
    now = AUTUMN + timedelta(minutes=32)
    plan.nowfun = lambda: now.astimezone(BERLIN)
    last = now - timedelta(seconds=1)
    assert plan.is_due(last.astimezone(BERLIN)).is_due is (celery.VERSION >= (5, 5))
    assert not plan.is_due(slots.floor(plan, last).astimezone(BERLIN)).is_due
    assert slots.due(plan, last, now) is None
    assert slots.pending(plan, last, now) == AUTUMN + timedelta(hours=1)


def test_what_falls_into_an_hour_that_is_left_out_follows_it(app: Celery) -> None:
    """For a beat that takes over in between, too."""
    plan = crontab(hour=2, minute=30, app=app)
    slot = SPRING + timedelta(minutes=30)
    assert slots.following(plan, SPRING - timedelta(hours=20)) == slot
    assert slots.following(plan, SPRING + timedelta(minutes=10)) == slot


def test_an_interval_does_not_see_the_clocks_change(app: Celery) -> None:
    before = at("2026-03-29T01:30:00", BERLIN)
    assert slots.following(every(3600, app), before) == before + timedelta(minutes=30)


def test_nothing_due_is_a_slot_in_the_future(app: Celery) -> None:
    now = at("2026-11-30T12:00:05")
    assert slots.pending(every(10, app), at("2026-11-30T12:00:00"), now) == at("2026-11-30T12:00:10")


def test_the_slots_of_a_short_gap_come_one_by_one(app: Celery) -> None:
    sent, now, found = at("2026-11-30T12:00:00"), at("2026-11-30T12:00:05.500000"), []
    while (slot := slots.pending(every(1, app), sent, now)) and slot <= now:
        found.append(slot)
        sent = slot
    assert found == [at("2026-11-30T12:00:00") + timedelta(seconds=n) for n in range(1, 6)]


@pytest.mark.parametrize(
    ("plan", "last"),
    [
        (crontab(hour=4, minute=0), "2026-11-30T04:00:00"),
        (crontab(minute="*/10", hour="1-4"), "2026-11-30T04:50:00"),
        (crontab(minute=0, hour=0, day_of_month=1), "2026-11-01T00:00:00"),
        (schedule(timedelta(hours=6)), "2026-11-30T12:00:00"),
    ],
    ids=["daily", "by night", "monthly", "interval"],
)
def test_of_a_long_gap_the_last_slot_is_left(plan: schedule, last: str) -> None:
    plan.app = Celery(set_as_current=False)
    now = at("2026-11-30T12:34:56")
    assert slots.pending(plan, at("2026-10-03T00:00:00"), now) == at(last)
    assert slots.pending(plan, at(last), now) > now


def test_of_a_dense_schedule_the_last_minute_is_left(app: Celery) -> None:
    now = at("2026-11-30T12:34:56.500000")
    assert slots.pending(every(1, app), at("2026-11-29T00:00:00"), now) == at("2026-11-30T12:33:57")


def test_a_schedule_that_changed_goes_on_from_its_last_slot(app: Celery) -> None:
    last = at("2026-11-30T12:00:07")
    assert slots.floor(every(5, app), last) == at("2026-11-30T12:00:05")
    assert slots.pending(every(5, app), slots.floor(every(5, app), last), last) == at("2026-11-30T12:00:10")


def test_a_user_s_own_schedule_is_asked_and_not_computed(app: Celery) -> None:
    class Odd(schedule):
        def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
            return super().is_due(last_run_at)

    odd = Odd(timedelta(seconds=7), app=app)
    moment = at("2026-11-30T12:00:03")
    assert slots.following(odd, moment) == moment + timedelta(seconds=7)
    assert slots.floor(odd, moment) == moment


def test_what_says_by_rules_of_its_own_that_it_is_due_has_a_slot_now(app: Celery) -> None:
    """Unless one is pending. Celery's own have none between theirs."""

    class WhenAsked(schedule):
        def is_due(self, last_run_at: datetime) -> schedstate:
            return schedstate(True, 60)

    class OnlyIsDue(BaseSchedule):
        is_due = WhenAsked.is_due

    now = at("2026-11-30T12:00:03")
    just, long_ago = now - SECOND, now - 30 * SECOND
    assert slots.due(WhenAsked(SECOND * 10, app=app), just, now) == now
    assert slots.due(WhenAsked(SECOND * 10, app=app), long_ago, now) == long_ago + 10 * SECOND
    assert slots.due(OnlyIsDue(app=app), long_ago, now) == now
    assert slots.due(every(10, app), just, now) is None
    assert slots.due(crontab(app=app), just, now) is None


@pytest.mark.parametrize("event", ["sunrise", "sunset", "solar_noon"])
def test_a_solar_event_is_one_slot_from_whatever_moment_it_is_looked_for(app: Celery, event: str) -> None:
    pytest.importorskip("ephem")
    plan = solar(event, 52.5, 13.4, app=app)
    first = slots.following(plan, at("2026-11-30T00:00:00"))
    earlier = [first - timedelta(hours=12) * fraction / 7**9 for fraction in (7**n for n in range(10))]
    assert {slots.following(plan, moment) for moment in earlier} == {first}
    second = slots.following(plan, first)
    assert timedelta(hours=23) < second - first < timedelta(hours=25)
    assert slots.pending(plan, first, first + timedelta(seconds=5)) == second
    assert slots.pending(plan, first - timedelta(days=90), first + timedelta(hours=1)) == first


def test_a_moment_that_comes_once_has_no_next_slot(app: Celery) -> None:
    """As django-celery-beat's clocked schedule."""

    class Once(schedule):
        def remaining_estimate(self, last_run_at: datetime) -> timedelta:
            return at("2026-11-30T12:00:00") - self.now()

        def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
            return self.remaining_estimate(last_run_at).total_seconds() <= 0, 60

    once = Once(timedelta(0), app=app)
    assert slots.following(once, at("2026-11-30T11:00:00")) == at("2026-11-30T12:00:00")
    assert slots.following(once, at("2026-11-30T12:00:00")) is None
