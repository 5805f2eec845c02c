"""Fleets of real workers, each with a Redis database and a PostgreSQL database of its own."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from faults.durable import DurableRedis
from faults.fleet import Fleet, flush
from localservers import Redis

#: Redis has sixteen databases: one for messages and one for results, and each pair rests before it is
#: taken again.
_pairs = itertools.cycle(range(8))

FleetMaker = Callable[..., Fleet]


@pytest.fixture
def durable() -> Iterator[DurableRedis]:
    """A broker of one test's own, with a record of where its messages are: ``make_fleet(broker=...)``."""
    with DurableRedis() as server:
        yield server


@pytest.fixture
def make_fleet(redis: Redis, dsn: str, tmp_path: Path) -> Iterator[FleetMaker]:
    """Make fleets with settings of their own: ``make_fleet(pglock_enabled=False)``."""
    fleets: list[Fleet] = []

    def make(**conf: Any) -> Fleet:
        pair = next(_pairs)
        folder = tmp_path / f"fleet{len(fleets) + 1}"
        folder.mkdir()
        broker, backend = redis.url(2 * pair), redis.url(2 * pair + 1)
        flush(broker)
        flush(backend)
        if "broker" in conf:
            # A broker that is not emptied: a queue of this fleet alone.
            conf.setdefault("task_default_queue", f"shop-{uuid.uuid4().hex[:12]}")
        options = {"broker": broker, "backend": backend, "dsn": dsn, **conf}
        fleets.append(Fleet(folder, **options))
        return fleets[-1]

    try:
        yield make
    finally:
        for fleet in fleets:
            fleet.close()


@pytest.fixture
def fleet(make_fleet: FleetMaker) -> Fleet:
    """A fleet without workers yet."""
    return make_fleet()
