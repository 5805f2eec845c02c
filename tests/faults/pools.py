"""One fleet with a worker of each pool, for all tests of a module: each worker has a queue of its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psycopg
from celery.result import AsyncResult

from localservers import PostgreSQL

from .durable import DurableRedis
from .fleet import Fleet, Worker

POOLS = {"prefork": 4, "gevent": 4, "threads": 4, "solo": 1}


class MixedFleet:
    """Workers by the name of their pool, and a session that observes."""

    def __init__(
        self, fleet: Fleet, server: PostgreSQL, dbname: str, sizes: Mapping[str, int], app: str
    ) -> None:
        self.fleet, self.sizes = fleet, sizes
        self.observer = psycopg.connect(server.url(dbname), autocommit=True, application_name="observer")
        self.workers: dict[str, Worker] = {
            pool: fleet.worker(pool, size, "-Q", pool, app=app, ready=False) for pool, size in sizes.items()
        }
        for worker in self.workers.values():
            worker.wait_ready(60)

    def send(self, pool: str, task: str, *args: object, **kwargs: object) -> AsyncResult[object]:
        return self.fleet.signature(task, *args, **kwargs).apply_async(queue=pool)


@contextmanager
def mixed_fleet(
    folder: Path,
    server: PostgreSQL,
    sizes: Mapping[str, int] = POOLS,
    *,
    port: int | None = None,
    app: str = "faults.bodies",
    **conf: object,
) -> Iterator[MixedFleet]:
    """Start one; ``port`` is that of whatever stands before the server."""
    dbname = f"test_{uuid.uuid4().hex[:12]}"
    server.execute(f"CREATE DATABASE {dbname}")
    url = server.url(dbname) if port is None else f"postgresql://postgres@127.0.0.1:{port}/{dbname}"
    with DurableRedis() as redis:
        fleet = Fleet(folder, redis.url(0), redis.url(1), url, **conf)
        mixed = None
        try:
            mixed = MixedFleet(fleet, server, dbname, sizes, app)
            yield mixed
        finally:
            fleet.close()
            if mixed is not None:
                mixed.observer.close()
            if server.running:
                server.execute(f"DROP DATABASE {dbname} WITH (FORCE)")
