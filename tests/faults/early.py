"""The shop, in a worker whose main process uses a lock before it forks its children."""

from __future__ import annotations

from typing import Any

from celery import signals

from .shop import app

__all__ = ["app"]


@signals.worker_init.connect
def on_worker_init(**_: Any) -> None:
    app.tasks["skip"].apply(("before the fork",), throw=True)
