"""Beats in this process: wrong set-ups, clocks that differ, inner schedulers that fail."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Any, ClassVar

import psycopg
import pytest
from celery import Celery
from celery.beat import Scheduler

from celery_pglock import beat as beat_module
from celery_pglock import term as term_module
from celery_pglock.beat import ElectedScheduler
from integration.judge import Judge
from localservers import PgBouncer

SECOND = timedelta(seconds=1)


class Noting(Scheduler):
    """Sends to a list."""

    sent: ClassVar[list[datetime]] = []
    fails: bool = False

    def apply_async(self, entry: Any, **_: Any) -> None:
        self.sent.append(datetime.fromisoformat(entry.options["headers"]["pglock_slot"]["due"]))

    def tick(self) -> float:
        if self.fails:
            raise RuntimeError("the tables are gone")
        return super().tick()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[datetime]:
    monkeypatch.setattr(Noting, "sent", [])
    return Noting.sent


@pytest.fixture
def new_beat(
    app: Celery, sent: list[datetime], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ElectedScheduler]]:
    """Make beats of a schedule of one entry a second."""
    beats: list[ElectedScheduler] = []
    app.conf.update(
        beat_schedule={"a": {"task": "a", "schedule": SECOND}},
        pglock_beat_scheduler=Noting,
        pglock_beat_poll=0.1,
        result_expires=None,
    )

    def new_beat(clock: float = 0.0, **conf: Any) -> ElectedScheduler:
        app.conf.update(conf)
        for module in (term_module, beat_module):
            monkeypatch.setattr(
                module, "utcnow", lambda: datetime.now(timezone.utc) + timedelta(seconds=clock)
            )
        monkeypatch.setattr(app, "now", lambda: datetime.now(app.timezone) + timedelta(seconds=clock))
        beats.append(ElectedScheduler(app))
        return beats[-1]

    yield new_beat
    for beat in beats:
        beat.close()


def run(beat: ElectedScheduler, seconds: float) -> None:
    """As Celery's service does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        wait = beat.tick()
        if wait > 0:
            time.sleep(wait)


def test_the_banner_s_scheduler_opens_nothing(app: Celery, judge: Judge) -> None:
    assert "celery:beat" in ElectedScheduler(app, lazy=True).info
    assert not judge.sessions()


def test_nothing_is_sent_through_a_pooler(
    new_beat: Callable[..., ElectedScheduler],
    pgbouncer: PgBouncer,
    dbname: str,
    sent: list[datetime],
    judge: Judge,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its locks are anybody's. The reason is told once."""
    with caplog.at_level(logging.WARNING):
        run(new_beat(pglock_database_url=pgbouncer.url(dbname)), 1.5)
    assert not sent
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "pooler" in caplog.text
    for pid in judge.sessions():  # the pooler's own, which it keeps
        judge.end(pid)


def test_nobody_leads_without_the_ledger_that_was_asked_for(
    new_beat: Callable[..., ElectedScheduler],
    observer: psycopg.Connection,
    sent: list[datetime],
    judge: Judge,
    caplog: pytest.LogCaptureFixture,
) -> None:
    beat = new_beat(pglock_beat_ledger="nowhere.ledger")
    with caplog.at_level(logging.WARNING):
        run(beat, 1.5)
        assert not sent
        assert len(caplog.records) == 1
        assert "CREATE TABLE IF NOT EXISTS nowhere.ledger" in caplog.text
        assert not judge.locks()
        observer.execute("CREATE SCHEMA nowhere")
        run(beat, 1.5)
    assert sent
    observer.execute("DROP SCHEMA nowhere CASCADE")


@pytest.mark.parametrize("ahead", [5.0, -5.0])
def test_clocks_that_differ_neither_lose_nor_double_a_slot(
    new_beat: Callable[..., ElectedScheduler],
    observer: psycopg.Connection,
    sent: list[datetime],
    ahead: float,
) -> None:
    first = new_beat(clock=ahead, pglock_beat_ledger="ledger")
    run(first, 2.5)
    first.close()
    run(new_beat(clock=0.0), 2.5 + max(0.0, ahead))
    observer.execute("DROP TABLE ledger")
    assert set(Counter(sent).values()) == {1}
    assert {after - before for before, after in pairwise(sent)} == {SECOND}


def test_clocks_that_differ_double_slots_without_a_ledger(
    new_beat: Callable[..., ElectedScheduler], sent: list[datetime]
) -> None:
    """The control."""
    first = new_beat(clock=5.0)
    run(first, 2.5)
    first.close()
    run(new_beat(clock=0.0), 7.5)
    assert max(Counter(sent).values()) == 2


def test_a_beat_whose_scheduler_fails_lets_the_lock_go(
    new_beat: Callable[..., ElectedScheduler],
    sent: list[datetime],
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    beat = new_beat()
    monkeypatch.setattr(Noting, "fails", True)
    with caplog.at_level(logging.ERROR):
        run(beat, 0.5)
    assert not judge.locks()
    assert len(caplog.records) == 1
    monkeypatch.setattr(Noting, "fails", False)
    run(beat, 1.5)
    assert sent


def test_a_beat_that_is_closed_twice_or_while_it_ticks_hands_over(
    new_beat: Callable[..., ElectedScheduler], judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler closes it wherever it is; the service closes it once more."""
    beat = new_beat()
    run(beat, 0.3)

    def interrupted(self: Noting) -> float:
        beat.close()
        raise SystemExit

    monkeypatch.setattr(Noting, "tick", interrupted)
    with pytest.raises(SystemExit):
        beat.tick()
    beat.close()
    beat.close()
    judge.sees_nothing_left()


def test_a_newcomer_lets_those_go_first_who_know_what_was_sent(
    new_beat: Callable[..., ElectedScheduler], judge: Judge
) -> None:
    beat = new_beat()
    beat.tick()
    assert not judge.locks()
    beat.tick()
    assert len(judge.locks()) == 1


def test_a_leader_says_no_more_than_it_has_sent(
    new_beat: Callable[..., ElectedScheduler],
    observer: psycopg.Connection,
    sent: list[datetime],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A publish that takes long lets Celery's heap look late for what is due meanwhile."""
    send = Noting.apply_async

    def send_slowly(self: Noting, entry: Any, **options: Any) -> None:
        time.sleep(0.4)
        send(self, entry, **options)

    monkeypatch.setattr(Noting, "apply_async", send_slowly)
    beat = new_beat()
    until, read = time.monotonic() + 5, 0
    while time.monotonic() < until:
        wait = beat.tick()
        (said,) = observer.execute(
            "SELECT max(substring(query FROM 'sent until ([^'']+)')) FROM pg_stat_activity"
            " WHERE application_name LIKE 'pglock %' AND datname = current_database()"
        ).fetchone()
        if said is not None and sent:
            read += 1
            assert datetime.fromisoformat(said) < sent[-1] + SECOND
        time.sleep(max(0.0, wait))
    assert read > 5
