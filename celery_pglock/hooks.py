"""What the package hears from Celery: the life of a worker, and of each execution's end.

No hook guards anything: Celery logs what a signal handler raises and goes on. What must stop a worker is a
bootstep.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg
from celery import Celery, bootsteps, signals
from celery.exceptions import ImproperlyConfigured

from .config import fix_settings, forget_settings, settings_of
from .delivery import CONTENT_TYPE_HEADER
from .execution import settle
from .locks.errors import LockSetupError, LockUnavailable
from .locks.keeper import close_all
from .locks.probe import probe
from .locks.process import name_this_process, serve_one_at_a_time
from .locks.settings import Settings
from .signals import send_events

__all__ = ["install"]

logger = logging.getLogger(__name__)

Handler = TypeVar("Handler", bound=Callable[..., None])


def install(app: Celery) -> None:
    """Let the app's workers check their locks when they start. Called for every locked task."""
    app.steps["worker"].add(CheckLocks)


class CheckLocks(bootsteps.Step):
    """Keeps a worker from starting whose locks could never work.

    One whose server is merely down starts: its tasks come back until the server does.
    """

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        send_events(bool(getattr(worker, "task_events", False)))
        fix_settings(worker.app)
        settings = settings_of(worker.app)
        if settings is None:
            logger.warning("pglock_enabled is False: all tasks run unlocked")
            return
        refuse_blocking_eventlet()
        for in_transaction in sorted(scopes_of(worker.app)):
            check_server(settings, transactions=in_transaction)


def scopes_of(app: Celery) -> set[bool]:
    """Which scopes the app's tasks use: whether their locks live in transactions."""
    options = (getattr(task, "_lock_options", None) for task in app.tasks.values())
    return {each.in_transaction for each in options if each is not None}


def check_server(settings: Settings, *, transactions: bool) -> None:
    """Ask the server once whether it can lock."""
    try:
        probe(settings, transactions=transactions)
    except LockSetupError as exc:
        raise ImproperlyConfigured(str(exc)) from exc
    except LockUnavailable as exc:
        logger.warning("%s: tasks wait until it can be", exc)


def refuse_blocking_eventlet() -> None:
    """Psycopg's compiled wait loop knows nothing of eventlet, and would block all greenlets of the worker."""
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is None or not patcher.is_monkey_patched("select"):
        return
    if os.environ.get("PSYCOPG_WAIT_FUNC") != "wait_selector" and psycopg.pq.__impl__ != "python":
        raise ImproperlyConfigured(
            "under eventlet psycopg would block the whole worker:"
            " set the environment variable PSYCOPG_WAIT_FUNC=wait_selector"
        )


def connect(signal: Any) -> Callable[[Handler], Handler]:
    """Connect a function for the life of the process, and only once."""
    decorator: Callable[[Handler], Handler]
    decorator = signal.connect(weak=False, dispatch_uid=f"celery_pglock.{signal.name}")
    return decorator


@connect(signals.celeryd_init)
def on_worker_init(sender: Any = None, **_: Any) -> None:
    name_this_process(str(sender))


@connect(signals.worker_process_init)
def on_process_init(**_: Any) -> None:
    # A child of prefork, or the one process of solo. Threads and green pools send no such signal.
    serve_one_at_a_time()


@connect(signals.worker_process_shutdown)
def on_process_shutdown(**_: Any) -> None:
    close_all()


@connect(signals.worker_shutdown)
def on_worker_shutdown(**_: Any) -> None:
    close_all()
    forget_settings()


@connect(signals.task_received)
def on_received(request: Any = None, **_: Any) -> None:
    # Only the main process sees how the message was serialized, and a new copy has to be written alike.
    if getattr(request.task, "_lock_options", None) is not None:
        request.request_dict[CONTENT_TYPE_HEADER] = request.content_type


@connect(signals.task_postrun)
def on_postrun(task_id: str = "", **_: Any) -> None:
    settle(task_id)
