"""A message that is published again after a conflict is the message that came, in everything."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import pytest

from faults.conftest import FleetMaker
from faults.fleet import Fleet
from localservers import RabbitMQ

#: What differs between any two messages.
OWN = {"event", "at", "pid", "thread", "name", "id", "root_id", "argsrepr", "headers", "run"}

CONTENT_TYPES = {
    "json": "application/json",
    "pickle": "application/x-python-serialize",
    "yaml": "application/x-yaml",
}


@pytest.fixture
def fleet(make_fleet: FleetMaker) -> Iterator[Fleet]:
    fleet = make_fleet(accept_content=["json", "pickle", "yaml"])
    # The same in both: a list of queues that the messages may name.
    fleet.worker("prefork", 3, "-Q", "shop,other")
    fleet.send("skip", "held", gate="end")
    fleet.running("held")
    return fleet


def sent(fleet: Fleet, payload: Any = None, **options: Any) -> tuple[dict, dict]:
    """Send two messages alike, one to a name that is free and one to a name that is held."""
    results = [
        fleet.signature("message", name, payload).apply_async(root_id="root", parent_id="parent", **options)
        for name in ("free", "held")
    ]
    fleet.logged("trying again", times=2)
    fleet.open("end")
    fleet.wait(lambda: len(fleet.history.events("message")) == 2, "both messages in their bodies")
    arrived = {event["name"]: event for event in fleet.history.events("message")}
    ids = {name: arrived[name]["id"] for name in arrived}
    assert ids == {"free": results[0].id, "held": results[1].id}
    for name, event in arrived.items():
        received = [line for line in fleet.history.events("received") if line["id"] == ids[name]]
        assert len(received) == (1 if name == "free" else len(received))
        assert name == "free" or len(received) > 1, "there was no conflict: nothing was tested"
        event.update({key: received[-1][key] for key in ("content_type", "compression")})
    return arrived["free"], arrived["held"]


def same(first: dict, second: dict) -> None:
    # None is what a producer writes that does not know the task: the task's own False.
    first["ignore_result"], second["ignore_result"] = (
        bool(first["ignore_result"]),
        bool(second["ignore_result"]),
    )
    assert {k: v for k, v in first.items() if k not in OWN} == {
        k: v for k, v in second.items() if k not in OWN
    }
    drop = {"pglock", "pglock_content_type"}
    assert {k: v for k, v in first["headers"].items() if k not in drop} == {
        k: v for k, v in second["headers"].items() if k not in drop
    }


def test_options_of_a_message_are_kept(fleet: Fleet) -> None:
    """Priority, queue, expiry, headers, limits, shadow, ``ignore_result``, ``argsrepr``; no try is spent."""
    free, held = sent(
        fleet,
        queue="other",
        priority=3,
        expires=datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=60),
        headers={"mine": "kept"},
        time_limit=50,
        soft_time_limit=40,
        shadow="a shadow",
        ignore_result=True,
        argsrepr="('secret',)",
        kwargsrepr="{'secret': 1}",
        reply_to="somebody",
    )
    same(free, held)
    assert held["argsrepr"] == "('secret',)"
    assert held["queue"] == "other"
    assert held["headers"]["mine"] == "kept"
    assert held["ignore_result"] is True
    assert held["retries"] == 0
    assert held["timelimit"] == [50, 40]


def test_stamps_of_a_message_are_kept(fleet: Fleet) -> None:
    """Stamps travel in headers of their own."""
    free, held = sent(fleet, stamped_headers=["monitoring"], monitoring="a test")
    same(free, held)
    assert held["stamps"] == {"monitoring": "a test"}


@pytest.mark.parametrize(
    ("serializer", "payload", "compression"),
    [
        ("json", {"a": 1}, "gzip"),
        ("pickle", {1, 2, 3}, "zlib"),
        ("yaml", {"day": datetime.date(2026, 1, 2)}, None),
    ],
)
def test_way_of_writing_a_message_is_kept(
    fleet: Fleet, serializer: str, payload: Any, compression: str | None
) -> None:
    """A message that only pickle can write is written by pickle again, and compressed alike."""
    options = {"compression": compression} if compression else {}
    free, held = sent(fleet, payload, serializer=serializer, **options)
    same(free, held)
    assert held["payload"] == repr(payload)
    assert held["content_type"] == CONTENT_TYPES[serializer]


def test_message_expires_while_it_waits(fleet: Fleet) -> None:
    """``expires`` bounds a wait for the lock like any other wait."""
    result = fleet.signature("message", "held").apply_async(expires=2)
    fleet.wait(lambda: result.state == "REVOKED", "the end of the message's time")
    fleet.open("end")
    assert not fleet.history.events("message")


def test_message_waits_again_and_again_in_a_quorum_queue(make_fleet: FleetMaker, rabbitmq: RabbitMQ) -> None:
    """RabbitMQ's delayed delivery writes down where a message was, and drops one that goes in circles."""
    fleet = make_fleet(
        broker=rabbitmq.url(),
        broker_transport_options={"confirm_publish": True},
        task_default_queue="quorum",
        task_default_queue_type="quorum",
        task_default_exchange="quorum",
        task_default_exchange_type="topic",
        task_default_routing_key="quorum",
        worker_detect_quorum_queues=True,
    )
    fleet.worker("threads", 3)
    holder = fleet.send("skip", "a", gate="end")
    fleet.running("a")
    result = fleet.send("every_3", "a")
    fleet.wait(
        lambda: sum(event["id"] == result.id for event in fleet.history.events("received")) >= 4,
        "four deliveries",
        30,
    )
    fleet.open("end")
    assert holder.get(timeout=10) == result.get(timeout=20) == "a"
