"""The lock as a block of code that is no task: scripts, web requests, management commands."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType

import psycopg
import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured
from psycopg.conninfo import make_conninfo

from celery_pglock import (
    AdvisoryLockedTask,
    LockDeadlock,
    LockId,
    LockLost,
    LockNotAcquired,
    LockUnavailable,
    advisory_lock,
    current_lock,
    is_skipped,
)
from celery_pglock.locks.hold import Hold
from celery_pglock.locks.keeper import Keeper, keeper_for
from celery_pglock.locks.keys import id_of
from celery_pglock.locks.owner import Owner
from celery_pglock.locks.requests import FindHolder
from celery_pglock.locks.session import Session
from celery_pglock.locks.settings import Settings
from integration.judge import Judge, eventually
from integration.rivals import in_thread, wait_until_waiting
from localservers import PostgreSQL

DEPLOY = id_of("celery:deploy")

pytestmark = pytest.mark.usefixtures("way")


@pytest.fixture(params=["session", "transaction"])
def scope(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_block_holds_the_lock_until_it_ends(dsn: str, judge: Judge, scope: str) -> None:
    """Whatever its end is."""
    with advisory_lock("deploy", scope=scope, database_url=dsn) as lock:
        assert judge.held() == {DEPLOY}
        assert (lock.name, lock.id, lock.lost) == ("celery:deploy", DEPLOY, False)
        assert current_lock() is lock
        lock.check()
    assert judge.held() == set()
    assert current_lock() is None
    with pytest.raises(ZeroDivisionError), advisory_lock("deploy", scope=scope, database_url=dsn):
        1 / 0  # noqa: B018
    assert judge.held() == set()


def test_a_try_is_refused_at_once(dsn: str, judge: Judge, scope: str) -> None:
    """`wait=0` tries once, and the text holds the name."""
    judge.take(DEPLOY)
    since = time.monotonic()
    with (
        pytest.raises(LockNotAcquired, match="celery:deploy"),
        advisory_lock("deploy", scope=scope, database_url=dsn),
    ):
        pass
    assert time.monotonic() - since < 1
    judge.give_back()
    assert current_lock() is None


@pytest.mark.parametrize("wait", [0.4, timedelta(seconds=0.4)], ids=str)
def test_seconds_are_waited(dsn: str, judge: Judge, scope: str, wait: float | timedelta) -> None:
    """As many as were given, and the text tells how many they were."""
    judge.take(DEPLOY)
    since = time.monotonic()
    with (
        pytest.raises(LockNotAcquired, match=r"celery:deploy.*0\.[4-9]"),
        advisory_lock("deploy", wait, scope=scope, database_url=dsn),
    ):
        pass
    assert 0.4 <= time.monotonic() - since < 1.2
    judge.give_back()


@pytest.mark.parametrize("wait", [20, None])
@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_a_name_that_becomes_free_is_taken(
    dsn: str, judge: Judge, scope: str, wait: float | None, mode: str
) -> None:
    """In each mode, at once."""

    def block() -> float:
        with advisory_lock("deploy", wait, scope=scope, mode=mode, database_url=dsn):
            return time.monotonic()

    judge.take(DEPLOY)
    future = in_thread(block)
    wait_until_waiting(judge, 1, DEPLOY)
    since = time.monotonic()
    judge.give_back()
    assert future.result(timeout=20) - since < 0.5


def test_a_block_is_used_once(dsn: str, judge: Judge, scope: str) -> None:
    """One handle for each acquisition: a second use could free what the first still holds."""
    lock = advisory_lock("deploy", scope=scope, database_url=dsn)
    with lock:
        assert "held" in repr(lock)
        with pytest.raises(TypeError, match="one block"), lock:
            pass
        assert judge.held() == {DEPLOY}
    with pytest.raises(TypeError, match="one block"), lock:
        pass
    assert judge.held() == set()


def test_blocks_of_many_threads_exclude_each_other(dsn: str, judge: Judge, way: str, scope: str) -> None:
    """Two hundred entries of eight threads, one at a time, on one session where that carries them."""
    if way != "owner":
        pytest.skip("a process of many threads has an owner")
    inside: list[int] = []
    entries: list[int] = []

    def press(number: int) -> None:
        for _ in range(25):
            with advisory_lock("deploy", 20, scope=scope, database_url=dsn):
                inside.append(number)
                entries.append(number)
                assert inside == [number]
                inside.remove(number)

    for future in [in_thread(lambda n=n: press(n)) for n in range(8)]:
        future.result(timeout=60)
    assert len(entries) == 200
    eventually(lambda: len(judge.sessions()) <= 1, "one session is left", within=2)


def test_blocks_of_threads_collide_without_a_lock(way: str) -> None:
    """The control."""
    barrier = threading.Barrier(2, timeout=5)
    for future in [in_thread(barrier.wait) for _ in range(2)]:
        future.result(timeout=10)


@pytest.mark.parametrize(
    "moment",
    [(Session, "perform"), (Session, "owe"), (Owner, "_answer_all"), (Keeper, "_drop_session")],
    ids=["statement", "owed", "owner", "watch"],
)
def test_a_block_that_is_collected_as_garbage_waits_for_nobody(
    dsn: str, judge: Judge, way: str, monkeypatch: pytest.MonkeyPatch, moment: tuple[type, str]
) -> None:
    """Whoever allocates closes a generator in a cycle, perhaps who is to answer its release."""
    (its_class, name), collected = moment, []
    if way == ("owner" if name == "owe" else "one at a time" if its_class is Owner else None):
        pytest.skip("no moment of that way")
    method = getattr(its_class, name)

    def collect_first(*args: object) -> object:
        if not any(collected):
            collected.append(gc.collect())
        return method(*args)

    def lines() -> Iterator[int]:
        with advisory_lock("deploy", database_url=dsn):
            yield 1

    def leave_garbage() -> None:
        cycle: list[object] = []
        cycle += [cycle, read := lines()]
        next(read)

    def work() -> None:
        keeper, owed = keeper_for(Settings(dsn)), Hold(LockId(5))
        keeper.acquire(owed)
        leave_garbage()
        assert judge.held() == {DEPLOY, LockId(5)}
        monkeypatch.setattr(its_class, name, collect_first)
        keeper.release_soon(owed)
        if its_class is Keeper:
            judge.end(judge.holder(DEPLOY))
            eventually(lambda: collected, "the watch does not see the end")
        with advisory_lock("other", database_url=dsn):
            pass

    gc.disable()
    try:
        in_thread(work).result(timeout=5)
        eventually(lambda: not judge.held(), "the lock of what was collected is left", within=3)
    finally:
        gc.enable()
    assert any(collected)


@pytest.mark.parametrize("wait", [0, 5])
def test_a_block_inside_of_a_statement_is_refused_and_locks_nothing(
    dsn: str, judge: Judge, way: str, wait: float
) -> None:
    """A signal handler may come while its own thread stands in the queue, and is told at once."""
    if way == "owner":
        pytest.skip("the owner's thread gets no signal")
    refusals: list[LockUnavailable] = []

    def handle(*_: object) -> None:
        since = time.monotonic()
        with pytest.raises(LockUnavailable) as refusal, advisory_lock("deploy", wait, database_url=dsn):
            pass
        assert time.monotonic() - since < 1
        refusals.append(refusal.value)

    judge.take(LockId(5))
    previous = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(LockNotAcquired), advisory_lock(LockId(5), 1, database_url=dsn):
            pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    # Answered behind all else that was left to the owner.
    keeper_for(Settings(dsn))._owner.ask(FindHolder(DEPLOY))
    judge.give_back()
    assert judge.held() == set()
    (refusal,) = refusals
    assert "signal handler" in str(refusal)
    with advisory_lock("deploy", database_url=dsn):
        assert judge.held() == {DEPLOY}


# Whose settings.


def test_the_database_is_the_app_s(app: Celery, judge: Judge) -> None:
    """And the namespace."""
    app.conf.pglock_namespace = "shop"
    with advisory_lock("deploy", app=app):
        assert judge.held() == {id_of("shop:deploy")}


def test_the_database_of_an_argument_wins(judge: Judge, dsn: str) -> None:
    """An app elsewhere lends its namespace and no more."""
    app = Celery("other", set_as_current=False)
    app.conf.update(pglock_database_url="postgresql://nowhere.invalid/", pglock_namespace="shop")
    with advisory_lock("deploy", app=app, database_url=dsn):
        assert judge.held() == {id_of("shop:deploy")}


def test_without_a_database_it_is_said_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock in a database that nobody named excludes nobody."""
    monkeypatch.delenv("CELERY_PGLOCK_DATABASE_URL", raising=False)
    with pytest.raises(ImproperlyConfigured, match="CELERY_PGLOCK_DATABASE_URL"):
        advisory_lock("deploy", app=Celery("other", set_as_current=False))


def test_disabled_locks_let_a_block_run(app: Celery, judge: Judge) -> None:
    """As they let tasks run."""
    app.conf.pglock_enabled = False
    with advisory_lock("deploy", app=app) as lock:
        assert judge.held() == set()
        assert not lost(lock)


def lost(lock: object) -> bool:
    return bool(getattr(lock, "lost", False))


IN_A_THREAD = """
import threading
from celery import Celery
from celery_pglock import advisory_lock

apps = [Celery(name) for name in NAMES]
for app in apps:
    app.conf.pglock_namespace = "prod"

def lock():
    try:
        with advisory_lock("deploy") as hold:
            print(hold.name)
    except TypeError as exc:
        print(exc)

thread = threading.Thread(target=lock)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("names", "printed"), [(["one"], "prod:deploy"), (["one", "two"], "name one (app=)")]
)
def test_another_thread_never_locks_under_another_namespace(
    names: list[str], printed: str, dsn: str, tmp_path: Path
) -> None:
    """An app is current in the thread that made it alone: Celery's default would exclude no task."""
    script = tmp_path / "script.py"
    script.write_text(IN_A_THREAD.replace("NAMES", repr(names)))
    environment = {**os.environ, "CELERY_PGLOCK_DATABASE_URL": dsn}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert printed in done.stdout, done


def test_a_name_in_another_database_is_another_lock(judge: Judge, postgres: PostgreSQL, dsn: str) -> None:
    """One maintenance lock over all shards: the hold in one of them covers no block in the next."""
    other = postgres.url()
    with advisory_lock("maintenance", database_url=dsn), advisory_lock("maintenance", database_url=other):
        holders = "SELECT count(DISTINCT database) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        assert judge.observer.execute(holders).fetchone() == (2,)


def test_one_database_may_be_named_in_two_ways(dsn: str, judge: Judge) -> None:
    """Else a block inside of another would wait for itself."""
    conninfo = make_conninfo(dsn, connect_timeout=5)
    with advisory_lock("deploy", database_url=dsn), advisory_lock("deploy", database_url=conninfo):
        assert len(judge.locks()) == 1


def test_a_name_with_its_namespace_is_told(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    """Logs and markers show it whole. Pasted from there it locks another name than the task."""
    advisory_lock("shop.train:tenant:42", app=app)
    assert not caplog.records
    advisory_lock("celery:shop.train:tenant:42", app=app)
    assert "its whole name is 'celery:celery:shop.train:tenant:42'" in caplog.text


def test_a_script_needs_no_app(dsn: str, judge: Judge, tmp_path: Path) -> None:
    """The environment is enough, and the end of the script is the end of its lock and its session."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        from celery_pglock import advisory_lock
        with advisory_lock("deploy"):
            print("in", flush=True)
            input()
        print("out", flush=True)
        """)
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "error", script],
        cwd=tmp_path,
        env={**os.environ, "CELERY_PGLOCK_DATABASE_URL": dsn},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "in\n"
        assert judge.held() == {DEPLOY}
        out, err = process.communicate("\n", timeout=20)
    assert (out, err, process.returncode) == ("out\n", "", 0)
    assert judge.held() == set()
    assert judge.sessions() == []


def test_a_server_that_is_not_there_is_no_conflict(way: str) -> None:
    """It could not be asked."""
    with (
        pytest.raises(LockUnavailable),
        advisory_lock("deploy", database_url="postgresql://127.0.0.1:1/none?connect_timeout=2"),
    ):
        pass


# Lost.


def test_a_loss_is_told(dsn: str, judge: Judge, scope: str) -> None:
    """By `.lost` and `.check()` in the block, and by an error at its end."""
    entered = False
    with (  # noqa: PT012
        pytest.raises(LockLost, match="celery:deploy"),
        advisory_lock("deploy", scope=scope, database_url=dsn) as lock,
    ):
        judge.end(judge.holder(DEPLOY))
        eventually(lambda: lock.lost, "the loss is not noticed", within=1)
        with pytest.raises(LockLost):
            lock.check()
        entered = True
    assert entered
    with advisory_lock("deploy", scope=scope, database_url=dsn):
        assert judge.held() == {DEPLOY}


def test_a_block_s_own_error_is_not_hidden_by_a_loss(dsn: str, judge: Judge, scope: str) -> None:
    """It comes first."""
    with pytest.raises(ZeroDivisionError), advisory_lock("deploy", scope=scope, database_url=dsn) as lock:  # noqa: PT012
        judge.end(judge.holder(DEPLOY))
        eventually(lambda: lock.lost, "the loss is not noticed", within=1)
        1 / 0  # noqa: B018


@pytest.mark.parametrize("wait", [0, 20])
def test_a_loss_interrupts_a_block_that_wants_it(dsn: str, judge: Judge, scope: str, wait: float) -> None:
    """On the main thread, in the middle of a sleep; without `abort` it sleeps on (the control)."""
    for abort, seconds in ((True, 20.0), (False, 0.6)):
        since = time.monotonic()
        with (  # noqa: PT012
            pytest.raises(LockLost),
            advisory_lock("deploy", wait, scope=scope, abort=abort, database_url=dsn),
        ):
            pid = judge.holder(DEPLOY)
            in_thread(lambda pid=pid: end(dsn, pid))
            time.sleep(seconds)
        assert time.monotonic() - since < 2 if abort else time.monotonic() - since >= 0.6
        eventually(lambda: not judge.held(), "the lock is left", within=2)


@pytest.fixture
def _signal_is_put_back() -> Iterator[None]:
    previous = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, previous)


@pytest.mark.usefixtures("_signal_is_put_back")
@pytest.mark.parametrize("chains", [False, True])
def test_a_loss_interrupts_a_block_whoever_took_the_signal(dsn: str, judge: Judge, chains: bool) -> None:
    """A profiler or a debugger, since the last block. What is sent to it still reaches it, and once."""
    told = []
    signal.signal(signal.SIGUSR2, lambda *_: told.append("first"))
    with advisory_lock("deploy", abort=True, database_url=dsn):
        ours = signal.getsignal(signal.SIGUSR2)

    def second(number: int, frame: FrameType | None) -> None:
        told.append("second")
        if chains:
            ours(number, frame)

    signal.signal(signal.SIGUSR2, second)
    since = time.monotonic()
    with pytest.raises(LockLost), advisory_lock("deploy", abort=True, database_url=dsn):  # noqa: PT012
        pid = judge.holder(DEPLOY)
        in_thread(lambda: end(dsn, pid))
        time.sleep(20)
    assert time.monotonic() - since < 2
    assert told == []
    os.kill(os.getpid(), signal.SIGUSR2)
    assert told == (["second", "first"] if chains else ["second"])
    # It goes, and puts back what it has found.
    signal.signal(signal.SIGUSR2, ours)
    with advisory_lock("deploy", abort=True, database_url=dsn):
        assert signal.getsignal(signal.SIGUSR2) is ours


def end(dsn: str, pid: int) -> None:
    time.sleep(0.1)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(%s)", [pid])


# Ids as they are.


@pytest.mark.parametrize("id", [LockId(77), LockId(-(2**63)), LockId(7, 7), LockId(-1, 2**31 - 1)], ids=repr)
def test_another_program_takes_the_same_lock(dsn: str, judge: Judge, id: LockId, scope: str) -> None:
    """Both key spaces, by plain SQL, in both directions."""
    keys = ", ".join("%s::bigint" if len(id) == 1 else "%s::int" for _ in id)
    with psycopg.connect(dsn, autocommit=True) as program:

        def take() -> bool:
            return program.execute(f"SELECT pg_try_advisory_lock({keys})", list(id)).fetchone()[0]

        with advisory_lock(id, scope=scope, database_url=dsn):
            assert not take()
        assert take()
        with pytest.raises(LockNotAcquired), advisory_lock(id, scope=scope, database_url=dsn):
            pass
        assert judge.held() == {id}


def test_a_task_takes_the_lock_of_another_program(app: Celery, judge: Judge) -> None:
    """By a callable `lock_key`, out of its arguments."""

    @app.task(base=AdvisoryLockedTask, name="f", shared=False, lock_key=lambda n: LockId(9, n))
    def f(n: int) -> list[LockId]:
        return sorted(judge.held())

    assert f.delay(5).result == [LockId(9, 5)]
    judge.take(LockId(9, 5))
    assert f.delay(5).result["pglock"] == "skipped"
    assert f.delay(6).result == sorted([LockId(9, 5), LockId(9, 6)])
    judge.give_back()
    assert "outside" in str(f.delay(2**31).result)


# Nested.


def test_a_body_takes_other_names(app: Celery, judge: Judge, scope: str) -> None:
    """They come and go, and its own stays."""

    @app.task(base=AdvisoryLockedTask, name="f", shared=False, lock_key=lambda: LockId(1), lock_scope=scope)
    def f() -> bool:
        outer = current_lock()
        for inner_scope in ("session", "transaction"):
            for wait in (0, 5):
                with advisory_lock(LockId(2), wait, scope=inner_scope, app=app):
                    assert judge.held() == {LockId(1), LockId(2)}
                    assert current_lock() is not outer
                assert judge.held() == {LockId(1)}
                assert current_lock() is outer
        return True

    assert f.delay().result is True
    assert judge.held() == set()


def test_a_block_that_was_never_left_covers_no_later_body(app: Celery, judge: Judge, scope: str) -> None:
    """An interrupt at the door of its `__exit__` leaves it so, until the last traceback is gone."""
    blocks = []

    @app.task(base=AdvisoryLockedTask, name="f", shared=False, lock_key=lambda: LockId(1))
    def f() -> None:
        blocks.append(advisory_lock(LockId(2), scope=scope, app=app))
        blocks[-1].__enter__()

    @app.task(base=AdvisoryLockedTask, name="g", shared=False, lock_key=lambda: LockId(2))
    def g() -> bool:
        return True

    f.delay()
    assert judge.held() == {LockId(2)}
    assert current_lock() is None
    assert is_skipped(g.delay().result)
    blocks.clear()
    eventually(lambda: not judge.held(), "the block was not given back")
    assert g.delay().result is True


@pytest.mark.parametrize("inner", ["session", "transaction"])
def test_a_name_that_is_held_is_not_taken_twice(dsn: str, judge: Judge, scope: str, inner: str) -> None:
    """And not freed early, however deep, whatever happens inside."""
    with advisory_lock("deploy", scope=scope, database_url=dsn) as outer:
        for _ in range(3):
            with advisory_lock("deploy", 5, scope=inner, database_url=dsn) as lock:
                assert lock is outer
                with pytest.raises(ValueError), advisory_lock("deploy", database_url=dsn):  # noqa: PT011
                    raise ValueError
                assert judge.held() == {DEPLOY}
            assert judge.held() == {DEPLOY}
            assert len(judge.locks()) == 1
    assert judge.held() == set()


def test_a_reader_does_not_write_under_its_own_lock(dsn: str, judge: Judge) -> None:
    """A shared hold is none that an exclusive block may run under: there may be other readers."""
    with advisory_lock("deploy", mode="shared", database_url=dsn):
        with psycopg.connect(dsn, autocommit=True) as reader:
            reader.execute("SELECT pg_advisory_lock_shared(%s)", [DEPLOY[0]])
            ran = False
            with pytest.raises(LockDeadlock, match=r"^an exclusive lock 'celery:deploy' inside"):  # noqa: SIM117
                with advisory_lock("deploy", database_url=dsn):
                    ran = True
            assert not ran, "an exclusive block ran beside a reader"
        assert judge.held() == {DEPLOY}
    eventually(lambda: not judge.held(), "the lock is left", within=1)


def test_a_writer_reads_under_its_own_lock(dsn: str, judge: Judge) -> None:
    """The other way round is safe."""
    with (
        advisory_lock("deploy", database_url=dsn) as outer,
        advisory_lock("deploy", mode="shared", database_url=dsn) as lock,
    ):
        assert lock is outer
    assert judge.held() == set()


def test_a_reading_task_does_not_run_a_writing_one_under_its_lock(app: Celery, judge: Judge) -> None:
    """`apply()` inside a body runs under the body's lock only where that is as strong."""
    options = {"base": AdvisoryLockedTask, "shared": False, "lock_name": "n", "lock_key": []}
    ran: list[str] = []

    @app.task(name="write", lock_on_conflict="raise", **options)
    def write() -> None:
        ran.append("write")

    @app.task(name="read", lock_mode="shared", **options)
    def read() -> None:
        with psycopg.connect(app.conf.pglock_database_url, autocommit=True) as reader:
            reader.execute("SELECT pg_advisory_lock_shared(%s)", [id_of("celery:n")[0]])
            write.apply()

    app.finalize()
    read.delay()
    assert ran == []
    write.delay()
    assert ran == ["write"]


def test_many_names_are_left_in_any_order(dsn: str, judge: Judge) -> None:
    """An `ExitStack` of them, some of which fail."""
    judge.take(LockId(5))
    with ExitStack() as stack:
        for n in range(10):
            with suppress(LockNotAcquired) if n == 5 else nullcontext():
                stack.enter_context(advisory_lock(LockId(n), database_url=dsn))
        assert judge.held() == {LockId(n) for n in range(10)}
    assert judge.held() == {LockId(5)}
    judge.give_back()


def test_names_nest_across_threads_without_mixing(dsn: str, judge: Judge, way: str) -> None:
    """A thread that is started inside of a block is not inside of it."""

    def beside() -> None:
        assert current_lock() is None
        with advisory_lock("deploy", database_url=dsn):
            pass

    with advisory_lock("deploy", database_url=dsn), pytest.raises(LockNotAcquired):
        in_thread(beside).result(timeout=20)


def test_blocks_that_wait_for_each_other_end(dsn: str, judge: Judge, way: str) -> None:
    """Two threads, each with what the other wants: both end when their time is up, and nothing is left."""
    if way != "owner":
        pytest.skip("with one session for each process the server sees it, and needs two processes")
    barrier = threading.Barrier(2)

    def cross(first: int, second: int) -> None:
        with advisory_lock(LockId(first), database_url=dsn):
            barrier.wait(timeout=10)
            with advisory_lock(LockId(second), 1, database_url=dsn):
                pass

    since = time.monotonic()
    futures = [in_thread(lambda pair=pair: cross(*pair)) for pair in ((1, 2), (2, 1))]
    ends = [future.exception(timeout=20) for future in futures]
    assert any(isinstance(error, LockNotAcquired) for error in ends)
    assert all(error is None or isinstance(error, LockNotAcquired) for error in ends)
    assert time.monotonic() - since < 3
    eventually(lambda: not judge.held(), "a lock is left", within=2)
