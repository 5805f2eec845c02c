"""A fleet in a storm of faults.

``PGLOCK_CHAOS_SECONDS`` says how long it lasts, ``PGLOCK_CHAOS_SEED`` which one it is.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import redis
from kombu import Queue

from faults.chaos import Chaos, hangs_in_billiard
from faults.conftest import FleetMaker
from faults.durable import DurableRedis
from faults.fleet import Fleet

SECONDS = float(os.environ.get("PGLOCK_CHAOS_SECONDS", "20"))
SEED = int(os.environ.get("PGLOCK_CHAOS_SEED", random.randrange(1_000_000)))


@pytest.mark.timeout(SECONDS + 300)
def test_nothing_overlaps_and_nothing_is_lost_in_a_storm_of_faults(tmp_path: Path) -> None:
    """Killed, stopped, frozen and cut off at random: the history shows one body for each name at a time."""
    report = Chaos(tmp_path, SEED).run(SECONDS)
    print(f"\n{SECONDS:g} s of chaos, PGLOCK_CHAOS_SEED={SEED}\n{report}")
    assert not report.overlaps
    assert not report.unfinished
    assert len(report.lost_by_kombu) <= report.chances_to_lose
    assert not report.stuck_names
    assert report.locks == 0
    assert report.sessions == 0
    assert len(report.faults) >= 12, "not every kind of fault happened"


def test_bodies_overlap_without_locks(tmp_path: Path) -> None:
    """The control: the same messages with locks off. It needs no storm."""
    report = Chaos(tmp_path, SEED, pools={"prefork": 3, "threads": 3}, locked=False).run(3.0, faults=False)
    print(f"\n{report}")
    assert report.overlaps


# What the storm excuses.


def test_record_tells_what_kombu_took_along(durable: DurableRedis, make_fleet: FleetMaker) -> None:
    """A frozen worker is handed a message. Killed, it takes it along: no lock plays a part."""
    fleet = make_fleet(broker=durable.url(0))
    queue = fleet.conf["task_default_queue"]
    worker = fleet.worker("solo", 1)
    assert fleet.send("plain", 1).get(timeout=20) == 1
    with redis.Redis.from_url(durable.url(0)) as client:
        while True:
            fleet.wait(lambda: client.info("clients")["blocked_clients"], "a BRPOP under way")
            worker.signal(signal.SIGSTOP)
            lost = fleet.send("plain", 2)
            if client.llen(queue) == 0:
                break
            # That BRPOP had come to its end, and the next was not sent.
            worker.signal(signal.SIGCONT)
            lost.get(timeout=20)
        assert client.hlen("unacked") == 0
    worker.kill()
    durable.stop()
    durable.start()
    fleet.worker("solo", 1)
    fleet.app.conf.broker_transport_options = {"visibility_timeout": 0.01}
    fleet.redeliver()
    assert fleet.send("plain", 3).get(timeout=20) == 3
    assert lost.state == "PENDING"
    assert durable.messages().lost() == {lost.id}


def test_record_excuses_no_message_that_was_noted(durable: DurableRedis, make_fleet: FleetMaker) -> None:
    """The control: what Kombu has noted and somebody drops then is nobody's loss but his."""
    fleet = make_fleet(broker=durable.url(0))
    whats = ["dropped", "kept", "returned", "lost", "queued"]
    ids = {what: fleet.send("plain", what).id for what in whats}
    with fleet.app.connection_for_write() as connection, redis.Redis.from_url(durable.url(0)) as client:
        queue = Queue(fleet.conf["task_default_queue"], channel=connection.default_channel)
        taken = {what: queue.get(accept=["json"]) for what in whats[:3]}
        assert {what: message.headers["id"] for what, message in taken.items()} == {
            what: ids[what] for what in whats[:3]
        }
        taken["dropped"].ack()
        # As Kombu does, and no more.
        client.brpop(queue.name)
        taken["returned"].requeue()
        found = durable.messages()
        assert {*found.queued.values()} == {ids["queued"], ids["returned"]}
        assert {*found.noted.values()} == {ids["kept"]}
        assert found.lost() == {ids["lost"]}
        client.brpop(queue.name)
        client.brpop(queue.name)
        assert durable.messages().lost() == {ids["lost"], ids["queued"], ids["returned"]}
        # Another copy of it may still come to its end.
        fleet.signature("plain", "lost").apply_async(task_id=ids["lost"])
        assert durable.messages().lost() == {ids["queued"], ids["returned"]}
        taken["kept"].ack()


def test_warm_shutdown_hangs_in_billiard_without_locks(durable: DurableRedis, make_fleet: FleetMaker) -> None:
    """A result that is longer than a pipe holds, of a job that the main process forgot with its broker.

    With a short one the child ends after half a minute. Fails where Celery has learnt to end: then what it
    excuses can go.
    """
    fleet = make_fleet(broker=durable.url(0), pglock_enabled=False)
    worker = fleet.worker("prefork", 1)
    (child,) = worker.children()
    # So that it does not say yet that it took the job on.
    os.kill(child, signal.SIGSTOP)
    fleet.send("ends", "a", "recursion")
    with redis.Redis.from_url(durable.url(0)) as client:
        fleet.wait(lambda: client.hlen("unacked") == 1, "the message in the hands of the worker")
    fleet.logged("received")
    durable.stop()
    fleet.logged("Connection to broker lost")
    durable.start()
    fleet.logged("Connected to", times=2)
    worker.signal(signal.SIGTERM)
    fleet.logged("Warm shutdown")
    os.kill(child, signal.SIGCONT)
    with pytest.raises(AssertionError, match="did not end"):
        worker.stop(10)
    assert hangs_in_billiard(worker.text())


def test_worker_that_hangs_in_a_body_is_not_excused(fleet: Fleet) -> None:
    """The control of the reader of stacks."""
    worker = fleet.worker("prefork", 2)
    fleet.send("skip", "a", gate="g")
    fleet.running("a")
    with pytest.raises(AssertionError, match="did not end"):
        worker.stop(3)
    assert not hangs_in_billiard(worker.text())
