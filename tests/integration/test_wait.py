"""Waiting takes a turn in PostgreSQL's own queue, and leaves nothing behind however it ends."""

from __future__ import annotations

import gc
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore

from celery_pglock import (
    AdvisoryLockedTask,
    LockDeadlock,
    LockId,
    LockLost,
    LockNotAcquired,
    LockUnavailable,
    advisory_lock,
    is_skipped,
)
from celery_pglock.config import settings_of
from celery_pglock.execution import Execution, settle
from celery_pglock.locks import process
from celery_pglock.locks.hold import Hold
from celery_pglock.locks.keeper import Keeper, keeper_for
from celery_pglock.locks.requests import Answer, Statement
from celery_pglock.locks.settings import Settings
from faults.proxy import Proxy
from integration.judge import Judge, eventually
from integration.rivals import (
    Stopped,
    descriptors,
    forked,
    in_thread,
    interrupted_after,
    kill,
    status_of,
    wait_until_waiting,
    waiting,
)
from localservers import PostgreSQL

ID, OTHER = LockId(11), LockId(12)

NewKeeper = Callable[..., Keeper]

pytestmark = [
    pytest.mark.usefixtures("way"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]


@pytest.fixture(params=["session", "transaction"])
def scope(request: pytest.FixtureRequest) -> str:
    return request.param


def taken(keeper: Keeper, id: LockId = ID, **options: Any) -> Hold:
    hold = Hold(id, **options)
    assert keeper.acquire(hold).answer is Answer.GRANTED
    return hold


def served(keeper: Keeper, seconds: float | None = 20, **options: Any) -> tuple[Hold, Keeper]:
    """Wait for a hold and return it with the keeper that it is released at."""
    hold = Hold(ID, **options)
    holder = keeper.waiter()
    asked = holder.wait(hold, seconds)
    assert asked.answer is Answer.GRANTED, (asked.answer, asked.error)
    return hold, holder


def is_over(future: Future[Any]) -> Any:
    return future.result(timeout=20)


# Its turn.


def test_waiters_are_served_in_the_order_of_their_arrival(new_keeper: NewKeeper, judge: Judge) -> None:
    """Twenty that arrived one after the other, and each is told at once."""
    order: list[int] = []
    handovers: list[float] = []
    left_at = time.monotonic()

    def wait(number: int, keeper: Keeper) -> None:
        nonlocal left_at
        hold, holder = served(keeper)
        handovers.append(time.monotonic() - left_at)
        order.append(number)
        left_at = time.monotonic()
        holder.release(hold)

    assert judge.take(ID)
    futures = []
    for number in range(20):
        futures.append(in_thread(partial(wait, number, new_keeper())))
        wait_until_waiting(judge, number + 1)
    left_at = time.monotonic()
    judge.give_back()
    for future in futures:
        is_over(future)
    assert order == list(range(20))
    print(f"seconds from a release to the next grant: median {statistics.median(handovers):.4f}")
    assert statistics.median(handovers) < 0.1


def test_those_who_try_again_are_served_in_any_order(new_keeper: NewKeeper, judge: Judge) -> None:
    """The control: twenty that ask now and then have no queue."""
    order: list[int] = []

    def poll(number: int, keeper: Keeper) -> None:
        while keeper.acquire(hold := Hold(ID)).answer is not Answer.GRANTED:
            time.sleep(random.uniform(0.001, 0.1))
        order.append(number)
        keeper.release(hold)

    assert judge.take(ID)
    futures = []
    for number in range(20):
        futures.append(in_thread(partial(poll, number, new_keeper())))
        eventually(lambda: len(judge.sessions()) > len(futures) - 1, "the session of the next")
    judge.give_back()
    for future in futures:
        is_over(future)
    assert order != list(range(20))


def test_nobody_gets_past_those_who_wait(new_keeper: NewKeeper, judge: Judge) -> None:
    """One who only tries is refused while another waits, even in the moment of the handover."""
    first, second = new_keeper(), new_keeper()
    judge.take(ID)
    waiter = in_thread(lambda: served(first))
    wait_until_waiting(judge, 1)
    judge.give_back()
    assert second.acquire(Hold(ID)).answer is Answer.CONFLICT
    hold, holder = is_over(waiter)
    holder.release(hold)


def test_a_wait_is_bounded(keeper: Keeper, judge: Judge) -> None:
    """It ends when its time is up, within half a second, and leaves no lock and no waiter."""
    judge.take(ID)
    since = time.monotonic()
    hold = Hold(ID)
    waiter = keeper.waiter()
    asked = waiter.wait(hold, 0.4)
    waiter.release(hold)
    assert asked.answer is Answer.CONFLICT
    assert 0.4 <= time.monotonic() - since < 0.9
    assert hold.status is Hold.Status.NEW
    assert waiting(judge) == []
    judge.give_back()
    assert judge.held() == set()


@pytest.mark.parametrize("wait", [timedelta(days=35), None], ids=str)
def test_a_long_wait_is_a_wait(dsn: str, judge: Judge, way: str, scope: str, wait: Any) -> None:
    """What PostgreSQL's own timeouts can't hold (24.8 days) is no error."""
    judge.take(ID)

    def block() -> None:
        with advisory_lock(ID, wait, scope=scope, database_url=dsn):
            pass

    future = in_thread(block)
    wait_until_waiting(judge, 1)
    judge.give_back()
    is_over(future)
    eventually(lambda: not judge.held(), "the lock is left behind")


def test_wait_ends_as_lock_not_acquired(app: Celery, judge: Judge, scope: str) -> None:
    """A task that waited for as long as it may fails, and says how long it was."""

    @app.task(base=AdvisoryLockedTask, name="f", shared=False, lock_key=lambda: ID, lock_scope=scope,
              lock_on_conflict="wait", lock_max_wait=timedelta(seconds=0.3))  # fmt: skip
    def f(): ...

    judge.take(ID)
    result = f.delay()
    assert isinstance(result.result, LockNotAcquired)
    assert "LockId(11)" in str(result.result)
    assert 0.3 <= result.result.args[1] < 2
    judge.give_back()
    assert f.delay().state == "SUCCESS"


def test_a_wait_of_nothing_tries_once(app: Celery, judge: Judge, scope: str) -> None:
    """`lock_max_wait=0` is no wait at all, and not one for ever."""

    @app.task(base=AdvisoryLockedTask, name="f", shared=False, lock_key=lambda: ID, lock_scope=scope,
              lock_on_conflict="wait", lock_max_wait=0)  # fmt: skip
    def f(): ...

    judge.take(ID)
    since = time.monotonic()
    assert isinstance(f.delay().result, LockNotAcquired)
    assert time.monotonic() - since < 1
    judge.give_back()


def test_a_hold_of_the_same_process_is_waited_for(new_keeper: NewKeeper, judge: Judge, way: str) -> None:
    """In a process of many bodies it is another thread's, else one with a minimum hold."""
    keeper = new_keeper()
    hold = taken(keeper, min_hold=0.0 if way == "owner" else 0.4)
    if way == "owner":
        waiter = in_thread(lambda: served(keeper))
        wait_until_waiting(judge, 1)
        keeper.release(hold)
    else:
        keeper.release(hold)
        assert judge.held() == {ID}
        waiter = in_thread(lambda: served(keeper))
    waited, holder = is_over(waiter)
    assert judge.held() == {ID}
    holder.release(waited)


@pytest.mark.parametrize("granted", [True, False])
def test_the_bound_of_a_wait_is_no_other_statement_s(keeper: Keeper, judge: Judge, granted: bool) -> None:
    """The session goes on as it was, whether the wait was granted or not."""
    if not granted:
        judge.take(ID)
    hold, waiter = Hold(ID), keeper.waiter()
    assert (waiter.wait(hold, 0.1).answer is Answer.GRANTED) is granted
    shown = Statement("SHOW lock_timeout")
    waiter.run(shown)
    assert shown.rows == [[b"0"]]
    waiter.release(hold)
    judge.give_back()


# However it ends.


def test_an_interrupted_wait_leaves_nothing_behind(dsn: str, judge: Judge, scope: str) -> None:
    """A soft limit or a revoke: the server forgets the waiter at once, while the name stays taken."""
    judge.take(ID)
    for seconds in (0.05, 0.11, 0.17, 0.3):
        with interrupted_after(seconds), advisory_lock(ID, None, scope=scope, database_url=dsn):
            pass
        eventually(lambda: not waiting(judge), "a zombie waits", within=2)
    judge.give_back()
    assert judge.held() == set()
    with advisory_lock(ID, scope=scope, database_url=dsn):
        assert judge.held() == {ID}


def test_a_wait_on_a_thread_is_interrupted_by_an_outer_loss(dsn: str, judge: Judge, scope: str) -> None:
    """No signal reaches a thread: what is thrown into it must not wait for its turn."""
    judge.take(ID)
    began = threading.Event()

    def work() -> None:
        with advisory_lock(OTHER, abort=True, database_url=dsn):
            began.set()
            with advisory_lock(ID, None, scope=scope, database_url=dsn):
                pass

    future = in_thread(work)
    assert began.wait(10)
    wait_until_waiting(judge, 1, ID)
    judge.end(judge.holder(OTHER))
    with pytest.raises(LockLost):
        future.result(timeout=2)
    eventually(lambda: not waiting(judge), "a zombie waits", within=2)
    judge.give_back()


def test_an_interrupt_at_the_moment_of_the_grant_leaves_no_lock(dsn: str, judge: Judge, scope: str) -> None:
    """The name is free however near the interrupt comes to the grant."""
    for number in range(15):
        judge.take(ID)
        giver = threading.Timer(0.1, judge.give_back)
        giver.start()
        try:
            with (
                interrupted_after(0.1 + number * 0.0004),
                advisory_lock(ID, None, scope=scope, database_url=dsn),
            ):
                time.sleep(5)
        finally:
            giver.join()
        eventually(lambda: not judge.held() and not waiting(judge), "a lock or a waiter is left", within=2)


def test_an_interrupt_behind_the_release_leaves_no_session(dsn: str, judge: Judge, way: str) -> None:
    """What many bodies wait for has a session of its own, which ends with its hold."""
    if way == "one at a time":
        pytest.skip("prefork and solo wait on their one session")
    for _ in range(100):
        eventually(lambda: judge.take(ID), "the name is not free", within=2)
        giver = in_thread(lambda: (wait_until_waiting(judge, 1), judge.give_back()))
        with interrupted_after(20):
            with advisory_lock(ID, 20, database_url=dsn):
                is_over(giver)
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 6e-4))
            time.sleep(5)
    gc.collect()
    eventually(lambda: len(judge.sessions()) == 1, "sessions are left")


def test_an_interrupted_wait_costs_no_other_hold(dsn: str, judge: Judge) -> None:
    """A body that is stopped while it waits for another lock tidies up under its own."""
    with advisory_lock(OTHER, database_url=dsn) as lock:
        own = judge.locks()
        for seconds in (0.05, 0.11, 0.17, 0.3):
            judge.take(ID)
            with interrupted_after(seconds), advisory_lock(ID, None, database_url=dsn):
                pass
            eventually(lambda: not waiting(judge), "a zombie waits", within=2)
            judge.give_back()
            assert judge.locks() == own
            assert not lock.lost
            with advisory_lock(ID, 10, database_url=dsn):
                assert judge.held() == {ID, OTHER}
    assert not lock.lost


def test_an_interrupt_at_the_moment_of_the_grant_gives_back_that_lock_alone(dsn: str, judge: Judge) -> None:
    """However near it comes; but for the instructions between the answer and the table of holds."""
    kept = 0
    for number in range(15):
        with suppress(LockLost), advisory_lock(OTHER, 10, database_url=dsn) as lock:
            judge.take(ID)
            giver = threading.Timer(0.1, judge.give_back)
            giver.start()
            try:
                with interrupted_after(0.098 + number * 0.0004), advisory_lock(ID, None, database_url=dsn):
                    time.sleep(5)
            finally:
                giver.join()
            still = set() if lock.lost else {OTHER}
            eventually(lambda still=still: judge.held() == still, "a lock is left or gone", within=2)
            kept += not lock.lost
    assert kept >= 10


def test_a_wait_that_can_not_be_taken_back_is_ended_with_all_else(dsn: str, judge: Judge, way: str) -> None:
    """Where the server does not answer nobody knows what it has granted, and nobody is kept waiting."""
    if way == "owner":
        pytest.skip("a wait of many bodies has a session of its own")
    judge.take(ID)
    with pytest.raises(LockLost), advisory_lock(OTHER, database_url=dsn) as lock:  # noqa: PT012
        backend = judge.holder(OTHER)
        frozen = threading.Timer(0.2, os.kill, (backend, signal.SIGSTOP))
        frozen.start()
        try:
            since = time.monotonic()
            with interrupted_after(0.4, again=0.0), advisory_lock(ID, None, database_url=dsn):
                pass
            assert lock.lost
            assert time.monotonic() - since < 3
        finally:
            frozen.join()
            os.kill(backend, signal.SIGCONT)
    judge.give_back()
    eventually(lambda: not judge.held(), "a lock is left", within=2)


def test_two_that_wait_for_each_other_on_their_one_session_are_told(dsn: str, judge: Judge, way: str) -> None:
    """PostgreSQL sees who holds and waits on one session, and ends the wait of one."""
    if way == "owner":
        pytest.skip("a wait of many bodies has a session of its own")

    def other_process() -> None:
        with (
            suppress(LockDeadlock),
            advisory_lock(ID, database_url=dsn),
            advisory_lock(OTHER, 20, database_url=dsn),
        ):
            pass

    with advisory_lock(OTHER, database_url=dsn) as lock:
        child = forked(other_process)
        wait_until_waiting(judge, 1)
        since = time.monotonic()
        with suppress(LockDeadlock), advisory_lock(ID, 20, database_url=dsn):
            pass
        assert time.monotonic() - since < 5
        assert not lock.lost
        assert OTHER in judge.held()
    assert status_of(child) == 0


def test_a_killed_process_does_not_wait_on(dsn: str, judge: Judge, scope: str) -> None:
    """The server notices that the client of a waiter is gone."""

    def wait() -> None:
        with advisory_lock(ID, 60, scope=scope, database_url=dsn):
            pass

    judge.take(ID)
    child = forked(wait)
    wait_until_waiting(judge, 1)
    kill(child)
    eventually(lambda: not waiting(judge), "a zombie waits", within=2)
    judge.give_back()
    assert judge.held() == set()


def test_a_waiter_whose_session_is_ended_waits_on(keeper: Keeper, judge: Judge) -> None:
    """It takes a turn anew, and the end of its session is no conflict."""
    judge.take(ID)
    waiter = in_thread(lambda: served(keeper))
    (pid,) = wait_until_waiting(judge, 1)
    judge.end(pid)
    eventually(lambda: waiting(judge) not in ([], [pid]), "nobody waits any more")
    judge.give_back()
    hold, holder = is_over(waiter)
    assert judge.held() == {ID}
    holder.release(hold)


@pytest.mark.parametrize("identity", ["free", "taken", "taken for good"])
def test_who_waits_on_has_its_identity_again_or_does_not_run(
    app: Celery, judge: Judge, way: str, identity: str
) -> None:
    """The session that had it ended: a second delivery may have it by now, and wait or run."""
    bodies: list[set[LockId]] = []

    @app.task(base=AdvisoryLockedTask, name="f", shared=False, lock_key=lambda: ID,
              lock_on_conflict="wait", lock_max_wait=20 if identity != "taken for good" else 1)  # fmt: skip
    def f() -> None:
        bodies.append(judge.held())

    def end_its_session() -> LockId:
        wait_until_waiting(judge, 1, ID)
        (execution,) = judge.held() - {ID}
        judge.end(judge.holder(execution))
        if way == "owner":
            # The end is noticed before this is answered.
            keeper = keeper_for(settings_of(app))
            keeper.release(taken(keeper, OTHER))
        wait_until_waiting(judge, 1, ID)
        if identity != "free":
            assert judge.take(execution)
        if identity != "taken for good":
            judge.observer.execute("SELECT pg_advisory_unlock(11)")
        return execution

    judge.take(ID)
    helper = in_thread(end_its_session)
    f.push_request(id="1", called_directly=False, is_eager=False, delivery_info={})
    try:
        with nullcontext() if identity == "free" else pytest.raises(Ignore):
            f()
        execution = is_over(helper)
        assert bodies == ([{ID, execution}] if identity == "free" else [])
        assert ID not in judge.held() or identity == "taken for good"
    finally:
        settle("1")
        f.pop_request()
        judge.give_back()
    eventually(lambda: not judge.held(), f"it is left: {judge.held()}", within=2)


@pytest.mark.parametrize("silent", [True, False])
def test_a_bounded_wait_ends_on_a_network_that_falls_silent(
    new_keeper: NewKeeper, judge: Judge, postgres: PostgreSQL, dbname: str, silent: bool
) -> None:
    """Within the bound for silence after its time. Until then an answer that does not come is no silence."""
    with Proxy(postgres.port) as proxy:
        keeper = new_keeper(f"postgresql://postgres@127.0.0.1:{proxy.port}/{dbname}", loss_timeout=3.0)
        outer = taken(keeper, OTHER)
        judge.take(ID)
        # What would wait on and on gets its answer in the end.
        answered = threading.Timer(9, proxy.resume) if silent else threading.Timer(2, judge.give_back)

        def go_silent() -> None:
            wait_until_waiting(judge, 1)
            if silent:
                proxy.stall()
            answered.start()

        helper = in_thread(go_silent)
        hold, waiter, since = Hold(ID), keeper.waiter(), time.monotonic()
        try:
            asked = waiter.wait(hold, 2.5)
            took = time.monotonic() - since
            is_over(helper)
            assert asked.answer is (Answer.UNKNOWN if silent else Answer.GRANTED)
            assert outer.lost is silent
            print(f"a wait of 2.5 s took {took:.1f} s")
            assert not silent or 2.5 <= took < 6.0
        finally:
            answered.cancel()
            proxy.resume()
            waiter.release(hold)
            keeper.release(outer)


@pytest.fixture
def proxy(postgres: PostgreSQL) -> Iterator[Proxy]:
    with Proxy(postgres.port) as proxy:
        yield proxy
        proxy.resume()


#: Seconds that bound the silence in the tests of it: the least that the package accepts.
LOSS_TIMEOUT = 3.0


def go_on(proxy: Proxy, judge: Judge) -> None:
    """Let what would wait on and on have its answer in the end."""
    proxy.resume()
    judge.give_back()


def wait_for_ever_under_another(keeper: Keeper, judge: Judge, meanwhile: Callable[[], object]) -> Hold:
    """Return the outer hold. Raises `LockLost` when that is lost, and fails when the wait is not granted."""
    outer = taken(keeper, OTHER, settings=keeper._settings)
    judge.take(ID)

    def once_it_waits() -> None:
        wait_until_waiting(judge, 1)
        meanwhile()

    helper = in_thread(once_it_waits)
    hold, waiter = Hold(ID), keeper.waiter()
    try:
        with keeper.interrupt_for(outer):
            assert waiter.wait(hold, None).answer is Answer.GRANTED
        return outer
    finally:
        is_over(helper)
        waiter.release(hold)
        keeper.release(outer)


def test_an_endless_wait_shows_a_silent_network_to_who_works_around_it(
    new_keeper: NewKeeper, judge: Judge, proxy: Proxy, dbname: str
) -> None:
    """It says nothing by itself, and stands on the session of the locks around it where one body runs."""
    keeper = new_keeper(f"postgresql://postgres@127.0.0.1:{proxy.port}/{dbname}", loss_timeout=LOSS_TIMEOUT)
    ends = threading.Timer(4 * LOSS_TIMEOUT, go_on, [proxy, judge])

    def go_silent() -> None:
        proxy.stall()
        ends.start()

    try:
        with pytest.raises(LockLost):
            wait_for_ever_under_another(keeper, judge, go_silent)
        assert ends.is_alive(), "it was noticed when the network did go on"
    finally:
        ends.cancel()
        go_on(proxy, judge)


@pytest.mark.parametrize("other", ["no fault", "a full server", "a dead host"])
def test_an_endless_wait_that_is_no_silence_costs_no_lock(
    new_keeper: NewKeeper, judge: Judge, proxy: Proxy, postgres: PostgreSQL, dbname: str, way: str, other: str
) -> None:
    """Nor where nobody is let in to look, or the first host of the URL would keep everybody waiting."""
    if way == "owner":
        pytest.skip("a wait of many bodies has a session of its own")
    judge.observer.execute("CREATE ROLE loner LOGIN CONNECTION LIMIT 2")
    hosts = f"127.0.0.1:{postgres.port}"
    if other == "a dead host":
        proxy.stall()
        hosts = f"127.0.0.1:{proxy.port},{hosts}"

    def fill_up_and_give_back() -> None:
        if other == "a full server":
            judge.observer.execute("ALTER ROLE loner CONNECTION LIMIT 0")
        time.sleep(2 * LOSS_TIMEOUT)
        judge.give_back()

    try:
        keeper = new_keeper(f"postgresql://loner@{hosts}/{dbname}", loss_timeout=LOSS_TIMEOUT)
        outer = wait_for_ever_under_another(keeper, judge, fill_up_and_give_back)
        assert outer.status is outer.Status.RELEASED
        keeper.retire()
    finally:
        judge.observer.execute("DROP ROLE loner")


def test_who_was_frozen_while_it_waited_has_lost_nothing(
    judge: Judge, proxy: Proxy, dbname: str, way: str
) -> None:
    """Nobody has seen it meanwhile, since it was itself that did not look."""
    if way == "owner":
        pytest.skip("a wait of many bodies has a session of its own")
    url = f"postgresql://postgres@127.0.0.1:{proxy.port}/{dbname}"

    def wait_under_another() -> None:
        process.serve_one_at_a_time()
        keeper = Keeper(Settings(url, loss_timeout=LOSS_TIMEOUT))
        outer = taken(keeper, OTHER, settings=keeper._settings)
        with keeper.interrupt_for(outer):
            assert keeper.waiter().wait(Hold(ID), None).answer is Answer.GRANTED
        keeper.close()

    judge.take(ID)
    child = forked(wait_under_another)
    wait_until_waiting(judge, 1)
    for _ in range(2):
        os.kill(child, signal.SIGSTOP)
        time.sleep(1.5 * LOSS_TIMEOUT)
        os.kill(child, signal.SIGCONT)
        time.sleep(0.2)
    judge.give_back()
    assert status_of(child) == 0


def test_an_endless_wait_ends_on_a_network_that_falls_silent(
    new_keeper: NewKeeper, judge: Judge, proxy: Proxy, dbname: str
) -> None:
    """Nobody works under it: it is looked for rarely."""
    url = f"postgresql://postgres@127.0.0.1:{proxy.port}/{dbname}"
    keeper = new_keeper(url, loss_timeout=1.0)
    judge.take(ID)
    ends = threading.Timer(12, go_on, [proxy, judge])

    def go_silent() -> None:
        wait_until_waiting(judge, 1)
        time.sleep(4.5)
        assert waiting(judge), "it was given up although it was seen"
        proxy.stall()
        ends.start()

    helper = in_thread(go_silent)
    hold, waiter = Hold(ID), keeper.waiter()
    try:
        assert waiter.wait(hold, None).answer is Answer.UNKNOWN
        is_over(helper)
        assert ends.is_alive(), "it ended when the network did go on"
    finally:
        ends.cancel()
        go_on(proxy, judge)
        waiter.release(hold)


def test_a_bounded_wait_in_a_transaction_ends_on_a_network_that_falls_silent(
    judge: Judge, proxy: Proxy, dbname: str, app: Celery
) -> None:
    """Within the bound for silence after its time."""
    app.conf.update(
        pglock_database_url=f"postgresql://postgres@127.0.0.1:{proxy.port}/{dbname}",
        pglock_loss_timeout=LOSS_TIMEOUT,
    )
    judge.take(ID)
    helper = in_thread(lambda: (wait_until_waiting(judge, 1), proxy.stall()))
    answered = threading.Timer(3 * LOSS_TIMEOUT, go_on, [proxy, judge])
    answered.start()
    try:
        with (
            pytest.raises(LockUnavailable, match="no answer"),
            advisory_lock(ID, 1, scope="transaction", app=app),
        ):
            pass
        is_over(helper)
        assert answered.is_alive(), "it ended when the network did go on"
    finally:
        answered.cancel()
        proxy.resume()
        judge.give_back()


def test_a_fork_beside_a_waiter_costs_it_nothing(dsn: str, judge: Judge, scope: str) -> None:
    """The child has neither its place in the queue nor its connection, and can't end either."""
    judge.take(ID)
    entered = threading.Event()

    def wait() -> None:
        with advisory_lock(ID, 20, scope=scope, database_url=dsn) as lock:
            entered.set()
            assert not lock.lost

    waiter = in_thread(wait)
    (pid,) = wait_until_waiting(judge, 1)

    for _ in range(3):
        assert status_of(forked(gc_and_leave)) == 0
    assert waiting(judge) == [pid]
    judge.give_back()
    is_over(waiter)
    assert entered.is_set()


def gc_and_leave() -> None:
    from celery_pglock.locks.keeper import close_all

    gc.collect()
    close_all()


# What it costs.


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, way: str) -> Iterator[None]:
    if way != "owner":
        pytest.skip("prefork and solo wait on their one session")
    return


@pytest.mark.parametrize("end", ["granted", "time is up", "minimum hold", "interrupted"])
@pytest.mark.usefixtures("threads")
def test_what_a_wait_takes_is_given_back(new_keeper: NewKeeper, judge: Judge, end: str) -> None:
    """Fifty waits: connections, threads and descriptors are what they were."""
    keeper = new_keeper()
    keeper.release(taken(keeper, OTHER))

    def once() -> None:
        if end == "interrupted":
            assert judge.take(ID)
            hold, waiter = Hold(ID), keeper.waiter()
            with interrupted_after(0.06):
                waiter.wait(hold, 20)
            waiter.release(hold)
            eventually(lambda: not waiting(judge), "a zombie waits", within=2)
            judge.give_back()
        elif end == "time is up":
            assert judge.take(ID)
            hold, waiter = Hold(ID), keeper.waiter()
            assert waiter.wait(hold, 0.01).answer is Answer.CONFLICT
            waiter.release(hold)
            judge.give_back()
        else:
            hold, holder = served(keeper, min_hold=0.02 if end == "minimum hold" else 0.0)
            holder.release(hold)

    def sessions() -> bool:
        return len(judge.sessions()) == 1

    once()
    eventually(sessions, "one session", within=2)
    before = len(descriptors()), threading.active_count()
    for _ in range(8 if end == "interrupted" else 50):
        once()
    eventually(lambda: not judge.held(), "a lock is left", within=2)
    eventually(sessions, "one session", within=2)

    def as_before() -> bool:
        return len(descriptors()) <= before[0] and threading.active_count() <= before[1]

    eventually(as_before, f"{before} descriptors and threads", within=2)


@pytest.mark.usefixtures("threads")
def test_others_of_the_process_go_on_beside_a_wait(new_keeper: NewKeeper, judge: Judge) -> None:
    """Only the wait takes a session of its own."""
    keeper = new_keeper()
    judge.take(ID)
    waiters = [in_thread(lambda: served(keeper)) for _ in range(3)]
    wait_until_waiting(judge, 3)
    for _ in range(20):
        keeper.release(taken(keeper, OTHER))
    assert len(judge.sessions()) == 4
    judge.give_back()
    while waiters:
        eventually(lambda: any(waiter.done() for waiter in waiters), "the next")
        done = next(waiter for waiter in waiters if waiter.done())
        waiters.remove(done)
        hold, holder = done.result()
        holder.release(hold)
    eventually(lambda: len(judge.sessions()) == 1, "a session is left", within=2)


def test_a_minimum_hold_ends_while_its_process_waits(new_keeper: NewKeeper, judge: Judge) -> None:
    """Also where the process waits on the one session that has it."""
    keeper = new_keeper()
    judge.take(ID)
    keeper.release(taken(keeper, OTHER, min_hold=0.3))
    assert OTHER in judge.held()
    waiter = in_thread(lambda: served(keeper))
    wait_until_waiting(judge, 1, ID)
    try:
        eventually(lambda: OTHER not in judge.held(), "the minimum hold lasts on", within=2)
    finally:
        judge.give_back()
        hold, holder = is_over(waiter)
        holder.release(hold)


# So many at a time.


def test_no_more_wait_than_the_task_allows(app: Celery, judge: Judge, way: str) -> None:
    """One runs, one waits, and who comes later is skipped."""

    @app.task(base=AdvisoryLockedTask, name="f", shared=False, lock_key=lambda: ID,
              lock_on_conflict="wait", lock_max_waiters=1)  # fmt: skip
    def f():
        return "ran"

    judge.take(ID)
    # Celery makes a task in the first thread that asks, and in the second one as well.
    app.finalize()
    waiter = start_process_or_thread(way, lambda: str(f.delay().result))
    wait_until_waiting(judge, 1, ID)
    for _ in range(3):
        assert is_skipped(f.delay().result)
    assert len(waiting(judge)) == 1
    judge.give_back()
    assert waiter() == "ran"
    assert f.delay().result == "ran"
    assert judge.held() == set()


def test_all_wait_where_the_task_does_not_say(app: Celery, judge: Judge, way: str) -> None:
    """The control: without `lock_max_waiters` the second one waits too."""

    @app.task(base=AdvisoryLockedTask, name="f", shared=False, lock_key=lambda: ID,
              lock_on_conflict="wait")  # fmt: skip
    def f():
        return "ran"

    judge.take(ID)
    # Celery makes a task in the first thread that asks, and in the second one as well.
    app.finalize()
    waiters = [start_process_or_thread(way, lambda: str(f.delay().result)) for _ in "ab"]
    wait_until_waiting(judge, 2, ID)
    judge.give_back()
    assert [waiter() for waiter in waiters] == ["ran", "ran"]


def start_process_or_thread(way: str, function: Callable[[], str]) -> Callable[[], str]:
    """Run a function beside us, in a process that has one body at a time or in a thread of this one."""
    if way == "owner":
        return in_thread(function).result
    readable, writable = os.pipe()
    child = forked(lambda: os.write(writable, function().encode()))
    os.close(writable)

    def result() -> str:
        try:
            assert status_of(child) == 0
            return os.read(readable, 100).decode()
        finally:
            os.close(readable)

    return result


def test_a_place_is_given_back_by_a_wait_that_was_interrupted(app: Celery, judge: Judge, way: str) -> None:
    """The next one may wait."""

    @app.task(base=AdvisoryLockedTask, name="f", shared=False, lock_key=lambda: ID,
              lock_on_conflict="wait", lock_max_waiters=1, lock_max_wait=0.5)  # fmt: skip
    def f(): ...

    judge.take(ID)
    for _ in range(2):
        with interrupted_after(0.2):
            f.apply(throw=True)
        eventually(lambda: judge.held() == {ID}, f"a place is left: {judge.held()}", within=2)
    assert isinstance(f.apply().result, LockNotAcquired)
    judge.give_back()


def test_a_place_is_given_back_where_the_interrupt_meets_its_release(
    app: Celery, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a soft time limit of just as many seconds as the task may wait."""
    release, interrupts = Keeper.release, iter([Stopped()])

    def release_late(self: Keeper, hold: Hold, **how: Any) -> None:
        if hold.id != ID and hold.status is hold.Status.HELD:
            for stopped in interrupts:
                raise stopped
        release(self, hold, **how)

    @app.task(base=AdvisoryLockedTask, name="f", shared=False, lock_key=lambda: ID,
              lock_on_conflict="wait", lock_max_waiters=1, lock_max_wait=0.1)  # fmt: skip
    def f(): ...

    judge.take(ID)
    monkeypatch.setattr(Keeper, "release", release_late)
    with pytest.raises(Stopped):
        f.apply(throw=True)
    assert next(interrupts, None) is None
    eventually(lambda: judge.held() == {ID}, f"a place is left: {judge.held()}", within=2)
    judge.give_back()


def test_what_was_waited_for_is_given_back_with_the_result_at_last(
    app: Celery, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where interrupts kept each release before from its work."""

    @app.task(base=AdvisoryLockedTask, name="f", shared=False, lock_key=lambda: ID,
              lock_on_conflict="wait")  # fmt: skip
    def f() -> None:
        assert judge.held() >= {ID}

    def stop(*_: object, **__: object) -> None:
        raise Stopped

    def deliver() -> None:
        f.push_request(id="1", called_directly=False, is_eager=False, delivery_info={})
        try:
            with monkeypatch.context() as patch:
                patch.setattr(Execution, "_end", stop)
                with pytest.raises(Stopped):
                    f()
            assert ID in judge.held()
        finally:
            settle("1")
            f.pop_request()

    judge.take(ID)
    future = in_thread(deliver)
    wait_until_waiting(judge, 1, ID)
    judge.give_back()
    future.result(timeout=20)
    eventually(lambda: not judge.held(), f"it is left: {judge.held()}", within=2)


def test_a_keeper_waits_under_the_settings_of_its_process(app: Celery, judge: Judge) -> None:
    """The session of a waiter says whose it is, like any other."""
    keeper = keeper_for(settings_of(app))
    judge.take(ID)
    waiter = in_thread(lambda: served(keeper))
    (pid,) = wait_until_waiting(judge, 1)
    assert pid in judge.sessions()
    judge.give_back()
    hold, holder = is_over(waiter)
    holder.release(hold)
