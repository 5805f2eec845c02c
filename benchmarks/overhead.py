"""A locked task minus the bare one, against what it could be built from, and what others pay."""

from __future__ import annotations

import itertools

import psycopg
from celery_once.backends.redis import Redis as OnceBackend

from celery_pglock.locks.hold import Hold
from celery_pglock.locks.keeper import Keeper, keeper_for
from celery_pglock.locks.keys import LockId
from celery_pglock.locks.process import serve_one_at_a_time
from celery_pglock.locks.settings import Settings
from localservers import PostgreSQL, Redis

from .execution import app_as_in_a_worker, bare, traced
from .measure import Contender, Cost, Ratio, Report, pin_to_one_core, race


def executions() -> Report:
    """The price of one lock."""
    pin_to_one_core()
    serve_one_at_a_time()
    with PostgreSQL() as postgres, Redis() as redis, connected(postgres) as kept:
        app = app_as_in_a_worker(postgres.url())
        run_bare, run_locked = bare(app.tasks["bare"]), traced(app.tasks["locked"])
        tenants = itertools.cycle(range(1000))
        run_locked(next(tenants))
        once = OnceBackend({"url": redis.url()})

        def ask_twice() -> None:
            kept.execute("SELECT 1")
            kept.execute("SELECT 1")

        run_asking = bare(app.task(ask_twice, name="asking"))

        def lock_on_redis() -> None:
            once.raise_or_lock("tenant:42", timeout=3600)
            once.clear_lock("tenant:42")

        run_once = bare(app.task(lock_on_redis, name="once"))

        def lock_on_a_connection_of_its_own() -> None:
            with connected(postgres) as connection:
                connection.execute("SELECT pg_try_advisory_lock(42)")
                connection.execute("SELECT pg_advisory_unlock(42)")

        costs = race(
            {
                "bare task": Contender(lambda: run_bare(next(tenants))),
                "locked task": Contender(lambda: run_locked(next(tenants)), session_of(postgres)),
                "task that asks twice": Contender(run_asking, kept.info.backend_pid),
                "SELECT 1, twice": Contender(ask_twice, kept.info.backend_pid),
                "celery-once, lock and clear": Contender(lock_on_redis, redis.pid),
                "task that locks by celery-once": Contender(run_once, redis.pid),
                "a connection each": Contender(lock_on_a_connection_of_its_own, calls=20, rest=0.2),
            }
        )
    return judged(costs["locked task"] - costs["bare task"], costs)


def judged(lock: Cost, costs: dict[str, Cost]) -> Report:
    asked, connection = costs["SELECT 1, twice"], costs["a connection each"]
    # Whoever waits finds its caches cold: Celery's own code, too, is slower behind a question. So what others
    # lock by is measured in a task's body, too.
    within = costs["task that asks twice"] - costs["bare task"]
    once = costs["task that locks by celery-once"] - costs["bare task"]
    alone = costs["celery-once, lock and clear"]
    return Report(
        [
            Ratio("lock / two SELECT 1", lock.wall / asked.wall, 2.0, aim=1.5, cpu=lock.cpu / asked.cpu),
            Ratio("lock / celery-once's on Redis", lock.wall / once.wall, 1.0, cpu=lock.cpu / once.cpu),
            Ratio("a connection each / lock", connection.wall / lock.wall, 25.0, aim=40.0, at_least=True),
        ],
        {**costs, "lock: locked - bare": lock},
        note=f"of two SELECT 1 in a task's body it costs {lock.wall / within.wall:.2f}, of CPU time"
        f" {lock.cpu / within.cpu:.2f}; of celery-once's in a loop {lock.wall / alone.wall:.2f}",
    )


def slots() -> Report:
    """One of N slots, all of them free."""
    pin_to_one_core()
    serve_one_at_a_time()
    with PostgreSQL() as postgres:
        keeper = keeper_for(Settings(postgres.url()))
        take_slot(keeper, 1)
        session = session_of(postgres)
        contenders = {n: Contender(lambda n=n: take_slot(keeper, n), session) for n in (1, 10, 100)}
        one, ten, hundred = race(contenders).values()
    return Report(
        [
            Ratio("lock_limit 10 / 1", ten.wall / one.wall, 1.5, cpu=ten.cpu / one.cpu),
            Ratio("lock_limit 100 / 10", hundred.wall / ten.wall, 1.25, cpu=hundred.cpu / ten.cpu),
        ],
        {"lock_limit 1": one, "lock_limit 10": ten, "lock_limit 100": hundred},
    )


def take_slot(keeper: Keeper, limit: int) -> None:
    hold = Hold(LockId(42), limit=limit)
    keeper.acquire(hold)
    keeper.release(hold)
    if hold.status is not hold.Status.RELEASED:
        raise RuntimeError(f"{hold!r} was not acquired and released")


def connected(postgres: PostgreSQL) -> psycopg.Connection:
    return psycopg.connect(postgres.url(), autocommit=True)


def session_of(postgres: PostgreSQL) -> int:
    """The server's process for the one session of this process."""
    [(pid,)] = postgres.execute("SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'pglock %'")
    return int(pid)
