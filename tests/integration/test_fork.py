"""A forked child can neither use nor end its parent's session, nor keep its lock alive."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context

import pytest
from billiard.common import reset_signals
from celery import Celery

from celery_pglock import AdvisoryLockedTask, LockId, LockLost, advisory_lock
from celery_pglock.config import settings_of
from celery_pglock.locks.hold import Hold
from celery_pglock.locks.keeper import Keeper, keeper_for
from celery_pglock.locks.session import Answer
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


def test_a_child_does_not_keep_the_lock_of_a_dead_parent(app: Celery, judge: Judge) -> None:
    """A grandchild that lives on holds no descriptor of the socket."""
    ready, ready_for_parent = os.pipe()

    def parent() -> None:
        keeper = keeper_for(settings_of(app))
        assert keeper.acquire(Hold(ID)).answer is Answer.GRANTED
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
