"""Servers that can't lock are refused when a worker starts; what a server limits is never a conflict."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from celery_pglock import LockLost
from faults.conftest import FleetMaker
from faults.fleet import Fleet, wait_for
from faults.judge import holders, wait_no_locks
from localservers import PgBouncer, PostgreSQL

STUB = "CREATE FUNCTION public.pg_try_advisory_lock({}) RETURNS boolean LANGUAGE sql AS 'SELECT {}'"


def refused(fleet: Fleet, *words: str, app: str = "faults.shop") -> None:
    """A worker says what is wrong and exits before any body runs."""
    fleet.send("skip", "a")
    worker = fleet.worker("prefork", 1, app=app, ready=False)
    assert worker.wait_ended(30) != 0
    text = worker.text()
    assert " ready.\n" not in text
    for word in words:
        assert word in text, text[-2000:]
    assert not fleet.history.runs()


@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_pooler_is_refused(make_fleet: FleetMaker, postgres: PostgreSQL, dbname: str, mode: str) -> None:
    """And what it serves to others stays as it was."""
    with PgBouncer(postgres, mode, default_pool_size=1) as pooler:
        refused(make_fleet(dsn=pooler.url(dbname)), "pooler", "pglock_database_url", "pglock_session_pooler")
        with psycopg.connect(pooler.url(dbname), autocommit=True) as other:
            assert other.execute("SHOW tcp_keepalives_count").fetchone() != ("2",)
            assert locks_in(postgres, dbname) == 0


def test_pooler_in_session_mode_works_only_when_asked_for(
    make_fleet: FleetMaker, postgres: PostgreSQL, dbname: str, observer: psycopg.Connection
) -> None:
    """Its next client finds nothing of the package's settings."""
    with PgBouncer(postgres, "session", default_pool_size=1) as pooler:
        refused(make_fleet(dsn=pooler.url(dbname)), "pglock_session_pooler = True")
        fleet = make_fleet(dsn=pooler.url(dbname), pglock_session_pooler=True)
        fleet.conf["pglock_loss_timeout"] = 7.0
        # One server connection is all there is: the proof of two sessions needs a second.
        pooler.settings["default_pool_size"] = 2
        pooler.stop()
        pooler.start()
        worker = fleet.worker("solo")
        fleet.send("skip", "a", gate="end")
        fleet.running("a")
        assert holders(observer, "a")
        fleet.open("end")
        worker.stop()
        wait_no_locks(observer)
        with psycopg.connect(pooler.url(dbname), autocommit=True) as other:
            assert other.execute("SHOW tcp_user_timeout").fetchone() == ("0",)


def locks_in(server: PostgreSQL, dbname: str) -> int:
    ((count,),) = server.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'", dbname=dbname)
    return int(count)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[PostgreSQL, PostgreSQL]]:
    """A primary and its standby."""
    with PostgreSQL() as primary, primary.standby() as standby:
        yield primary, standby


@pytest.mark.parametrize("app", ["faults.shop", "faults.pooled"], ids=["sessions", "transactions"])
def test_standby_is_refused(make_fleet: FleetMaker, pair: tuple[PostgreSQL, PostgreSQL], app: str) -> None:
    """Its locks are unknown to the primary, and no transaction could write there."""
    refused(make_fleet(dsn=pair[1].url()), "standby", "pglock_database_url", app=app)


def hosts(*servers: PostgreSQL) -> str:
    """One URL with several hosts."""
    return f"postgresql://postgres@{','.join(f'127.0.0.1:{server.port}' for server in servers)}/postgres"


def test_work_goes_on_at_the_new_primary(make_fleet: FleetMaker, pair: tuple[PostgreSQL, PostgreSQL]) -> None:
    """Of several hosts the primary is found; the holder notices its end; locks are taken at its successor."""
    old, new = pair
    fleet = make_fleet(dsn=hosts(new, old))
    fleet.worker("prefork", 2, app="faults.bodies")
    lost = fleet.send("lost_abort", "a")
    fleet.running("a")
    with psycopg.connect(old.url(), autocommit=True) as observer:
        assert holders(observer, "a")
    at = time.monotonic()
    old.stop("immediate")
    assert isinstance(lost.get(timeout=10, propagate=False), LockLost)
    (run,) = fleet.history.runs("a")
    assert run.ended is not None
    print(f"noticed {1000 * (run.ended - at):.0f} ms after the end of the primary")
    assert run.ended - at < 0.5
    # Until there is a primary, nobody runs and nothing is lost: a standby alone is a failover under way.
    waiting = fleet.send("skip", "b", gate="end")
    fleet.wait(lambda: waiting.state == "RETRY", "the answer that there is no primary")
    assert not fleet.history.runs("b")
    new.promote()
    fleet.running("b")
    with psycopg.connect(new.url(), autocommit=True) as observer:
        assert holders(observer, "b")
    fleet.open("end")
    assert waiting.get(timeout=10) == "b"


@pytest.fixture
def role(postgres: PostgreSQL, dbname: str) -> Iterator[str]:
    """A user without privileges."""
    name = f"user_{uuid.uuid4().hex[:12]}"
    postgres.execute(f"CREATE ROLE {name} LOGIN")
    yield name
    postgres.execute(f"DROP OWNED BY {name}", dbname=dbname)
    postgres.execute(f"DROP ROLE {name}")


@pytest.mark.parametrize("answer", ["true", "false", "NULL::boolean"])
def test_server_whose_locks_do_not_exclude_is_refused(
    make_fleet: FleetMaker, postgres: PostgreSQL, dbname: str, role: str, answer: str
) -> None:
    """Its functions answer, and lock nothing: found out by two sessions, not by a product's name."""
    for arguments in ("bigint", "integer, integer"):
        postgres.execute(STUB.format(arguments, answer), dbname=dbname)
    postgres.execute(f"ALTER ROLE {role} SET search_path = public, pg_catalog")
    refused(make_fleet(dsn=postgres.url(dbname, role)), "pglock_database_url")


def test_missing_right_is_refused(
    make_fleet: FleetMaker, postgres: PostgreSQL, dbname: str, role: str
) -> None:
    """The error of the server is told."""
    for arguments in ("bigint", "integer, integer"):
        postgres.execute(
            f"REVOKE EXECUTE ON FUNCTION pg_try_advisory_lock({arguments}) FROM PUBLIC", dbname=dbname
        )
    refused(make_fleet(dsn=postgres.url(dbname, role)), "pg_try_advisory_lock", "pglock_database_url")


def test_right_server_is_not_refused(
    make_fleet: FleetMaker, postgres: PostgreSQL, dbname: str, role: str
) -> None:
    """The control: the same user with its rights and no stubs."""
    fleet = make_fleet(dsn=postgres.url(dbname, role))
    fleet.worker("prefork", 1)
    assert fleet.send("skip", "a").get(timeout=10) == "a"


def test_worker_waits_for_a_server_that_is_down(make_fleet: FleetMaker, own_postgres: PostgreSQL) -> None:
    """It starts, runs nothing, loses nothing, and goes on when the server is there."""
    own_postgres.stop()
    fleet = make_fleet(dsn=own_postgres.url())
    worker = fleet.worker("prefork", 1)
    result = fleet.send("skip", "a")
    fleet.wait(lambda: result.state == "RETRY", "the answer that there is none")
    assert not fleet.history.runs()
    own_postgres.start()
    assert result.get(timeout=20) == "a"
    assert " is held by " not in worker.text()


# Limits.

LIMITS = (
    "statement_timeout",
    "lock_timeout",
    "idle_session_timeout",
    "idle_in_transaction_session_timeout",
    "transaction_timeout",
)


@contextmanager
def limited(server: PostgreSQL, role: str, limit: str) -> Iterator[None]:
    """Give a role all limits on time that this release has."""
    known = server.execute("SELECT name FROM pg_settings WHERE name = ANY(%s)", [list(LIMITS)])
    for (name,) in known:
        server.execute(f"ALTER ROLE {role} SET {name} = '{limit}'")
    yield
    server.execute(f"ALTER ROLE {role} RESET ALL")


def test_limits_of_the_role_end_no_holder_and_stay_with_the_body(
    make_fleet: FleetMaker, postgres: PostgreSQL, dbname: str, role: str, observer: psycopg.Connection
) -> None:
    """The lock outlives every timeout of its role, while the body's own connections keep them."""
    with limited(postgres, role, "1s"):
        fleet = make_fleet(dsn=postgres.url(dbname, role))
        fleet.worker("prefork", 1, "-Q", "prefork", app="faults.bodies")
        fleet.worker("threads", 2, "-Q", "threads", app="faults.bodies")
        results = {
            pool: fleet.signature("shows_limits", pool, 3.0).apply_async(queue=pool)
            for pool in ("prefork", "threads")
        }
        for pool in results:
            fleet.running(pool)
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            assert all(holders(observer, pool) for pool in results)
            time.sleep(0.02)
        for result in results.values():
            assert result.get(timeout=10) == ["1s", "1s", "1s"]


def test_full_server_is_no_conflict(
    make_fleet: FleetMaker, postgres: PostgreSQL, dbname: str, role: str
) -> None:
    """53300: tasks wait for a connection, nothing runs without, nobody is said to hold the name."""
    fleet = make_fleet(dsn=postgres.url(dbname, role))
    worker = fleet.worker("threads", 2)
    postgres.execute(f"ALTER ROLE {role} CONNECTION LIMIT 0")
    results = [fleet.send("skip", name) for name in ("a", "b")]
    fleet.wait(lambda: all(result.state == "RETRY" for result in results), "the answer that it is full")
    assert not fleet.history.runs()
    assert " is held by " not in worker.text()
    assert "too many connections" in worker.text()
    postgres.execute(f"ALTER ROLE {role} CONNECTION LIMIT -1")
    assert [result.get(timeout=20) for result in results] == ["a", "b"]
    assert not any("Traceback" in worker.text() for worker in fleet.workers)


def test_full_lock_table_is_no_conflict(make_fleet: FleetMaker) -> None:
    """53200: as with a full server, and a lock that is held already stays."""
    small = {"max_locks_per_transaction": "10", "max_connections": "12", "autovacuum": "off"}
    with PostgreSQL(small) as server:
        fleet = make_fleet(dsn=server.url())
        worker = fleet.worker("threads", 4)
        kept = fleet.send("skip", "kept", gate="end")
        fleet.running("kept")
        with psycopg.connect(server.url(), autocommit=True) as hog:
            wait_for(lambda: not takes_one_more(hog), "a full lock table", 30)
            result = fleet.send("skip", "a")
            fleet.wait(lambda: result.state == "RETRY", "the answer that it is full")
            assert not fleet.history.runs("a")
            assert " is held by " not in worker.text()
            assert "out of shared memory" in worker.text()
        assert result.get(timeout=20) == "a"
        fleet.open("end")
        assert kept.get(timeout=10) == "kept"


def takes_one_more(hog: psycopg.Connection) -> bool:
    """Whether there is room for another lock. Hundreds are taken at a time."""
    try:
        hog.execute("SELECT pg_advisory_lock((random() * 1e15)::bigint) FROM generate_series(1, 20)")
    except psycopg.errors.OutOfMemory:
        return False
    return True
