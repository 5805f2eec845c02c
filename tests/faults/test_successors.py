"""What an execution publishes in its own place never meets the lock of its own predecessor."""

from __future__ import annotations

import pytest
from celery import chain, group

from faults.conftest import FleetMaker
from faults.fleet import Fleet

TIMES = 200


def waits_for_itself(fleet: Fleet) -> bool:
    """Whether anything was taken for a conflict or for a second delivery."""
    text = "".join(worker.text() for worker in fleet.workers)
    return "is held by" in text or "under way elsewhere" in text


@pytest.mark.smoke
def test_next_task_of_a_chain_with_one_name_finds_it_free(fleet: Fleet) -> None:
    """``chain(a.s(42), b.s(42))`` under one lock name, two hundred times: `skip` never skips."""
    fleet.worker("prefork", 2)
    fleet.worker("threads", 4)
    # Up to redis-py 5 a result that the garbage collector meets while another is being unsubscribed blocks
    # its own thread for ever: none goes before the end.
    kept = []
    # A few at a time: behind a long queue a successor would come long after its predecessor.
    for turn in range(TIMES // 4):
        names = [f"order {turn} {number}" for number in range(4)]
        chains = [
            chain(fleet.signature("skip", name), fleet.signature("skip"), app=fleet.app) for name in names
        ]
        results = [each.apply_async() for each in chains]
        kept += results
        # Looked up: a subscriber may miss the one notice of a stored result, and wait for ever.
        ids = [result.id for result in results]
        fleet.wait(lambda ids=ids: len(fleet.results(ids)) == len(ids), f"the ends of {names}", 60)
        stored = fleet.results(ids)
        assert [stored[id]["result"] for id in ids] == names
    assert len(fleet.history.runs()) == 2 * TIMES
    assert not waits_for_itself(fleet)


OUTCOMES = {"retries_itself": 2, "replaces_itself": "replaced", "fails_twice": 2}


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_successor_finds_its_predecessors_name_free(fleet: Fleet, pool: str) -> None:
    """``retry(countdown=0)``, ``replace()`` and ``autoretry_for`` publish inside the body.

    Their ``finally`` blocks still run under the lock: the server shows it.
    """
    # Room for each beside its predecessor: a successor that waits for a place would meet no lock.
    fleet.worker(pool, 8)
    tasks = [*OUTCOMES]
    results = [fleet.send(task, f"name {number}") for number, task in enumerate(tasks)]
    assert [result.get(timeout=30) for result in results] == [OUTCOMES[task] for task in tasks]
    assert len(fleet.history.runs()) == 3 * len(tasks)
    assert not waits_for_itself(fleet)
    assert not fleet.history.overlaps()
    events = fleet.history.events("finally")
    assert len(events) == 3 * len(tasks)
    assert all(len(event["holders"]) == 1 for event in events), events


def test_finally_of_a_body_runs_without_a_lock_where_locks_are_off(make_fleet: FleetMaker) -> None:
    """The control of the observer in the body."""
    fleet = make_fleet(pglock_enabled=False)
    fleet.worker("prefork", 4)
    fleet.send("retries_itself", "a").get(timeout=30)
    # Without a lock the last try may be over before the one that published it.
    fleet.wait(lambda: len(fleet.history.events("finally")) == 3, "the end of each try")
    assert [event["holders"] for event in fleet.history.events("finally")] == [[]] * 3


@pytest.mark.parametrize("how", ["delay", "apply_async", "countdown", "later"])
def test_body_that_sends_its_own_request_again_loses_none(fleet: Fleet, how: str) -> None:
    """`signature_from_request` is Celery's, for everybody: what a body sends by it is no duplicate."""
    fleet.worker("prefork", 2)
    result = fleet.send("sends_itself", "a", how)
    fleet.wait(lambda: len(fleet.history.runs("a")) == 2, "the second run")
    assert [event["id"] for event in fleet.history.events("sent")] == [result.id]
    assert not waits_for_itself(fleet)
    assert not fleet.history.overlaps()


def test_body_that_sends_its_own_request_under_another_id_has_no_successor(fleet: Fleet) -> None:
    """It is another task, which runs beside it."""
    fleet.worker("prefork", 2)
    result = fleet.send("sends_itself", "a", "other id")
    fleet.wait(lambda: fleet.history.runs("elsewhere"), "the other task")
    assert result.get(timeout=30) == "sends"
    assert [event["id"] for event in fleet.history.events("sent")] == ["other id"]
    assert len(fleet.history.runs("a")) == 1


def test_two_who_retry_themselves_take_turns(fleet: Fleet) -> None:
    """Two tasks of one name that retry themselves never overlap and lose no try of theirs."""
    fleet.worker("prefork", 4)
    both = group([fleet.signature("retry", "a", 0.05) for _ in range(6)], app=fleet.app).apply_async()
    assert both.get(timeout=60) == ["a"] * 6
    assert len(fleet.history.runs("a")) == 6
    assert not fleet.history.overlaps()
