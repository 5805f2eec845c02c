"""What callers see of a conflict, in each shape that Celery gives to work: nothing ever hangs."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import chain, chord, group
from celery.canvas import chunks, xmap, xstarmap
from celery.exceptions import ChordError, TaskRevokedError
from celery.result import allow_join_result

from celery_pglock import LockNotAcquired, is_skipped
from faults.fleet import Fleet, flush
from localservers import PostgreSQL, Redis

TIMEOUT = 15


@pytest.fixture(scope="module")
def callers(postgres: PostgreSQL, redis: Redis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One worker for all tests of this module, which tell their locks apart by name."""
    dbname = f"callers_{uuid.uuid4().hex[:12]}"
    postgres.execute(f"CREATE DATABASE {dbname}")
    folder: Path = tmp_path_factory.mktemp("callers")
    flush(redis.url(14))
    flush(redis.url(15))
    fleet = Fleet(folder, redis.url(14), redis.url(15), postgres.url(dbname))
    try:
        fleet.worker("threads", 12)
        yield fleet
    finally:
        fleet.close()
        postgres.execute(f"DROP DATABASE {dbname} WITH (FORCE)")


@pytest.fixture
def held(callers: Fleet) -> Iterator[str]:
    """A name that a body holds until the test is over, or opens the gate of this name."""
    callers.app.set_current()
    name = f"held {uuid.uuid4().hex[:6]}"
    callers.send("skip", name, gate=name)
    callers.running(name)
    yield name
    callers.open(name)


def free() -> str:
    return f"free {uuid.uuid4().hex[:6]}"


@pytest.mark.smoke
def test_skip_is_a_success_with_a_marker(callers: Fleet, held: str) -> None:
    """``get()`` of a skipped task returns at once, with what `is_skipped` knows."""
    result = callers.send("skip", held)
    assert is_skipped(result.get(timeout=TIMEOUT))
    assert result.state == "SUCCESS"
    assert len(callers.history.runs(held)) == 1


def test_retry_runs_when_the_name_is_free(callers: Fleet, held: str) -> None:
    """A conflict that is retried is no failure to its caller, and its state says RETRY meanwhile."""
    result = callers.send("retry", held)
    callers.wait(lambda: result.state == "RETRY", "the state RETRY")
    callers.open(held)
    assert result.get(timeout=TIMEOUT) == held
    assert len(callers.history.runs(held)) == 2


def test_raise_is_a_failure_with_its_link_error(callers: Fleet, held: str) -> None:
    """`LockNotAcquired` reaches the caller by its own type, and ``link_error`` is called."""
    error = callers.signature("failed", held)
    result = callers.signature("raises", held).apply_async(link_error=error)
    with pytest.raises(LockNotAcquired, match=held):
        result.get(timeout=TIMEOUT)
    callers.wait(lambda: any(held in each["args"] for each in callers.history.events("failed")), "link_error")


def test_conflict_that_lasts_too_long_is_a_failure_with_its_link_error(callers: Fleet, held: str) -> None:
    """After ``lock_max_wait`` a retried conflict ends as `LockNotAcquired`, like any failure."""
    error = callers.signature("failed", held)
    result = callers.signature("give_up", held).apply_async(link_error=error)
    with pytest.raises(LockNotAcquired) as raised:
        result.get(timeout=TIMEOUT)
    _, waited, tries = raised.value.args
    assert 2 <= waited < 6
    assert tries >= 2
    callers.wait(lambda: any(held in each["args"] for each in callers.history.events("failed")), "link_error")


def test_callable_chooses_anew_for_each_conflict(callers: Fleet, held: str) -> None:
    """First it retries, then it skips."""
    assert is_skipped(callers.send("choose", held).get(timeout=TIMEOUT))
    text = callers.workers[0].text()
    assert f"lock 'celery:shop:{held}' is held by" in text
    assert "trying again" in text


@pytest.mark.parametrize("options", [{}, {"ignore_result": True}])
def test_skip_in_a_chain_revokes_what_follows(callers: Fleet, held: str, options: dict[str, bool]) -> None:
    """A marker is never fed to the next task: the chain ends as revoked, and nothing of it runs.

    Also where nobody wants the result of the skipped task itself.
    """
    first, last = callers.signature("skip", held).set(**options), callers.signature("plain")
    result = chain(first, last, app=callers.app).apply_async()
    with pytest.raises(TaskRevokedError):
        result.get(timeout=TIMEOUT)
    # It raises as soon as the first is revoked; what follows is marked after that.
    callers.wait(lambda: result.state == result.parent.state == "REVOKED", "the end of both")
    assert not [event for event in callers.history.events("plain") if event["skipped"]]


def test_skip_at_the_end_of_a_chain_is_its_result(callers: Fleet, held: str) -> None:
    """Where nothing follows the marker is the chain's result."""
    result = chain(callers.signature("plain", held), callers.signature("skip"), app=callers.app).apply_async()
    assert is_skipped(result.get(timeout=TIMEOUT))


def test_chain_goes_on_with_a_result_of_the_tasks_own(callers: Fleet, held: str) -> None:
    """``lock_skip_result`` says: go on with this."""
    result = chain(
        callers.signature("go_on", held), callers.signature("plain"), app=callers.app
    ).apply_async()
    assert result.get(timeout=TIMEOUT) == "went on"


def test_skip_with_a_link_is_revoked(callers: Fleet, held: str) -> None:
    """A ``link`` would be fed the marker too: it does not run."""
    seen = len(callers.history.events("plain"))
    result = callers.signature("skip", held).apply_async(link=callers.signature("plain"))
    with pytest.raises(TaskRevokedError):
        result.get(timeout=TIMEOUT)
    assert len(callers.history.events("plain")) == seen


def test_group_has_the_marker_in_its_list(callers: Fleet, held: str) -> None:
    """The other members of a group run."""
    name = free()
    result = group(callers.signature("skip", held), callers.signature("skip", name), app=callers.app)()
    marker, ran = result.get(timeout=TIMEOUT)
    assert is_skipped(marker)
    assert ran == name


def test_chord_gets_the_markers_in_its_list(callers: Fleet, held: str) -> None:
    """A chord's body runs, and can tell who was skipped."""
    name = free()
    header = [callers.signature("skip", held), callers.signature("skip", name)]
    result = chord(header, callers.signature("total"), app=callers.app).apply_async()
    marker, ran = result.get(timeout=TIMEOUT)
    assert is_skipped(marker)
    assert ran == name


@pytest.mark.parametrize("task", ["raises", "give_up"])
def test_chord_fails_with_a_member_that_fails(callers: Fleet, held: str, task: str) -> None:
    """A member that does not get its lock is like any other failed member: errback, no body."""
    header = [callers.signature(task, held), callers.signature("skip", free())]
    body = callers.signature("total").on_error(callers.signature("failed", f"chord {held}"))
    result = chord(header, body, app=callers.app).apply_async()
    with pytest.raises((ChordError, LockNotAcquired)):
        result.get(timeout=TIMEOUT)
    callers.wait(lambda: result.state == "FAILURE", "the failure of the body")
    callers.wait(
        lambda: any(f"chord {held}" in each["args"] for each in callers.history.events("failed")),
        "the errback",
    )


def test_chord_waits_for_a_member_that_is_retried(callers: Fleet, held: str) -> None:
    """A retry after a conflict stays a member: the body runs once, after all, with the right values."""
    name = free()
    header = [callers.signature("retry", held), callers.signature("retry", name)]
    result = chord(header, callers.signature("total"), app=callers.app).apply_async()
    callers.wait(lambda: callers.history.runs(name), "the free member")
    callers.logged(f"lock 'celery:shop:{held}' is held by")
    assert not result.ready()
    callers.open(held)
    assert result.get(timeout=TIMEOUT) == [held, name]
    totals = [event["results"] for event in callers.history.events("total")]
    assert totals.count([held, name]) == 1


def test_chain_waits_for_a_member_that_is_retried(callers: Fleet, held: str) -> None:
    """What follows a retried task follows its body."""
    result = chain(
        callers.signature("retry", held), callers.signature("plain"), app=callers.app
    ).apply_async()
    callers.logged(f"lock 'celery:shop:{held}' is held by")
    callers.open(held)
    assert result.get(timeout=TIMEOUT) == held


def test_skipped_chain_inside_a_chord_fails_the_chord(callers: Fleet, held: str) -> None:
    """A chain in a header that ends early must not leave the chord waiting."""
    inner = chain(callers.signature("skip", held), callers.signature("plain"), app=callers.app)
    header = [inner, callers.signature("skip", free())]
    result = chord(header, callers.signature("total"), app=callers.app).apply_async()
    with pytest.raises((ChordError, TaskRevokedError)):
        result.get(timeout=TIMEOUT)


@pytest.mark.parametrize(("task", "error"), [("skip", TaskRevokedError), ("raises", LockNotAcquired)])
def test_what_came_before_a_group_tells(callers: Fleet, held: str, task: str, error: type[Exception]) -> None:
    """The group that a chain ends with waits for ever, in Celery itself: the task before it does not."""
    before = callers.signature(task, held)
    last = group(callers.signature("plain"), callers.signature("plain"), app=callers.app)
    result = chain(before, last, app=callers.app).apply_async()
    with pytest.raises(error):
        result.parent.get(timeout=TIMEOUT)


def test_map_has_the_marker_in_the_items_place(callers: Fleet, held: str) -> None:
    """``map``, ``starmap`` and ``chunks``: each item has its own lock."""
    # Each shape has names of its own: they run beside each other.
    items = [[(free(), 0), (held, 0), (free(), 0)] for _ in range(3)]
    app = callers.app
    mapped = xmap(callers.signature("pair"), items[0], app=app).apply_async()
    starmapped = xstarmap(callers.signature("skip"), items[1], app=app).apply_async()
    chunked = chunks(callers.signature("skip"), items[2], 2, app=app).apply_async()
    results = [result.get(timeout=TIMEOUT) for result in (mapped, starmapped, chunked)]
    results[2] = [*results[2][0], *results[2][1]]
    for (first, second, third), given in zip(results, items, strict=True):
        assert first == given[0][0]
        assert is_skipped(second)
        assert third == given[2][0]
    assert len(callers.history.runs(held)) == 1


@pytest.mark.parametrize("task", ["raises", "retry"])
def test_map_fails_where_an_item_can_not_wait(callers: Fleet, held: str, task: str) -> None:
    """An item has no message of its own that could be published again."""
    result = xstarmap(callers.signature(task), [(free(), 0), (held, 0)], app=callers.app).apply_async()
    with pytest.raises(LockNotAcquired):
        result.get(timeout=TIMEOUT)


def test_nothing_was_left_unread(callers: Fleet) -> None:
    """The module's last look: no body ran beside another, and the worker told of no error but failures."""
    assert not callers.history.overlaps()
    with allow_join_result():
        assert callers.send("skip", free()).get(timeout=TIMEOUT)
