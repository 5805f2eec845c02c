"""A lock that lives in a transaction: committed with success, rolled back with every other end."""

from __future__ import annotations

import itertools
import logging
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import psycopg
import pytest
from celery import Celery
from celery.app.trace import build_tracer
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.signals import before_task_publish
from psycopg.rows import dict_row
from psycopg.types.numeric import IntLoader

from celery_pglock import (
    AdvisoryLockedTask,
    LockId,
    LockLost,
    LockNotAcquired,
    LockUnavailable,
    advisory_lock,
    current_lock,
    is_skipped,
    lock_lost,
)
from celery_pglock.locks import line
from celery_pglock.locks.hold import Hold
from celery_pglock.locks.keeper import close_all, keeper_for
from celery_pglock.locks.requests import Answer
from celery_pglock.locks.settings import Settings
from celery_pglock.locks.transaction import Transaction
from integration.judge import Judge, eventually
from integration.rivals import forked, in_thread, interrupted_after, status_of, wait_until_waiting
from localservers import PgBouncer, PostgreSQL

ID = LockId(21)

Rows = Callable[[], list[str]]

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


@pytest.fixture
def rows(observer: psycopg.Connection) -> Rows:
    """What bodies have written for good."""
    observer.execute("CREATE TABLE IF NOT EXISTS written (what text)")
    observer.execute("CREATE TABLE IF NOT EXISTS once (what text UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    observer.execute("TRUNCATE written, once")
    return lambda: [what for (what,) in observer.execute("SELECT what FROM written ORDER BY what")]


@pytest.fixture
def lost() -> Iterator[list[Hold]]:
    """The holds that were told to be lost."""
    lost: list[Hold] = []

    def receive(lock: Hold, **_: Any) -> None:
        lost.append(lock)

    lock_lost.connect(receive)
    yield lost
    lock_lost.disconnect(receive)


def write(what: str) -> None:
    current_lock().connection.execute("INSERT INTO written VALUES (%s)", [what])


def task(app: Celery, body: Callable[[], Any], **options: Any) -> Any:
    """Make a task that writes first and then is what the test wants."""

    def f() -> Any:
        write("early")
        return body()

    options = {"lock_scope": "transaction", "lock_key": lambda: ID, "name": uuid.uuid4().hex, **options}
    return app.task(base=AdvisoryLockedTask, shared=False, **options)(f)


def throw(error: BaseException) -> None:
    raise error


@pytest.fixture
def published() -> Iterator[list[dict[str, Any]]]:
    """The headers of all messages that are published, and reach nobody."""
    published: list[dict[str, Any]] = []

    def receive(headers: dict[str, Any], **_: Any) -> None:
        published.append(headers)

    before_task_publish.connect(receive)
    yield published
    before_task_publish.disconnect(receive)


def delivered(task: Any, id: str = "one", *, redelivered: bool = False) -> None:
    """Do what a worker does with a message."""
    request = {"id": id, "task": task.name, "retries": 0, "called_directly": False, "headers": {}}
    build_tracer(task.name, task, app=task.app)(
        id, (), {}, {**request, "delivery_info": {"redelivered": redelivered}}
    )


# How it ends.


def test_what_runs_again_after_a_lost_commit_counts_its_tries(
    app: Celery, observer: psycopg.Connection, rows: Rows, published: list[dict[str, Any]]
) -> None:
    """Else it comes back every second for as long as commits fail."""
    observer.execute(
        "CREATE OR REPLACE FUNCTION farewell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(1); RETURN NULL; END $$"
    )
    observer.execute(
        "CREATE CONSTRAINT TRIGGER farewell AFTER INSERT ON written DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION farewell()"
    )
    app.conf.task_always_eager = False
    try:
        delivered(task(app, lambda: "done", lock_on_lost="retry"))
    finally:
        observer.execute("DROP TRIGGER farewell ON written")
    assert [headers["pglock"]["failures"] for headers in published] == [1]


def test_success_commits(app: Celery, judge: Judge, rows: Rows) -> None:
    """And not before the end: until then the work and the lock are the transaction's."""

    def body() -> str:
        assert judge.held() == {ID}
        assert rows() == []
        return "done"

    result = task(app, body).delay()
    assert (result.state, result.result) == ("SUCCESS", "done")
    assert rows() == ["early"]
    assert judge.held() == set()


@pytest.mark.parametrize(
    "error",
    [ValueError(), Ignore(), Reject("no", requeue=False), Retry(), LockLost("x"), LockNotAcquired("x")],
    ids=lambda error: type(error).__name__,
)
def test_every_other_end_rolls_back(
    app: Celery, judge: Judge, rows: Rows, error: Exception, lost: list[Hold]
) -> None:
    """Whatever the body raises."""
    result = task(app, lambda: throw(error)).delay()
    assert result.state != "SUCCESS"
    assert rows() == []
    assert judge.held() == set()
    assert lost == []


def test_an_interrupted_body_rolls_back(dsn: str, judge: Judge, rows: Rows) -> None:
    """Also what is no `Exception`."""
    with interrupted_after(0.2), advisory_lock(ID, scope="transaction", database_url=dsn):
        write("early")
        time.sleep(5)
    assert rows() == []
    assert judge.held() == set()


def test_an_interrupt_inside_a_statement_rolls_back(dsn: str, judge: Judge, rows: Rows) -> None:
    """The connection is busy still when the transaction has to end."""
    with interrupted_after(0.2), advisory_lock(ID, scope="transaction", database_url=dsn) as lock:
        write("early")
        lock.connection.execute("SELECT pg_sleep(20)")
    eventually(lambda: not judge.held(), "the lock is left", within=2)
    assert rows() == []


@contextmanager
def soft_time_limit(seconds: float) -> Iterator[None]:
    """Raise in the main thread, as a worker's soft time limit does."""
    previous = signal.signal(signal.SIGALRM, lambda *_: throw(SoftTimeLimitExceeded()))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("policy", ["abort", "retry"])
def test_a_soft_time_limit_inside_a_statement_is_no_loss(
    app: Celery,
    judge: Judge,
    rows: Rows,
    policy: str,
    lost: list[Hold],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The connection is given up with its statement, by ourselves: the task ends as its limit says."""
    app.conf.task_always_eager = False
    f = task(app, lambda: current_lock().connection.execute("SELECT pg_sleep(20)"), lock_on_lost=policy)
    with soft_time_limit(0.3):
        delivered(f)
    result = f.AsyncResult("one")
    assert (result.state, type(result.result)) == ("FAILURE", SoftTimeLimitExceeded)
    assert lost == []
    ours = [record for record in caplog.records if record.name.startswith("celery_pglock")]
    assert [record for record in ours if record.levelno >= logging.WARNING] == []
    eventually(lambda: not judge.held(), "the lock is left", within=2)
    assert rows() == []


def test_a_failed_commit_is_a_failed_task(
    app: Celery,
    judge: Judge,
    rows: Rows,
    lost: list[Hold],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A constraint that is checked at the end fails the task; nothing was lost."""

    def body() -> None:
        for _ in range(2):
            current_lock().connection.execute("INSERT INTO once VALUES ('twice')")

    result = task(app, body).delay()
    assert result.state == "FAILURE"
    assert isinstance(result.result, psycopg.errors.UniqueViolation)
    assert rows() == []
    assert judge.held() == set()
    assert lost == []
    assert [record for record in caplog.records if record.name.startswith("celery_pglock")] == []
    assert task(app, lambda: None).delay().state == "SUCCESS"


def test_a_body_that_swallows_an_error_of_its_transaction_fails(app: Celery, rows: Rows) -> None:
    """PostgreSQL would answer the COMMIT of a failed transaction with a rollback, and no error."""

    def body() -> None:
        with suppress(psycopg.Error):
            current_lock().connection.execute("SELECT 1 / 0")

    result = task(app, body).delay()
    assert isinstance(result.result, psycopg.errors.InFailedSqlTransaction)
    assert rows() == []


def test_a_commit_may_take_longer_than_the_network_may_be_silent(
    app: Celery, judge: Judge, rows: Rows, observer: psycopg.Connection
) -> None:
    """Constraints are checked at its end. Cut by us, it would be done or not, and nobody could tell."""
    app.conf.pglock_loss_timeout = 3.0
    observer.execute("CREATE TABLE slow (n int)")
    observer.execute(
        "CREATE FUNCTION think() RETURNS trigger LANGUAGE plpgsql"
        " AS 'BEGIN PERFORM pg_sleep(4.5); RETURN NULL; END'"
    )
    observer.execute(
        "CREATE CONSTRAINT TRIGGER thinks AFTER INSERT ON slow DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION think()"
    )
    try:
        since = time.monotonic()
        result = task(
            app, lambda: current_lock().connection.execute("INSERT INTO slow VALUES (1)") and 1
        ).delay()
        assert time.monotonic() - since > 4.5, "the commit was quick: nothing was tested"
        assert result.state == "SUCCESS", result.result
        assert rows() == ["early"]
        assert judge.held() == set()
    finally:
        observer.execute("DROP TABLE slow")
        observer.execute("DROP FUNCTION think")


# Whose it is to end.


@pytest.mark.parametrize("method", ["commit", "rollback"])
def test_the_methods_of_the_body_are_refused(app: Celery, rows: Rows, method: str, judge: Judge) -> None:
    """They say what to do instead, and leave the transaction as it is."""

    def body() -> None:
        with pytest.raises(TypeError, match="task"):
            getattr(current_lock().connection, method)()
        assert judge.held() == {ID}

    assert task(app, body).delay().state == "SUCCESS"
    assert rows() == ["early"]


@pytest.mark.parametrize("policy", ["abort", "retry"])
@pytest.mark.parametrize(
    "statement", ["COMMIT", "ROLLBACK", "COMMIT AND CHAIN", "COMMIT; BEGIN", "END", "ABORT"]
)
def test_sql_that_ends_the_transaction_is_noticed(
    app: Celery, judge: Judge, statement: str, policy: str, rows: Rows, lost: list[Hold]
) -> None:
    """The body went on without its lock, so the task has not succeeded, whatever its policy for losses."""

    def body() -> None:
        current_lock().connection.execute(statement)
        assert judge.held() == set()
        write("late")

    result = task(app, body, lock_on_lost=policy).delay()
    assert result.state == "FAILURE"
    assert isinstance(result.result, LockLost)
    assert "transaction" in str(result.result)
    assert len(lost) == 1
    assert judge.held() == set()


@pytest.mark.parametrize("statement", ["COMMIT", "COMMIT; BEGIN"])
@pytest.mark.parametrize("error", [None, ValueError("later")], ids=["returns", "fails"])
def test_a_body_that_ends_its_transaction_is_not_run_again(
    app: Celery, rows: Rows, statement: str, error: Exception | None, lost: list[Hold]
) -> None:
    """It would do so again, and write once more each time. A lost connection is another matter."""
    app.conf.task_always_eager = False

    def body() -> None:
        current_lock().connection.execute(statement)
        if error is not None:
            raise error

    f = task(app, body, lock_on_lost="retry")
    delivered(f)
    assert f.AsyncResult("one").state == "FAILURE"
    assert len(lost) == 1


def test_a_body_whose_connection_is_lost_is_run_again(
    app: Celery, judge: Judge, dsn: str, lost: list[Hold]
) -> None:
    """The control."""
    app.conf.task_always_eager = False

    def body() -> None:
        end_soon(dsn, judge.holder(ID))
        time.sleep(20)

    f = task(app, body, lock_on_lost="retry")
    delivered(f)
    assert f.AsyncResult("one").state == "RETRY"
    assert len(lost) == 1


def test_sql_that_ends_the_transaction_of_a_failing_body_is_noticed(
    app: Celery, judge: Judge, rows: Rows, lost: list[Hold]
) -> None:
    """A failed task has written nothing; where that is not so it is said."""

    def body() -> None:
        current_lock().connection.execute("COMMIT")
        raise ValueError("later")

    result = task(app, body).delay()
    assert isinstance(result.result, (ValueError, LockLost))
    assert rows() == ["early"], "nothing was committed: nothing was tested"
    assert len(lost) == 1, "a failed task's work stays, and nobody is told"


@pytest.mark.parametrize("statement", ["COMMIT", "COMMIT; BEGIN"])
def test_no_fencing_token_is_drawn_without_the_lock(dsn: str, judge: Judge, statement: str) -> None:
    """It would be higher than the next holder's, and pass the fence that exists for just that."""
    with pytest.raises(LockLost), advisory_lock(ID, scope="transaction", database_url=dsn) as lock:  # noqa: PT012
        lock.connection.execute(statement)
        assert judge.take(ID)
        with pytest.raises(LockLost, match="ended its transaction"):
            lock.fencing_token()
        assert lock.lost
    judge.give_back()


def test_a_fencing_token_of_a_lost_connection_is_a_loss(dsn: str) -> None:
    """Whether the watch saw it before, or the question found out."""
    for _ in range(20):
        with pytest.raises(LockLost), advisory_lock(ID, scope="transaction", database_url=dsn) as lock:  # noqa: PT012
            with closing(psycopg.connect(dsn, autocommit=True)) as connection:
                connection.execute("SELECT pg_terminate_backend(%s)", [lock.connection.info.backend_pid])
            lock.fencing_token()


def test_a_fencing_token_is_drawn_under_the_lock(dsn: str) -> None:
    """The control: each higher than the one before."""
    tokens = []
    for _ in range(3):
        with advisory_lock(ID, scope="transaction", database_url=dsn) as lock:
            tokens.append(lock.fencing_token())
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen", "unseen"])
def test_a_fencing_token_needs_no_warm_connection(dsn: str, judge: Judge, is_seen: bool) -> None:
    """One that was ended while nobody used it costs a holder nothing, whether or not the watch saw it."""
    with advisory_lock(ID, scope="transaction", database_url=dsn) as lock:
        with advisory_lock("other", scope="transaction", database_url=dsn):
            pass
        (warm,) = line._warm
        if not is_seen:
            warm.watch.look_away()
        judge.end(warm.connection.info.backend_pid)
        if is_seen:
            eventually(lambda: warm.ended, "the watch sees it")
            assert line.warm_line(warm.settings) is None
        assert lock.fencing_token() > 0
        assert warm.connection.closed


def test_a_failed_transaction_has_no_fencing_token(dsn: str) -> None:
    """It is told by an error of ours."""
    told = False
    with suppress(psycopg.Error), advisory_lock(ID, scope="transaction", database_url=dsn) as lock:
        with suppress(psycopg.Error):
            lock.connection.execute("SELECT 1/0")
        with pytest.raises(LockUnavailable):
            lock.fencing_token()
        told = True
    assert told


def test_a_body_that_leaves_the_transaction_alone_loses_nothing(
    app: Celery, rows: Rows, lost: list[Hold]
) -> None:
    """The control."""
    assert task(app, lambda: write("late")).delay().state == "SUCCESS"
    assert rows() == ["early", "late"]
    assert lost == []


def test_a_savepoint_is_the_body_s_to_roll_back(app: Celery, judge: Judge, rows: Rows) -> None:
    """It keeps the lock, by psycopg's block and by SQL."""

    def body() -> None:
        connection = current_lock().connection
        with suppress(ZeroDivisionError), connection.transaction():
            write("in vain")
            1 / 0  # noqa: B018
        assert judge.held() == {ID}
        connection.execute("SAVEPOINT here")
        write("in vain too")
        connection.execute("ROLLBACK TO here")
        assert judge.held() == {ID}
        with connection.transaction():
            write("late")

    assert task(app, body).delay().state == "SUCCESS"
    assert rows() == ["early", "late"]


def close_it() -> None:
    current_lock().connection.close()


def test_a_body_that_closes_its_connection_fails(app: Celery, judge: Judge, rows: Rows) -> None:
    """Nothing was written, and the next task has a connection."""
    result = task(app, close_it).delay()
    assert result.state == "FAILURE"
    assert rows() == []
    assert task(app, lambda: None).delay().state == "SUCCESS"


def test_the_connection_is_refused_outside_of_a_transaction(app: Celery, dsn: str) -> None:
    """A session lock has none to lend, and a hold that is over none any more."""
    with advisory_lock(ID, database_url=dsn) as lock, pytest.raises(TypeError, match="lock_scope"):
        lock.connection  # noqa: B018
    with advisory_lock(ID, scope="transaction", database_url=dsn) as lock:
        pass
    with pytest.raises(TypeError):
        lock.connection  # noqa: B018


def test_a_transaction_inside_of_a_session_s_hold_lends_none(app: Celery, dsn: str, judge: Judge) -> None:
    """It runs under the hold that is there, and says where to look. Two such scopes share the outer one."""
    inner = task(app, lambda: None)
    for scope in ("session", "transaction"):
        with advisory_lock(ID, scope=scope, database_url=dsn):
            result = inner.apply()
            assert len(judge.locks()) == 1
        if scope == "session":
            assert isinstance(result.result, TypeError)
            assert 'lock_scope="transaction" where it was acquired, which may be around' in str(result.result)
        else:
            assert result.state == "SUCCESS", result.result


# When it is lost.


def end_soon(dsn: str, pid: int) -> None:
    """End a session from a connection that no interrupt of this thread can meet."""

    def end() -> None:
        with closing(psycopg.connect(dsn, autocommit=True)) as connection:
            connection.execute("SELECT pg_terminate_backend(%s)", [pid])

    in_thread(end)


@pytest.mark.parametrize("policy", ["abort", "retry"])
def test_a_lost_connection_has_written_nothing(
    app: Celery, judge: Judge, dsn: str, rows: Rows, policy: str, lost: list[Hold]
) -> None:
    """The task fails, whatever its policy: there is no success without what it wrote."""

    def body() -> None:
        end_soon(dsn, judge.holder(ID))
        eventually(lambda: current_lock().lost, "the loss is not noticed", within=2)

    result = task(app, body, lock_on_lost=policy).delay()
    assert isinstance(result.result, LockLost)
    assert rows() == []
    assert len(lost) == 1
    assert task(app, lambda: None).delay().state == "SUCCESS"


def test_a_body_is_interrupted_when_its_connection_is_lost(app: Celery, dsn: str, judge: Judge) -> None:
    """Also in the middle of a sleep."""

    def body() -> None:
        end_soon(dsn, judge.holder(ID))
        time.sleep(20)

    since = time.monotonic()
    assert isinstance(task(app, body).delay().result, LockLost)
    assert time.monotonic() - since < 2


def test_a_connection_that_is_gone_before_the_commit_is_a_loss(
    app: Celery, dsn: str, rows: Rows, lost: list[Hold]
) -> None:
    """Whether the watch saw it before the body was over, or the driver did: 20 times at once."""

    def body() -> None:
        with closing(psycopg.connect(dsn, autocommit=True)) as connection:
            pid = current_lock().connection.info.backend_pid
            connection.execute("SELECT pg_terminate_backend(%s)", [pid])

    f = task(app, body)
    assert {type(f.delay().result) for _ in range(20)} == {LockLost}
    assert len(lost) == 20
    assert rows() == []


def end_itself() -> None:
    current_lock().connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")


def test_a_connection_that_is_lost_inside_a_statement_is_a_loss(
    app: Celery, rows: Rows, lost: list[Hold]
) -> None:
    """There the driver's error is often the first to arrive. It is told as the reason's cause."""
    f = task(app, end_itself)
    for _ in range(10):
        error = f.delay().result
        assert isinstance(error, LockLost), repr(error)
    assert len(lost) == 10
    assert rows() == []


@pytest.mark.parametrize("abort", [True, False])
def test_a_block_whose_connection_is_lost_inside_a_statement_ends_with_a_loss(dsn: str, abort: bool) -> None:
    """As a task does."""
    for _ in range(5):
        with (
            pytest.raises(LockLost) as caught,
            advisory_lock(ID, scope="transaction", abort=abort, database_url=dsn),
        ):
            end_itself()
    if not abort:
        assert isinstance(caught.value.__context__, psycopg.OperationalError)


def test_an_error_of_the_body_s_own_stays_beside_a_loss(app: Celery, lost: list[Hold]) -> None:
    """The control: it is not the loss that it tells."""

    def body() -> None:
        try:
            end_itself()
        except BaseException:  # noqa: BLE001 - the driver's error, or what stops the body
            raise ValueError("mine") from None

    assert isinstance(task(app, body).delay().result, ValueError)
    assert len(lost) == 1


def test_a_lost_lock_lends_no_connection(app: Celery, dsn: str, judge: Judge) -> None:
    """It says that it is lost, and not that there never was one."""

    def body() -> None:
        end_soon(dsn, judge.holder(ID))
        with suppress(BaseException):
            time.sleep(20)
        assert current_lock().lost
        current_lock().connection.execute("SELECT 1")

    assert isinstance(task(app, body).delay().result, LockLost)


def test_a_commit_without_an_answer_ends_with_the_driver_s_error(
    app: Celery, observer: psycopg.Connection, rows: Rows, lost: list[Hold]
) -> None:
    """Nobody knows whether it was done: to call it a lost lock would say that it was not."""
    observer.execute("CREATE TABLE fatal (n int)")
    observer.execute(
        "CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql"
        " AS 'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END'"
    )
    observer.execute(
        "CREATE CONSTRAINT TRIGGER dies AFTER INSERT ON fatal DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION die()"
    )
    try:
        f = task(app, lambda: current_lock().connection.execute("INSERT INTO fatal VALUES (1)") and 1)
        assert isinstance(f.delay().result, psycopg.OperationalError)
        assert len(lost) == 1
        assert rows() == []
    finally:
        observer.execute("DROP TABLE fatal")
        observer.execute("DROP FUNCTION die")


def test_a_warm_connection_that_was_ended_costs_nothing(app: Celery, judge: Judge) -> None:
    """The next task opens another."""
    f = task(app, lambda: None)
    assert f.delay().state == "SUCCESS"
    (pid,) = judge.sessions()
    judge.end(pid)
    assert f.delay().state == "SUCCESS"


# One connection.


def test_one_warm_connection_is_reused(app: Celery, judge: Judge) -> None:
    """Twenty tasks, one after the other, whatever became of them."""
    pids: set[int] = set()

    def body() -> None:
        pids.add(current_lock().connection.info.backend_pid)
        if next(count) % 3 == 2:
            raise ValueError

    count = itertools.count()
    f = task(app, body)
    for _ in range(20):
        f.delay()
    assert next(count) == 20
    assert len(pids) == 1
    assert judge.sessions() == list(pids)


def test_what_a_body_changes_on_its_connection_ends_with_it(app: Celery) -> None:
    """The next task finds a connection as it is documented."""

    def change() -> None:
        connection = current_lock().connection
        connection.row_factory = dict_row
        connection.execute("SET LOCAL application_name = 'mine'")

    assert task(app, change).delay().state == "SUCCESS"
    look = task(app, lambda: list(current_lock().connection.execute("SELECT 1").fetchone()))
    assert look.delay().result == [1]
    look = task(app, lambda: current_lock().connection.execute("SHOW application_name").fetchone()[0])
    assert look.delay().result.startswith("pglock ")


class Marked(IntLoader):
    """How one body wants to read its numbers."""

    def load(self, data: Any) -> Any:
        return f"the first body's {super().load(data)}"


#: What a body may leave behind on a session.
LEAVE = (
    "CREATE TEMP TABLE accounts (n int)",
    "CREATE TEMP SEQUENCE numbers",
    "SELECT nextval('numbers')",
    "PREPARE saying AS SELECT 'the first'",
    "DECLARE reader CURSOR WITH HOLD FOR SELECT 1",
    "LISTEN news",
    "SELECT pg_advisory_lock(5, 5)",
    "SET search_path = pg_catalog",
)
#: Where it would be seen.
LEFT = {
    "temporary tables": "SELECT count(*) FROM pg_class WHERE relpersistence = 't' AND relkind = 'r'",
    "prepared statements": "SELECT count(*) FROM pg_prepared_statements",
    "cursors": "SELECT count(*) FROM pg_cursors WHERE is_holdable",
    "session locks": "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2",
    "settings": "SELECT count(*) FROM pg_settings WHERE name = 'search_path' AND source = 'session'",
}


def left(connection: psycopg.Connection) -> dict[str, int]:
    return {what: connection.execute(query).fetchone()[0] for what, query in LEFT.items()}


def test_what_a_body_leaves_on_its_session_does_not_meet_the_next(app: Celery, dsn: str) -> None:
    """On the same connection, whatever became of the bodies between."""
    pids = set()

    def lock(id: LockId = ID) -> Any:
        return advisory_lock(id, scope="transaction", database_url=dsn)

    with lock() as first:
        for statement in LEAVE:
            first.connection.execute(statement)
        pids.add(first.connection.info.backend_pid)
        assert all(left(first.connection).values()), "nothing was left: nothing is tested"
    with suppress(ValueError), lock():
        raise ValueError
    with advisory_lock(ID, database_url=dsn), pytest.raises(LockNotAcquired):
        in_thread(lambda: lock().__enter__()).result(timeout=20)
    with lock() as last:
        pids.add(last.connection.info.backend_pid)
        assert left(last.connection) == dict.fromkeys(LEFT, 0)
        with pytest.raises(psycopg.Error), last.connection.transaction():
            last.connection.execute("SELECT lastval()")
    # To listen, and to listen no more, begins with the end of a transaction.
    with lock() as one_more:
        pids.add(one_more.connection.info.backend_pid)
        assert one_more.connection.execute("SELECT pg_listening_channels()").fetchall() == []
    assert len(pids) == 1


def test_what_a_body_sets_on_its_connection_does_not_reach_the_next(dsn: str) -> None:
    """Each has an object of its own, on one session."""
    told: list[str] = []
    pids, connections = [], []
    for number in (1, 2):
        with advisory_lock(ID, scope="transaction", database_url=dsn) as lock:
            connection = lock.connection
            connections.append(connection)
            pids.append(connection.info.backend_pid)
            assert connection.execute("SELECT 7").fetchone() == (7,)
            connection.execute("DO $$ BEGIN RAISE NOTICE 'by %s'; END $$" % number)  # noqa: UP031
            connection.adapters.register_loader("int4", Marked)
            connection.add_notice_handler(lambda notice: told.append(notice.message_primary))
            connection.row_factory = dict_row
            connection.prepare_threshold = 0
            connection.execute("SELECT 8")
            connection.execute("DO $$ BEGIN RAISE NOTICE 'after %s'; END $$" % number)  # noqa: UP031
    assert told == ["after 1", "after 2"]
    assert connections[0] is not connections[1]
    assert pids[0] == pids[1]


@pytest.mark.parametrize("way", ["with", "close"])
def test_the_connection_is_not_the_body_s_to_close(app: Celery, judge: Judge, rows: Rows, way: str) -> None:
    """Psycopg's own block would commit and close it at its end. It says so before anything is done in it."""

    def body() -> None:
        connection = current_lock().connection
        with pytest.raises(TypeError, match=r"task's lock.*transaction\(\)"):  # noqa: PT012
            if way == "close":
                connection.close()
            with connection:
                write("inside")
        assert judge.held() == {ID}

    assert task(app, body).delay().state == "SUCCESS"
    assert rows() == ["early"]


def test_an_idle_transaction_holds_nothing_back(
    app: Celery, judge: Judge, observer: psycopg.Connection
) -> None:
    """No snapshot: vacuum goes on, and an index is built beside it. REPEATABLE READ would hold back both."""
    observer.execute("CREATE TABLE IF NOT EXISTS indexed (n int)")

    def xmin(pid: int) -> Any:
        return observer.execute("SELECT backend_xmin FROM pg_stat_activity WHERE pid = %s", [pid]).fetchone()[
            0
        ]

    def body() -> None:
        pid = judge.holder(ID)
        assert xmin(pid) is None
        observer.execute("SET statement_timeout = '10s'")
        observer.execute("CREATE INDEX CONCURRENTLY ON indexed (n)")
        observer.execute("RESET statement_timeout")
        assert judge.holder(ID) == pid

    options = {"lock_scope": "transaction", "lock_key": lambda: ID}
    f = app.task(base=AdvisoryLockedTask, name="f", shared=False, **options)(body)
    for _ in range(2):
        result = f.delay()
        assert result.state == "SUCCESS", result.result
        observer.execute("DROP INDEX indexed_n_idx")
    with psycopg.connect(observer.info.dsn) as control:
        control.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        control.execute("SELECT 1")
        assert xmin(control.info.backend_pid) is not None


def network_settings(connection: psycopg.Connection) -> list[str]:
    rows = connection.execute("SELECT setting FROM pg_settings WHERE name LIKE 'tcp\\_%' ORDER BY name")
    return [setting for (setting,) in rows]


@pytest.mark.parametrize("wait", [0, 20], ids=["try", "wait"])
def test_the_server_waits_for_a_silent_client_as_long_as_for_a_session_s(
    dsn: str, judge: Judge, wait: float
) -> None:
    """A network that falls silent sends no end of the connection, and Linux waits for two hours.

    After the transaction the connection may be another client's.
    """
    if wait:
        judge.take(ID)

    def hold() -> list[list[str]]:
        seen = []
        with suppress(LockLost), advisory_lock(ID, wait, scope="transaction", database_url=dsn) as lock:
            seen.append(network_settings(lock.connection))
            lock.connection.execute("COMMIT")
            seen.append(network_settings(lock.connection))
        return seen

    future = in_thread(hold)
    if wait:
        wait_until_waiting(judge, 1)
        judge.give_back()
    inside, outside = future.result(timeout=20)
    with advisory_lock(ID, database_url=dsn):
        session = keeper_for(Settings(dsn))._session
        assert inside == network_settings(session._connection) == ["2", "5", "5", "15000"]
    assert outside == network_settings(judge.observer) != inside


# What a role limits.


@pytest.fixture
def role(postgres: PostgreSQL, observer: psycopg.Connection) -> Iterator[str]:
    """A plain user."""
    name = f"role_{uuid.uuid4().hex[:12]}"
    postgres.execute(f"CREATE ROLE {name} LOGIN")
    yield name
    postgres.execute(f"DROP ROLE {name}")


def is_ended_when_idle(url: str) -> bool:
    with closing(psycopg.connect(url)) as control:
        control.execute("SELECT 1")
        time.sleep(0.6)
        try:
            control.execute("SELECT 1")
        except psycopg.Error:
            return True
        return False


@pytest.mark.parametrize("wait", [0, 20], ids=["try", "wait"])
@pytest.mark.parametrize("limit", ["idle_in_transaction_session_timeout", "transaction_timeout"])
def test_limits_of_a_role_do_not_end_a_transaction(
    postgres: PostgreSQL, role: str, dbname: str, judge: Judge, limit: str, wait: float
) -> None:
    """A transaction of the same role beside it is ended (the control), and ours is not."""
    if limit == "transaction_timeout" and judge.observer.info.server_version < 170000:
        pytest.skip("PostgreSQL has it since 17")
    postgres.execute(f"ALTER ROLE {role} SET {limit} = '300ms'")
    url = postgres.url(dbname, user=role)

    def hold() -> None:
        with advisory_lock(ID, wait, scope="transaction", database_url=url) as lock:
            if not wait:
                assert is_ended_when_idle(url)
            time.sleep(0.5)
            assert not lock.lost

    if wait:
        judge.take(ID)
    future = in_thread(hold)
    if wait:
        (pid,) = wait_until_waiting(judge, 1)
        time.sleep(0.5)
        judge.give_back()
        eventually(judge.held, "the waiter holds it")
        assert judge.holder(ID) == pid
    future.result(timeout=20)


def test_a_wait_lasts_longer_than_the_role_s_statements_may(
    postgres: PostgreSQL, role: str, dbname: str, judge: Judge
) -> None:
    """The wait is ours, the body's statements are limited as the role is."""
    for limit in ("statement_timeout", "lock_timeout"):
        postgres.execute(f"ALTER ROLE {role} SET {limit} = '200ms'")
    url = postgres.url(dbname, user=role)

    def hold() -> None:
        with advisory_lock(ID, 20, scope="transaction", database_url=url) as lock:
            assert [
                lock.connection.execute(f"SHOW {limit}").fetchone()[0]
                for limit in ("statement_timeout", "lock_timeout")
            ] == ["200ms", "200ms"]
            with pytest.raises(psycopg.errors.QueryCanceled), lock.connection.transaction():
                lock.connection.execute("SELECT pg_sleep(1)")

    judge.take(ID)
    future = in_thread(hold)
    wait_until_waiting(judge, 1)
    time.sleep(0.5)
    judge.give_back()
    future.result(timeout=20)


# A conflict.


def test_a_conflict_is_skipped_or_raised(app: Celery, judge: Judge) -> None:
    """The policies of a session's lock, and nothing is left open by the refusal."""
    judge.take(ID)
    assert is_skipped(task(app, lambda: None).delay().result)
    assert isinstance(task(app, lambda: None, lock_on_conflict="raise").delay().result, LockNotAcquired)
    assert judge.observer.execute(
        "SELECT state FROM pg_stat_activity WHERE pid = ANY(%s)", [judge.sessions()]
    ).fetchall() == [("idle",)]
    judge.give_back()


def test_a_conflict_is_waited_for(app: Celery, judge: Judge, rows: Rows) -> None:
    """In PostgreSQL's queue, with the connection that it works with afterwards."""
    judge.take(ID)
    f = task(app, lambda: None, lock_on_conflict="wait", lock_max_wait=20)
    future = in_thread(f.delay)
    (pid,) = wait_until_waiting(judge, 1)
    assert judge.sessions() == [pid]
    judge.give_back()
    assert future.result(timeout=20).state == "SUCCESS"
    assert rows() == ["early"]
    assert judge.sessions() == [pid]


@pytest.mark.parametrize("scope", ["session", "transaction"])
def test_a_copy_of_a_task_that_waited_stores_no_failure_over_it(
    app: Celery, judge: Judge, scope: str
) -> None:
    """It meets its own execution, not a conflict: the state of a task that runs is not the copy's."""
    app.conf.update(task_track_started=True, task_always_eager=False)
    ran, leave, id = threading.Semaphore(0), threading.Event(), uuid.uuid4().hex

    @app.task(base=AdvisoryLockedTask, name="book", shared=False, lock_scope=scope, lock_key=lambda: ID,
              lock_on_conflict="wait", lock_max_wait=2, acks_late=True)  # fmt: skip
    def book() -> str:
        ran.release()
        assert leave.wait(20)
        return "done"

    judge.take(ID)
    first = in_thread(lambda: delivered(book, id, redelivered=False))
    wait_until_waiting(judge, 1)
    judge.give_back()
    assert ran.acquire(timeout=10)
    # As long as a wait would take.
    copy, until = in_thread(lambda: delivered(book, id, redelivered=True)), time.monotonic() + 3
    while time.monotonic() < until:
        assert book.AsyncResult(id).state == "STARTED"
        time.sleep(0.05)
    leave.set()
    for future in (first, copy):
        future.result(timeout=20)
    assert book.AsyncResult(id).result == "done"
    eventually(lambda: not judge.held(), "a lock is left", within=2)
    assert not ran.acquire(blocking=False), "it ran twice"


@pytest.mark.parametrize("first", ["session", "transaction"])
@pytest.mark.parametrize("second", ["session", "transaction"])
@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_scopes_meet_under_one_name(dsn: str, judge: Judge, first: str, second: str, mode: str) -> None:
    """An exclusive lock of one keeps out the other, and shared ones go together."""

    def other() -> None:
        with advisory_lock("n", scope=second, mode=mode, database_url=dsn):
            assert len(judge.locks()) == 2

    with advisory_lock("n", scope=first, mode=mode, database_url=dsn):
        if mode == "shared" and (first, second) != ("session", "session"):
            in_thread(other).result(timeout=20)
        elif mode == "exclusive":
            with pytest.raises(LockNotAcquired, match="n"):
                in_thread(other).result(timeout=20)


def test_a_fork_beside_a_transaction_costs_it_nothing(app: Celery, judge: Judge, rows: Rows) -> None:
    """A child can neither commit nor end it, and its end is no end of the connection."""

    def child() -> None:
        import gc

        with pytest.raises((psycopg.Error, LockLost, TypeError)):
            write("by the child")
        gc.collect()

    def body() -> None:
        pid = judge.holder(ID)
        for _ in range(2):
            assert status_of(forked(child)) == 0
        assert judge.holder(ID) == pid
        write("late")

    assert task(app, body).delay().state == "SUCCESS"
    assert rows() == ["early", "late"]


# Behind a pooler.


@pytest.fixture
def pooled(pgbouncer: PgBouncer, dbname: str) -> str:
    return pgbouncer.url(dbname)


def test_it_works_behind_a_pooler_in_transaction_mode(
    app: Celery, pooled: str, judge: Judge, rows: Rows, pgbouncer: PgBouncer, dbname: str
) -> None:
    """Twelve runs: the lock excludes, nothing is prepared, and no setting is left for other clients."""
    app.conf.pglock_database_url = pooled

    def body() -> None:
        assert judge.held() == {ID}
        write(f"run {len(rows())}")
        current_lock().connection.execute("SELECT %s::int", [5], prepare=None)

    for _ in range(12):
        result = task(app, body).delay()
        assert result.state == "SUCCESS", result.result
    assert len([row for row in rows() if row.startswith("run")]) == 12
    assert judge.held() == set()
    with psycopg.connect(pooled, autocommit=True, prepare_threshold=None) as client:
        assert client.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
        changed = client.execute(
            "SELECT name, setting FROM pg_settings WHERE source = 'session' AND name NOT IN"
            " ('application_name', 'client_encoding', 'DateStyle', 'TimeZone', 'standard_conforming_strings')"
        ).fetchall()
        assert changed == []
    # The pooler's own connections keep the name of the client that they served.
    close_all()
    for pid in judge.sessions():
        judge.end(pid)


def test_what_others_have_behind_a_pooler_stays_theirs(
    postgres: PostgreSQL, dbname: str, judge: Judge
) -> None:
    """A connection is cleared of what a body left; behind a pooler that is not ours to clear."""
    with PgBouncer(postgres, default_pool_size=1) as pooler:
        url = pooler.url(dbname)
        with psycopg.connect(url, autocommit=True, prepare_threshold=None) as client:
            client.execute("PREPARE theirs AS SELECT 1")
            client.execute("CREATE TEMP TABLE their_rows ()")
            for _ in range(3):
                with advisory_lock(ID, scope="transaction", database_url=url) as lock:
                    lock.connection.execute("SELECT 1")
            assert client.execute("EXECUTE theirs").fetchone() == (1,)
            client.execute("TABLE their_rows")
        close_all()


def test_a_session_lock_is_refused_behind_that_pooler(pooled: str) -> None:
    """The control: there a session lock would be shared or lost."""
    from celery_pglock import LockSetupError

    with pytest.raises(LockSetupError, match="pooler"), advisory_lock("n", database_url=pooled):
        pass


def test_a_pool_without_a_free_connection_is_an_error_and_no_conflict(
    postgres: PostgreSQL, dbname: str, judge: Judge
) -> None:
    """Three connections and a fourth lock: told within seconds that it could not be asked for."""
    with PgBouncer(postgres, default_pool_size=3) as small:
        settings = Settings(small.url(dbname), loss_timeout=3.0)
        holds = [Hold(LockId(n)) for n in range(4)]
        scopes = [Transaction(settings) for _ in holds]
        for scope, hold in zip(scopes[:3], holds, strict=False):
            assert scope.acquire(hold).answer is Answer.GRANTED
        since = time.monotonic()
        asked = scopes[3].acquire(holds[3])
        assert asked.answer is Answer.UNKNOWN
        assert isinstance(asked.error, LockUnavailable)
        assert "a pooler without a free server connection" in str(asked.error)
        assert time.monotonic() - since < 5, "as long as the bound, and no second time"
        for scope, hold in zip(scopes[:3], holds, strict=False):
            scope.release(hold)
        assert scopes[3].acquire(holds[3]).answer is Answer.GRANTED
        scopes[3].release(holds[3])
    eventually(lambda: not judge.held(), "a lock is left", within=2)
