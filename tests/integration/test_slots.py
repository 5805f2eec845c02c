"""At most N hold a name at once: threads, processes, whatever their N."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from celery_pglock import LockId, LockNotAcquired, advisory_lock
from celery_pglock.locks import probe
from celery_pglock.locks.hold import Hold
from celery_pglock.locks.keeper import Keeper, close_all
from celery_pglock.locks.requests import Acquire, Answer
from celery_pglock.locks.settings import Settings
from integration.judge import Judge, eventually
from integration.rivals import forked, in_thread, interrupted_after, kill, status_of

ID = LockId(1 << 40)

NewKeeper = Callable[..., Keeper]

pytestmark = [
    pytest.mark.usefixtures("way"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]

EDGES = [
    LockId(0),
    LockId(1),
    LockId(-1),
    LockId(2),
    LockId(2**63 - 1),
    LockId(2**63 - 2),
    LockId(-(2**63)),
    LockId(-(2**63) + 1),
    LockId(1, 2**31 - 1),
    LockId(1, -(2**31)),
    LockId(-(2**31), 0),
    LockId(2**31 - 1, 1),
]


def granted(keeper: Keeper, limit: int, id: LockId = ID, *, shared: bool = False) -> Hold | None:
    hold = Hold(id, limit=limit, shared=shared)
    answer = keeper.acquire(hold).answer
    assert answer in (Answer.GRANTED, Answer.CONFLICT)
    return hold if answer is Answer.GRANTED else None


@pytest.mark.parametrize("sessions", [1, 4])
def test_n_are_granted_and_no_more(new_keeper: NewKeeper, judge: Judge, sessions: int) -> None:
    """In one process, where locks stack, and in several."""
    keepers = [new_keeper() for _ in range(sessions)]
    holds = [(keepers[n % sessions], granted(keepers[n % sessions], 3)) for n in range(8)]
    assert [hold is not None for _, hold in holds] == [True] * 3 + [False] * 5
    assert len(judge.locks()) == 3
    keeper, hold = holds[1]
    keeper.release(hold)
    assert len(judge.locks()) == 2
    again = granted(keepers[-1], 3)
    assert again is not None
    assert granted(keepers[0], 3) is None
    keepers[-1].release(again)
    for keeper, hold in (holds[0], holds[2]):
        keeper.release(hold)
    assert judge.locks() == []


@pytest.mark.parametrize("id", EDGES, ids=repr)
def test_the_slots_of_an_id_at_the_edge_are_different_locks(
    new_keeper: NewKeeper, judge: Judge, id: LockId
) -> None:
    """No number overflows, and the id itself is one of them."""
    first, second = new_keeper(), new_keeper()
    holds = [granted(keeper, 3, id) for keeper in (first, second, first)]
    assert None not in holds
    assert len(judge.held()) == 3
    assert id in judge.held()
    assert {hold.occupied for hold in holds} == judge.held()
    assert granted(second, 3, id) is None
    for hold, keeper in zip(holds, (first, second, first), strict=True):
        keeper.release(hold)
    assert judge.held() == set()


@pytest.mark.parametrize("shared", [False, True])
def test_slots_of_one_id_meet_the_id_beside_it(new_keeper: NewKeeper, judge: Judge, shared: bool) -> None:
    """Ids that are given as they are may lie side by side; in one session locks stack, and must not here."""
    for keeper, other in ((new_keeper(), None), (new_keeper(), new_keeper())):
        hold = granted(keeper, 1, LockId(99), shared=shared)
        slots = [granted(other or keeper, 2, LockId(100)) for _ in range(2)]
        assert [slot is not None for slot in slots] == [True, False]
        assert judge.held() == {LockId(99), LockId(100)}
        keeper.release(hold)
        assert judge.held() == {LockId(100)}
        (other or keeper).release(slots[0])
        assert judge.held() == set()


def test_the_id_beside_it_is_asked_for_in_another_statement(keeper: Keeper, judge: Judge) -> None:
    """Which slot is got shows in the answer only: two questions at once could get one lock twice."""
    first = granted(keeper, 3, LockId(100))
    for asked in (
        [Acquire(Hold(LockId(100), limit=3)), Acquire(Hold(LockId(99)))],
        [Acquire(Hold(LockId(99))), Acquire(Hold(LockId(100), limit=3))],
    ):
        keeper._answer(asked)
        holds = [each.hold for each in asked if each.answer is Answer.GRANTED]
        assert len({hold.occupied for hold in holds}) == len(holds)
        assert judge.held() == {LockId(100), *(hold.occupied for hold in holds)}
        for hold in holds:
            keeper.release(hold)
            assert not hold.lost
    keeper.release(first)
    assert judge.held() == set()


def test_a_change_of_n_never_admits_more_than_the_larger(new_keeper: NewKeeper, judge: Judge) -> None:
    """A rolling deploy from two to three and back, with everything held on the way."""
    old, new = new_keeper(), new_keeper()
    held = [(old, granted(old, 2)), (old, granted(old, 2))]
    assert granted(old, 2) is None
    held.append((new, granted(new, 3)))
    assert held[-1][1] is not None
    assert granted(new, 3) is None
    assert granted(old, 2) is None
    keeper, hold = held.pop(0)
    keeper.release(hold)
    # Two of three places are taken, one of them outside of the old ones' view.
    held.append((old, granted(old, 2)))
    assert held[-1][1] is not None
    assert [granted(old, 2), granted(new, 3)] == [None, None]
    assert len(judge.locks()) == 3
    for keeper, hold in held:
        keeper.release(hold)
    assert judge.locks() == []


def test_a_killed_process_frees_its_slot_at_once(dsn: str, new_keeper: NewKeeper, judge: Judge) -> None:
    """And no other: the next one is granted within a second."""
    keeper = new_keeper()
    mine = granted(keeper, 2)

    def hold() -> None:
        with advisory_lock(ID, limit=2, database_url=dsn):
            time.sleep(60)

    child = forked(hold)
    eventually(lambda: len(judge.locks()) == 2, "the child's slot")
    assert granted(keeper, 2) is None
    kill(child)
    hold_again = eventually(lambda: granted(keeper, 2), "the slot of the killed one", within=1)
    assert len(judge.locks()) == 2
    keeper.release(mine)
    keeper.release(hold_again)


def test_an_interrupted_block_leaves_no_slot(dsn: str, judge: Judge) -> None:
    """In the question, in the block and in the release."""
    for number in range(10):
        # Not while a session opens: what is interrupted inside of psycopg's connect() complains when it goes.
        with advisory_lock(ID, limit=2, database_url=dsn):
            pass
        with interrupted_after(0.02 + number * 0.001):
            while True:
                with advisory_lock(ID, limit=2, database_url=dsn):
                    pass
        eventually(lambda: not judge.locks(), f"a slot is left: {judge.locks()}", within=2)


def test_a_block_waits_for_a_slot(dsn: str, new_keeper: NewKeeper, judge: Judge) -> None:
    """Where PostgreSQL has no queue it asks again, for as long as it may."""
    keeper = new_keeper()
    holds = [granted(keeper, 2), granted(keeper, 2)]
    since = time.monotonic()
    with (
        pytest.raises(LockNotAcquired, match="held by another"),
        advisory_lock(ID, 0.3, limit=2, database_url=dsn),
    ):
        pass
    assert 0.3 <= time.monotonic() - since < 1.5

    def wait() -> float:
        with advisory_lock(ID, 20, limit=2, database_url=dsn):
            return time.monotonic()

    future = in_thread(wait)
    time.sleep(0.2)
    released_at = time.monotonic()
    keeper.release(holds[0])
    assert future.result(timeout=20) - released_at < 1
    keeper.release(holds[1])
    close_all()


# Never more than N.


class Crowd:
    """Counts, over all processes, how many are inside at once."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.inside = context.Value("i", 0)
        self.most = context.Value("i", 0)
        self.entries = context.Value("i", 0)

    @contextmanager
    def one_more(self) -> Iterator[None]:
        with self.inside.get_lock():
            self.inside.value += 1
            self.entries.value += 1
            self.most.value = max(self.most.value, self.inside.value)
        try:
            yield
        finally:
            with self.inside.get_lock():
                self.inside.value -= 1


def press(crowd: Crowd, keeper: Keeper | None, limit: int, entries: int) -> None:
    """Go in and out again and again, as often as one is let in."""
    while crowd.entries.value < entries:
        if keeper is None:
            with crowd.one_more():
                time.sleep(0.0002)
            continue
        hold = granted(keeper, limit)
        if hold is None:
            time.sleep(0.0005)
            continue
        with crowd.one_more():
            time.sleep(0.0002)
        keeper.release(hold)


def press_in_threads(crowd: Crowd, keeper: Keeper | None, limit: int, entries: int, threads: int) -> None:
    futures = [in_thread(lambda: press(crowd, keeper, limit, entries)) for _ in range(threads)]
    for future in futures:
        future.result(timeout=100)


@pytest.mark.timeout(110)
def test_n_are_never_exceeded_by_threads_and_processes(dsn: str, judge: Judge, way: str) -> None:
    """Five thousand acquisitions of three slots, half of them by four threads in each of four processes."""
    crowd = Crowd()
    threads = 4 if way == "owner" else 1

    def process() -> None:
        probe._proven.clear()
        press_in_threads(crowd, Keeper(Settings(dsn)), 3, 2500, threads)

    since = time.monotonic()
    children = [forked(process) for _ in range(4)]
    assert [status_of(child) for child in children] == [0, 0, 0, 0]
    print(
        f"{crowd.entries.value} acquisitions in {time.monotonic() - since:.1f} s, {crowd.most.value} at once"
    )
    assert crowd.entries.value >= 2500
    assert crowd.most.value == 3
    eventually(lambda: not judge.locks(), "a slot is left", within=2)


def test_n_are_exceeded_without_slots(way: str) -> None:
    """The control: the same crowd, let in by nobody."""
    crowd = Crowd()
    children = [forked(lambda: press_in_threads(crowd, None, 3, 2500, 4)) for _ in range(4)]
    assert [status_of(child) for child in children] == [0, 0, 0, 0]
    assert crowd.most.value > 3


def test_each_execution_in_a_batch_has_a_slot_of_its_own(keeper: Keeper, judge: Judge, way: str) -> None:
    """Threads that ask at the same moment, whose questions share a statement."""
    barrier = threading.Barrier(12)

    def ask(n: int) -> Hold | None:
        barrier.wait()
        return granted(keeper, 4)

    futures = [in_thread(lambda n=n: ask(n)) for n in range(12)]
    holds = [hold for future in futures if (hold := future.result(timeout=20))]
    assert len(holds) == 4
    assert {hold.slot for hold in holds} == {0, 1, 2, 3}
    assert judge.held() == {hold.occupied for hold in holds}
    for hold in holds:
        keeper.release(hold)


def test_of_free_slots_the_first_is_taken_and_no_other_tried(keeper: Keeper, judge: Judge, way: str) -> None:
    """One that was tried would be held. What that costs is the benchmarks' to tell."""
    hold = granted(keeper, 100)
    assert judge.held() == {ID}
    keeper.release(hold)
