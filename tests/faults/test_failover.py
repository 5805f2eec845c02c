"""The URL leads to another server, while the one before goes on to answer: a failover, a move of the data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from celery import Celery

from celery_pglock import Leader, LockLost
from celery_pglock.locks.hold import Hold
from celery_pglock.locks.keeper import Keeper
from celery_pglock.locks.keys import LockId
from celery_pglock.locks.line import close_warm
from celery_pglock.locks.requests import Answer
from celery_pglock.locks.settings import Settings
from celery_pglock.locks.transaction import Transaction
from faults.fleet import wait_for
from faults.judge import holders
from faults.pools import mixed_fleet
from faults.proxy import Proxy
from localservers import PostgreSQL

POOLS = {"prefork": 2, "threads": 2, "gevent": 10, "solo": 1}

#: The least that the package accepts, in seconds.
FAILOVER_TIMEOUT = 3.0

#: What a busy machine may add.
ROOM = 1.0


@pytest.fixture
def old() -> Iterator[PostgreSQL]:
    with PostgreSQL() as server:
        yield server


class CountingProxy(Proxy):
    """Counts the connections that were made through it."""

    accepted = 0

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        await super()._accept(reader, writer)


@pytest.fixture
def proxy(old: PostgreSQL) -> Iterator[Proxy]:
    """Where the URL leads: whoever is connected already stays where he is."""
    with Proxy(old.port) as proxy:
        yield proxy


def test_holder_learns_that_its_server_was_replaced(
    old: PostgreSQL, proxy: Proxy, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In every pool the body is stopped although its session lives, and what follows locks at the new one."""
    folder = tmp_path_factory.mktemp("failover")
    with mixed_fleet(
        folder, old, POOLS, port=proxy.port, pglock_failover_timeout=FAILOVER_TIMEOUT
    ) as mixed, old.standby() as new:  # fmt: skip
        results = {pool: mixed.send(pool, "lost_abort", pool) for pool in POOLS}
        for pool in POOLS:
            mixed.fleet.running(pool)
        new.promote()
        at = time.monotonic()
        proxy.target = new.port
        for pool, result in results.items():
            error = result.get(timeout=10, propagate=False)
            assert isinstance(error, LockLost)
            assert "another server" in str(error)
            (run,) = mixed.fleet.history.runs(pool)
            assert run.ended is not None
            print(f"{pool:8} noticed after {run.ended - at:.2f} s of {FAILOVER_TIMEOUT:g} s")
            assert run.ended - at < FAILOVER_TIMEOUT + ROOM
        for pool in POOLS:
            later = mixed.send(pool, "skip", f"{pool} later", gate="end")
            mixed.fleet.running(f"{pool} later")
            with psycopg.connect(new.url(mixed.observer.info.dbname)) as observer:
                assert holders(observer, f"{pool} later")
            results[pool] = later
        mixed.fleet.open("end")
        for pool, result in results.items():
            assert result.get(timeout=10) == f"{pool} later"


@pytest.fixture
def new_keeper() -> Iterator[list[Keeper]]:
    keepers: list[Keeper] = []
    yield keepers
    for keeper in keepers:
        keeper.retire()


def settings_for(proxy: Proxy, timeout: float | None = FAILOVER_TIMEOUT) -> Settings:
    return Settings(f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres", failover_timeout=timeout)


def keeper_at(proxy: Proxy, keepers: list[Keeper], timeout: float | None = FAILOVER_TIMEOUT) -> Keeper:
    keepers.append(Keeper(settings_for(proxy, timeout)))
    return keepers[-1]


def advisory_locks(server: PostgreSQL) -> int:
    ((count,),) = server.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
    return int(count)


@contextmanager
def held(keeper: Keeper, id: int = 1) -> Iterator[Hold]:
    hold = Hold(LockId(id))
    assert keeper.acquire(hold).answer is Answer.GRANTED
    try:
        yield hold
    finally:
        keeper.release(hold)


def test_two_hold_a_name_on_two_servers_until_the_first_is_told(
    old: PostgreSQL, proxy: Proxy, new_keeper: list[Keeper]
) -> None:
    """The control is one that does not look: it holds for ever what another may have elsewhere."""
    watches, does_not = keeper_at(proxy, new_keeper), keeper_at(proxy, new_keeper, None)
    with held(watches) as hold, held(does_not, 2) as other, PostgreSQL() as new:
        proxy.target = new.port
        at = time.monotonic()
        with held(keeper_at(proxy, new_keeper)) as successor:
            assert not hold.lost
            wait_for(lambda: hold.lost, "the loss", FAILOVER_TIMEOUT + ROOM)
            print(f"noticed after {time.monotonic() - at:.2f} s")
            time.sleep(FAILOVER_TIMEOUT)
            assert old.execute("SELECT 1")
            assert not other.lost
            assert not successor.lost


def test_session_that_holds_nothing_moves_too(
    old: PostgreSQL, proxy: Proxy, new_keeper: list[Keeper]
) -> None:
    """Short tasks would lock at the old server for as long as their worker lives."""
    keeper = keeper_at(proxy, new_keeper)
    with PostgreSQL() as new:
        with held(keeper):
            pass
        proxy.target = new.port

        def locks_there() -> bool:
            hold = Hold(LockId(1))
            # The one question that meets the end of the session is not answered.
            if keeper.acquire(hold).answer is not Answer.GRANTED:
                return False
            found = advisory_locks(new)
            keeper.release(hold)
            return found == 1

        assert not locks_there()
        wait_for(locks_there, "a lock at the new server", FAILOVER_TIMEOUT + ROOM)


def test_session_that_lay_idle_locks_at_the_new_server_at_once(
    old: PostgreSQL, proxy: Proxy, new_keeper: list[Keeper]
) -> None:
    """Nobody looks for one that nobody uses, signs of life or not. The control is one that never looks."""
    keepers = [Keeper(replace(settings_for(proxy), freeze_timeout=freeze)) for freeze in (None, 3.0)]
    keepers.append(Keeper(settings_for(proxy, None)))
    new_keeper += keepers
    with PostgreSQL() as new:
        for keeper in keepers:
            with held(keeper):
                pass
        # The first look, for what was held just now, and then as long as nobody looks.
        time.sleep(FAILOVER_TIMEOUT + ROOM)
        proxy.target = new.port
        for keeper, locks in zip(keepers, [(0, 1), (0, 1), (1, 0)], strict=True):
            with held(keeper):
                assert (advisory_locks(old), advisory_locks(new)) == locks


def test_who_waits_at_the_old_server_waits_at_the_new_one(proxy: Proxy, new_keeper: list[Keeper]) -> None:
    """Else it would get the lock where nobody asks for it any more, however late."""
    keeper = Keeper(settings_for(proxy), shared=False)
    with PostgreSQL() as new, held(keeper_at(proxy, new_keeper, None)), ThreadPoolExecutor() as pool:
        waits = pool.submit(keeper.wait, Hold(LockId(1)), 5 * FAILOVER_TIMEOUT)
        # Past the first look, after which its question is older than any look.
        time.sleep(FAILOVER_TIMEOUT + ROOM)
        assert not waits.done()
        proxy.target = new.port
        at = time.monotonic()
        asked = waits.result()
        print(f"granted after {time.monotonic() - at:.2f} s")
        assert asked.answer is Answer.GRANTED
        assert advisory_locks(new) == 1
        keeper.release(asked.hold)


def test_quiet_holder_learns_it_too(old: PostgreSQL, tmp_path: Path, new_keeper: list[Keeper]) -> None:
    """Over a local socket nobody asks for a sign of life: a pooler may stand behind it."""
    socket = tmp_path / ".s.PGSQL.1"
    keeper = Keeper(
        Settings(f"user=postgres dbname=postgres host={tmp_path} port=1", failover_timeout=FAILOVER_TIMEOUT)
    )
    new_keeper.append(keeper)
    with PostgreSQL() as new:
        socket.symlink_to(old.folder / f".s.PGSQL.{old.port}")
        with held(keeper) as hold:
            # Past the first look, which sees that it was used.
            time.sleep(FAILOVER_TIMEOUT + ROOM)
            assert not hold.lost
            socket.unlink()
            socket.symlink_to(new.folder / f".s.PGSQL.{new.port}")
            wait_for(lambda: hold.lost, "the loss", FAILOVER_TIMEOUT + ROOM)


def test_one_look_serves_all_sessions_of_a_process(old: PostgreSQL, new_keeper: list[Keeper]) -> None:
    """On threads and green pools each that waits has one of its own."""
    with CountingProxy(old.port) as proxy, PostgreSQL() as new, ExitStack() as stack:
        keepers = [keeper_at(proxy, new_keeper) for _ in range(10)]
        holds = [stack.enter_context(held(keeper, id)) for id, keeper in enumerate(keepers)]
        before = proxy.accepted
        time.sleep(2 * FAILOVER_TIMEOUT)
        assert 1 <= proxy.accepted - before <= 5
        proxy.target = new.port
        wait_for(lambda: all(hold.lost for hold in holds), "the losses", FAILOVER_TIMEOUT + ROOM)


def test_leaders_move_together(proxy: Proxy) -> None:
    """Who followed at the old server would lead there when its leader has moved."""
    app = Celery("shop", set_as_current=False)
    app.conf.update(
        pglock_database_url=settings_for(proxy).database_url, pglock_failover_timeout=FAILOVER_TIMEOUT
    )
    with PostgreSQL() as new, ExitStack() as stack:
        leaders = [stack.enter_context(Leader("loop", poll=0.1, app=app)) for _ in range(3)]

        def lead() -> int:
            return sum(leader.is_leader for leader in leaders)

        wait_for(lambda: lead() == 1, "a leader")
        proxy.target = new.port
        wait_for(lambda: advisory_locks(new) == 1, "a leader at the new server", FAILOVER_TIMEOUT + ROOM)
        time.sleep(FAILOVER_TIMEOUT)
        for _ in range(50):
            assert (lead(), advisory_locks(new)) == (1, 1)
            time.sleep(0.05)


@pytest.mark.parametrize("found", ["a standby", "nobody"])
def test_what_tells_nothing_costs_nothing(
    old: PostgreSQL, proxy: Proxy, new_keeper: list[Keeper], found: str
) -> None:
    """In the middle of a failover the URL may lead to a standby, or nowhere."""
    with held(keeper_at(proxy, new_keeper)) as hold, old.standby() as standby:
        if found == "nobody":
            standby.stop()
        proxy.target = standby.port
        time.sleep(2 * FAILOVER_TIMEOUT)
        assert not hold.lost


def test_server_that_tells_the_time_otherwise_is_the_same(
    old: PostgreSQL, proxy: Proxy, new_keeper: list[Keeper]
) -> None:
    """A new connection has the settings of today, and the session those of its start."""
    with held(keeper_at(proxy, new_keeper)) as hold:
        old.execute("ALTER DATABASE postgres SET timezone = 'Asia/Tokyo'")
        old.execute("ALTER DATABASE postgres SET datestyle = 'German'")
        time.sleep(FAILOVER_TIMEOUT)
        assert not hold.lost


def test_kept_connection_of_transactions_moves_too(old: PostgreSQL, proxy: Proxy) -> None:
    """One that is kept warm is not used for ever."""
    settings = settings_for(proxy)

    def server_of_a_lock() -> object:
        scope, hold = Transaction(settings), Hold(LockId(1))
        scope.acquire(hold)
        try:
            return hold.connection.execute("SELECT pg_postmaster_start_time()").fetchone()
        finally:
            scope.release(hold)

    with PostgreSQL() as new:
        before = server_of_a_lock()
        proxy.target = new.port
        assert server_of_a_lock() == before, "it is not kept at all"
        wait_for(lambda: server_of_a_lock() != before, "a lock at the new server", FAILOVER_TIMEOUT + ROOM)
    close_warm()
