"""A network that falls silent: the old body has stopped before the server gives its name to another.

Real workers hold names through links between network namespaces that are cut: in both directions or in one,
by a wrong hardware address or by dropped packets. Nobody hears of the cut. The judge sits beside the server
and asks it all the while who holds what; the bodies write down that they live into a file that no cut
touches, and messages go through a Unix socket.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from celery_pglock import LockLost
from faults.durable import DurableRedis
from faults.fleet import Fleet
from faults.judge import holders
from faults.netns import CUTS, FarPostgreSQL, Link, Namespace, links
from localservers import PostgreSQL

#: Seconds. The client counts a silence as a loss before the server does.
LOSS_TIMEOUT = 6.0

#: One worker for each link.
POOLS = ("prefork", "threads", "gevent", "solo", "prefork", "threads", "gevent", "solo", "prefork", "gevent")
PARTITIONS = 30


class Site:
    """A server behind ten links, and a fleet whose workers sit at their far ends."""

    def __init__(
        self, server: PostgreSQL, namespace: Namespace, cables: list[Link], redis: DurableRedis, folder: Path
    ) -> None:
        self.server, self.namespace, self.links = server, namespace, cables
        self.fleet = Fleet(folder, redis.socket_url(0), redis.socket_url(1), server.socket_url())
        self.fleet.conf["pglock_loss_timeout"] = LOSS_TIMEOUT
        self.observer = psycopg.connect(server.socket_url(), autocommit=True)

    def start_worker(self, number: int, pool: str, **conf: object) -> str:
        """Start a worker at the end of a link, and return the queue that it serves."""
        link, queue = self.links[number], f"link{number}"
        environment = {"FLEET_NETNS": str(link.client.pid)}
        url = self.server.url(host=link.server_address)
        self.fleet.worker(pool, 2, "-Q", queue, app="faults.bodies", env=environment, ready=False,
                          pglock_database_url=url, **conf)  # fmt: skip
        return queue

    def wait_ready(self) -> None:
        for worker in self.fleet.workers:
            worker.wait_ready(60)

    def send(self, number: int, task: str, name: str, how: str = "steps") -> object:
        return self.fleet.signature(task, name, how).apply_async(queue=f"link{number}")

    def held(self, names: list[str]) -> set[str]:
        """Which of the names somebody holds."""
        return {name for name in names if holders(self.observer, name)}

    def close(self) -> None:
        self.fleet.close()
        self.observer.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with (
        links(len(POOLS)) as (namespace, cables),
        FarPostgreSQL(namespace) as server,
        DurableRedis() as redis,
    ):
        made = Site(server, namespace, cables, redis, tmp_path)
        try:
            yield made
        finally:
            made.close()


@pytest.mark.timeout(240)
def test_body_has_stopped_before_its_name_is_free(site: Site) -> None:
    """In thirty partitions; a glitch of one second before each of them costs nothing."""
    for number, pool in enumerate(POOLS):
        site.start_worker(number, pool)
    site.wait_ready()
    hows = itertools.cycle(CUTS)
    table: dict[str, list[tuple[str, float, float]]] = {how: [] for how in CUTS}
    for round_ in range(PARTITIONS // len(POOLS)):
        names = {f"{round_}-{number}": number for number in range(len(POOLS))}
        # One body of each round goes on although its lock is lost: the judge must see it overstay.
        control = f"{round_}-0"
        results = {
            name: site.send(number, "lost_continue" if name == control else "lost_abort", name)
            for name, number in names.items()
        }
        for name in names:
            site.fleet.running(name)
        cuts = {name: next(hows) for name in names}
        next(hows)  # so that each pool meets each kind of cut
        glitch(site, {names[name]: how for name, how in cuts.items()})
        assert site.held(list(names)) == set(names), "a glitch freed a name"
        assert not any(site.fleet.history.runs(name)[0].ended for name in names), "a glitch stopped a body"
        at = time.monotonic()
        for name, how in cuts.items():
            site.links[names[name]].cut(how)
        freed = watch_until_free(site, list(names))
        for name, how in cuts.items():
            (run,) = site.fleet.history.runs(name)
            if name == control:
                assert run.last_seen > freed[name], "the judge did not see a body that overstayed"
                os.kill(run.pid, signal.SIGKILL)
            else:
                assert run.ended is not None, f"{name} runs, and its name is free"
                table[how].append((POOLS[names[name]], run.ended - at, freed[name] - at))
        for name, how in cuts.items():
            site.links[names[name]].heal(how)
        for name, result in results.items():
            if name != control:
                assert isinstance(result.get(timeout=20, propagate=False), LockLost)
    report(table)
    for figures in table.values():
        for pool, noticed, free in figures:
            assert noticed < LOSS_TIMEOUT, f"{pool}: noticed after {noticed:.1f} s"
            assert noticed < free, f"{pool}: stopped after {noticed:.1f} s, and free after {free:.1f} s"
            # Counted from the first of the commands that cut, to the judge's next look.
            assert free < 2 * LOSS_TIMEOUT + 1.0


def glitch(site: Site, cuts: dict[int, str]) -> None:
    """One second of silence."""
    for number, how in cuts.items():
        site.links[number].cut(how)
    time.sleep(1.0)
    for number, how in cuts.items():
        site.links[number].heal(how)
    # Until TCP has sent again what it owes.
    time.sleep(1.0)


def watch_until_free(site: Site, names: list[str]) -> dict[str, float]:
    """Ask the server until all names are free, and tell when each was last seen held."""
    last_held = dict.fromkeys(names, 0.0)
    deadline = time.monotonic() + 4 * LOSS_TIMEOUT
    while held := site.held(names):
        now = time.monotonic()
        last_held.update(dict.fromkeys(held, now))
        assert now < deadline, f"still held: {held}"
        time.sleep(0.01)
    return last_held


def report(table: dict[str, list[tuple[str, float, float]]]) -> None:
    print(f"\npglock_loss_timeout = {LOSS_TIMEOUT:g} s")
    print(f"{'cut':18} {'times':>5}  {'noticed after':24} {'freed after':24} least margin")
    for how, figures in table.items():
        noticed, freed = [row[1] for row in figures], [row[2] for row in figures]
        margin = min(free - stopped for stopped, free in zip(noticed, freed, strict=True))
        print(f"{how:18} {len(figures):5}  {spread(noticed):24} {spread(freed):24} {margin:5.2f} s")


def spread(seconds: list[float]) -> str:
    return f"{min(seconds):.2f}, {statistics.median(seconds):.2f}, {max(seconds):.2f} s"
