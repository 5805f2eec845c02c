"""Fencing tokens grow with the holders of a name, and let what is written to refuse a late writer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from faults.judge import holders
from faults.pools import MixedFleet, mixed_fleet
from localservers import PostgreSQL

HOLDERS = 200


@pytest.fixture(scope="module")
def mixed(postgres: PostgreSQL, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MixedFleet]:
    sizes = {"prefork": 2, "threads": 3}
    with mixed_fleet(tmp_path_factory.mktemp("fencing"), postgres, sizes) as mixed:
        yield mixed


def test_token_grows_with_each_holder(mixed: MixedFleet) -> None:
    """Two hundred holders of one name, in processes and threads: tokens in the order of the runs."""
    results = [mixed.send(pool, "fenced", "a") for _ in range(HOLDERS // 2) for pool in mixed.sizes]
    for result in results:
        # A conflict is skipped: the holders are fewer than the messages.
        result.get(timeout=30)
    while len(mixed.fleet.history.events("token")) < HOLDERS:
        for result in [mixed.send(pool, "fenced", "a") for _ in range(20) for pool in mixed.sizes]:
            result.get(timeout=30)
    events = sorted(mixed.fleet.history.events("token"), key=lambda event: event["at"])
    tokens = [event["token"] for event in events]
    assert tokens == sorted(set(tokens))
    assert {len(mixed.workers[pool].children()) > 0 for pool in mixed.sizes} == {True, False}
    assert len({event["pid"] for event in events}) == 3, "not all processes held it"
    print(f"{len(tokens)} holders, tokens {tokens[0]} to {tokens[-1]}")


@pytest.mark.parametrize(("guard", "value"), [("AND token <= %(token)s", "new"), ("", "late")])
def test_late_writer_is_rejected(mixed: MixedFleet, guard: str, value: str) -> None:
    """A body that lost its lock and goes on writes after its successor; without the guard it would win."""
    name, observer = f"ledger {value}", mixed.observer
    observer.execute("CREATE TABLE IF NOT EXISTS ledger (name text, token bigint, value text)")
    observer.execute("INSERT INTO ledger VALUES (%s, 0, 'old')", [name])
    late = mixed.send("prefork", "writes", name, "late", guard, gate=value)
    mixed.fleet.running(name)
    (backend,) = holders(observer, name)
    observer.execute("SELECT pg_terminate_backend(%s)", [backend])
    assert mixed.send("threads", "writes", name, "new", guard).get(timeout=10) == 1
    mixed.fleet.open(value)
    assert late.get(timeout=10) == (0 if guard else 1)
    assert observer.execute("SELECT value FROM ledger WHERE name = %s", [name]).fetchone() == (value,)
