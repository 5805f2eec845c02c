"""Fencing tokens grow with the holders of a name, and let what is written to refuse a late writer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import psycopg
import pytest

from celery_pglock import LockError, LockUnavailable, advisory_lock
from celery_pglock.locks.hold import Hold
from celery_pglock.locks.keeper import Keeper, close_all, keeper_for, scribe_for
from celery_pglock.locks.keys import LockId
from celery_pglock.locks.settings import Settings
from celery_pglock.locks.transaction import Transaction
from faults.fleet import wait_for
from faults.judge import holders
from faults.pools import MixedFleet, mixed_fleet
from localservers import PostgreSQL

HOLDERS = 200


@pytest.fixture(scope="module")
def mixed(postgres: PostgreSQL, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MixedFleet]:
    sizes = {"prefork": 2, "threads": 3}
    with mixed_fleet(tmp_path_factory.mktemp("fencing"), postgres, sizes) as mixed:
        yield mixed


def test_token_grows_with_each_holder(mixed: MixedFleet) -> None:
    """Two hundred holders of one name, in processes and threads: tokens in the order of the runs."""
    results = [mixed.send(pool, "fenced", "a") for _ in range(HOLDERS // 2) for pool in mixed.sizes]
    for result in results:
        # A conflict is skipped: the holders are fewer than the messages.
        result.get(timeout=30)
    while len(mixed.fleet.history.events("token")) < HOLDERS:
        for result in [mixed.send(pool, "fenced", "a") for _ in range(20) for pool in mixed.sizes]:
            result.get(timeout=30)
    events = sorted(mixed.fleet.history.events("token"), key=lambda event: event["at"])
    tokens = [event["token"] for event in events]
    assert tokens == sorted(set(tokens))
    assert {len(mixed.workers[pool].children()) > 0 for pool in mixed.sizes} == {True, False}
    assert len({event["pid"] for event in events}) == 3, "not all processes held it"
    print(f"{len(tokens)} holders, tokens {tokens[0]} to {tokens[-1]}")


@pytest.mark.parametrize(("guard", "value"), [("AND token <= %(token)s", "new"), ("", "late")])
def test_late_writer_is_rejected(mixed: MixedFleet, guard: str, value: str) -> None:
    """A body that lost its lock and goes on writes after its successor; without the guard it would win."""
    name, observer = f"ledger {value}", mixed.observer
    observer.execute("CREATE TABLE IF NOT EXISTS ledger (name text, token bigint, value text)")
    observer.execute("INSERT INTO ledger VALUES (%s, 0, 'old')", [name])
    late = mixed.send("prefork", "writes", name, "late", guard, gate=value)
    mixed.fleet.running(name)
    (backend,) = holders(observer, name)
    observer.execute("SELECT pg_terminate_backend(%s)", [backend])
    assert mixed.send("threads", "writes", name, "new", guard).get(timeout=10) == 1
    mixed.fleet.open(value)
    assert late.get(timeout=10) == (0 if guard else 1)
    assert observer.execute("SELECT value FROM ledger WHERE name = %s", [name]).fetchone() == (value,)


@pytest.mark.parametrize("commit", ["on", "off"])
@pytest.mark.parametrize("scope", ["session", "transaction"])
def test_token_grows_over_a_crash_of_the_server(own_postgres: PostgreSQL, scope: str, commit: str) -> None:
    """Where the name is free at once and the old body is late, whether or not its role waits for commits."""
    own_postgres.execute(f"ALTER ROLE postgres SET synchronous_commit = {commit}")
    tokens = []
    for _ in range(4):
        with (
            suppress(LockError, psycopg.Error),
            advisory_lock("a", wait=10, scope=scope, database_url=own_postgres.url()) as lock,
        ):
            tokens.append(lock.fencing_token())
            own_postgres.restart("immediate")
    close_all()
    assert len(tokens) == 4
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("scope", ["session", "transaction"])
def test_token_that_waits_for_a_standby_costs_no_lock(own_postgres: PostgreSQL, scope: str) -> None:
    """It comes in a bounded time or not at all, and nothing that is held hangs on the session that waits."""
    settings = Settings(own_postgres.url(), loss_timeout=3.0)
    keeper = keeper_for(settings)
    holder: Keeper | Transaction = keeper if scope == "session" else Transaction(settings)
    hold, other = Hold(LockId(1)), Hold(LockId(2))
    holder.acquire(hold)
    keeper.acquire(other)

    def comes() -> bool:
        hold._token = None
        try:
            return hold.fencing_token() > 0
        except LockUnavailable:
            return False

    assert comes()
    own_postgres.execute("ALTER SYSTEM SET synchronous_standby_names = 'gone'")
    own_postgres.execute("SELECT pg_reload_conf()")
    # The server's processes read it one after the other.
    wait_for(lambda: not comes(), "a commit that waits")
    assert not hold.lost
    assert not other.lost
    own_postgres.execute("ALTER SYSTEM RESET synchronous_standby_names")
    own_postgres.execute("SELECT pg_reload_conf()")
    wait_for(comes, "a commit that does not")
    holder.release(hold)
    keeper.release(other)
    assert [hold.status, other.status] == [Hold.Status.RELEASED] * 2
    keeper.retire()
    scribe_for(settings, "tokens").retire()
