"""Every way to hold a lock, in real workers of every pool, some of which are killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable

import psycopg
import pytest

from celery_pglock import LockNotAcquired
from faults.conftest import FleetMaker
from faults.fleet import Fleet, Worker, alive
from faults.history import Run
from faults.judge import holders, sessions, wait_free, wait_no_locks
from localservers import PgBouncer

WAITING = """
    SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


def waiting(observer: psycopg.Connection) -> int:
    """How many wait in PostgreSQL's queues."""
    return observer.execute(WAITING).fetchone()[0]


def at_once(runs: list[Run]) -> int:
    """How many of these bodies were alive at one time."""
    return max((sum(1 for b in runs if b.started <= a.started < b.last_seen) for a in runs), default=0)


def start(fleet: Fleet, pool: str, concurrency: int) -> Worker:
    return fleet.worker(pool, concurrency, app="faults.modes")


# Waiting.


def test_waiters_take_turns_in_order_and_without_a_pause(fleet: Fleet, observer: psycopg.Connection) -> None:
    """Fifty bodies of 100 ms: other tasks go on beside them, and what the waits took is given back."""
    workers = [start(fleet, pool, 30) for pool in ("threads", "gevent")]
    fleet.send("wait", "a", gate="go")
    holder = fleet.running("a")
    ids = []
    for number in range(50):
        ids.append(fleet.send("wait", "a", 0.1).id)
        fleet.wait(lambda n=number: waiting(observer) == n + 1, "one more waiter")
    # Whichever worker takes it has a session for its other tasks.
    for _ in range(4):
        assert fleet.send("skip", "beside").get(timeout=10) == "beside"
    assert len(sessions(observer)) <= 50 + len(workers)
    fleet.open("go")
    fleet.wait(lambda: sum(1 for run in fleet.history.runs("a") if run.ended) == 51, "all of them", 60)
    runs = [run for run in fleet.history.runs("a") if run.run != holder.run]
    ended = next(run.ended for run in fleet.history.runs("a") if run.run == holder.run)
    assert [run.task_id for run in sorted(runs, key=lambda run: run.started)] == ids
    took = max(run.ended for run in runs) - ended
    work = sum(run.ended - run.started for run in runs)
    print(f"50 bodies of {work:.2f} s took {took:.2f} s: {took / work:.3f}")
    assert took <= 1.15 * work
    assert not fleet.history.overlaps()
    fleet.wait(lambda: len(sessions(observer)) <= len(workers), "the sessions of the waits are given back")


@pytest.mark.parametrize("task", ["wait", "wait_in_transaction"])
def test_a_wait_that_is_interrupted_leaves_nothing(
    fleet: Fleet, observer: psycopg.Connection, task: str
) -> None:
    """By a soft limit, by a revoke, by the end of the process: neither a lock nor a waiter."""
    start(fleet, "prefork", 2)
    fleet.send("skip", "a", gate="go")
    fleet.running("a")

    def waiter(**options: float) -> object:
        result = fleet.signature(task, "a").apply_async(**options)
        fleet.wait(lambda: waiting(observer) == 1, "it waits")
        return result

    def gone() -> None:
        fleet.wait(lambda: waiting(observer) == 0, "no zombie waits", 3)
        assert len(holders(observer, "a")) == 1

    result = waiter(soft_time_limit=1)
    with pytest.raises(Exception, match="SoftTimeLimit"):
        result.get(timeout=10)
    gone()
    for signum in ("SIGTERM", "SIGKILL"):
        waiter().revoke(terminate=True, signal=signum)
        gone()
    result = waiter()
    fleet.open("go")
    assert result.get(timeout=20) == "a"
    wait_no_locks(observer)


def test_a_wait_that_is_over_fails(fleet: Fleet, observer: psycopg.Connection) -> None:
    """As `LockNotAcquired`, in time."""
    start(fleet, "prefork", 2)
    fleet.send("skip", "a", gate="go")
    fleet.running("a")
    since = time.monotonic()
    with pytest.raises(LockNotAcquired, match="celery:shop:a"):
        fleet.send("wait_briefly", "a").get(timeout=10)
    assert 0.9 < time.monotonic() - since < 4
    assert waiting(observer) == 0
    fleet.open("go")


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_worker_that_stops_leaves_no_waiter(fleet: Fleet, observer: psycopg.Connection, pool: str) -> None:
    """Warm it serves its waiters first, cold and killed it leaves the queue."""
    start(fleet, "solo", 1)
    fleet.send("skip", "a", gate="go")
    fleet.running("a")
    # Celery joins the threads of a worker that is told to stop cold: that waits for them too.
    cold = () if pool == "threads" else (signal.SIGQUIT,)
    for how in (*cold, signal.SIGKILL, signal.SIGTERM):
        worker = start(fleet, pool, 2)
        fleet.send("wait", "a")
        fleet.wait(lambda: waiting(observer) == 1, "it waits")
        worker.signal(how)
        if how is signal.SIGTERM:
            fleet.open("go")
        worker.wait_ended()
        fleet.wait(lambda: waiting(observer) == 0, f"{how.name}: no zombie waits", 3)
    assert len(fleet.history.runs("a")) == 2
    wait_free(observer, "a")


# Storms.


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_no_mode_admits_more_than_it_says(fleet: Fleet, observer: psycopg.Connection, pool: str) -> None:
    """Waiters, readers and writers, three at once: with processes killed in the middle of it."""
    workers = [start(fleet, pool, 6) for _ in range(2)]
    for n in range(3):
        # Each death has a storm of its own: while a worker starts, the other may work off all there is.
        storm(fleet)
        runs = fleet.wait(lambda: bodies(fleet), "a body")
        if pool == "prefork":
            os.kill(random.choice(runs).pid, signal.SIGKILL)
        elif n < 2:
            workers[n].kill()
            workers.append(start(fleet, pool, 6))
    fleet.wait(lambda: is_quiet(fleet), "the end of the storm", 60)
    exclusive, limited = judged(fleet)
    assert exclusive == []
    assert limited == 3
    wait_no_locks(observer, timeout=5)


def test_all_modes_are_exceeded_without_locks(make_fleet: FleetMaker) -> None:
    """The control: the same storm with the locks off."""
    fleet = make_fleet(pglock_enabled=False)
    for _ in range(2):
        start(fleet, "threads", 6)
    storm(fleet)
    fleet.wait(lambda: is_quiet(fleet), "the end of the storm", 60)
    exclusive, limited = judged(fleet)
    assert exclusive
    assert limited > 3


def storm(fleet: Fleet) -> None:
    messages = [
        *[("wait", "a")] * 6,
        *[("wait_in_transaction", "a")] * 4,
        *[("read", "rw")] * 6,
        *[("wait", "rw")] * 3,
        *[("three", "t")] * 10,
    ]
    random.shuffle(messages)
    for task, name in messages:
        fleet.send(task, name, 0.15)


def bodies(fleet: Fleet) -> list[Run]:
    """Those that run: one that was killed has no end either."""
    return [run for run in fleet.history.runs() if run.ended is None and alive(run.pid)]


def is_quiet(fleet: Fleet) -> bool:
    """Whether no body has said anything for two seconds and a half: retries come within one."""
    return time.time() - fleet.history.path.stat().st_mtime > 2.5


def judged(fleet: Fleet) -> tuple[list[tuple[Run, Run]], int]:
    """The pairs of bodies that should not have met, and how many of three met at once."""
    wrong = [
        (one, other)
        for one, other in fleet.history.overlaps()
        if one.name != "t" and not (one.task == other.task == "read")
    ]
    return wrong, at_once(fleet.history.runs("t"))


# Bursts.

#: The full check has 5,000 messages.
MESSAGES = int(os.environ.get("PGLOCK_BURST_MESSAGES", "300"))
POOLS = {"prefork": 3, "threads": 8, "gevent": 8}


def burst(fleet: Fleet, task: str, messages: int, seconds: float, at_once: int) -> list[Run]:
    """Send messages to a worker of each pool, so many of them under way at once; return their runs."""
    pids = {start(fleet, pool, concurrency).pid: pool for pool, concurrency in POOLS.items()}
    waiting = [fleet.signature(task, task, seconds) for _ in range(messages)]
    under_way: set[str] = set()
    deadline = time.monotonic() + 60 + messages / 5
    while waiting or under_way:
        under_way -= {
            id for id, result in fleet.results(list(under_way)).items() if result["status"] == "SUCCESS"
        }
        while waiting and len(under_way) < at_once:
            under_way.add(waiting.pop().apply_async().id)
        assert time.monotonic() < deadline, (
            f"{len(waiting)} messages were not sent, and {under_way} have no end"
        )
        time.sleep(0.05)
    runs = sorted(fleet.history.runs(task), key=lambda run: run.started)
    assert len({run.task_id for run in runs}) == len(runs) == messages
    parents = Counter(pids.get(run.pid, "prefork") for run in runs)
    print(f"{messages} bodies in {runs[-1].ended - runs[0].started:.1f} s: {dict(parents)}")
    assert parents.keys() == POOLS.keys()
    return runs


@pytest.mark.timeout(1200)
def test_n_at_once_are_never_exceeded_in_a_burst(fleet: Fleet, observer: psycopg.Connection) -> None:
    """Three at once, of processes, threads and greenlets together; what a process holds is one session's."""
    runs = burst(fleet, "three", MESSAGES, 0.05, at_once=60)
    print(f"{at_once(runs)} at once")
    assert at_once(runs) == 3
    assert len(sessions(observer)) <= POOLS["prefork"] + 2
    wait_no_locks(observer)


def test_n_at_once_are_exceeded_in_a_burst_without_a_limit(make_fleet: FleetMaker) -> None:
    """The control: the same burst with the locks off."""
    assert at_once(burst(make_fleet(pglock_enabled=False), "three", 300, 0.05, at_once=60)) > 3


#: The rate of `faults.modes`: so many starts in any window of seconds.
STARTS, WINDOW = 10, 0.5


def most_in_a_window(fleet: Fleet, runs: list[Run]) -> int:
    """The most executions that were certainly granted the lock within one window.

    Nobody but the lock knows the moment of a grant: it lies between the execution's coming to the lock and
    its body's first line, on a busy machine not near to either. Those count that lie in the window with both.
    """
    asked: dict[str, list[float]] = defaultdict(list)
    for event in fleet.history.events("asked"):
        asked[event["id"]].append(event["at"])
    spans = [(max(at for at in asked[run.task_id] if at <= run.started), run.started) for run in runs]
    return max(
        sum(1 for came, started in spans if came >= since and started < since + WINDOW) for since, _ in spans
    )


def test_no_more_than_n_start_in_any_window(fleet: Fleet, observer: psycopg.Connection) -> None:
    """Over the history of a burst on three pools: the minimum hold of ten slots is a rate."""
    runs = burst(fleet, "rate", 300, 0.005, at_once=200)
    most = most_in_a_window(fleet, runs)
    starts = [run.started for run in runs]
    shortest = min(later - first for first, later in zip(starts, starts[STARTS:], strict=False))
    print(f"{most} in a window of {WINDOW} s; {STARTS + 1} starts took {shortest:.3f} s at least")
    assert most <= STARTS
    wait_no_locks(observer)


def test_more_than_n_start_in_a_window_without_a_minimum_hold(fleet: Fleet) -> None:
    """The control: ten at once are no rate."""
    assert most_in_a_window(fleet, burst(fleet, "ten", 300, 0.005, at_once=200)) > STARTS


# Connections.


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_each_way_takes_no_more_connections_than_it_says(
    fleet: Fleet, observer: psycopg.Connection, pool: str
) -> None:
    """One for each process; further ones for a body in a transaction, and for who waits beside others."""
    worker = start(fleet, pool, 4)
    for task, names, of_a_thread, of_a_child in (
        ("three", "aaa", 1, 1),
        ("read", "bbb", 1, 1),
        ("wait", "ccc", 1 + 2, 1),
        ("late_in_transaction", "def", 1 + 3, 2),
    ):
        results = [fleet.send(task, name, gate=task) for name in names]
        at_work = [1, 2] if task == "wait" else [3, 0]
        fleet.wait(
            lambda want=at_work: [len(bodies(fleet)), waiting(observer)] == want, f"{task}: all at work"
        )
        seen = Counter(sessions(observer))
        if pool == "prefork":
            assert seen.keys() <= set(worker.children())
            assert max(seen.values()) == of_a_child, task
        else:
            assert seen == {worker.pid: of_a_thread}, task
        fleet.open(task)
        for result in results:
            result.get(timeout=20)
    # One that was warm is left of each process that had a transaction.
    processes = dict.fromkeys([worker.pid] if pool != "prefork" else worker.children(), 2)
    fleet.wait(lambda: Counter(sessions(observer)) <= Counter(processes), "what is not needed is given back")


# A minimum hold.


def test_an_execution_s_own_retry_does_not_meet_its_minimum_hold(fleet: Fleet) -> None:
    """The same execution goes on; the next task of a chain under its name is another one."""
    start(fleet, "prefork", 2)
    assert fleet.send("kept_retries", "a").get(timeout=15) == 2
    assert fleet.send("kept_retries", "a", 0).get(timeout=15)["pglock"] == "skipped"
    both = (fleet.signature("kept", "b") | fleet.signature("kept", "b", immutable=True)).apply_async()
    assert both.get(timeout=15)["pglock"] == "skipped"
    assert len(fleet.history.runs("b")) == 1


def test_a_killed_process_frees_its_minimum_holds(fleet: Fleet, observer: psycopg.Connection) -> None:
    """Nobody is left to keep them."""
    worker = start(fleet, "threads", 2)
    assert fleet.send("kept", "a").get(timeout=10) == "a"
    assert fleet.send("kept", "a").get(timeout=10)["pglock"] == "skipped"
    worker.kill()
    wait_no_locks(observer)
    start(fleet, "solo", 1)
    assert fleet.send("kept", "a").get(timeout=10) == "a"


# Two that wait for each other.


@pytest.mark.parametrize("pool", ["prefork", "solo", "threads"])
def test_bodies_that_wait_for_each_other_end(fleet: Fleet, observer: psycopg.Connection, pool: str) -> None:
    """Where hold and wait are one session the server ends one in a second, elsewhere their bound does."""
    for _ in range(2 if pool == "solo" else 1):
        start(fleet, pool, 2)
    server_sees_it = pool != "threads"
    wait = 20 if server_sees_it else 2
    results = [fleet.send("crosses", *names, wait) for names in (("a", "b"), ("b", "a"))]
    fleet.wait(lambda: waiting(observer) == 2, "both wait")
    since = time.monotonic()
    fleet.wait(lambda: all(result.ready() for result in results), "both end", 15)
    took = time.monotonic() - since
    states = sorted(result.state for result in results)
    errors = [str(result.result) for result in results if result.state == "FAILURE"]
    print(f"{pool}: {took:.1f} s, {errors}")
    if server_sees_it:
        assert states == ["FAILURE", "SUCCESS"]
        assert "deadlock" in errors[0]
        assert took < 3
    else:
        assert "FAILURE" in states
        assert took < 6
    wait_no_locks(observer)


# Transactions.


def test_transactions_exclude_behind_a_pooler(
    make_fleet: FleetMaker, pgbouncer: PgBouncer, dbname: str, observer: psycopg.Connection
) -> None:
    """Sixteen transfers by two workers through PgBouncer in transaction mode: none is lost."""
    observer.execute("CREATE TABLE account (name text PRIMARY KEY, balance int)")
    observer.execute("INSERT INTO account VALUES ('a', 0)")
    fleet = make_fleet(pglock_database_url=pgbouncer.url(dbname))
    for _ in range(2):
        fleet.worker("prefork", 2, app="faults.pooled")
    results = [fleet.send("transfer", "a", 1) for _ in range(16)]
    for result in results:
        result.get(timeout=30)
    assert observer.execute("SELECT balance FROM account").fetchone() == (16,)
    assert not fleet.history.overlaps()
    assert len({run.pid for run in fleet.history.runs("a")}) >= 3
    wait_no_locks(observer)
    with psycopg.connect(pgbouncer.url(dbname), autocommit=True, prepare_threshold=None) as client:
        assert client.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
        changed = client.execute(
            "SELECT name FROM pg_settings WHERE source = 'session' AND name LIKE '%%timeout%%'"
        ).fetchall()
        assert changed == []


def test_a_commit_that_fails_is_not_tried_again(fleet: Fleet, observer: psycopg.Connection) -> None:
    """`lock_on_lost="retry"` is for lost locks, and this one was not."""
    observer.execute("CREATE TABLE once (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    start(fleet, "prefork", 1)
    with pytest.raises(Exception, match="duplicate key"):
        fleet.send("fails_at_its_commit", "a").get(timeout=10)
    assert len(fleet.history.runs("a")) == 1
    assert observer.execute("SELECT count(*) FROM once").fetchone() == (0,)


def test_a_redelivered_transaction_that_is_done_does_not_run_again(make_fleet: FleetMaker) -> None:
    """The result backend knows."""
    fleet = make_fleet(broker_transport_options={"visibility_timeout": 1})
    worker = start(fleet, "threads", 2)
    result = fleet.send("late_in_transaction", "a", gate="go")
    fleet.running("a")

    def put_back() -> bool:
        fleet.redeliver()
        return "its second delivery is put back" in worker.text()

    fleet.wait(put_back, "a second delivery")
    # It comes again in a second at the earliest, and finds the result: between a commit and its result, a
    # copy would run.
    fleet.open("go")
    assert result.get(timeout=10) == "a"
    fleet.wait(fleet.drained, "an empty queue")
    assert len(fleet.history.runs("a")) == 1


def test_the_consumer_of_a_prefork_worker_has_no_session(fleet: Fleet, observer: psycopg.Connection) -> None:
    """What it asked at its start is closed before the first fork."""
    worker = start(fleet, "prefork", 2)
    assert fleet.send("late_in_transaction", "a").get(timeout=10) == "a"
    assert worker.pid not in sessions(observer)
    assert set(sessions(observer)) <= set(worker.children())


@pytest.fixture
def held(fleet: Fleet) -> Callable[[], None]:
    """A name that is held by a worker of its own."""
    start(fleet, "solo", 1)
    fleet.send("skip", "a", gate="go")
    fleet.running("a")
    return lambda: fleet.open("go")


def test_one_runs_and_one_waits(fleet: Fleet, held: Callable[[], None], observer: psycopg.Connection) -> None:
    """With `lock_max_waiters=1` later ones are skipped, in whatever process they are."""
    start(fleet, "prefork", 3)
    start(fleet, "threads", 3)
    results = [fleet.send("one_waits", "a") for _ in range(8)]
    fleet.wait(lambda: sum(result.ready() for result in results) == 7, "seven are skipped")
    assert waiting(observer) == 1
    held()
    fleet.wait(lambda: all(result.ready() for result in results), "the one that waited")
    values = [result.get(timeout=10) for result in results]
    assert len([value for value in values if value == "a"]) == 1
    wait_no_locks(observer)
