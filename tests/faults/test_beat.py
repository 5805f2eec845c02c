"""Many beats, one sender: who leads, who takes over, and what is sent meanwhile."""

from __future__ import annotations

import itertools
import json
import os
import shelve
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import celery
import psycopg
import pytest
from celery import Celery

from celery_pglock.locks.ledger import CREATE
from faults.beats import Beat, Beats, Send, counts
from faults.fleet import flush, status_of, wait_for
from faults.nursery import TESTS
from faults.proxy import Proxy
from localservers import PostgreSQL, Redis

_databases = itertools.cycle(range(16))

BeatsMaker = Callable[..., Beats]


@pytest.fixture
def make_beats(redis: Redis, dsn: str, tmp_path: Path) -> Iterator[BeatsMaker]:
    made: list[Beats] = []

    def make(**conf: Any) -> Beats:
        broker = redis.url(next(_databases))
        flush(broker)
        made.append(Beats(tmp_path, conf.pop("broker", broker), conf.pop("dsn", dsn), **conf))
        return made[-1]

    try:
        yield make
    finally:
        for beats in made:
            beats.close()


@pytest.fixture
def beats(make_beats: BeatsMaker) -> Beats:
    return make_beats()


def end(observer: psycopg.Connection, beat: Beat) -> None:
    """Let PostgreSQL end a beat's session."""
    observer.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name LIKE %s",
        [f"pglock % {beat.pid}"],
    )


def test_one_of_two_beats_sends(beats: Beats) -> None:
    """Each slot of each entry once, and the other beat knows who leads and says so once. It opens no file."""
    first, second = beats.pair()
    beats.reader.wait(24)
    assert set(counts(beats.reader.sends).values()) == {1}
    assert not beats.missing()
    assert second.text().count("this beat follows") == 1
    assert f" {first.pid} (pid" in second.text()
    assert not list(beats.folder.glob(f"{second.name}.schedule*"))


def test_two_plain_beats_send_twice(beats: Beats) -> None:
    """The control: what Celery's own beat does."""
    for _ in range(2):
        beats.start(command=("beat",))
    wait_for(
        lambda: sum(sent > 2 for sent in counts_by_sender(beats.reader.sends).values()) == 2, "two senders"
    )


def counts_by_sender(sends: list[Send]) -> Counter[str]:
    return Counter(send.headers["origin"] for send in sends)


def test_a_killed_leader_is_replaced_within_a_poll(beats: Beats) -> None:
    """At the default poll, and what it has sent is known to the others."""
    first, _ = beats.pair(pglock_beat_poll=1.0)
    beats.wait_between_slots()
    first.kill()
    killed = time.time()
    sends = beats.reader.wait(9, since=killed)
    assert sends[0].arrived - killed < 2.0
    assert not beats.missing()
    assert set(counts(beats.reader.sends).values()) == {1}


def test_sigterm_hands_over_at_once_and_ends_with_0(beats: Beats) -> None:
    """Whenever it comes, also between a send and its record. Nobody waits for a poll."""
    first = beats.start_leader()
    second = beats.start_follower(pglock_beat_poll=3.0)
    # A whole tick: who has just come and knows nothing yet listens for a poll, whoever resigns.
    beats.reader.wait(6, since=time.time())
    first.signal(signal.SIGTERM)
    asked = time.time()
    assert second.wait_leading() - asked < 1.5
    assert first.wait_ended() == 0
    beats.reader.wait(6, since=time.time())
    assert not beats.missing()
    assert "Traceback" not in first.text()
    assert set(counts(beats.reader.sends).values()) == {1}


def test_sigterm_hands_over_at_once_while_postgresql_is_asked(beats: Beats, postgres: PostgreSQL) -> None:
    """Over a slow link a leader asks nearly all of the time. Interrupted in that, it could tell nobody."""
    with Proxy(postgres.port) as proxy:
        first = beats.start_leader(
            pglock_database_url=beats.dsn.replace(f":{postgres.port}", f":{proxy.port}")
        )
        second = beats.start_follower(pglock_beat_poll=3.0)
        proxy.delay(0.2)
        beats.reader.wait(3, since=time.time())
        time.sleep(0.6)  # in the middle of the next tick, and in no publish
        first.signal(signal.SIGTERM)
        assert first.wait_ended() == 0
        ended = time.time()
        assert second.wait_leading() - ended < 1.0
    assert not beats.missing()
    assert set(counts(beats.reader.sends).values()) == {1}


@pytest.mark.parametrize("settings", [{}, {"pglock_loss_timeout": 60}], ids=["", "patient"])
def test_sigterm_is_not_kept_waiting_by_a_silent_network(
    beats: Beats, postgres: PostgreSQL, settings: dict[str, Any]
) -> None:
    """Supervisors kill what takes its time."""
    with Proxy(postgres.port) as proxy:
        url = beats.dsn.replace(f":{postgres.port}", f":{proxy.port}")
        first = beats.start_leader(pglock_database_url=url, **settings)
        proxy.stall()
        time.sleep(0.5)  # by now it asks
        asked = time.time()
        first.signal(signal.SIGTERM)
        assert first.wait_ended() == 0
        assert time.time() - asked < 4.0


def test_a_leader_whose_session_ends_steps_down_and_campaigns_again(
    beats: Beats, observer: psycopg.Connection
) -> None:
    first = beats.start_leader()
    for _ in range(3):
        beats.wait_between_slots()
        lost = time.time()
        end(observer, first)
        beats.reader.wait(3, since=lost)
        first.wait_leading()
    assert not beats.missing()
    assert set(counts(beats.reader.sends).values()) == {1}, "it knows itself what it has sent"
    assert first._process.poll() is None
    assert "Traceback" not in first.text()


@pytest.mark.skipif(celery.VERSION < (5, 7), reason="beat has no remote control before Celery 5.7")
def test_a_follower_answers_probes(beats: Beats) -> None:
    beats.start_leader()
    beats.start_follower("-n", "second@here", "--enable-remote-control")
    with Celery("probe", broker=beats.broker, set_as_current=False) as probe:
        wait_for(lambda: probe.control.ping(destination=["second@here"], timeout=0.3), "an answer", 30)


def test_a_leader_that_lost_its_lock_writes_nothing_any_more(
    beats: Beats, observer: psycopg.Connection
) -> None:
    """Neither when it steps down nor when it ends: a file of its own keeps what it last wrote as leader."""
    first = beats.start_leader(beat_sync_every=1000, pglock_beat_poll=1.0)
    (sent, *_) = beats.reader.wait(9)
    end(observer, first)
    with psycopg.connect(beats.dsn, autocommit=True) as rival:
        rival.execute("SELECT pg_advisory_lock(%s)", [id_of_beat()])
        first.wait_following()
        assert first.stop() == 0
    with shelve.open(str(beats.folder / f"{first.name}.schedule")) as file:
        assert file["entries"][sent.entry].last_run_at <= sent.due


def id_of_beat() -> int:
    from celery_pglock.locks.keys import id_of

    return id_of("celery:beat")[0]


def test_nothing_is_sent_while_postgresql_can_not_be_asked(make_beats: BeatsMaker, own_postgres: Any) -> None:
    """It waits, says why once, and begins when the server is back."""
    own_postgres.stop()
    beats = make_beats(dsn=own_postgres.url())
    beat = beats.start()
    beats.wait_logged(beat, "this process can't lead")
    time.sleep(1)  # five polls
    assert not beats.reader.sends
    assert beat.text().count("this process can't lead") == 1
    own_postgres.start()
    beats.reader.wait(3)
    own_postgres.restart()
    beats.reader.wait(6, since=time.time())
    assert beat._process.poll() is None


def test_a_frozen_leader_loses_its_lock(beats: Beats) -> None:
    """And sends nothing of what another has sent when it wakes."""
    first, _ = beats.pair(pglock_freeze_timeout=3.0)
    beats.wait_between_slots()
    os.kill(first.pid, signal.SIGSTOP)
    frozen = time.time()
    beats.leader_besides(first, timeout=6)
    beats.reader.wait(6, since=frozen + 1)
    os.kill(first.pid, signal.SIGCONT)
    beats.wait_logged(first, "this beat follows")
    beats.reader.wait(6, since=time.time())
    assert not first.leads()
    assert not beats.missing()
    assert set(counts(beats.reader.sends).values()) == {1}


LEDGER = {"pglock_beat_ledger": "celery_pglock_beat"}


@pytest.mark.parametrize("settings", [{}, LEDGER], ids=["no ledger", "ledger"])
@pytest.mark.parametrize("where", ["in a receiver", "while the broker is away"])
def test_who_was_frozen_before_its_message_left_keeps_it(
    make_beats: BeatsMaker, postgres: PostgreSQL, redis: Redis, settings: dict[str, Any], where: str
) -> None:
    """It was granted the slot, and another has sent it. That its session is over reaches it after it woke."""
    beats = make_beats(**settings, pglock_freeze_timeout=3.0, task_publish_retry_policy={"max_retries": None})
    with Proxy(postgres.port) as proxy, Proxy(redis.port) as road:
        first = beats.start_leader(
            pglock_database_url=beats.dsn.replace(f":{postgres.port}", f":{proxy.port}"),
            broker_url=beats.broker.replace(f":{redis.port}", f":{road.port}"),
        )
        beats.start_follower()
        beats.wait_between_slots()
        if where == "in a receiver":
            (beats.folder / "freeze").touch()
        else:
            road.cut()
            wait_for(lambda: road.refused > 1, "a second try of kombu's")
            first.signal(signal.SIGSTOP)
        wait_for(lambda: status_of(first.pid) == "T", "a leader that is frozen")
        frozen = time.time()
        proxy.stall()
        wait_for(lambda: {send.entry for send in beats.reader.since(frozen)} == set("abc"), "its slot")
        road.resume()
        first.signal(signal.SIGCONT)
        time.sleep(1)  # in vain: it waits for PostgreSQL
        proxy.resume()
        beats.wait_logged(first, "this beat follows")
        beats.reader.wait(6, since=time.time())
    assert not beats.missing()
    assert set(counts(beats.reader.sends).values()) == {1}
    assert "its publishing was stopped, since" in first.text()


def test_with_a_ledger_a_takeover_sends_each_slot_once(make_beats: BeatsMaker) -> None:
    beats = make_beats(**LEDGER)
    beats.pair()
    for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        beats.wait_between_slots()
        leader = beats.leader()
        leader.signal(how)
        leader.wait_ended()
        beats.start().wait_decided()
    beats.reader.wait(6, since=time.time())
    assert not beats.missing()
    assert set(counts(beats.reader.sends).values()) == {1}


def test_with_a_ledger_what_all_beats_slept_through_is_sent_once(make_beats: BeatsMaker) -> None:
    """From another machine too: each beat has a file of its own."""
    beats = make_beats(**LEDGER)
    first = beats.start_leader()
    beats.wait_between_slots()
    first.kill()
    time.sleep(1)
    beats.start_leader()
    beats.reader.wait(15, since=time.time())
    assert not beats.missing()
    assert set(counts(beats.reader.sends).values()) == {1}


@pytest.mark.parametrize("locked", [True, False], ids=["locked", "control"])
def test_an_entry_whose_task_still_runs_is_skipped(make_beats: BeatsMaker, locked: bool) -> None:
    """The lock is the worker's: the beat knows nothing of the task but its name."""
    beats = make_beats(**LEDGER, task_default_queue="builds")
    beats.conf["beat_schedule"] = {"build": {"task": "elsewhere.build", "schedule": 0.25, "args": [0.6]}}
    beat = beats.start_leader()
    worker = beats.start(command=("worker", "-c", "4", "-P", "threads"), pglock_enabled=locked)
    builds = beats.folder / "builds"
    wait_for(lambda: builds.exists() and builds.read_text().count("end") >= 3, worker.text, 20)
    beat.stop()
    worker.stop()
    events = [line.split()[0] for line in builds.read_text().splitlines()]
    in_turns = all(one != other for one, other in pairwise(events))
    assert in_turns is locked
    assert ("already running" in worker.text() or "skipped" in worker.text()) is locked
    assert beat.text().count("Sending due task build (elsewhere.build)") > events.count("end") or not locked


@pytest.mark.parametrize(("settings", "runs"), [(LEDGER, 1), ({}, 2)], ids=["ledger", "control"])
def test_a_second_message_of_a_slot_does_not_run(
    make_beats: BeatsMaker, settings: dict[str, Any], runs: int
) -> None:
    """As when a leader dies between sending and recording; without the ledger it runs."""
    beats = make_beats(**settings, beat_schedule={"a": {"task": "note", "schedule": 1.0}})
    beat = beats.start_leader()
    (send, *_) = beats.reader.wait(1)
    beat.kill()
    beats.reader.close()
    flush(beats.broker)
    with Celery("producer", broker=beats.broker, set_as_current=False) as producer:
        for _ in range(2):
            producer.send_task("note", queue="clock", headers={"pglock_slot": send.headers["pglock_slot"]})
    worker = beats.start(command=("worker", "-c", "1", "-P", "solo"))
    ends = ("succeeded in", "was run by another message")
    wait_for(lambda: sum(map(worker.text().count, ends)) == 2, worker.text, 20)
    worker.stop()
    assert len((beats.folder / "runs").read_text().splitlines()) == runs


def test_a_ledger_that_is_locked_costs_a_worker_s_other_tasks_nothing(
    make_beats: BeatsMaker, observer: psycopg.Connection
) -> None:
    """A body beside it keeps its lock, and the message of the slot runs when the table is free."""
    beats = make_beats(**LEDGER, pglock_loss_timeout=3.0)
    observer.execute(CREATE.format(table="celery_pglock_beat"))
    slot = {"entry": "a", "due": "2026-12-01T04:00:00+00:00", "schedule": "celery:beat"}
    with Celery("producer", broker=beats.broker, set_as_current=False) as producer:
        beats.reader.close()
        worker = beats.start(command=("worker", "-c", "2", "-P", "threads"))
        producer.send_task("elsewhere.build", [5.0], queue="clock")
        wait_for((beats.folder / "builds").exists, worker.text, 20)
        with observer.transaction():
            observer.execute("LOCK TABLE celery_pglock_beat")
            producer.send_task("note", queue="clock", headers={"pglock_slot": slot})
            wait_for(lambda: "end" in (beats.folder / "builds").read_text(), worker.text, 20)
    wait_for(lambda: worker.text().count("succeeded in") == 2, worker.text, 20)
    worker.stop()
    assert "was lost" not in worker.text()
    assert (beats.folder / "builds").read_text().split().count("end") == 1
    assert len((beats.folder / "runs").read_text().splitlines()) == 1


# Other schedulers, other ways to start one.


def test_a_user_s_own_scheduler_is_built_by_the_leader_alone(make_beats: BeatsMaker) -> None:
    beats = make_beats(pglock_beat_scheduler="faults.clock:InMemory")
    first, second = beats.pair()
    beats.wait_between_slots()
    assert (first.text().count("built in"), second.text().count("built in")) == (1, 0)
    first.kill()
    beats.reader.wait(9, since=second.wait_leading())
    assert second.text().count("built in") == 1
    assert not beats.missing()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_beats_inside_of_workers(beats: Beats, pool: str) -> None:
    """Always a process of its own. The workers read another queue."""
    command = ("worker", "-B", "--scheduler", "pglock", "-P", pool, "-c", "1", "-Q", "other")
    first, second = beats.pair(command=command)
    beats.wait_between_slots()
    # The whole node: a beat outlives the worker that started it, and goes on leading.
    os.killpg(first.pid, signal.SIGKILL)
    beats.reader.wait(9, since=second.wait_leading())
    assert not beats.missing()
    assert set(counts(beats.reader.sends).values()) == {1}
    assert second.stop() == 0


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    """The tables of django-celery-beat, with a clocked task that is switched off."""
    pytest.importorskip("django_celery_beat")
    settings = {
        "INSTALLED_APPS": ["django_celery_beat"],
        "DATABASES": {
            "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "schedule.sqlite")}
        },
        "MIGRATION_MODULES": {"django_celery_beat": None},
        "USE_TZ": True,
    }
    monkeypatch.setenv("FLEET_DJANGO", json.dumps(settings))
    in_django(
        tmp_path,
        """
import datetime
from django.core.management import call_command
call_command("migrate", run_syncdb=True, verbosity=0)
from django_celery_beat.models import ClockedSchedule, PeriodicTask
moment = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=1)
clocked = ClockedSchedule.objects.create(clocked_time=moment)
PeriodicTask.objects.create(name="once", task="note", clocked=clocked, one_off=True, enabled=False)
""",
    )
    with closing(sqlite3.connect(tmp_path / "schedule.sqlite", isolation_level=None, timeout=20)) as tables:
        yield tables


def in_django(folder: Path, code: str) -> None:
    """Run some lines in a project of django-celery-beat."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "FLEET_CONF": "{}", "FLEET_FOLDER": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", f"import faults.clock\n{code}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("settings", [{}, LEDGER], ids=["no ledger", "ledger"])
def test_django_celery_beat(
    make_beats: BeatsMaker, tables: sqlite3.Connection, settings: dict[str, Any]
) -> None:
    """A takeover loses nothing of an interval and sends a clocked task once; a change is seen."""
    beats = make_beats(
        pglock_beat_scheduler="django_celery_beat.schedulers:DatabaseScheduler",
        every=timedelta(seconds=1),  # the shortest that its tables hold
        **settings,
    )
    beats.conf["beat_schedule"] = beats.entries("ab")
    first, second = beats.pair()
    beats.reader.wait(2)
    now = datetime.now(timezone.utc).replace(tzinfo=None)
    moment = now + timedelta(seconds=1.5)
    tables.execute("UPDATE django_celery_beat_clockedschedule SET clocked_time = ?", [str(moment)])
    tables.execute("UPDATE django_celery_beat_periodictask SET enabled = 1 WHERE name = 'once'")
    tables.execute("UPDATE django_celery_beat_periodictasks SET last_update = ?", [str(now)])
    wait_for(lambda: [each for each in beats.reader.sends if each.entry == "once"], first.text, 15)
    beats.wait_between_slots("ab")
    first.kill()
    beats.reader.wait(4, since=second.wait_leading())
    sends = list(beats.reader.sends)
    assert not beats.missing(of="ab")
    assert set(counts(sends).values()) == {1}
    (once,) = [each for each in sends if each.entry == "once"]
    assert once.due == moment.replace(tzinfo=timezone.utc)
    query = "SELECT total_run_count, enabled FROM django_celery_beat_periodictask WHERE name = ?"
    ((runs, _),) = tables.execute(query, ["a"]).fetchall()
    assert runs >= len([each for each in sends if each.entry == "a"]) - 2
    ((_, enabled),) = tables.execute(query, ["once"]).fetchall()
    assert not enabled


def goes_on(beats: Beats, proxy: Proxy) -> None:
    """Let the network go on. What lay in it when it stood still, one message, nobody can call back."""
    proxy.resume()
    beats.reader.wait(6, since=time.time())
    sent = counts(beats.reader.sends)
    assert sum(count - 1 for count in sent.values()) <= 1
    assert max(sent.values()) <= 2


def test_a_leader_whose_publishing_hangs_loses_its_lock(make_beats: BeatsMaker, redis: Redis) -> None:
    """Its watch is alive and well: only what it sends counts."""
    beats = make_beats(pglock_freeze_timeout=3.0)
    with Proxy(redis.port) as proxy:
        far = beats.broker.replace(f":{redis.port}", f":{proxy.port}")
        first = beats.start_leader(broker_url=far)
        second = beats.start_follower()
        beats.wait_between_slots()
        proxy.stall()
        hung = time.time()
        assert second.wait_leading(15) - hung < 5
        beats.reader.wait(30, since=hung)
        wait_for(lambda: "its publishing was stopped, since" in first.text(), first.text)
        first.wait_following()
        assert not beats.missing()
        goes_on(beats, proxy)


def end_leader(observer: psycopg.Connection) -> None:
    """Let PostgreSQL end the session that holds the lock, whosesoever it is."""
    observer.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks JOIN pg_database ON database = pg_database.oid"
        " WHERE locktype = 'advisory' AND datname = current_database()"
    )


def test_with_a_ledger_what_the_broker_had_when_the_lock_was_lost_is_sent_once(
    make_beats: BeatsMaker, redis: Redis, observer: psycopg.Connection
) -> None:
    """Its answer is still on the way to the leader, and another leads before it comes."""
    beats = make_beats(**LEDGER, every=timedelta(seconds=1), pglock_beat_poll=0.1)
    beats.conf["beat_schedule"] = beats.entries("a")
    with Proxy(redis.port) as proxy:
        beats.pair(broker_url=beats.broker.replace(f":{redis.port}", f":{proxy.port}"))
        beats.reader.wait(2)
        proxy.delay(0.12)
        for _ in range(4):
            beats.reader.wait(1, since=time.time())
            end_leader(observer)
            beats.reader.wait(2, since=time.time())
        assert not beats.missing()
        assert set(counts(beats.reader.sends).values()) == {1}
        assert not any("its publishing was stopped" in beat.text() for beat in beats.beats)


def test_a_publish_that_hangs_is_stopped_when_the_lock_is_lost(
    make_beats: BeatsMaker, redis: Redis, observer: psycopg.Connection
) -> None:
    beats = make_beats(**LEDGER)
    with Proxy(redis.port) as proxy:
        first = beats.start_leader(broker_url=beats.broker.replace(f":{redis.port}", f":{proxy.port}"))
        second = beats.start_follower()
        beats.wait_between_slots()
        proxy.stall()
        time.sleep(3 * beats.every.total_seconds())  # the next slot's publish hangs
        struck = time.time()
        end(observer, first)
        beats.wait_logged(first, "its publishing was stopped, since", 5)
        assert time.time() - struck < 3
        first.wait_following()
        assert second.leads()
        beats.reader.wait(12, since=struck)
        assert not beats.missing()
        goes_on(beats, proxy)
