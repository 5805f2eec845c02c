"""``app.conf`` -> settings."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery
from celery.exceptions import ImproperlyConfigured

from .durations import seconds_of
from .locks.settings import Settings
from .spelling import advice_for

__all__ = ["BeatSettings", "beat_settings_of", "fix_settings", "forget_settings", "ledger_of", "settings_of"]

ENVIRONMENT = "CELERY_PGLOCK_DATABASE_URL"

SETTINGS = (
    "pglock_database_url",
    "pglock_namespace",
    "pglock_enabled",
    "pglock_session_pooler",
    "pglock_loss_timeout",
    "pglock_freeze_timeout",
    "pglock_failover_timeout",
    "pglock_beat_scheduler",
    "pglock_beat_name",
    "pglock_beat_poll",
    "pglock_beat_ledger",
)

_fixed: WeakKeyDictionary[Celery, Settings | None] = WeakKeyDictionary()


def settings_of(app: Celery) -> Settings | None:
    """Return the ``pglock_*`` settings, None where ``pglock_enabled`` is False.

    Raises `ImproperlyConfigured` where no database is named.
    """
    try:
        return _fixed[app]
    except KeyError:
        return read_settings(app)


def fix_settings(app: Celery) -> None:
    """Read the settings now and once: a worker does not look them up for each task."""
    refuse_unknown(app)
    _fixed[app] = read_settings(app)


def forget_settings() -> None:
    """Read the settings anew from now on."""
    _fixed.clear()


def refuse_unknown(app: Celery) -> None:
    """Refuse a misspelt setting, which would leave the one that was meant at its default."""
    given = sorted(map(str, app.conf))
    # Known when they are read. Django's hold ours as CELERY_PGLOCK_...: a PGLOCK_... is another package's.
    prefix = app.conf.prefix or ""
    for key in given:
        name = key.removeprefix(prefix).lower() if prefix and key.startswith(prefix) else key
        if name.startswith("pglock_") and name not in SETTINGS:
            advice = advice_for(name, SETTINGS, "settings")
            raise ImproperlyConfigured(f"celery-pglock: there is no setting {name}: {advice}")


def read_settings(app: Celery, url: str | None = None) -> Settings | None:
    """Read the settings from ``app.conf``, but for the database if one is named."""
    if not flag(app, "pglock_enabled", default=True):
        return None
    if url is None:
        url = app.conf.get("pglock_database_url")
    if url is None:
        url = os.environ.get(ENVIRONMENT)
    if url is None:
        raise ImproperlyConfigured(
            "celery-pglock: no database is set, and workers in two databases would not exclude each other:"
            f' set app.conf.pglock_database_url = "postgresql://..." or the environment\'s {ENVIRONMENT}'
            ' ("" stands for libpq\'s own PG* variables). Tests that need no locks set pglock_enabled = False'
        )
    if not isinstance(url, str):
        raise ImproperlyConfigured(f"pglock_database_url: a URL or conninfo, not {type(url).__name__}")
    return Settings(
        database_url=url,
        namespace=text(app, "pglock_namespace", "celery"),
        session_pooler=flag(app, "pglock_session_pooler", default=False),
        loss_timeout=seconds(app, "pglock_loss_timeout", 10.0, least=3.0),
        freeze_timeout=seconds_or_none(app, "pglock_freeze_timeout", None, least=3.0),
        failover_timeout=seconds_or_none(app, "pglock_failover_timeout", 60.0, least=3.0),
    )


@dataclass(frozen=True)
class BeatSettings:
    """How several beats share one schedule."""

    scheduler: Any
    name: str
    poll: float
    ledger: str | None


def beat_settings_of(app: Celery) -> BeatSettings:
    """Return the ``pglock_beat_*`` settings. Raises `ImproperlyConfigured`."""
    refuse_unknown(app)
    return BeatSettings(
        # By its path, or the class itself.
        scheduler=app.conf.get("pglock_beat_scheduler", "celery.beat:PersistentScheduler"),
        name=text(app, "pglock_beat_name", "beat"),
        poll=seconds(app, "pglock_beat_poll", 1.0, least=0.1),
        ledger=ledger_of(app),
    )


def ledger_of(app: Celery) -> str | None:
    """Return the table that tells which slots of a schedule were sent, if there is one."""
    if app.conf.get("pglock_beat_ledger") is None:
        return None
    return text(app, "pglock_beat_ledger", "celery_pglock_beat")


def flag(app: Celery, setting: str, *, default: bool) -> bool:
    """Read a setting that is True or False. A text such as "no" would be taken for True."""
    value = app.conf.get(setting, default)
    if not isinstance(value, bool):
        raise ImproperlyConfigured(f"{setting}: True or False, not {value!r}")
    return value


def seconds(app: Celery, setting: str, default: float, *, least: float) -> float:
    """Read a setting in seconds; a timedelta will do."""
    value = app.conf.get(setting, default)
    try:
        return seconds_of(value, least=least)
    except (TypeError, ValueError):
        raise ImproperlyConfigured(
            f"{setting}: seconds >= {least:g}, or a timedelta, not {value!r}"
        ) from None


def seconds_or_none(app: Celery, setting: str, default: float | None, *, least: float) -> float | None:
    """Read a setting in seconds that may be None."""
    given = app.conf.get(setting, default)
    return None if given is None else seconds(app, setting, given, least=least)


def text(app: Celery, setting: str, default: str) -> str:
    """Read a setting that is a text and not empty."""
    value = app.conf.get(setting, default)
    if not isinstance(value, str) or not value:
        raise ImproperlyConfigured(f"{setting}: a text such as {default!r}, not {value!r}")
    return value
