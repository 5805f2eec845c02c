"""A forked child can neither use nor end its parent's session, nor keep its lock alive."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from billiard.common import reset_signals
from celery import Celery

from celery_pglock import AdvisoryLockedTask, LockId, LockLost, advisory_lock
from celery_pglock.config import settings_of
from celery_pglock.locks.hold import Hold
from celery_pglock.locks.keeper import Keeper, keeper_for, scribe_for
from celery_pglock.locks.session import Answer
from celery_pglock.locks.transaction import Transaction
from integration.judge import Judge, eventually

ID, OTHER = LockId(1), LockId(2)

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork"),
    # What Python 3.12 says of a fork beside threads, which is what these tests are about.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
    pytest.mark.usefixtures("way"),
]


def in_child(function: Callable[[], None]) -> int:
    """Run a function in a forked child, which ends without the parent's clean-up. Returns its status."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        function()
        status = 0
    except BaseException:  # noqa: BLE001 - shown by the child, told by its status
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


@contextmanager
def no_descriptor_left() -> Iterator[Callable[[], None]]:
    """Bring the process to its limit of open files. The function brings it back, in a child as well.

    Itself a child: a number that another thread waits for in ``accept()`` would be free in the next one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []

    def give_back() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        while taken:
            os.close(taken.pop())

    highest = max(int(number.name) for number in Path("/dev/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield give_back
    finally:
        give_back()


@pytest.fixture
def keeper(app: Celery) -> Keeper:
    """This process's keeper: it is the one that a fork has to deal with."""
    return keeper_for(settings_of(app))


@pytest.fixture
def hold(keeper: Keeper) -> Hold:
    hold = Hold(ID)
    assert keeper.acquire(hold).answer is Answer.GRANTED
    return hold


def test_a_child_that_ends_does_not_end_the_session_of_its_parent(
    keeper: Keeper, hold: Hold, judge: Judge
) -> None:
    """However often one is forked, the parent's lock stays, and its session serves on."""
    pid = judge.holder(ID)
    for _ in range(3):
        assert in_child(lambda: None) == 0
    assert judge.holder(ID) == pid
    keeper.release(hold)
    assert not hold.lost
    assert judge.sessions() == [pid]


def test_a_child_that_closes_and_releases_costs_its_parent_nothing(
    keeper: Keeper, hold: Hold, judge: Judge
) -> None:
    """What it inherited is dead: neither a close, a release nor its garbage reaches the server."""
    pid = judge.holder(ID)

    def child() -> None:
        session = keeper._session
        keeper.release_soon(hold)
        keeper.close()
        if session is not None:
            session.close("the child's own")

    assert in_child(child) == 0
    assert judge.holder(ID) == pid
    keeper.release(hold)
    assert not hold.lost


def test_a_child_opens_a_session_of_its_own(app: Celery, keeper: Keeper, hold: Hold, judge: Judge) -> None:
    """And meets the lock of its parent there, as any other process would."""

    def child() -> None:
        own = keeper_for(settings_of(app))
        assert own is not keeper
        assert own.acquire(Hold(ID)).answer is Answer.CONFLICT
        other = Hold(OTHER)
        assert own.acquire(other).answer is Answer.GRANTED
        assert judge_in_child(app).holder(OTHER) != judge_in_child(app).holder(ID)
        own.release(other)
        own.close()

    assert in_child(child) == 0
    assert judge.held() == {ID}
    keeper.release(hold)


def test_a_child_draws_its_tokens_on_a_session_of_its_own(
    app: Celery, keeper: Keeper, hold: Hold, judge: Judge
) -> None:
    """The one that its parent draws them on is neither used nor ended."""
    drawn = hold.fencing_token()
    sessions = judge.sessions()
    assert len(sessions) == 2

    def child() -> None:
        other = Hold(OTHER)
        assert keeper_for(settings_of(app)).acquire(other).answer is Answer.GRANTED
        assert other.fencing_token() > drawn

    assert in_child(child) == 0
    eventually(lambda: sorted(judge.sessions()) == sorted(sessions), "the parent's sessions", within=2)
    keeper.release(hold)
    again = Hold(ID)
    assert keeper.acquire(again).answer is Answer.GRANTED
    assert again.fencing_token() > drawn
    keeper.release(again)


def judge_in_child(app: Celery) -> Judge:
    """The parent's observer is none of the child's business either."""
    import psycopg

    return Judge(psycopg.connect(app.conf.pglock_database_url, autocommit=True))


@pytest.mark.parametrize("limit", [nullcontext, no_descriptor_left], ids=["", "at the limit"])
@pytest.mark.parametrize("scope", ["session", "transaction"])
def test_a_child_does_not_keep_the_lock_of_a_dead_parent(
    app: Celery, judge: Judge, scope: str, limit: Callable[[], AbstractContextManager[Any]]
) -> None:
    """A grandchild that lives on holds no descriptor of the socket, wherever it could open none either."""
    ready, ready_for_parent = os.pipe()

    def parent() -> None:
        settings = settings_of(app)
        holder = keeper_for(settings) if scope == "session" else Transaction(settings)
        assert holder.acquire(Hold(ID)).answer is Answer.GRANTED
        with limit():
            grandchild = os.fork()
        if not grandchild:
            signal.pause()
        os.write(ready_for_parent, grandchild.to_bytes(4, "big"))
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(parent) == -signal.SIGKILL
    grandchild = int.from_bytes(os.read(ready, 4), "big")
    try:
        eventually(lambda: not judge.held(), "a grandchild keeps the lock alive", within=2)
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(ready)
        os.close(ready_for_parent)


def test_a_body_that_uses_multiprocessing_keeps_its_lock(app: Celery, judge: Judge) -> None:
    """Its processes come and go."""

    @app.task(base=AdvisoryLockedTask, lock_key=lambda: ID, shared=False)
    def f():
        pid = judge.holder(ID)
        process = get_context("fork").Process(target=os.getpid)
        process.start()
        process.join()
        return judge.holder(ID) == pid

    assert f.delay().get() is True
    assert judge.held() == set()


def test_a_locked_task_in_a_child_of_a_body_takes_part(app: Celery, judge: Judge) -> None:
    """It does not run under the hold of a session that is not its own."""

    @app.task(base=AdvisoryLockedTask, name="f", lock_key="<x>", shared=False)
    def f(x, inner=False):
        if inner:
            return "ran"

        def child() -> None:
            assert f.apply((2,), {"inner": True}).get(disable_sync_subtasks=False) == "ran"

        return in_child(child)

    assert f.delay(1).get() == 0
    assert judge.held() == set()


def test_a_keeper_of_before_the_fork_begins_anew(keeper: Keeper, hold: Hold, judge: Judge) -> None:
    """Somebody may have kept it: a `Leader` that was made when its module was imported."""

    def child() -> None:
        mine, theirs = socket.socketpair()
        other = Hold(OTHER)
        assert keeper.acquire(other).answer is Answer.GRANTED
        mine.send(b"not the watch's")
        theirs.settimeout(2)
        assert theirs.recv(64) == b"not the watch's"
        assert judge.holder(ID) != judge.holder(OTHER)
        keeper.release(other)
        assert keeper.acquire(Hold(ID)).answer is Answer.CONFLICT

    assert in_child(child) == 0
    assert not hold.lost
    keeper.release(hold)


def test_a_fork_at_the_limit_of_open_files_begins_anew(app: Celery, judge: Judge) -> None:
    """Nothing has to be opened for what is given up: the child's own hold is acquired, and watched."""

    def parent() -> None:
        keeper, hold, other = keeper_for(settings_of(app)), Hold(ID), Hold(OTHER)
        assert keeper.acquire(hold).answer is Answer.GRANTED

        def child() -> None:
            give_back()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            own = judge_in_child(app)
            assert keeper.acquire(other).answer is Answer.GRANTED
            own.end(own.holder(OTHER))
            eventually(lambda: other.lost, "nobody watches", within=5)
            assert own.held() == {ID}

        with no_descriptor_left() as give_back:
            assert in_child(child) == 0
        assert not hold.lost

    assert in_child(parent) == 0


def test_what_can_not_be_given_up_keeps_nothing_else(
    app: Celery, keeper: Keeper, hold: Hold, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the others is given up, and nobody in the child meets any of them again."""
    settings = settings_of(app)
    hold.fencing_token()
    scribe = scribe_for(settings, "tokens")
    inherited, transaction = Hold(OTHER), Transaction(settings)
    transaction.acquire(inherited)

    def fail() -> None:
        raise OSError("it can not")

    def child() -> None:
        assert scribe._session is None
        assert inherited.lost
        assert keeper_for(settings) is not keeper
        assert keeper_for(settings).acquire(Hold(ID)).answer is Answer.CONFLICT

    with monkeypatch.context() as patch:
        patch.setattr(keeper, "disown", fail)
        assert in_child(child) == 0
    assert [hold.lost, inherited.lost] == [False, False]
    transaction.release(inherited)
    keeper.release(hold)


def test_a_child_whose_signals_were_reset_is_stopped_by_a_loss(app: Celery, judge: Judge) -> None:
    """As billiard resets them at the start of a worker's child, where its parent had a block before."""
    url = app.conf.pglock_database_url
    with advisory_lock(ID, abort=True, database_url=url):
        pass

    def child() -> None:
        reset_signals(full=True)
        own = judge_in_child(app)
        with pytest.raises(LockLost), advisory_lock(ID, abort=True, database_url=url):  # noqa: PT012
            own.end(own.holder(ID))
            time.sleep(5)
            raise AssertionError("nothing stopped it")

    assert in_child(child) == 0
