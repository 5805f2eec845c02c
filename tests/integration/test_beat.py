"""Beats in this process: wrong set-ups, clocks that differ, inner schedulers that fail."""

from __future__ import annotations

import errno
import logging
import shelve
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import celery
import psycopg
import pytest
from celery import Celery
from celery.beat import Scheduler
from celery.schedules import BaseSchedule, crontab, schedstate, solar

from celery_pglock.beat import ElectedScheduler, slots
from celery_pglock.beat import scheduler as scheduler_module
from celery_pglock.beat import term as term_module
from celery_pglock.beat.progress import Progress
from celery_pglock.beat.term import Term
from celery_pglock.locks import candidate as candidate_module
from celery_pglock.locks.candidate import Candidate
from celery_pglock.locks.keeper import Keeper, close_all
from celery_pglock.locks.keys import id_of
from celery_pglock.locks.ledger import Ledger
from integration.judge import Judge, eventually
from integration.rivals import in_thread
from localservers import PgBouncer, PostgreSQL

SECOND = timedelta(seconds=1)
BEAT = id_of("celery:beat")


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

        def now() -> datetime:
            return datetime.now(timezone.utc) + timedelta(seconds=clock)

        for module in (term_module, scheduler_module):
            monkeypatch.setattr(module, "utcnow", now)
        monkeypatch.setattr(app, "now", lambda: now().astimezone(app.timezone))
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


def run_until(beat: ElectedScheduler, happened: Callable[[], object], reason: str) -> None:
    """Run until something has happened: on a busy machine any span of time may hold a slot fewer."""
    until = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < until, reason
        time.sleep(max(0.0, beat.tick()))


def run_until_sent(beat: ElectedScheduler, sent: list[datetime], count: int) -> None:
    """Run until so many messages are sent in all."""
    run_until(beat, lambda: len(sent) >= count, f"{count} messages")


def lead(beat: ElectedScheduler) -> None:
    while "leads" not in repr(beat):
        beat.tick()


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
    beat = new_beat(pglock_database_url=pgbouncer.url(dbname))
    with caplog.at_level(logging.WARNING):
        run_until(beat, lambda: caplog.records, "the reason")
        run(beat, 1.2)
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
        run_until(beat, lambda: caplog.records, "what is missing")
        run(beat, 1.2)
        assert not sent
        assert len(caplog.records) == 1
        assert 'CREATE TABLE IF NOT EXISTS "nowhere"."ledger"' in caplog.text
        assert not judge.locks()
        observer.execute("CREATE SCHEMA nowhere")
        run_until_sent(beat, sent, 1)
    observer.execute("DROP SCHEMA nowhere CASCADE")


@pytest.mark.parametrize("ahead", [5.0, -5.0])
def test_clocks_that_differ_neither_lose_nor_double_a_slot(
    new_beat: Callable[..., ElectedScheduler],
    observer: psycopg.Connection,
    sent: list[datetime],
    ahead: float,
) -> None:
    first = new_beat(clock=ahead, pglock_beat_ledger="ledger")
    run_until_sent(first, sent, 1)
    first.close()
    # What lies between the two clocks, and what falls due then.
    run_until_sent(new_beat(clock=0.0), sent, len(sent) + max(0, round(-ahead)) + 2)
    observer.execute("DROP TABLE ledger")
    assert set(Counter(sent).values()) == {1}
    assert {after - before for before, after in pairwise(sent)} == {SECOND}


@pytest.mark.parametrize("ledger", ["ledger", None])
def test_one_clock_that_is_wrong_silences_no_other_beat(
    new_beat: Callable[..., ElectedScheduler],
    observer: psycopg.Connection,
    sent: list[datetime],
    ledger: str | None,
) -> None:
    """What it has sent a day early is still to come."""
    wrong = new_beat(clock=86400.0, pglock_beat_ledger=ledger)
    run_until_sent(wrong, sent, 1)
    wrong.close()
    del sent[:]
    run_until_sent(new_beat(clock=0.0), sent, 2)
    observer.execute("DROP TABLE IF EXISTS ledger")


def test_a_table_that_a_wrong_clock_has_written_to_silences_no_beat(
    new_beat: Callable[..., ElectedScheduler], sent: list[datetime], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of django-celery-beat, which all beats share."""
    set_up = Noting.setup_schedule

    def set_up_from_table(self: Noting) -> None:
        set_up(self)
        self.schedule["a"].last_run_at += timedelta(days=1)

    monkeypatch.setattr(Noting, "setup_schedule", set_up_from_table)
    run_until_sent(new_beat(), sent, 1)


def test_clocks_that_differ_double_slots_without_a_ledger(
    new_beat: Callable[..., ElectedScheduler], sent: list[datetime]
) -> None:
    """The control."""
    first = new_beat(clock=2.0)
    run_until_sent(first, sent, 1)
    first.close()
    run_until(new_beat(clock=0.0), lambda: max(Counter(sent).values()) == 2, "a slot that is sent twice")


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
        run_until(beat, lambda: caplog.records, "a failure")
        run(beat, 0.3)
    assert not judge.locks()
    assert len(caplog.records) == 1
    monkeypatch.setattr(Noting, "fails", False)
    run_until_sent(beat, sent, 1)


def test_a_takeover_loses_nothing_however_long_a_scheduler_takes_to_build(
    new_beat: Callable[..., ElectedScheduler],
    sent: list[datetime],
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An entry that has never run says that it ran when that began."""
    leader, follower = new_beat(), new_beat()
    follower.tick()
    run_until_sent(leader, sent, 1)
    follower.tick()
    judge.end(judge.locks()[0][1])
    set_up = Noting.setup_schedule

    def set_up_slowly(self: Noting) -> None:
        set_up(self)
        time.sleep(1.5)

    monkeypatch.setattr(Noting, "setup_schedule", set_up_slowly)
    lead(follower)
    run_until_sent(follower, sent, 3)
    assert {after - before for before, after in pairwise(sent)} == {SECOND}


@pytest.mark.parametrize("kept_for", [60.0, 0.0], ids=["kept", "control"])
def test_a_lock_is_kept_while_a_scheduler_is_built_but_not_for_ever(
    new_beat: Callable[..., ElectedScheduler],
    sent: list[datetime],
    judge: Judge,
    observer: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    kept_for: float,
) -> None:
    """It says nothing to a server that bears 3 seconds of that. What it told is still to be read there."""
    monkeypatch.setattr(scheduler_module, "BUILT_WITHIN", kept_for)
    set_up = Noting.setup_schedule
    held: list[bool] = []

    def set_up_slowly(self: Noting) -> None:
        set_up(self)
        time.sleep(4.5)
        held.append(bool(judge.locks()))
        if held[0]:
            said = "SELECT query FROM pg_stat_activity WHERE pid = %s"
            assert observer.execute(said, [judge.holder(BEAT)]).fetchone()[0].startswith("NOTIFY")

    monkeypatch.setattr(Noting, "setup_schedule", set_up_slowly)
    beat = new_beat(pglock_freeze_timeout=3)
    while not held:
        beat.tick()
    assert held[0] is bool(kept_for)
    if kept_for:
        run_until_sent(beat, sent, 1)
    else:
        run(beat, 1.5)
        assert not sent


def test_beats_that_can_not_work_do_not_say_at_each_poll_who_tries(
    new_beat: Callable[..., ElectedScheduler],
    observer: psycopg.Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each has the lock for a moment, and the others see it there. Who works in the end says so."""
    beats = [new_beat(pglock_beat_ledger="nowhere.ledger") for _ in range(3)]
    stopped = threading.Event()

    def tick(beat: ElectedScheduler) -> None:
        while not stopped.is_set():
            stopped.wait(max(0.0, beat.tick()))

    with caplog.at_level(logging.INFO), ThreadPoolExecutor() as threads:
        ticks = [threads.submit(tick, beat) for beat in beats]
        try:
            # Who has not tried yet may see the others pass the lock between them, and says so.
            eventually(lambda: caplog.text.count("this process can't lead") == len(beats), "each has tried")
            caplog.clear()
            time.sleep(3)
            said = [record.message for record in caplog.records]
            observer.execute("CREATE SCHEMA nowhere")
            eventually(lambda: "this beat leads: " in caplog.text, "one leads")
        finally:
            stopped.set()
        for each in ticks:
            each.result()
    assert len(said) <= 3
    assert not [line for line in said if "leads: " in line]
    observer.execute("DROP SCHEMA nowhere CASCADE")


def test_a_beat_says_that_it_leads_when_a_tick_has_worked(
    new_beat: Callable[..., ElectedScheduler],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    beat = new_beat()
    with caplog.at_level(logging.INFO):
        with monkeypatch.context() as patch:
            patch.setattr(Noting, "fails", True)
            run_until(beat, lambda: "its scheduler failed" in caplog.text, "a failure")
        assert "this beat leads: " not in caplog.text
        run_until(beat, lambda: "this beat leads: " in caplog.text, "it says so")


def test_a_beat_that_leads_in_vain_says_so_once_a_minute(
    new_beat: Callable[..., ElectedScheduler],
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its ticks work, and what is done between them fails."""
    monkeypatch.setattr(Noting, "sync", disk_is_full)
    monkeypatch.setattr(scheduler_module, "WARN_EVERY", 1.0)
    beat, since = new_beat(), time.monotonic()
    with caplog.at_level(logging.INFO):
        for line in ("this beat leads: ", "this beat leads no longer: "):
            while caplog.text.count(line) < 3:
                run(beat, 0.2)
                beat._do_sync()
            assert time.monotonic() - since > 2, "two pauses of a second"


class Syncing(Noting):
    """Writes down what it knows after each send, as Celery's does with ``beat_sync_every=1``."""

    def apply_async(self, entry: Any, **options: Any) -> None:
        try:
            super().apply_async(entry, **options)
        finally:
            self._do_sync()


def disk_is_full(_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_is_sent_is_recorded_where_a_scheduler_can_not_write_it_down(
    new_beat: Callable[..., ElectedScheduler],
    observer: psycopg.Connection,
    sent: list[datetime],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker has the message when that fails."""
    monkeypatch.setattr(Syncing, "sync", disk_is_full)
    beat = new_beat(pglock_beat_scheduler=Syncing, pglock_beat_ledger="ledger")
    run_until_sent(beat, sent, 2)
    recorded = observer.execute("SELECT due FROM ledger WHERE sent_at IS NOT NULL ORDER BY due").fetchall()
    observer.execute("DROP TABLE ledger")
    assert [due for (due,) in recorded] == sent


@pytest.mark.parametrize("ledger", [None, "ledger"])
def test_what_a_lost_term_has_sent_is_counted_in_the_next(
    new_beat: Callable[..., ElectedScheduler],
    sent: list[datetime],
    judge: Judge,
    observer: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    ledger: str | None,
) -> None:
    """An entry of django-celery-beat that is to run once would run again."""
    send = Noting.apply_async

    def send_and_lose(self: Noting, entry: Any, **options: Any) -> None:
        send(self, entry, **options)
        if len(sent) == 1:
            judge.end(judge.locks()[0][1])

    monkeypatch.setattr(Noting, "apply_async", send_and_lose)
    beat = new_beat(beat_schedule={"a": {"task": "a", "schedule": 3 * SECOND}}, pglock_beat_ledger=ledger)
    lead(beat)
    while "leads" in repr(beat):
        time.sleep(max(0.0, beat.tick()))
    lead(beat)
    assert beat.schedule["a"].total_run_count == len(sent) >= 1
    observer.execute("DROP TABLE IF EXISTS ledger")


def test_a_leader_writes_nothing_down_behind_a_send_that_cost_it_the_lock(
    new_beat: Callable[..., ElectedScheduler],
    sent: list[datetime],
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    synced: list[bool] = []
    monkeypatch.setattr(Syncing, "sync", lambda _: synced.append(bool(judge.locks())))
    send = Noting.apply_async

    def send_and_lose(self: Noting, entry: Any, **options: Any) -> None:
        send(self, entry, **options)
        if len(sent) == 2:
            judge.end(judge.locks()[0][1])

    monkeypatch.setattr(Noting, "apply_async", send_and_lose)
    beat = new_beat(pglock_beat_scheduler=Syncing)
    lead(beat)
    while "leads" in repr(beat):
        time.sleep(max(0.0, beat.tick()))
    assert synced == [True]


def test_a_scheduler_that_can_not_write_down_what_it_knows_ends_no_beat(
    new_beat: Callable[..., ElectedScheduler],
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Celery's service asks for it between two ticks. Another host may have room."""
    beat = new_beat()
    lead(beat)
    monkeypatch.setattr(Noting, "sync", disk_is_full)
    beat._do_sync()
    assert not judge.locks()
    assert "could not write down what it knows" in caplog.text
    lead(beat)
    beat.close()
    assert not judge.sessions()


class OnAFullDisk(dict[str, Any]):
    """A file that is written to when it is closed."""

    def close(self) -> None:
        disk_is_full(self)


def test_a_schedule_file_on_a_full_disk_keeps_no_lock(
    new_beat: Callable[..., ElectedScheduler], judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = new_beat()
    lead(beat)
    beat._term.inner._store = shelve.Shelf(OnAFullDisk())
    monkeypatch.setattr(Noting, "fails", True)
    beat.tick()
    assert not judge.locks()


def test_a_beat_that_is_closed_twice_or_while_it_ticks_hands_over(
    new_beat: Callable[..., ElectedScheduler], judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler closes it wherever it is; the service closes it once more."""
    beat = new_beat()
    lead(beat)

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
    """Also those that were cut off: at once they can't know whether they missed something."""
    knows, newcomer = new_beat(), new_beat()
    run_until(knows, lambda: knows._progress.until, "it knows something")
    for pid in judge.sessions():
        judge.end(pid)
    newcomer.tick()
    while "leads" in repr(knows):
        knows.tick()
    newcomer.tick()
    assert not judge.locks()
    knows.tick()
    assert "leads" in repr(knows)
    newcomer.tick()
    assert "leads" not in repr(newcomer)


def test_a_beat_that_was_cut_off_lets_those_go_first_who_listened(
    new_beat: Callable[..., ElectedScheduler], judge: Judge
) -> None:
    beat = new_beat()
    run_until(beat, lambda: beat._progress.until, "it knows something")
    assert judge.locks()
    (session,) = judge.sessions()
    judge.end(session)
    while "leads" in repr(beat):
        beat.tick()
    eventually(lambda: judge.sessions() not in ([], [session]), "it listens again")
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
    beat, read = new_beat(), 0
    while len(sent) < 3 or read < 4:
        wait = beat.tick()
        newcomer = Progress()
        for (statement,) in observer.execute(
            "SELECT query FROM pg_stat_activity"
            " WHERE application_name LIKE 'pglock %' AND datname = current_database()"
        ):
            newcomer.read(statement)
        if newcomer.until is not None and sent:
            read += 1
            assert newcomer.until < sent[-1] + SECOND
        time.sleep(max(0.0, wait))


@pytest.mark.parametrize("told", [True, False], ids=["told", "control"])
def test_two_takeovers_within_a_poll_repeat_nothing(
    new_beat: Callable[..., ElectedScheduler],
    sent: list[datetime],
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
    told: bool,
) -> None:
    """A leader tells each send at once.

    Where followers learn at their polls alone, a slot comes three times.
    """
    if not told:
        monkeypatch.setattr(Candidate, "_hear", lambda *_: None)
    beats = [new_beat() for _ in range(3)]
    run_until_sent(beats[0], sent, 1)
    for beat in beats[1:] * 2:
        beat.tick()
    for beat in beats:
        while "leads" not in repr(beat):
            beat.tick()
        before = len(sent)
        while len(sent) == before:
            time.sleep(max(0.0, beat.tick()))
        for pid in {pid for _, pid in judge.locks()}:
            judge.end(pid)
    assert (max(Counter(sent).values()) == 1) is told


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "control"])
def test_the_lock_is_confirmed_before_each_send_of_a_tick(
    new_beat: Callable[..., ElectedScheduler],
    sent: list[datetime],
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
    asked: bool,
) -> None:
    """Where the watch does not see the end of the session, the question does."""
    monkeypatch.setattr(Keeper, "_on_end", lambda *_: None)
    ask = Candidate.tell
    monkeypatch.setattr(Candidate, "tell", lambda self, _: self.leads)  # it would see the end, too
    monkeypatch.setattr(Candidate, "confirm", ask)
    if not asked:
        monkeypatch.setattr(Candidate, "confirm", lambda self, _: self.leads)
    send = Noting.apply_async

    def send_and_lose(self: Noting, entry: Any, **options: Any) -> None:
        send(self, entry, **options)
        for _, pid in judge.locks():
            judge.end(pid)

    monkeypatch.setattr(Noting, "apply_async", send_and_lose)
    beat = new_beat(beat_schedule={name: {"task": name, "schedule": SECOND} for name in "abc"})
    while not sent:
        time.sleep(max(0.0, beat.tick()))
    for _ in range(4):
        if "leads" in repr(beat):
            beat.tick()
    assert len(sent) == (1 if asked else 3)


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "control"])
def test_an_entry_that_only_seems_due_keeps_no_other_waiting(
    new_beat: Callable[..., ElectedScheduler],
    sent: list[datetime],
    monkeypatch: pytest.MonkeyPatch,
    reset: bool,
) -> None:
    """As when django-celery-beat reads its tables anew, with older last runs than were sent.

    Celery's heap keeps such an entry on top, up to Celery 5.6.
    """
    goes_on_after = Term._goes_on_after

    def go_on_and_keep_the_heap(self: Term, entry: Any, slot: datetime) -> Any:
        heap = self.inner._heap
        told = goes_on_after(self, entry, slot)
        self.inner._heap = heap
        return told

    if not reset:
        monkeypatch.setattr(Term, "_goes_on_after", go_on_and_keep_the_heap)
    hourly = {"task": "hourly", "schedule": timedelta(hours=1)}
    beat = new_beat(beat_schedule={"hourly": hourly, "a": {"task": "a", "schedule": SECOND}})
    run_until_sent(beat, sent, 1)
    inner = beat._term.inner
    inner.schedule["hourly"].last_run_at -= timedelta(hours=2)
    inner._heap = None
    before = len(sent)
    if reset or celery.VERSION >= (5, 7):
        run_until_sent(beat, sent, before + 2)
    else:
        run(beat, 2.2)
        assert len(sent) == before


def test_a_signal_waits_until_a_send_is_told(
    new_beat: Callable[..., ElectedScheduler], sent: list[datetime], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery's handlers raise `SystemExit` wherever the beat is."""

    def stop(*_: object) -> None:
        raise SystemExit

    before = signal.signal(signal.SIGTERM, stop)
    send = Noting.apply_async

    def send_and_stop(self: Noting, entry: Any, **options: Any) -> None:
        send(self, entry, **options)
        signal.raise_signal(signal.SIGTERM)

    first, second = new_beat(), new_beat()
    second.tick()
    try:
        monkeypatch.setattr(Noting, "apply_async", send_and_stop)
        with pytest.raises(SystemExit):
            run(first, 20)
    finally:
        signal.signal(signal.SIGTERM, before)
    monkeypatch.setattr(Noting, "apply_async", send)
    first.close()
    run_until_sent(second, sent, 2)
    assert set(Counter(sent).values()) == {1}


def test_a_poll_is_shorter_than_the_server_s_patience(new_beat: Callable[..., ElectedScheduler]) -> None:
    """The server ends a leader's session that says nothing for so long."""
    assert new_beat(pglock_beat_poll=60).max_interval < scheduler_module.WEDGED_AFTER / 2
    assert new_beat(pglock_freeze_timeout=3).max_interval == 1


def test_a_first_beat_leads_however_long_a_poll_is(
    new_beat: Callable[..., ElectedScheduler], judge: Judge
) -> None:
    """It listens for as long as the server bears silence, and says something meanwhile."""
    run_until(new_beat(pglock_beat_poll=60, pglock_freeze_timeout=3), judge.locks, "it leads")


def test_nothing_is_sent_by_a_beat_of_a_standby(
    new_beat: Callable[..., ElectedScheduler],
    own_postgres: PostgreSQL,
    sent: list[datetime],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its locks are its own. The reason is told once, and again each minute, until it is a primary."""
    with own_postgres.standby() as standby:
        beat = new_beat(pglock_database_url=standby.url())
        with caplog.at_level(logging.WARNING):
            run_until(beat, lambda: caplog.records, "the reason")
            run(beat, 0.5)
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert "standby" in caplog.text
            monkeypatch.setattr(candidate_module, "WARN_EVERY", 0.5)
            since = time.monotonic()
            run_until(beat, lambda: len(caplog.records) == 3, "two more, the first of which is due")
            assert time.monotonic() - since > 0.5
        assert not sent
        standby.promote()
        run_until_sent(beat, sent, 1)
        beat.close()


def test_solar_entries_are_sent_once_across_a_takeover(
    new_beat: Callable[..., ElectedScheduler], app: Celery, sent: list[datetime]
) -> None:
    pytest.importorskip("ephem")
    sunset = solar("sunset", 52.5, 13.4, app=app)
    due = slots.following(sunset, datetime.now(timezone.utc))
    ahead = (due - datetime.now(timezone.utc)).total_seconds() - 2
    app.conf.beat_schedule = {"sunset": {"task": "lamps", "schedule": sunset}}
    first, second = new_beat(clock=ahead), new_beat(clock=ahead)
    lead(first)
    second.tick()
    run_until_sent(first, sent, 1)
    first.close()
    lead(second)
    run(second, 0.5)
    assert sent == [due]


def test_who_takes_over_in_an_hour_that_comes_twice_sends_nothing_for_it(
    new_beat: Callable[..., ElectedScheduler], app: Celery, sent: list[datetime]
) -> None:
    """Celery's crontab says then that it is due, whenever it is asked about a last run in that hour.

    As it is when django-celery-beat reads its tables anew. No other entry waits for it.
    """
    app.conf.timezone = "Europe/Berlin"
    quarterly = {"task": "quarterly", "schedule": crontab(minute="*/15", app=app)}
    moment = datetime(2026, 10, 25, 1, 32, tzinfo=timezone.utc)
    beat = new_beat(
        clock=(moment - datetime.now(timezone.utc)).total_seconds(),
        beat_schedule={"quarterly": quarterly, "a": {"task": "a", "schedule": SECOND}},
    )
    run_until_sent(beat, sent, 1)
    inner = beat._term.inner
    inner.schedule["quarterly"].last_run_at = moment.astimezone(app.timezone)
    inner._heap = None
    run_until_sent(beat, sent, 3)
    assert set(Counter(sent).values()) == {1}
    assert {after - before for before, after in pairwise(sent)} == {SECOND}


def test_an_entry_has_no_slot_before_its_start(
    new_beat: Callable[..., ElectedScheduler], sent: list[datetime], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Django-celery-beat's, which until then has a last run in the distant past."""
    beat = new_beat(beat_schedule={})
    lead(beat)
    start = datetime.now(timezone.utc) - timedelta(seconds=5)
    start = start.replace(microsecond=0)
    inner = beat._term.inner
    inner.update_from_dict({"late": {"task": "late", "schedule": SECOND}})
    entry = inner.schedule["late"]
    entry.last_run_at = start - timedelta(days=365 * 30)
    monkeypatch.setattr(
        Scheduler.Entry,
        "model",
        SimpleNamespace(start_time=start, last_run_at=entry.last_run_at),
        raising=False,
    )
    run_until_sent(beat, sent, 7)
    assert sent[0] == start
    assert {after - before for before, after in pairwise(sent)} == {SECOND}


class OnlyIsDue(BaseSchedule):
    """Says no more than Celery's beat asks."""

    def is_due(self, last_run_at: datetime) -> schedstate:
        left = 0.4 - (self.now() - last_run_at).total_seconds()
        return schedstate(left <= 0, left if left > 0 else 0.4)


class WhenWanted(OnlyIsDue):
    """Is not due when it estimates to be."""

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        return last_run_at + timedelta(minutes=1) - self.now()


@pytest.mark.parametrize("kind", [OnlyIsDue, WhenWanted])
def test_a_schedule_with_rules_of_its_own_is_sent_when_it_says_so(
    new_beat: Callable[..., ElectedScheduler],
    app: Celery,
    sent: list[datetime],
    kind: type[BaseSchedule],
) -> None:
    beat = new_beat(beat_schedule={"own": {"task": "own", "schedule": kind(app=app)}})
    lead(beat)
    since = time.monotonic()
    run_until_sent(beat, sent, 5)
    assert time.monotonic() - since > 1.5, "four intervals between them"
    assert set(Counter(sent).values()) == {1}


class Clocked(BaseSchedule):
    """As django-celery-beat's, for which an entry's count tells that it has run."""

    def __init__(self, clocked_time: datetime, app: Celery) -> None:
        super().__init__(app=app)
        self.clocked_time = clocked_time
        self.asked = 0

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        return self.clocked_time - self.now()

    def is_due(self, last_run_at: datetime) -> schedstate:
        self.asked += 1
        left = self.remaining_estimate(last_run_at).total_seconds()
        return schedstate(left <= 0, max(left, 0) or 1e8)


def test_a_clocked_entry_has_one_slot_which_a_ledger_knows(
    new_beat: Callable[..., ElectedScheduler],
    app: Celery,
    observer: psycopg.Connection,
    sent: list[datetime],
) -> None:
    """Also when its leader did not live to count that it ran. No other entry waits for it."""
    moment = datetime.now(timezone.utc)
    once = Clocked(moment, app)
    schedule = {"once": {"task": "once", "schedule": once}, "a": {"task": "a", "schedule": SECOND}}
    first, second = (new_beat(beat_schedule=schedule, pglock_beat_ledger="ledger") for _ in "ab")
    run_until(first, lambda: moment in sent, "its slot")
    second.tick()
    first.close()
    run_until_sent(second, sent, len(sent) + 2)
    observer.execute("DROP TABLE ledger")
    assert set(Counter(sent).values()) == {1}
    assert once.asked < 100, "a few times in each poll"


# What others say, and what they leave.


def told(observer: psycopg.Connection, note: str) -> None:
    observer.execute("SELECT pg_notify(%s, %s)", [f"pglock:{BEAT[0]}", note])


@pytest.mark.parametrize("note", ["{oops", "5", '{"entry": "a"}', '{"until": "2026-01-01T00:00:00"}'])
def test_a_note_that_nobody_understands_ends_no_beat(
    new_beat: Callable[..., ElectedScheduler],
    observer: psycopg.Connection,
    sent: list[datetime],
    note: str,
) -> None:
    """Neither who leads nor who follows: all hear the same, and would end at once."""
    leader, follower = new_beat(), new_beat()
    lead(leader)
    follower.tick()
    told(observer, note)
    follower.tick()
    run_until_sent(leader, sent, 1)
    leader.close()
    run_until_sent(follower, sent, 2)
    assert {after - before for before, after in pairwise(sent)} == {SECOND}


def test_any_name_can_be_told_whatever_a_role_thinks_of_backslashes(
    new_beat: Callable[..., ElectedScheduler], postgres: PostgreSQL, dbname: str, sent: list[datetime]
) -> None:
    postgres.execute("CREATE ROLE old LOGIN")
    postgres.execute("ALTER ROLE old SET standard_conforming_strings = off")
    postgres.execute("ALTER ROLE old SET escape_string_warning = off")
    try:
        schedule = {name: {"task": "a", "schedule": SECOND} for name in ('a"b', "it's", "\\", "ü")}
        conf = {"pglock_database_url": postgres.url(dbname, user="old"), "beat_schedule": schedule}
        leader, follower = new_beat(**conf), new_beat(**conf)
        lead(leader)
        follower.tick()
        run_until_sent(leader, sent, 4)
        leader.close()
        run_until_sent(follower, sent, 9)
        times = Counter(sent)
        times.pop(max(times))  # perhaps not all of that slot yet
        assert len(times) >= 2
        assert set(times.values()) == {4}
    finally:
        close_all()
        postgres.execute("DROP ROLE old")


def test_what_a_ledger_refused_is_sent_by_the_next_leader(
    new_beat: Callable[..., ElectedScheduler],
    observer: psycopg.Connection,
    sent: list[datetime],
    judge: Judge,
) -> None:
    """Celery looks at the other entries meanwhile, and finds nothing due."""
    schedule = {name: {"task": name, "schedule": SECOND} for name in "ab"}
    beats = [new_beat(pglock_beat_ledger="ledger", beat_schedule=schedule) for _ in "ab"]
    time.sleep(1.05 - time.time() % 1)
    for beat in beats:
        beat.tick()
    lead(beats[0])
    due = datetime.now(timezone.utc).replace(microsecond=0) + SECOND
    assert not sent
    observer.execute("ALTER TABLE ledger RENAME TO away")
    beats[1].tick()
    run(beats[0], 2.5)
    assert not sent
    judge.end(judge.locks()[0][1])
    observer.execute("ALTER TABLE away RENAME TO ledger")
    run_until(beats[1], lambda: Counter(sent)[due + 2 * SECOND] == 2, "all that is late")
    assert sorted(sent)[:6] == sorted([due, due + SECOND, due + 2 * SECOND] * 2)
    observer.execute("DROP TABLE ledger")


@pytest.mark.parametrize("late", [True, False], ids=["recorded", "control"])
def test_what_was_sent_before_a_restart_of_the_server_is_recorded_late(
    new_beat: Callable[..., ElectedScheduler],
    own_postgres: PostgreSQL,
    sent: list[datetime],
    monkeypatch: pytest.MonkeyPatch,
    late: bool,
) -> None:
    """Where the server goes away between the broker's answer and its own."""
    if not late:
        monkeypatch.setattr(Term, "record_late", lambda _: None)
    leader, follower = (
        new_beat(pglock_beat_ledger="ledger", pglock_database_url=own_postgres.url()) for _ in "ab"
    )
    follower.tick()
    run_until_sent(leader, sent, 1)
    record = Ledger.record

    def stop_and_record(self: Ledger, *slot: Any) -> None:
        monkeypatch.setattr(Ledger, "record", record)
        own_postgres.stop()
        record(self, *slot)

    monkeypatch.setattr(Ledger, "record", stop_and_record)
    while "leads" in repr(leader):
        time.sleep(max(0.0, leader.tick()))
    own_postgres.start()
    leader.tick()
    # Its first one is what was sent before, if that is not recorded.
    run_until_sent(follower, sent, len(sent) + 1)
    assert max(Counter(sent).values()) == (1 if late else 2)


@pytest.mark.parametrize("patient", [True, False], ids=["patient", "control"])
def test_the_next_leader_lets_the_one_before_record_what_it_had_begun_to_send(
    new_beat: Callable[..., ElectedScheduler],
    observer: psycopg.Connection,
    sent: list[datetime],
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
    patient: bool,
) -> None:
    """A slot that is written down as begun is not sent at once. What nobody records is sent in the end."""
    if not patient:
        monkeypatch.setattr(term_module, "IN_DOUBT_FOR", 0.0)
    leader, follower = (new_beat(pglock_beat_ledger="ledger") for _ in "ab")
    lead(leader)
    follower.tick()
    run_until_sent(leader, sent, 1)
    record = Ledger.record

    def lose_and_record(self: Ledger, *slot: Any) -> None:
        monkeypatch.setattr(Ledger, "record", record)
        judge.end(judge.locks()[0][1])
        lead(follower)
        run(follower, 0.5)
        record(self, *slot)

    monkeypatch.setattr(Ledger, "record", lose_and_record)
    while "leads" in repr(leader):
        time.sleep(max(0.0, leader.tick()))
    run_until_sent(follower, sent, len(sent) + 1)
    assert max(Counter(sent).values()) == (1 if patient else 2)
    assert {after - before for before, after in pairwise(sorted(set(sent)))} == {SECOND}
    observer.execute("DROP TABLE ledger")


def test_what_a_leader_had_begun_to_send_when_it_died_is_sent_by_the_next(
    new_beat: Callable[..., ElectedScheduler],
    observer: psycopg.Connection,
    sent: list[datetime],
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody records it: it is in doubt for a moment only."""
    send = Noting.apply_async

    def send_once_and_die(self: Noting, entry: Any, **options: Any) -> None:
        if sent:
            monkeypatch.setattr(Noting, "apply_async", send)
            judge.end(judge.locks()[0][1])
            raise SystemExit
        send(self, entry, **options)

    monkeypatch.setattr(Noting, "apply_async", send_once_and_die)
    leader, follower = (new_beat(pglock_beat_ledger="ledger") for _ in "ab")
    lead(leader)
    with pytest.raises(SystemExit):
        run(leader, 20)
    run_until_sent(follower, sent, 3)
    assert set(Counter(sent).values()) == {1}
    assert {after - before for before, after in pairwise(sent)} == {SECOND}
    observer.execute("DROP TABLE ledger")


@pytest.mark.parametrize("late", [True, False], ids=["told", "control"])
def test_what_was_sent_before_the_lock_was_lost_is_told_late(
    new_beat: Callable[..., ElectedScheduler],
    sent: list[datetime],
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
    late: bool,
) -> None:
    """Without a ledger, too: whoever listens has it."""
    if not late:
        monkeypatch.setattr(Candidate, "tell_late", lambda *_: None)
    send = Noting.apply_async

    def send_and_lose(self: Noting, entry: Any, **options: Any) -> None:
        monkeypatch.setattr(Noting, "apply_async", send)
        send(self, entry, **options)
        judge.end(judge.locks()[0][1])

    monkeypatch.setattr(Noting, "apply_async", send_and_lose)
    leader, follower = new_beat(), new_beat()
    lead(leader)
    follower.tick()
    while "leads" in repr(leader):
        time.sleep(max(0.0, leader.tick()))
    run_until_sent(follower, sent, 2)
    assert max(Counter(sent).values()) == (1 if late else 2)


@pytest.mark.parametrize("frozen_for", [0.0, 1.0], ids=["control", "frozen"])
def test_who_was_frozen_in_a_publish_sends_no_more_when_it_wakes(
    new_beat: Callable[..., ElectedScheduler],
    sent: list[datetime],
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
    frozen_for: float,
) -> None:
    """What the broker does not have is another's to send by then. A publish that has just begun may end."""
    send, ends = Noting.apply_async, []

    def freeze_and_send(self: Noting, entry: Any, **options: Any) -> None:
        time.sleep(frozen_for)
        ((_, pid),) = judge.locks()
        # On a thread: what is interrupted is the publish, and not the judge.
        ends.append(in_thread(lambda: judge.end(pid)))
        time.sleep(0.3)
        send(self, entry, **options)

    monkeypatch.setattr(Noting, "apply_async", freeze_and_send)
    beat = new_beat()
    lead(beat)
    while "leads" in repr(beat):
        time.sleep(max(0.0, beat.tick()))
    for end in ends:
        end.result(timeout=10)
    assert len(sent) == (0 if frozen_for else 1)


def test_who_resigned_is_news_once(
    new_beat: Callable[..., ElectedScheduler], own_postgres: PostgreSQL, sent: list[datetime]
) -> None:
    """It may come together with the grant. As news later on, it would have a server asked without a pause."""
    first, second = (new_beat(pglock_database_url=own_postgres.url()) for _ in "ab")
    lead(first)
    second.tick()
    first.close()
    second.tick()
    assert "leads" in repr(second)
    own_postgres.stop()
    ticks, until = 0, time.monotonic() + 1
    while time.monotonic() < until:
        time.sleep(max(0.0, second.tick()))
        ticks += 1
    assert ticks < 25
    second.close()


def test_a_newcomer_listens_as_long_where_somebody_resigns(
    new_beat: Callable[..., ElectedScheduler], judge: Judge, observer: psycopg.Connection
) -> None:
    """Who may know more than it was cut off, and needs two polls to be back."""
    judge.take(BEAT)
    newcomer = new_beat(pglock_beat_poll=0.4)
    newcomer.tick()
    judge.give_back()
    told(observer, "resigned")
    since = time.monotonic()
    while not judge.locks():
        newcomer.tick()
    assert time.monotonic() - since > 0.75


def test_who_was_cut_off_unseen_does_not_lead_on_a_session_that_heard_nothing(
    new_beat: Callable[..., ElectedScheduler],
    judge: Judge,
    sent: list[datetime],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The question for the lock finds it out before the watch does: what was told meanwhile was missed."""
    monkeypatch.setattr(Keeper, "_on_end", lambda *_: None)
    leader, cut_off, listens = (new_beat() for _ in range(3))
    lead(leader)
    cut_off.tick()
    (pid,) = set(judge.sessions()) - {pid for _, pid in judge.locks()}
    judge.end(pid)
    listens.tick()
    run_until_sent(leader, sent, 1)
    leader.close()
    cut_off.tick()
    assert not judge.locks()
    run_until_sent(listens, sent, 2)
    assert set(Counter(sent).values()) == {1}
