"""A process without sessions for each test, and a judge outside of it."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from celery import Celery, _state

from celery_pglock.locks import keeper as keeper_module
from celery_pglock.locks import probe, process
from celery_pglock.locks.keeper import Keeper
from celery_pglock.locks.settings import Settings
from integration.judge import Judge
from localservers import PostgreSQL


@pytest.fixture(scope="module")
def dbname(postgres: PostgreSQL) -> Iterator[str]:
    """One database for the tests of a module, each of which leaves it empty: to create one takes long."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    postgres.execute(f"CREATE DATABASE {name}")
    yield name
    postgres.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def judge(observer: psycopg.Connection) -> Judge:
    return Judge(observer)


@pytest.fixture(params=["one at a time", "owner"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which a process talks to its session: prefork and solo, threads and green pools."""
    monkeypatch.setattr(process, "_one_at_a_time", request.param == "one at a time")
    return request.param


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin without sessions, settings and apps of other tests."""
    monkeypatch.setattr(_state, "_apps", weakref.WeakSet())
    monkeypatch.setattr(process, "_one_at_a_time", False)
    monkeypatch.setattr(keeper_module, "_keepers", {})
    monkeypatch.setattr(keeper_module, "_scribes", {})
    monkeypatch.setattr(probe, "_proven", set())
    # Two threads that apply tasks leave Celery's global the wrong way round.
    monkeypatch.setattr(_state, "_task_join_will_block", False)
    yield
    keeper_module.close_all()
    # Else each would leave a thread and a pipe to this one process.
    for keeper in [*keeper_module._keepers.values(), *keeper_module._scribes.values()]:
        keeper.retire()


@pytest.fixture
def new_keeper(judge: Judge, dsn: str) -> Iterator[Callable[..., Keeper]]:
    """Make keepers of their own sessions; none may leave a lock or a session behind."""
    keepers = []

    def new_keeper(url: str = dsn, **settings: Any) -> Keeper:
        keepers.append(Keeper(Settings(url, **settings)))
        return keepers[-1]

    yield new_keeper
    for keeper in keepers:
        keeper.retire()
    judge.sees_nothing_left()


@pytest.fixture
def keeper(new_keeper: Callable[..., Keeper]) -> Keeper:
    return new_keeper()


@pytest.fixture
def app(judge: Judge, dsn: str) -> Iterator[Celery]:
    """An eager app whose locks lie in the test's database."""
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(pglock_database_url=dsn, task_always_eager=True, task_store_eager_result=True)
    yield app
    keeper_module.close_all()
    app.close()
    judge.sees_nothing_left()
