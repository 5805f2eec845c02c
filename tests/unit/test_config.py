"""`app.conf` -> settings: which database, and what is never shown of it."""

from __future__ import annotations

import logging
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from celery_pglock import AdvisoryLockedTask, LockSetupError, LockUnavailable, config
from celery_pglock.config import beat_settings_of, fix_settings, settings_of
from celery_pglock.locks.keeper import Keeper
from celery_pglock.locks.probe import probe
from celery_pglock.locks.settings import Settings

#: A setting where it is read: by `app.conf.get` or by one of the functions that check it.
NAMED = re.compile(r"(?:get|text|flag|seconds|seconds_or_none)\((?:app, )?\"(pglock_\w+)\"")

SECRET = "hunter2"
URL = f"postgresql://user:{SECRET}@127.0.0.1:1/shop"


def add_one(x):
    return x + 1


def app_with(**conf: Any) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.update(conf)
    return app


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CELERY_PGLOCK_DATABASE_URL", raising=False)


def test_a_missing_database_is_an_error_that_names_the_setting() -> None:
    """Workers in two databases would not exclude each other: there is no default."""
    with pytest.raises(ImproperlyConfigured, match=r"pglock_database_url.*CELERY_PGLOCK_DATABASE_URL"):
        settings_of(app_with())


def test_a_locked_execution_without_a_database_does_not_run() -> None:
    """The body of a locked task never runs where nobody can be asked."""
    app = app_with(task_always_eager=True)
    ran = []

    @app.task(base=AdvisoryLockedTask, shared=False)
    def task():
        ran.append(1)

    result = task.delay()
    assert isinstance(result.result, ImproperlyConfigured)
    assert not ran


def test_the_environment_names_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CELERY_PGLOCK_DATABASE_URL` is read where the setting is not set."""
    monkeypatch.setenv("CELERY_PGLOCK_DATABASE_URL", "dbname=env")
    assert settings_of(app_with()).database_url == "dbname=env"
    assert settings_of(app_with(pglock_database_url="dbname=conf")).database_url == "dbname=conf"


def test_an_empty_url_stands_for_libpqs_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """`""` is a choice, and not a missing value: the environment does not replace it."""
    monkeypatch.setenv("CELERY_PGLOCK_DATABASE_URL", "dbname=env")
    assert settings_of(app_with(pglock_database_url="")).database_url == ""


def test_disabled_means_no_settings_and_no_database() -> None:
    """`pglock_enabled = False` is for tests: bodies run unlocked."""
    app = app_with(pglock_enabled=False, task_always_eager=True)
    assert settings_of(app) is None
    task = app.task(base=AdvisoryLockedTask, shared=False)(add_one)
    assert task.delay(1).result == 2


def test_bodies_find_a_hold_where_locks_are_disabled() -> None:
    """What asks for its lock runs in a test as it does in a worker, but for what only PostgreSQL has."""
    app = app_with(pglock_enabled=False, task_always_eager=True)
    seen: list[Any] = []

    @app.task(base=AdvisoryLockedTask, bind=True, shared=False, lock_name="deploy")
    def task(self, again=False):
        self.lock.check()
        seen.append((self.lock.name, self.lock.lost))
        for ask in (self.lock.fencing_token, lambda: self.lock.connection):
            with pytest.raises(TypeError, match="where locks are disabled"):
                ask()
        return self(again=True) if not again else task.lock

    assert task.delay().result is not None
    assert seen == [("deploy", False), ("deploy", False)]
    assert task.lock is None


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("pglock_database_url", 5),
        ("pglock_database_url", b"dbname=x"),
        ("pglock_namespace", ""),
        ("pglock_namespace", None),
        ("pglock_namespace", 5),
        ("pglock_enabled", "no"),
        ("pglock_session_pooler", "no"),
        ("pglock_loss_timeout", None),
        ("pglock_loss_timeout", 2.9),
        ("pglock_freeze_timeout", "10"),
        ("pglock_failover_timeout", 0),
        ("pglock_failover_timeout", float("inf")),
        ("pglock_failover_timeout", True),
    ],
)
def test_a_bad_setting_is_refused(setting: str, value: Any) -> None:
    """The refusal names the setting: a text "no" would read as True."""
    with pytest.raises(ImproperlyConfigured, match=setting):
        settings_of(app_with(**{"pglock_database_url": "", setting: value}))


def configured(how: str, name: str) -> Celery:
    app = Celery("shop", set_as_current=False)
    if how == "conf":
        app.conf[name] = "prod"
    elif how == "dict":
        app.config_from_object({name: "prod"})
    else:
        source = type("settings", (), {f"CELERY_{name.upper()}": "prod", "PGLOCK_OF_ANOTHER": 1})
        app.config_from_object(source, namespace="CELERY")
    app.conf.pglock_database_url = ""
    return app


@pytest.mark.parametrize("how", ["conf", "dict", "Django's"])
def test_a_misspelt_setting_keeps_a_worker_from_starting(how: str) -> None:
    """Two systems with "pglock_namspace" would share all their names."""
    with pytest.raises(ImproperlyConfigured, match=r"pglock_namspace: did you mean pglock_namespace\?"):
        fix_settings(configured(how, "pglock_namspace"))
    app = configured(how, "pglock_namespace")
    fix_settings(app)
    assert settings_of(app).namespace == "prod"


def test_a_misspelt_setting_keeps_a_beat_from_starting() -> None:
    """A ledger that nobody writes would be missed when it is needed."""
    with pytest.raises(ImproperlyConfigured, match="pglock_beat_ledger"):
        beat_settings_of(app_with(pglock_beat_ledgr="celery_pglock_beat"))


def test_every_setting_is_known_by_its_name() -> None:
    """What the package reads is no misspelling."""
    read = set(NAMED.findall(Path(config.__file__).read_text()))
    assert read == set(config.SETTINGS)


def test_the_namespace_is_part_of_every_name() -> None:
    """Two apps with the same task names can share a database."""
    assert settings_of(app_with(pglock_database_url="")).namespace == "celery"
    assert settings_of(app_with(pglock_database_url="", pglock_namespace="prod")).namespace == "prod"


def test_bounds_are_seconds_or_a_timedelta_and_some_may_be_left_out() -> None:
    """None switches off what is looked for at a price."""
    settings = settings_of(app_with(pglock_database_url=""))
    assert (settings.loss_timeout, settings.freeze_timeout, settings.failover_timeout) == (10.0, None, 60.0)
    settings = settings_of(
        app_with(
            pglock_database_url="", pglock_freeze_timeout=timedelta(minutes=1), pglock_failover_timeout=None
        )
    )
    assert (settings.freeze_timeout, settings.failover_timeout) == (60.0, None)


# Never a URL, a password.


@pytest.mark.parametrize("url", [URL, f"host=127.0.0.1 port=1 password={SECRET}"])
def test_no_repr_and_no_error_shows_the_password(url: str) -> None:
    """Reprs and errors end up in logs and error trackers."""
    settings = Settings(url)
    with pytest.raises(LockUnavailable) as refusal:
        probe(settings)
    shown = [repr(settings), str(settings), repr(Keeper(settings)), str(refusal.value), repr(refusal.value)]
    assert not [text for text in shown if SECRET in text]


@pytest.mark.parametrize(
    "url",
    [
        f"postgres//user:{SECRET}@host/db",
        f"postgresql://user:{SECRET}@[host/db",
        f"password={SECRET} nonsense",
        f"host=x pasword={SECRET}",
        f"postgresql://host/db?pasword={SECRET}",
    ],
)
def test_an_url_that_can_not_be_parsed_is_not_quoted(url: str) -> None:
    """The error names the setting, and nothing of its value; nor do the errors that it came from."""
    with pytest.raises(LockSetupError, match="pglock_database_url") as refusal:
        probe(Settings(url))
    error: BaseException | None = refusal.value
    while error is not None:
        assert SECRET not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_no_log_line_shows_the_password(caplog: pytest.LogCaptureFixture) -> None:
    """Neither where the server can't be reached."""
    app = app_with(pglock_database_url=URL, task_always_eager=True)
    task = app.task(base=AdvisoryLockedTask, shared=False)(add_one)
    with caplog.at_level(logging.DEBUG):
        result = task.delay(1)
    assert isinstance(result.result, LockUnavailable)
    assert SECRET not in caplog.text + str(result.result) + (result.traceback or "")


def test_celerys_report_of_the_settings_masks_the_url() -> None:
    """`celery report` and a worker's remote `conf` command print the settings."""
    assert SECRET not in app_with(pglock_database_url=URL).bugreport()
