"""Many threads of one process: what they ask together, and how fast they take turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median

import psycopg

from celery_pglock import AdvisoryLockedTask
from celery_pglock.locks.hold import Hold
from celery_pglock.locks.keeper import keeper_for
from celery_pglock.locks.keys import LockId
from celery_pglock.locks.settings import Settings
from localservers import PostgreSQL
from tests.faults.proxy import Proxy

from .execution import app_as_in_a_worker, traced
from .measure import Ratio, Report

CROWD = 50
ROUNDS = 10

#: Seconds that one waiter's body takes.
BODY = 0.1


def far_away() -> Report:
    """Fifty acquisitions at once, 100 ms away from the server."""
    trips, acquisitions, releases = [], [], []
    with PostgreSQL() as postgres, Proxy(postgres.port) as proxy, ThreadPoolExecutor(CROWD) as threads:
        url = f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres"
        keeper = keeper_for(Settings(url))
        keeper.acquire(Hold(LockId(0)))
        with psycopg.connect(url, autocommit=True) as kept:
            proxy.delay(0.05)
            for number in range(ROUNDS):
                holds = [Hold(LockId(1, CROWD * number + each)) for each in range(CROWD)]
                trips.append(seconds(partial(kept.execute, "SELECT 1")))
                acquisitions.append(seconds(partial(at_once, threads, keeper.acquire, holds)))
                if not all(hold.status is hold.Status.HELD for hold in holds):
                    raise RuntimeError("not all were acquired")
                releases.append(seconds(partial(at_once, threads, keeper.release, holds)))
        proxy.delay(0)
        keeper.retire()
    trip = median(trips)
    return Report(
        [
            Ratio(f"{CROWD} acquisitions / round trip", median(acquisitions) / trip, 2.5, aim=1.5),
            Ratio(f"{CROWD} releases / round trip", median(releases) / trip, 2.5, aim=1.5),
        ],
        note=f"a round trip took {trip * 1000:.0f} ms",
    )


def taking_turns() -> Report:
    """Fifty bodies of 100 ms that wait for one name."""
    with PostgreSQL() as postgres, ThreadPoolExecutor(CROWD) as threads:
        app = app_as_in_a_worker(postgres.url())
        options = {"base": AdvisoryLockedTask, "lock_key": [], "lock_on_conflict": "wait"}
        run = traced(app.task(sleep, **options))
        taken = seconds(partial(at_once, threads, lambda _: run(), range(CROWD)))
    return Report([Ratio(f"drain of {CROWD} waiters / their bodies", taken / (CROWD * BODY), 1.15)])


def sleep() -> None:
    time.sleep(BODY)


def seconds(work: Callable[[], object]) -> float:
    since = time.perf_counter()
    work()
    return time.perf_counter() - since


def at_once(threads: ThreadPoolExecutor, work: Callable[..., object], items: Iterable[object]) -> None:
    """Do the same to each of a crowd, all at the same moment."""
    ready = threading.Barrier(CROWD)

    def start(item: object) -> None:
        ready.wait()
        work(item)

    list(threads.map(start, items))
