"""What kind of server it is, what it lacks and what it limits: asked for and never taken for a conflict."""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import psycopg
import pytest

from celery_pglock import LockError, LockId, LockSetupError, LockUnavailable
from celery_pglock.locks.hold import Hold
from celery_pglock.locks.keeper import Keeper
from celery_pglock.locks.probe import probe
from celery_pglock.locks.session import Acquire, Answer, Release, Session
from celery_pglock.locks.settings import Settings
from celery_pglock.locks.transaction import Transaction
from integration.judge import Judge, eventually
from localservers import PgBouncer, PostgreSQL

ID, OTHER = LockId(1), LockId(2)

NewKeeper = Callable[..., Keeper]


def refusal(keeper: Keeper, id: LockId = ID) -> LockError:
    """The error of a question that nobody could answer."""
    asked = keeper.acquire(Hold(id))
    assert asked.answer is Answer.UNKNOWN
    assert asked.error is not None
    return asked.error


def acquired(keeper: Keeper, id: LockId = ID) -> Hold:
    hold = Hold(id)
    assert keeper.acquire(hold).answer is Answer.GRANTED
    return hold


@pytest.fixture(scope="module")
def small_server() -> Iterator[PostgreSQL]:
    """A server of this module alone, whose lock table is full after about two thousand names."""
    with PostgreSQL({"max_locks_per_transaction": "10", "max_connections": "60"}) as server:
        yield server


@pytest.fixture
def role(postgres: PostgreSQL, observer: psycopg.Connection) -> Iterator[str]:
    """A plain user."""
    name = f"role_{uuid.uuid4().hex[:12]}"
    postgres.execute(f"CREATE ROLE {name} LOGIN")
    yield name
    observer.execute("DROP SCHEMA IF EXISTS stubs CASCADE")
    postgres.execute(f"DROP ROLE {name}")


@pytest.fixture
def as_role(role: str, new_keeper: NewKeeper, postgres: PostgreSQL, dbname: str) -> NewKeeper:
    """Make a keeper that logs in as the plain user."""
    return lambda **settings: new_keeper(postgres.url(dbname, user=role), **settings)


# What a role limits.


def test_limits_of_a_role_do_not_end_a_quiet_holder(
    as_role: NewKeeper, judge: Judge, postgres: PostgreSQL, role: str, dbname: str
) -> None:
    """`idle_session_timeout` ends a session of the same role beside it (the control), and not ours."""
    postgres.execute(f"ALTER ROLE {role} SET idle_session_timeout = '200ms'")
    postgres.execute(f"ALTER ROLE {role} SET idle_in_transaction_session_timeout = '200ms'")
    keeper = as_role()
    hold = acquired(keeper)
    pid = judge.holder(ID)
    with closing(psycopg.connect(postgres.url(dbname, user=role))) as control:
        eventually(lambda: not is_alive(judge, control.info.backend_pid), "the control was not ended")
    assert judge.holder(ID) == pid
    keeper.release(hold)
    assert not hold.lost


def is_alive(judge: Judge, pid: int) -> bool:
    return bool(judge.observer.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [pid]).fetchall())


@pytest.mark.parametrize("limit", ["statement_timeout", "lock_timeout"])
def test_limits_of_a_role_do_not_end_a_statement(
    as_role: NewKeeper, postgres: PostgreSQL, role: str, limit: str
) -> None:
    """A slow server is no reason to fail."""
    postgres.execute(f"ALTER ROLE {role} SET {limit} = '100ms'")
    keeper = as_role()
    keeper.release(acquired(keeper))
    (row,) = keeper._session._query(f"SELECT current_setting('{limit}') FROM pg_sleep(0.2)")
    assert row == [b"0"]


def test_too_many_connections_are_no_conflict(
    as_role: NewKeeper, postgres: PostgreSQL, role: str, judge: Judge
) -> None:
    """53300: the lock could not be asked for; once there is room again it is acquired."""
    postgres.execute(f"ALTER ROLE {role} CONNECTION LIMIT 0")
    keeper = as_role()
    error = refusal(keeper)
    assert isinstance(error, LockUnavailable)
    assert "too many connections" in str(error)
    postgres.execute(f"ALTER ROLE {role} CONNECTION LIMIT -1")
    keeper.release(acquired(keeper))


# What a server lacks.


def test_a_missing_right_is_named(as_role: NewKeeper, observer: psycopg.Connection) -> None:
    """What can't pass by itself is a wrong setup, and says what is missing."""
    observer.execute("REVOKE EXECUTE ON FUNCTION pg_try_advisory_lock(bigint) FROM PUBLIC")
    try:
        error = refusal(as_role())
    finally:
        observer.execute("GRANT EXECUTE ON FUNCTION pg_try_advisory_lock(bigint) TO PUBLIC")
    assert isinstance(error, LockSetupError)
    assert "pglock_database_url" in str(error)
    assert "pg_try_advisory_lock" in str(error)


def test_a_missing_right_is_named_in_a_transaction(
    postgres: PostgreSQL, dbname: str, role: str, observer: psycopg.Connection, judge: Judge
) -> None:
    """As for a session: told as what may pass, the task would come back for ever."""
    scope = Transaction(Settings(postgres.url(dbname, user=role)))
    observer.execute("REVOKE EXECUTE ON FUNCTION pg_try_advisory_xact_lock(bigint) FROM PUBLIC")
    try:
        asked = scope.acquire(Hold(ID))
    finally:
        observer.execute("GRANT EXECUTE ON FUNCTION pg_try_advisory_xact_lock(bigint) TO PUBLIC")
    assert asked.answer is Answer.UNKNOWN
    assert isinstance(asked.error, LockSetupError)
    assert "pg_try_advisory_xact_lock" in str(asked.error)
    judge.sees_nothing_left()


@pytest.fixture
def no_lock_function(observer: psycopg.Connection) -> Iterator[None]:
    """A server that is not really PostgreSQL lacks the function."""
    observer.execute("SET allow_system_table_mods = on")
    observer.execute("ALTER FUNCTION pg_catalog.pg_try_advisory_lock(bigint) RENAME TO gone")
    yield
    observer.execute("ALTER FUNCTION pg_catalog.gone(bigint) RENAME TO pg_try_advisory_lock")


def test_a_missing_function_is_named(no_lock_function: None, new_keeper: NewKeeper) -> None:
    """42883 is a wrong server, and will be tomorrow."""
    error = refusal(new_keeper())
    assert isinstance(error, LockSetupError)
    assert "pg_try_advisory_lock" in str(error)


@pytest.mark.parametrize("body", ["true", "NULL::boolean"])
def test_a_server_whose_locks_do_not_exclude_is_refused(
    as_role: NewKeeper, postgres: PostgreSQL, role: str, observer: psycopg.Connection, body: str
) -> None:
    """Look-alikes answer true to everybody: a lock that one session holds must be refused to another."""
    observer.execute("CREATE SCHEMA stubs")
    observer.execute(f"GRANT USAGE ON SCHEMA stubs TO {role}")
    for kinds in ("bigint", "integer, integer"):
        observer.execute(
            f"CREATE FUNCTION stubs.pg_try_advisory_lock({kinds}) RETURNS boolean"
            f" LANGUAGE sql AS 'SELECT {body}'"
        )
    postgres.execute(f"ALTER ROLE {role} SET search_path = stubs, pg_catalog")
    error = refusal(as_role())
    assert isinstance(error, LockSetupError)
    assert "pglock_database_url" in str(error)


def test_a_standby_is_refused(small_server: PostgreSQL) -> None:
    """Its locks are unknown to the primary, whose name the error asks for. In both scopes."""
    with small_server.standby() as standby:
        for transactions in (False, True):
            with pytest.raises(LockSetupError, match=r"pglock_database_url.*standby.*name the primary"):
                probe(Settings(standby.url()), transactions=transactions)
        left = "SELECT 1 FROM pg_stat_activity WHERE application_name LIKE 'pglock %'"
        eventually(lambda: not standby.execute(left), "a session is left")
        standby.promote()
        for transactions in (False, True):
            probe(Settings(standby.url()), transactions=transactions)


# A pooler in the way.


def test_a_pooler_is_refused(postgres: PostgreSQL, dbname: str, new_keeper: NewKeeper, judge: Judge) -> None:
    """In transaction mode two clients share one session lock. The error names both ways out."""
    with PgBouncer(postgres, pool_mode="transaction") as pooler:
        error = refusal(new_keeper(pooler.url(dbname)))
    assert isinstance(error, LockSetupError)
    assert "name the server itself" in str(error)
    assert "pglock_session_pooler" in str(error)
    assert judge.held() == set()


def test_a_pooler_in_session_mode_is_accepted_when_asked_for(
    postgres: PostgreSQL, dbname: str, new_keeper: NewKeeper, judge: Judge
) -> None:
    """`pglock_session_pooler = True`: locks behind it exclude those of direct sessions, and are released."""
    with PgBouncer(postgres, pool_mode="session") as pooler:
        assert isinstance(refusal(new_keeper(pooler.url(dbname))), LockSetupError)
        keeper, direct = new_keeper(pooler.url(dbname), session_pooler=True), new_keeper()
        hold = acquired(keeper)
        assert judge.held() == {ID}
        assert direct.acquire(Hold(ID)).answer is Answer.CONFLICT
        keeper.release(hold)
        direct.release(acquired(direct))
        keeper.close()


# A server that goes and comes.


@pytest.fixture
def keeper_there(small_server: PostgreSQL) -> Iterator[Keeper]:
    """A keeper whose server may be stopped."""
    keeper = Keeper(Settings(small_server.url()))
    yield keeper
    if not small_server.running:
        small_server.start()
    keeper.retire()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_between_two_tasks_costs_nothing(
    small_server: PostgreSQL, keeper_there: Keeper, mode: Any
) -> None:
    """One reconnect is tried before anything counts as a failure; while it is down, nothing is a conflict."""
    keeper_there.release(acquired(keeper_there))
    small_server.restart(mode)
    hold = acquired(keeper_there)
    small_server.stop(mode)
    # Of another name: until its end is noticed this one is held here, by what runs under it.
    assert isinstance(refusal(keeper_there, OTHER), LockUnavailable)
    assert hold.lost
    small_server.start()
    keeper_there.release(acquired(keeper_there))


def test_an_attempt_to_connect_is_bounded() -> None:
    """A server that accepts and says nothing is given up; libpq alone would wait for ever."""
    with closing(socket.create_server(("127.0.0.1", 0))) as mute:
        port = mute.getsockname()[1]
        with pytest.raises(LockUnavailable):
            probe(Settings(f"host=127.0.0.1 port={port} connect_timeout=2"))


class Cutter:
    """A way to the server that can break behind a question: the server gets it, the answer is lost.

    The server's end stays open, as when a network falls silent.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.cut_next = False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.ghosts: list[socket.socket] = []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.port))
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self.pump, args=(source, target, client), daemon=True).start()

    def pump(self, source: socket.socket, target: socket.socket, client: socket.socket) -> None:
        while data := received(source):
            # With the answer in hand, so that the server has done what it was asked.
            if source is not client and self.cut_next:
                self.cut_next = False
                self.ghosts.append(source)
                client.shutdown(socket.SHUT_RDWR)
                client.close()
                return
            try:
                target.sendall(data)
            except OSError:
                break
        if target not in self.ghosts and source not in self.ghosts:
            source.close()
            target.close()


def received(source: socket.socket) -> bytes:
    try:
        return source.recv(65536)
    except OSError:
        return b""


@contextmanager
def way_that_breaks(postgres: PostgreSQL) -> Iterator[Cutter]:
    cutter = Cutter(postgres.port)
    yield cutter
    cutter.listener.close()
    for ghost in cutter.ghosts:
        ghost.close()


@pytest.mark.usefixtures("way")
def test_a_refusal_by_our_own_ghost_is_no_conflict(
    postgres: PostgreSQL, dbname: str, new_keeper: NewKeeper, judge: Judge
) -> None:
    """The first try was granted and its answer lost: the second is refused by the first, by nobody else."""
    with way_that_breaks(postgres) as way:
        url = f"postgresql://postgres@127.0.0.1:{way.listener.getsockname()[1]}/{dbname}"
        keeper = new_keeper(url)
        keeper.release(acquired(keeper, OTHER))
        way.cut_next = True
        error = refusal(keeper)
        assert judge.held() == {ID}, "the ghost does not hold the lock: this test shows nothing"
        assert isinstance(error, LockUnavailable)
        judge.end(judge.holder(ID))
        keeper.release(acquired(keeper))


# A full lock table.


@pytest.fixture
def filler(small_server: PostgreSQL) -> Iterator[psycopg.Connection]:
    """A session that holds all that the table has room for, and can give single ones back."""
    with psycopg.connect(small_server.url(), autocommit=True) as connection:
        yield connection


def fill(filler: psycopg.Connection) -> None:
    """Take ids until the server has no room left."""
    with pytest.raises(psycopg.errors.OutOfMemory):
        filler.execute("SELECT pg_try_advisory_lock(n) FROM generate_series(100000, 200000) AS n")
    n = 200_000
    with suppress(psycopg.errors.OutOfMemory):
        while True:
            filler.execute(f"SELECT pg_try_advisory_lock({n})")
            n += 1


@pytest.mark.usefixtures("way")
def test_a_full_lock_table_is_no_conflict_and_costs_nobody_a_lock(
    keeper_there: Keeper, filler: psycopg.Connection
) -> None:
    """53200: could not be asked; what is held stays held, and with room again all goes on as before."""
    keeper = keeper_there
    held = acquired(keeper, OTHER)
    judge = Judge(filler)
    pid = judge.holder(OTHER)
    fill(filler)
    error = refusal(keeper)
    assert isinstance(error, LockUnavailable)
    assert "out of shared memory" in str(error)
    assert [id for id, each in judge.locks() if each == pid] == [OTHER]
    assert judge.holder(OTHER) == pid
    assert not held.lost
    judge.give_back()
    hold = acquired(keeper)
    assert judge.held() == {ID, OTHER}
    keeper.release(hold)
    keeper.release(held)
    assert judge.held() == set()


@pytest.fixture
def session(small_server: PostgreSQL) -> Iterator[Session]:
    session = Session(Settings(small_server.url()), "pglock test")
    yield session
    session.close("the test is over")


def test_a_statement_that_fails_half_way_leaves_nothing_behind(
    session: Session, filler: psycopg.Connection
) -> None:
    """Several questions share one statement: where the last meets a full table, the first may be granted."""
    judge = Judge(filler)
    old = Acquire(Hold(LockId(50)))
    session.perform([old])
    fill(filler)
    filler.execute("SELECT pg_advisory_unlock(100000)")
    requests = [Acquire(Hold(LockId(n)), Hold(LockId(n + 1000))) for n in range(5)]
    with pytest.raises(LockUnavailable):
        session.perform([Release(old.hold), *requests])
    assert [id for id in judge.held() if id < (100_000,)] == []
    assert [each.hold.status for each in requests] == [Hold.Status.NEW] * 5
    assert old.hold.status is Hold.Status.RELEASED
    judge.give_back()
    session.perform(requests)
    assert [each.answer for each in requests] == [Answer.GRANTED] * 5


def test_one_question_that_fails_costs_the_others_nothing(
    keeper_there: Keeper, filler: psycopg.Connection
) -> None:
    """Those who asked in the same statement get their own answers: there is room for one."""
    keeper, judge = keeper_there, Judge(filler)
    keeper.release(acquired(keeper))
    fill(filler)
    filler.execute("SELECT pg_advisory_unlock(100000)")
    requests = [Acquire(Hold(LockId(n))) for n in range(5)]
    keeper._answer(requests)
    answers = [each.answer for each in requests]
    assert answers.count(Answer.GRANTED) >= 1
    assert set(answers) <= {Answer.GRANTED, Answer.UNKNOWN}
    granted = {each.hold.id for each in requests if each.answer is Answer.GRANTED}
    assert {id for id in judge.held() if id < (100_000,)} == granted
    for each in requests:
        keeper.release(each.hold)
    assert not {id for id in judge.held() if id < (100_000,)}
