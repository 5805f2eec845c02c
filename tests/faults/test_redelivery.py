"""A second delivery of a running task's message is no duplicate: one body, and its result is the result."""

from __future__ import annotations

import os
import signal
import time
import uuid

import psycopg
import pytest

from faults.conftest import FleetMaker
from faults.fleet import Fleet
from faults.judge import take, waiting
from localservers import RabbitMQ

MET_ITSELF = "under way elsewhere"
IS_DONE = "is done: its second delivery is dropped"

END_SESSIONS = """
    SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name LIKE 'pglock %'
"""


@pytest.fixture
def impatient(make_fleet: FleetMaker) -> Fleet:
    """A fleet whose broker delivers again what is not acknowledged within a second."""
    return make_fleet(broker_transport_options={"visibility_timeout": 1})


def redeliver_until_logged(fleet: Fleet, text: str, times: int = 1) -> None:
    def seen() -> bool:
        fleet.redeliver()
        return sum(worker.text().count(text) for worker in fleet.workers) >= times

    fleet.wait(seen, f"{text!r} logged {times} times")


@pytest.mark.parametrize("task", ["skip", "retry", "late_skip", "late_retry"])
def test_message_that_was_published_twice_runs_once(fleet: Fleet, task: str) -> None:
    """Two messages with one task id at one time: one body, and the caller gets what it returns."""
    fleet.worker("prefork", 2)
    id = str(uuid.uuid4())
    signature = fleet.signature(task, "a", gate="end")
    result = signature.apply_async(task_id=id)
    fleet.running("a")
    signature.apply_async(task_id=id)
    fleet.logged(MET_ITSELF)
    assert not result.ready(), f"the second delivery wrote {result.result!r} over a running task"
    fleet.open("end")
    assert result.get(timeout=10) == "a"
    if not task.startswith("late"):
        assert len(fleet.history.runs("a")) == 1
    fleet.wait(fleet.drained, "an empty queue")
    assert not fleet.history.overlaps()
    assert result.get() == "a"


@pytest.mark.parametrize("task", ["skip", "late_skip"])
def test_task_id_can_be_used_again_once_its_result_is_there(fleet: Fleet, task: str) -> None:
    """A nightly job has one id for each day: what is asked for again is no second delivery."""
    fleet.worker("prefork", 2)
    for day in map(str, range(10)):
        fleet.signature(task, "a").apply_async(task_id=day).get(timeout=10)
        fleet.signature(task, "a").apply_async(task_id=day)
        fleet.wait(lambda day=day: len(fleet.history.runs(task_id=day)) == 2, f"two bodies of {day}")


def test_message_that_was_published_twice_runs_twice_without_locks(make_fleet: FleetMaker) -> None:
    """The control: with the locks off both bodies run at one time."""
    fleet = make_fleet(pglock_enabled=False)
    fleet.worker("prefork", 2)
    for _ in range(2):
        fleet.signature("skip", "a", gate="end").apply_async(task_id="twice")
    fleet.wait(lambda: len(fleet.history.runs("a")) == 2, "two bodies")
    fleet.open("end")
    fleet.wait(fleet.drained, "an empty queue")
    assert fleet.history.overlaps()


@pytest.mark.smoke
@pytest.mark.parametrize("task", ["late_skip", "late_retry"])
def test_redelivered_message_waits_for_the_first_and_does_not_run(impatient: Fleet, task: str) -> None:
    """The broker's visibility timeout passes under a long body: the copies wait, and end with it."""
    fleet = impatient
    fleet.worker("prefork", 3)
    result = fleet.send(task, "a", gate="end")
    fleet.running("a")
    redeliver_until_logged(fleet, MET_ITSELF, times=2)
    assert not result.ready()
    fleet.open("end")
    assert result.get(timeout=10) == "a"
    fleet.wait(fleet.drained, "an empty queue")
    assert len(fleet.history.runs("a")) == 1, "the task ran again although its result was stored"
    fleet.logged(IS_DONE)
    assert result.get() == "a"


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_redelivered_message_waits_until_the_result_is_stored(impatient: Fleet, pool: str) -> None:
    """The name is free when the body ends, but the execution is over when its result is stored."""
    fleet = impatient
    slow = f"faults.shop:SlowBackend+{fleet.conf['result_backend']}"
    fleet.worker(pool, 3, env={"FLEET_SLOW_STORE": "3"}, result_backend=slow)
    result = fleet.send("late_skip", "a", gate="end")
    fleet.running("a")
    fleet.open("end")
    fleet.wait(lambda: fleet.history.events("storing"), "the result on its way")
    redeliver_until_logged(fleet, MET_ITSELF)
    assert not result.ready()
    assert result.get(timeout=15) == "a"
    fleet.wait(fleet.drained, "an empty queue")
    assert len(fleet.history.runs("a")) == 1
    assert result.get() == "a"


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_second_delivery_meets_an_execution_whose_session_ended_while_it_waited(
    fleet: Fleet, observer: psycopg.Connection, pool: str
) -> None:
    """It waits on, and is known for what it is when its body runs."""
    fleet.worker(pool, 2, app="faults.modes")
    id = str(uuid.uuid4())
    signature = fleet.signature("wait", "a", gate="end")
    take(observer, "a")
    result = signature.apply_async(task_id=id)
    fleet.wait(lambda: waiting(observer) == 1, "it waits")
    observer.execute(END_SESSIONS)
    fleet.wait(lambda: waiting(observer) == 1, "it waits on")
    observer.execute("SELECT pg_advisory_unlock_all()")
    fleet.running("a")
    signature.apply_async(task_id=id)
    fleet.logged(MET_ITSELF)
    assert not result.ready()
    fleet.open("end")
    assert result.get(timeout=10) == "a"
    fleet.wait(fleet.drained, "an empty queue")
    assert len(fleet.history.runs("a")) == 1
    assert result.get() == "a"


@pytest.mark.parametrize("task", ["late_skip", "late_retry"])
def test_redelivered_message_runs_when_the_first_was_killed(impatient: Fleet, task: str) -> None:
    """Copies that met the running execution are still there when its worker dies, and do its work."""
    fleet = impatient
    first = fleet.worker("solo", task_default_queue="shop")
    result = fleet.send(task, "a", gate="end")
    started = fleet.running("a").started
    fleet.worker("threads", 2)
    redeliver_until_logged(fleet, MET_ITSELF)
    first.kill()
    fleet.open("end")
    assert fleet.wait(lambda: len(fleet.history.runs("a")) == 2, "a second body")
    assert result.get(timeout=20) == "a"
    assert fleet.history.runs("a")[1].started > started
    assert not fleet.history.overlaps()


def test_redelivered_message_runs_where_no_backend_knows_the_first(make_fleet: FleetMaker) -> None:
    """With ignored results nobody knows that a task is done: it runs again, one body after the other."""
    fleet = make_fleet(broker_transport_options={"visibility_timeout": 1}, task_ignore_result=True)
    fleet.worker("prefork", 3)
    fleet.send("late_skip", "a", gate="end")
    fleet.running("a")
    redeliver_until_logged(fleet, MET_ITSELF)
    fleet.open("end")
    fleet.wait(lambda: len(fleet.history.runs("a")) >= 2, "the copy's body")
    fleet.wait(fleet.drained, "an empty queue")
    assert not fleet.history.overlaps()


@pytest.mark.parametrize("countdown", [0, 4], ids=["retry runs", "retry is to come"])
def test_redelivered_message_runs_no_try_again(impatient: Fleet, countdown: int) -> None:
    """It comes when its task has retried itself: nothing is written over the result of the later try."""
    fleet = impatient
    fleet.worker("threads", 4)
    result = fleet.send("late_tries", "a", countdown)
    first = fleet.running("a")
    redeliver_until_logged(fleet, MET_ITSELF)
    fleet.open("try 0")
    if countdown:
        fleet.open("try 1")
    else:
        fleet.running("a", after=first.started)
        fleet.logged(MET_ITSELF, times=2)
        assert not result.ready()
        fleet.open("try 1")
    assert result.get(timeout=20) == "real"
    fleet.wait(fleet.drained, "an empty queue")
    assert len(fleet.history.runs("a")) == 2
    assert not fleet.history.overlaps()
    assert result.get() == "real"


@pytest.fixture
def tracked(make_fleet: FleetMaker) -> Fleet:
    """An impatient fleet whose tasks tell when they start."""
    return make_fleet(broker_transport_options={"visibility_timeout": 1}, task_track_started=True)


def test_second_delivery_writes_no_start_over_what_the_body_says(tracked: Fleet) -> None:
    fleet = tracked
    fleet.worker("threads", 2)
    result = fleet.send("late_progress", "a", gate="end")
    fleet.running("a")
    redeliver_until_logged(fleet, MET_ITSELF)
    assert (result.state, result.info) == ("PROGRESS", {"done": 50})
    fleet.open("end")
    assert result.get(timeout=10) == "a"


def test_second_delivery_of_a_failure_does_not_run(tracked: Fleet) -> None:
    """A start that it wrote over the failure would make it look as if the task ran."""
    fleet = tracked
    fleet.worker("threads", 2)
    result = fleet.send("late_failure", "a", gate="end")
    fleet.running("a")
    assert result.state == "STARTED"
    redeliver_until_logged(fleet, MET_ITSELF)
    fleet.open("end")
    fleet.logged(IS_DONE)
    fleet.wait(fleet.drained, "an empty queue")
    assert len(fleet.history.runs("a")) == 1
    assert result.state == "FAILURE"


def test_second_delivery_of_a_try_does_not_run(tracked: Fleet) -> None:
    """The RETRY that the first stored stays."""
    fleet = tracked
    fleet.worker("threads", 2)
    result = fleet.send("late_tries", "a", 6)
    fleet.running("a")
    redeliver_until_logged(fleet, MET_ITSELF)
    fleet.open("try 0")
    fleet.logged(IS_DONE)
    fleet.open("try 1")
    assert result.get(timeout=20) == "real"
    fleet.wait(fleet.drained, "an empty queue")
    assert len(fleet.history.runs("a")) == 2


def test_retry_that_a_stopped_worker_gives_back_runs(fleet: Fleet) -> None:
    """The SUCCESS under its id is older than its countdown: that of the first try, which did not raise."""
    first = fleet.worker("prefork", 1)
    result = fleet.send("goes_on", "a", 6)
    assert result.get(timeout=10) == "try 0"
    fleet.logged("received", times=2)
    first.stop()
    fleet.worker("prefork", 1)
    fleet.wait(lambda: len(fleet.history.runs("a")) == 2, "the retry's body")
    fleet.wait(fleet.drained, "an empty queue")


def test_conflict_of_an_id_used_again_runs_when_its_worker_was_stopped(fleet: Fleet) -> None:
    """What is stored under its id is older than the copy that waits."""
    first = fleet.worker("prefork", 2)
    signature = fleet.signature("late_patient", "a")
    assert signature.apply_async(task_id="report").get(timeout=10) == "a"
    fleet.send("skip", "a", gate="end")
    fleet.running("a")
    signature.apply_async(task_id="report")
    fleet.logged("trying again in 6 s")
    fleet.wait(
        lambda: len([e for e in fleet.history.events("received") if e["id"] == "report"]) == 3, "it waits"
    )
    fleet.open("end")
    first.stop()
    fleet.worker("prefork", 2)
    fleet.wait(lambda: len(fleet.history.runs(task_id="report")) == 2, "its second use's body")
    fleet.wait(fleet.drained, "an empty queue")


def test_waiting_message_that_is_redelivered_does_not_multiply(
    make_fleet: FleetMaker,
) -> None:
    """A countdown longer than the visibility timeout would have each copy make more of them."""
    fleet = make_fleet(broker_transport_options={"visibility_timeout": 2})
    fleet.worker("threads", 4)
    holder = fleet.send("skip", "a", gate="end")
    fleet.running("a")
    result = fleet.send("late_patient", "a")
    until = time.monotonic() + 8
    while time.monotonic() < until:
        fleet.redeliver()
        time.sleep(0.25)
    fleet.open("end")
    assert holder.get(timeout=10) == result.get(timeout=20) == "a"
    fleet.wait(fleet.drained, "an empty queue")
    published = [event for event in fleet.history.events("published") if event["id"] == result.id]
    assert len(published) < 16
    assert len(fleet.history.runs("a", task_id=result.id)) == 1


def test_killed_child_of_a_late_task_is_replaced(fleet: Fleet) -> None:
    """Late acknowledgment and a lost child: the message comes again at once, and gets the lock."""
    fleet.worker("prefork", 2)
    result = fleet.send("late_retry", "a", gate="end")
    first = fleet.running("a")
    fleet.worker("solo")
    os.kill(first.pid, signal.SIGKILL)
    fleet.running("a", after=first.started)
    fleet.open("end")
    assert result.get(timeout=10) == "a"
    assert not fleet.history.overlaps()


@pytest.mark.parametrize("task", ["late_skip", "late_retry"])
def test_message_that_rabbitmq_delivers_again_runs_once(
    make_fleet: FleetMaker, rabbitmq: RabbitMQ, task: str
) -> None:
    """A closed connection returns every unacknowledged message, while the bodies go on."""
    fleet = make_fleet(
        broker=rabbitmq.url(), broker_transport_options={}, broker_connection_retry_on_startup=True
    )
    fleet.worker("prefork", 3)
    result = fleet.send(task, "a", gate="end")
    fleet.running("a")
    rabbitmq.close_all_connections("a test")
    fleet.logged(MET_ITSELF, timeout=40)
    fleet.open("end")
    assert result.get(timeout=20) == "a"
    fleet.logged(" ignored", times=2, timeout=30)
    assert len(fleet.history.runs("a")) == 1
    assert result.get() == "a"


def test_rabbitmq_delivers_a_killed_workers_message_to_the_next(
    make_fleet: FleetMaker, rabbitmq: RabbitMQ
) -> None:
    """A dead worker's message comes at once, and its lock is free by then or soon after."""
    fleet = make_fleet(broker=rabbitmq.url(), broker_transport_options={})
    first = fleet.worker("prefork", 1)
    result = fleet.send("late_retry", "a", gate="end")
    started = fleet.running("a").started
    fleet.worker("threads", 2)
    first.kill()
    fleet.running("a", after=started)
    fleet.open("end")
    assert result.get(timeout=20) == "a"
    assert not fleet.history.overlaps()
