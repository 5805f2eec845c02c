"""``app.conf`` -> settings."""

from __future__ import annotations

import os

from celery import Celery
from celery.exceptions import ImproperlyConfigured

from .locks.settings import Settings

__all__ = ["is_enabled", "settings_of"]

ENVIRONMENT = "CELERY_PGLOCK_DATABASE_URL"


def is_enabled(app: Celery) -> bool:
    """Whether tasks are locked at all: ``pglock_enabled``."""
    return bool(app.conf.get("pglock_enabled", True))


def settings_of(app: Celery) -> Settings:
    """Read the ``pglock_*`` settings. Raises `ImproperlyConfigured` where no database is named."""
    url = app.conf.get("pglock_database_url")
    if url is None:
        url = os.environ.get(ENVIRONMENT)
    if url is None:
        raise ImproperlyConfigured(
            "celery-pglock: no database is set, and workers in two databases would not exclude each other:"
            f' set app.conf.pglock_database_url = "postgresql://..." or the environment\'s {ENVIRONMENT}'
            ' ("" stands for libpq\'s own PG* variables)'
        )
    if not isinstance(url, str):
        raise ImproperlyConfigured(f"pglock_database_url: a URL or conninfo, not {type(url).__name__}")
    return Settings(
        database_url=url,
        namespace=_text(app, "pglock_namespace", "celery"),
        session_pooler=bool(app.conf.get("pglock_session_pooler", False)),
    )


def _text(app: Celery, setting: str, default: str) -> str:
    value = app.conf.get(setting, default)
    if not isinstance(value, str) or not value:
        raise ImproperlyConfigured(f"{setting}: a text such as {default!r}, not {value!r}")
    return value
