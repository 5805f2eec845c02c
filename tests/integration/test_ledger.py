"""The ledger of a beat, on a real server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone

import psycopg
import pytest

from celery_pglock import LockSetupError, LockUnavailable
from celery_pglock.locks.hold import Hold
from celery_pglock.locks.keeper import Keeper, close_all, keeper_for, scribe_for
from celery_pglock.locks.keys import LockId
from celery_pglock.locks.ledger import Ledger
from celery_pglock.locks.requests import Answer, Statement
from celery_pglock.locks.settings import Settings
from integration.judge import Judge
from integration.rivals import in_thread
from localservers import PgBouncer, PostgreSQL

NOON = datetime(2026, 11, 30, 12, 0, 0, 250000, tzinfo=timezone.utc)


@pytest.fixture
def new_ledger(keeper: Keeper, observer: psycopg.Connection) -> Iterator[Callable[..., Ledger]]:
    yield lambda schedule="celery:beat", table="ledger": Ledger(table, schedule, keeper.run)
    observer.execute("DROP TABLE IF EXISTS ledger")


@pytest.fixture
def ledger(new_ledger: Callable[..., Ledger]) -> Ledger:
    ledger = new_ledger()
    ledger.create()
    return ledger


def test_a_slot_is_sent_once(ledger: Ledger) -> None:
    assert ledger.claim("report", NOON)
    ledger.record("report", NOON)
    assert not ledger.claim("report", NOON)
    assert ledger.claim("report", NOON + timedelta(seconds=1))
    assert ledger.claim("other", NOON)


def test_a_slot_whose_sender_died_is_sent_again(ledger: Ledger) -> None:
    assert ledger.claim("report", NOON)
    assert ledger.claim("report", NOON)
    assert ledger.last() == {}


def test_the_last_slot_of_each_entry_is_kept_to_the_microsecond(ledger: Ledger) -> None:
    for second in range(3):
        ledger.claim("report", NOON + timedelta(seconds=second))
        ledger.record("report", NOON + timedelta(seconds=second))
    assert ledger.last() == {"report": NOON + timedelta(seconds=2)}


def test_schedules_share_a_table_and_nothing_else(ledger: Ledger, new_ledger: Callable[..., Ledger]) -> None:
    other = new_ledger("celery:other")
    other.create()
    ledger.claim("report", NOON)
    ledger.record("report", NOON)
    assert other.claim("report", NOON)
    assert other.last() == {}


def test_the_first_message_of_a_slot_runs_as_often_as_it_comes(ledger: Ledger) -> None:
    ledger.claim("report", NOON)
    assert ledger.run("report", NOON.isoformat(), "first")
    assert not ledger.run("report", NOON.isoformat(), "second")
    assert ledger.run("report", NOON.isoformat(), "first")


def test_names_are_taken_as_they_are(ledger: Ledger) -> None:
    for name in ("it's", 'a "b"', "100 %s", "back\\slash", "{braces}", "ü"):
        assert ledger.claim(name, NOON)
        ledger.record(name, NOON)
        assert ledger.last()[name] == NOON


def test_rows_older_than_a_day_go_but_the_last_of_each_entry(
    ledger: Ledger, observer: psycopg.Connection
) -> None:
    now = datetime.now(timezone.utc).replace(microsecond=0)
    old, older = now - timedelta(days=300), now - timedelta(days=301)
    for entry, due in [("yearly", old), ("yearly", older), ("gone", old), ("daily", old), ("daily", now)]:
        ledger.claim(entry, due)
        ledger.record(entry, due)
    ledger.clean(["yearly", "daily"])
    rows = observer.execute("SELECT entry, due FROM ledger ORDER BY entry").fetchall()
    assert rows == [("daily", now), ("yearly", old)]


def test_the_word_of_a_clock_that_is_wrong_is_not_believed_and_guarded_all_the_same(ledger: Ledger) -> None:
    """Clocks differ by seconds. A slot of the time to come is not the last one, and is not sent again."""
    now = datetime.now(timezone.utc).replace(microsecond=0)
    past, soon, wrong = now - timedelta(days=3), now + timedelta(seconds=40), now + timedelta(days=1)
    for entry, due in [("yearly", past), ("yearly", wrong), ("a", now), ("a", soon), ("a", wrong)]:
        ledger.claim(entry, due)
        ledger.record(entry, due)
    ledger.clean(["yearly", "a"])
    assert ledger.last() == {"yearly": past, "a": soon}
    assert not ledger.claim("a", wrong)


def test_a_ledger_of_no_entries_is_cleaned_too(ledger: Ledger) -> None:
    ledger.clean([])


def test_who_may_not_create_the_table_is_told_what_to_run(
    observer: psycopg.Connection, dbname: str, keeper: Keeper
) -> None:
    observer.execute("CREATE ROLE beats")
    # Up to 14 everybody may create tables there.
    observer.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    try:
        keeper.run(Statement("SET ROLE beats"))
        with pytest.raises(LockSetupError, match=r'permission denied.*CREATE TABLE IF NOT EXISTS "ledger"'):
            Ledger("ledger", "celery:beat", keeper.run).create()
        # What somebody else has created is used without that right.
        observer.execute("CREATE TABLE ledger AS SELECT 1")
        Ledger("ledger", "celery:beat", keeper.run).create()
    finally:
        keeper.close()
        observer.execute("DROP TABLE IF EXISTS ledger")
        observer.execute("DROP ROLE beats")


def test_what_to_run_makes_the_very_table_that_is_asked_for(
    observer: psycopg.Connection, keeper: Keeper
) -> None:
    """Capitals are part of a name that is quoted, and not of another."""
    ledger = Ledger("Shop_Beat", "celery:beat", keeper.run)
    with pytest.raises(LockSetupError) as told:
        ledger.last()
    advice = str(told.value).partition("may run: ")[2]
    try:
        observer.execute(advice.replace("<the role of the beats>", "CURRENT_USER"))
        ledger.create()
        assert ledger.claim("report", NOON)
        assert observer.execute("SELECT to_regclass('shop_beat')").fetchone() == (None,)
    finally:
        observer.execute('DROP TABLE IF EXISTS shop_beat, "Shop_Beat"')


def test_a_missing_table_costs_nobody_his_lock(keeper: Keeper, new_ledger: Callable[..., Ledger]) -> None:
    """A worker's session carries the holds of other tasks."""
    hold = Hold(LockId(7))
    keeper.acquire(hold)
    with pytest.raises(LockSetupError, match="does not exist"):
        new_ledger(table="nowhere").run("report", NOON.isoformat(), "first")
    assert hold.status is hold.Status.HELD
    keeper.holder_of(LockId(7))
    assert hold.status is hold.Status.HELD
    keeper.release(hold)
    assert not hold.lost


@pytest.mark.parametrize("network", [True, False])
def test_a_locked_table_costs_nobody_his_lock(
    postgres: PostgreSQL, dbname: str, observer: psycopg.Connection, ledger: Ledger, network: bool
) -> None:
    """Who asks is told so in a moment, whatever lies between; the session of the locks goes on."""
    settings = Settings(postgres.url(dbname) if network else postgres.socket_url(dbname), loss_timeout=9.0)
    keeper, hold = keeper_for(settings), Hold(LockId(7))
    keeper.acquire(hold)
    asks = Ledger("ledger", "celery:beat", scribe_for(settings, "ledger").run)
    with observer.transaction():
        observer.execute("LOCK TABLE ledger")
        since = time.monotonic()
        asked = in_thread(lambda: asks.run("report", NOON.isoformat(), "first"))
        while not asked.done():
            other = Hold(LockId(8))
            asked_at = time.monotonic()
            assert keeper.acquire(other).answer is Answer.GRANTED
            keeper.release(other)
            assert time.monotonic() - asked_at < 1
        assert 0.1 < time.monotonic() - since < 2
        with pytest.raises(LockUnavailable, match="lock timeout"):
            asked.result(timeout=0)
    assert asks.run("report", NOON.isoformat(), "first")
    assert not hold.lost
    keeper.release(hold)
    close_all()


def test_a_server_that_can_not_be_reached_is_told_with_its_reason() -> None:
    keeper = Keeper(Settings("postgresql://127.0.0.1:1/nothing"))
    with pytest.raises(LockUnavailable, match="refused"):
        Ledger("ledger", "celery:beat", keeper.run).claim("report", NOON)
    keeper.retire()


def test_a_set_up_that_no_lock_is_safe_in_is_told_to_who_asks_a_ledger(
    pgbouncer: PgBouncer, dbname: str, judge: Judge
) -> None:
    """A task that is asked for again and again instead never runs, and nobody learns why."""
    keeper = Keeper(Settings(pgbouncer.url(dbname)))
    with pytest.raises(LockSetupError, match="pooler"):
        Ledger("ledger", "celery:beat", keeper.run).run("report", NOON.isoformat(), "first")
    keeper.retire()
    for pid in judge.sessions():  # the pooler's own, which it keeps
        judge.end(pid)
