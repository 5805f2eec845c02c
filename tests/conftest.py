"""The servers that tests share, and a database for each test.

A server that the machine lacks skips the tests that ask for it, with the reason; where the environment has
`CI` set it fails them instead.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import signal
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import psycopg
import pytest
from celery import _state

from localservers import MissingServer, PgBouncer, PostgreSQL, RabbitMQ, Redis

# What a script runs in the background ignores Ctrl-C, and so would all that is started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)

FAULTS = Path(__file__).parent / "faults"

#: What takes long and asks nothing of a version of Celery or PostgreSQL.
THOROUGH = {"test_beat.py", "test_cli.py", "test_interrupts.py", "test_localservers.py"}

# The time of one example says nothing on a busy machine.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.load_profile("default")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgreSQL]:
    """The server of all tests: a test that stops it or changes its settings takes `own_postgres`."""
    with PostgreSQL() as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[PostgreSQL]:
    """A server of this test alone, which may stop, restart, freeze and kill it."""
    with PostgreSQL() as server:
        yield server


@pytest.fixture
def dbname(postgres: PostgreSQL) -> Iterator[str]:
    """The name of a database of this test alone."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    postgres.execute(f"CREATE DATABASE {name}")
    yield name
    postgres.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def dsn(postgres: PostgreSQL, dbname: str) -> str:
    """The URL of that database. Advisory locks belong to a database: no other test's locks are seen in it."""
    return postgres.url(dbname)


@pytest.fixture
def observer(dsn: str) -> Iterator[psycopg.Connection]:
    """A session in the same database that judges from outside."""
    with psycopg.connect(dsn, autocommit=True, application_name="observer") as connection:
        yield connection


@pytest.fixture(scope="session")
def redis() -> Iterator[Redis]:
    with Redis() as server:
        yield server


@pytest.fixture(scope="session")
def pgbouncer(postgres: PostgreSQL) -> Iterator[PgBouncer]:
    """A pooler in transaction mode before the server of all tests."""
    with PgBouncer(postgres) as server:
        yield server


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    with RabbitMQ() as server:
        yield server


@pytest.fixture(autouse=True)
def _no_shared_tasks() -> Iterator[None]:
    """A task that is shared with the apps of later tests would be bound by them too: use `shared=False`."""
    before = set(_state._on_app_finalizers)
    yield
    left = _state._on_app_finalizers - before
    _state._on_app_finalizers -= left
    assert not left, "the test leaves a shared task behind"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    try:
        return (yield)
    except MissingServer as missing:
        skip_or_fail(missing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    try:
        return (yield)
    except MissingServer as missing:
        skip_or_fail(missing)


def skip_or_fail(missing: MissingServer) -> NoReturn:
    if os.environ.get("CI"):
        raise pytest.fail.Exception(f"CI must have every server: {missing}", pytrace=False) from None
    raise pytest.skip.Exception(str(missing)) from None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FAULTS in item.path.parents:
            item.add_marker("faults")
        elif item.path.name in THOROUGH:
            item.add_marker("thorough")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show why a test was run again: the next run's success must not hide it."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"why {report.nodeid} was run again")
        terminalreporter.write_line(report.longreprtext)


def pytest_report_header() -> list[str]:
    """Tell which build is tested, and with what."""
    spec = importlib.util.find_spec("celery_pglock")
    packages = ("celery", "kombu", "psycopg")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return [
        f"celery_pglock: {spec and spec.origin}",
        f"versions: Python {platform.python_version()}, {versions}",
    ]
