"""One leads, the others follow, and the next leads when the first is gone or has stopped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_pglock import Leader, LockId
from celery_pglock.locks.keys import id_of
from integration.judge import Judge, eventually
from integration.rivals import forked, kill, status_of

ID = id_of("celery:orchestrator")

pytestmark = [
    pytest.mark.usefixtures("way"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]


class Diary:
    """What the callbacks of many leaders were told, in order."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def note(self, name: str, event: str) -> Callable[[], None]:
        return lambda: self.lines.append((name, event))


@pytest.fixture
def diary() -> Diary:
    return Diary()


@pytest.fixture
def new_leader(dsn: str, diary: Diary, judge: Judge) -> Iterator[Callable[..., Leader]]:
    """Make leaders that look often; all are stopped at the end, and nothing is left of them."""
    leaders: list[Leader] = []
    threads = threading.active_count()

    def new_leader(name: str = "a", **options: Any) -> Leader:
        options = {
            "poll": 0.05,
            "on_gain": diary.note(name, "gain"),
            "on_loss": diary.note(name, "loss"),
            "database_url": dsn,
            **options,
        }
        leaders.append(Leader("orchestrator", **options))
        return leaders[-1]

    yield new_leader
    for leader in leaders:
        leader.stop()
    judge.sees_nothing_left()
    eventually(lambda: threading.active_count() <= threads, "a thread is left", within=2)


def test_one_leads(new_leader: Callable[..., Leader], judge: Judge, diary: Diary) -> None:
    """Of three there is one at every moment."""
    leaders = [new_leader(name) for name in "abc"]
    for leader in leaders:
        leader.start()
    eventually(lambda: any(leader.is_leader for leader in leaders), "a leader")
    for _ in range(20):
        assert sum(leader.is_leader for leader in leaders) == 1
        time.sleep(0.01)
    assert [event for _, event in diary.lines] == ["gain"]
    assert judge.held() == {ID}
    assert "leads" in repr(next(leader for leader in leaders if leader.is_leader))


def test_a_block_leads_and_stops(new_leader: Callable[..., Leader], judge: Judge, diary: Diary) -> None:
    """Its end gives the name back before it returns."""
    with new_leader() as leader:
        eventually(lambda: leader.is_leader, "it leads")
        assert judge.held() == {ID}
    assert not leader.is_leader
    assert judge.held() == set()
    assert diary.lines == [("a", "gain"), ("a", "loss")]
    leader.stop()
    with pytest.raises(TypeError, match="before"):
        leader.start()


def test_it_hands_over_at_once(new_leader: Callable[..., Leader], diary: Diary) -> None:
    """The next leads with its next look."""
    first, second = new_leader("a"), new_leader("b")
    first.start()
    eventually(lambda: first.is_leader, "the first leads")
    second.start()
    since = time.monotonic()
    first.stop()
    eventually(lambda: second.is_leader, "the second leads", within=0.5)
    assert time.monotonic() - since < 0.5


def test_it_steps_down_before_another_leads(new_leader: Callable[..., Leader], diary: Diary) -> None:
    """What `on_loss` stops has stopped when the other's `on_gain` is called."""

    def slow() -> None:
        time.sleep(0.3)
        diary.note("a", "loss")()

    first, second = new_leader("a", on_loss=slow), new_leader("b")
    first.start()
    eventually(lambda: first.is_leader, "the first leads")
    second.start()
    time.sleep(0.1)
    first.stop()
    eventually(lambda: second.is_leader, "the second leads")
    eventually(lambda: len(diary.lines) >= 3, "it is told")
    assert diary.lines == [("a", "gain"), ("a", "loss"), ("b", "gain")]


def test_nobody_says_it_leads_while_it_stops(new_leader: Callable[..., Leader], judge: Judge) -> None:
    """`is_leader` is false in `on_loss`, and the lock is held until that is over."""
    told: list[bool] = []
    leader = new_leader(on_loss=lambda: told.append(leader.is_leader))
    leader.start()
    eventually(lambda: leader.is_leader, "it leads")
    leader.stop()
    assert told == [False]


def test_it_campaigns_again_after_a_loss(
    new_leader: Callable[..., Leader], judge: Judge, diary: Diary, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of its session is told at once, with a warning, and it may lead again."""
    leader = new_leader()
    leader.start()
    for term in range(1, 4):
        eventually(lambda: leader.is_leader and len(judge.locks()) == 1, "it leads")
        since = time.monotonic()
        judge.end(judge.holder(ID))
        eventually(lambda term=term: diary.lines.count(("a", "loss")) == term, "the loss", within=0.5)
        assert time.monotonic() - since < 0.5
        assert "lost" in caplog.text
    eventually(lambda: leader.is_leader, "it leads again")
    assert diary.lines == [("a", "gain"), ("a", "loss")] * 3 + [("a", "gain")]


def test_another_leads_when_a_leader_is_killed(
    new_leader: Callable[..., Leader], dsn: str, judge: Judge
) -> None:
    """At once."""

    def lead() -> None:
        with Leader("orchestrator", poll=0.05, database_url=dsn):
            time.sleep(60)

    child = forked(lead)
    eventually(lambda: judge.held() == {ID}, "the child leads")
    leader = new_leader()
    leader.start()
    time.sleep(0.2)
    assert not leader.is_leader
    kill(child)
    eventually(lambda: leader.is_leader, "the next leads", within=1)


def test_a_forked_child_does_not_lead(new_leader: Callable[..., Leader], judge: Judge) -> None:
    """Its parent does, and goes on to."""
    leader = new_leader()
    leader.start()
    eventually(lambda: leader.is_leader, "it leads")

    def child() -> None:
        assert not leader.is_leader, "the child of a leader says that it leads"

    assert status_of(forked(child)) == 0
    assert leader.is_leader
    assert judge.held() == {ID}


def test_callbacks_that_raise_end_no_campaign(
    new_leader: Callable[..., Leader], judge: Judge, caplog: pytest.LogCaptureFixture
) -> None:
    """Their errors are logged; the leader leads, loses, and leads again."""

    def fail() -> None:
        raise ZeroDivisionError

    leader = new_leader(on_gain=fail, on_loss=fail)
    leader.start()
    eventually(lambda: leader.is_leader, "it leads")
    judge.end(judge.holder(ID))
    eventually(
        lambda: caplog.text.count("a callback of the leader failed") >= 3, "both failed, and one again"
    )
    eventually(lambda: leader.is_leader, "it leads again")
    leader.stop()
    assert judge.held() == set()


def test_a_callback_may_stop_its_leader(
    new_leader: Callable[..., Leader], judge: Judge, diary: Diary
) -> None:
    """From inside its own thread."""
    leader = new_leader(on_gain=lambda: leader.stop())  # noqa: PLW0108 - it is made here
    leader.start()
    eventually(lambda: ("a", "loss") in diary.lines, "it stopped")
    eventually(lambda: judge.held() == set(), "the lock is left", within=1)


def test_a_server_that_is_not_there_ends_no_campaign(
    new_leader: Callable[..., Leader], caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, not at every look."""
    with caplog.at_level(logging.WARNING):
        leader = new_leader(database_url="postgresql://127.0.0.1:1/none")
        leader.start()
        eventually(lambda: caplog.records, "a warning")
        time.sleep(0.3)
        assert not leader.is_leader
        leader.stop()
    assert len([r for r in caplog.records if r.name.startswith("celery_pglock")]) == 1


def test_a_leader_takes_the_database_of_its_app(app: Celery, judge: Judge) -> None:
    """And may have an id as its name."""
    with Leader(LockId(4, 4), poll=0.05, app=app) as leader:
        eventually(lambda: leader.is_leader, "it leads")
        assert judge.held() == {LockId(4, 4)}


def test_no_two_lead_in_a_storm(new_leader: Callable[..., Leader], judge: Judge) -> None:
    """Sixteen terms, each stopped while the next looks: what was told does not overlap."""
    leading: set[str] = set()
    wrong: list[set[str]] = []

    def gain(name: str) -> None:
        if leading:
            wrong.append({*leading, name})
        leading.add(name)

    for turn in range(8):
        name = str(turn)
        leader = new_leader(
            name,
            poll=0.01,
            on_gain=lambda name=name: gain(name),
            on_loss=lambda name=name: leading.discard(name),
        )
        leader.start()
        eventually(lambda leader=leader: leader.is_leader, "the next leads")
        follower = new_leader(
            f"{name}f",
            poll=0.01,
            on_gain=lambda name=name: gain(f"{name}f"),
            on_loss=lambda name=name: leading.discard(f"{name}f"),
        )
        follower.start()
        time.sleep(0.03)
        leader.stop()
        eventually(lambda follower=follower: follower.is_leader, "the follower leads")
        follower.stop()
    assert wrong == []
    assert judge.locks() == []
