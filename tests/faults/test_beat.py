"""Many beats, one sender: who leads, who takes over, and what is sent meanwhile."""

from __future__ import annotations

import itertools
import json
import os
import shelve
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import celery
import psycopg
import pytest
from celery import Celery

from faults.beats import Beat, Beats, counts, missing
from faults.fleet import TESTS, flush, wait_for
from faults.proxy import Proxy
from localservers import Redis

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
    """Each slot of each entry once, and the other beat knows who leads and says so once."""
    first = beats.start_leader()
    second = beats.start_follower()
    sends = beats.reader.wait(12, since=time.time())
    assert set(counts(sends).values()) == {1}
    assert not missing(sends)
    assert second.text().count("this beat follows") == 1
    assert f" {first.pid} (pid" in second.text()


def test_two_plain_beats_send_twice(beats: Beats) -> None:
    """The control: what Celery's own beat does."""
    for _ in range(2):
        beats.start(command=("beat",))
    sends = beats.reader.wait(18)
    assert len([send for send in sends if sends[0].arrived <= send.arrived < sends[0].arrived + 2]) >= 9


def test_a_killed_leader_is_replaced_within_a_poll(beats: Beats) -> None:
    first = beats.start_leader()
    beats.start_follower()
    beats.reader.wait(3)
    first.kill()
    killed = time.time()
    sends = beats.reader.wait(9, since=killed)
    assert sends[0].arrived - killed < 2.0
    assert not missing(beats.reader.sends)
    assert max(counts(beats.reader.sends).values()) <= 2


def test_sigterm_hands_over_and_ends_with_0(beats: Beats) -> None:
    first = beats.start_leader()
    beats.start_follower(pglock_beat_poll=0.2)
    beats.reader.wait(3)
    asked = time.time()
    assert first.stop() == 0
    sends = beats.reader.wait(6, since=asked)
    assert beats.leader() is beats.beats[1]
    assert not missing(beats.reader.sends)
    assert "Traceback" not in first.text()
    assert max(counts(sends).values()) <= 2


def test_a_leader_whose_session_ends_steps_down_and_campaigns_again(
    beats: Beats, observer: psycopg.Connection
) -> None:
    first = beats.start_leader()
    beats.reader.wait(3)
    for _ in range(3):
        lost = time.time()
        end(observer, first)
        beats.reader.wait(3, since=lost)
        first.wait_leading()
    assert not missing(beats.reader.sends)
    assert set(counts(beats.reader.sends).values()) == {1}, "it knows itself what it has sent"
    assert first._process.poll() is None
    assert "Traceback" not in first.text()


@pytest.mark.skipif(celery.VERSION < (5, 7), reason="beat has no remote control before Celery 5.7")
def test_a_follower_answers_probes(beats: Beats) -> None:
    beats.start_leader()
    beats.start_follower("-n", "second@here", "--enable-remote-control")
    with Celery("probe", broker=beats.broker, set_as_current=False) as probe:
        wait_for(lambda: probe.control.ping(destination=["second@here"], timeout=1), "an answer", 30)


def test_a_follower_writes_no_file(beats: Beats) -> None:
    beats.start_leader()
    second = beats.start_follower()
    beats.reader.wait(6)
    assert not list(beats.folder.glob(f"{second.name}.schedule*"))


def test_a_leader_that_lost_its_lock_writes_nothing_any_more(
    beats: Beats, observer: psycopg.Connection
) -> None:
    """Neither when it steps down nor when it ends: a file of its own keeps what it last wrote as leader."""
    first = beats.start_leader(beat_sync_every=1000, pglock_beat_poll=5)
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
    beats.wait_logged(beat, "nobody is asked to lead")
    time.sleep(2.5)
    assert not beats.reader.sends
    assert beat.text().count("nobody is asked to lead") == 1
    own_postgres.start()
    beats.reader.wait(3)
    own_postgres.restart()
    beats.reader.wait(6, since=time.time())
    assert beat._process.poll() is None


def test_a_frozen_leader_loses_its_lock(beats: Beats) -> None:
    """And sends nothing of what another has sent when it wakes."""
    first = beats.start_leader()
    beats.start_follower()
    beats.reader.wait(3)
    os.kill(first.pid, signal.SIGSTOP)
    frozen = time.time()
    beats.leader_besides(first, timeout=15)
    beats.reader.wait(6, since=frozen + 10)
    assert not missing(beats.reader.sends)
    os.kill(first.pid, signal.SIGCONT)
    beats.reader.wait(6, since=time.time())
    assert not first.leads()
    assert max(counts(beats.reader.sends).values()) <= 2


LEDGER = {"pglock_beat_ledger": "celery_pglock_beat"}


def test_with_a_ledger_a_takeover_sends_each_slot_once(make_beats: BeatsMaker) -> None:
    beats = make_beats(**LEDGER)
    first = beats.start_leader()
    beats.start_follower()
    for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        beats.reader.wait(6, since=time.time())
        leader = beats.leader()
        beats.start_follower()
        leader.signal(how)
        beats.leader_besides(leader)
    beats.reader.wait(6, since=time.time())
    assert first._process.poll() is not None
    assert not missing(beats.reader.sends)
    assert set(counts(beats.reader.sends).values()) == {1}


def test_with_a_ledger_what_all_beats_slept_through_is_sent_once(make_beats: BeatsMaker) -> None:
    """From another machine too: each beat has a file of its own."""
    beats = make_beats(**LEDGER)
    first = beats.start_leader()
    beats.reader.wait(3)
    first.kill()
    time.sleep(3)
    beats.start_leader()
    beats.reader.wait(15, since=time.time())
    assert not missing(beats.reader.sends)
    assert set(counts(beats.reader.sends).values()) == {1}


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


# Other schedulers, other ways to start one.


def test_a_user_s_own_scheduler_is_built_by_the_leader_alone(make_beats: BeatsMaker) -> None:
    beats = make_beats(pglock_beat_scheduler="faults.clock:InMemory")
    first = beats.start_leader()
    second = beats.start_follower()
    beats.reader.wait(3)
    assert (first.text().count("built in"), second.text().count("built in")) == (1, 0)
    first.kill()
    beats.reader.wait(9, since=second.wait_leading())
    assert second.text().count("built in") == 1
    assert not missing(beats.reader.sends)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_beats_inside_of_workers(beats: Beats, pool: str) -> None:
    """Always a process of its own. The workers read another queue."""
    command = ("worker", "-B", "--scheduler", "pglock", "-P", pool, "-c", "1", "-Q", "other")
    first = beats.start_leader(command=command)
    second = beats.start_follower(command=command)
    sends = beats.reader.wait(9, since=time.time())
    assert set(counts(sends).values()) == {1}
    # The whole node: a beat outlives the worker that started it, and goes on leading.
    os.killpg(first.pid, signal.SIGKILL)
    beats.reader.wait(9, since=second.wait_leading())
    assert not missing(beats.reader.sends)
    assert max(counts(beats.reader.sends).values()) <= 2
    assert second.stop() == 0


@pytest.fixture
def django_beats(make_beats: BeatsMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Beats:
    """Beats whose schedule lies in the tables of django-celery-beat."""
    pytest.importorskip("django_celery_beat")
    settings = {
        "INSTALLED_APPS": ["django_celery_beat"],
        "DATABASES": {
            "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "schedule.sqlite")}
        },
        "USE_TZ": True,
    }
    monkeypatch.setenv("FLEET_DJANGO", json.dumps(settings))
    in_django(tmp_path, "from django.core.management import call_command; call_command('migrate')")
    return make_beats(
        pglock_beat_scheduler="django_celery_beat.schedulers:DatabaseScheduler",
        beat_schedule={name: {"task": "note", "schedule": 1.0} for name in ("a", "b")},
    )


def in_django(folder: Path, code: str) -> str:
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
    return done.stdout


def test_django_celery_beat(django_beats: Beats, tmp_path: Path) -> None:
    """A takeover loses nothing of an interval and sends a clocked task once; a change is seen."""
    beats = django_beats
    first = beats.start_leader()
    second = beats.start_follower()
    beats.reader.wait(2)
    in_django(
        tmp_path,
        """
import datetime
from django_celery_beat.models import ClockedSchedule, PeriodicTask
moment = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=2)
clocked = ClockedSchedule.objects.create(clocked_time=moment)
PeriodicTask.objects.create(name="once", task="note", clocked=clocked, one_off=True)
""",
    )
    wait_for(lambda: [each for each in beats.reader.sends if each.entry == "once"], first.text, 15)
    beats.reader.wait(2, since=time.time())
    first.kill()
    beats.reader.wait(12, since=second.wait_leading())
    assert not missing([each for each in beats.reader.sends if each.entry != "once"])
    sent = counts(beats.reader.sends)
    assert max(sent.values()) <= 2
    assert [count for (entry, _), count in sent.items() if entry == "once"] == [1]
    stored = in_django(
        tmp_path,
        "from django_celery_beat.models import PeriodicTask\n"
        "print(PeriodicTask.objects.get(name='a').total_run_count, "
        "PeriodicTask.objects.get(name='once').enabled)",
    )
    runs, enabled = stored.split()
    assert int(runs) >= len([each for each in beats.reader.sends if each.entry == "a"]) - 2
    assert enabled == "False"


def test_a_leader_whose_publishing_hangs_loses_its_lock(make_beats: BeatsMaker, redis: Redis) -> None:
    """Its watch is alive and well: only what it sends counts."""
    beats = make_beats()
    with Proxy(redis.port) as proxy:
        far = beats.broker.replace(f":{redis.port}", f":{proxy.port}")
        first = beats.start_leader(broker_url=far)
        second = beats.start_follower()
        beats.reader.wait(3)
        proxy.stall()
        hung = time.time()
        took = second.wait_leading(15) - hung
        assert took < 13
        beats.reader.wait(30, since=hung)
        wait_for(lambda: "its publishing hung, and was stopped" in first.text(), first.text)
        assert not first.leads()
        assert not missing(beats.reader.sends)
        before = len(beats.reader.sends)
        proxy.resume()
        beats.reader.wait(6, since=time.time())
        sent = counts(beats.reader.sends)
        # What lay in the network when it stood still: nobody can call it back.
        assert sum(count - 1 for count in sent.values()) <= 9, before
        assert max(sent.values()) <= 2
