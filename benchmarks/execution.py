"""Executions without a worker: Celery's own tracer, with all that a worker does once for its process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from celery import Celery, Task, signals
from celery.app.trace import build_tracer, setup_worker_optimizations

from celery_pglock import AdvisoryLockedTask
from celery_pglock.config import fix_settings

_numbers = itertools.count()


def app_as_in_a_worker(database_url: str) -> Celery:
    """Return an app with two tasks, ``bare`` and ``locked``."""
    app = Celery("bench", broker="memory://")
    app.conf.pglock_database_url = database_url
    app.task(train, name="bare")
    app.task(train, name="locked", base=AdvisoryLockedTask, lock_key="tenant:<tenant_id>")
    setup_worker_optimizations(app)
    fix_settings(app)
    return app


def train(tenant_id: int, full: bool = False) -> None:
    """Do nothing."""


def bare(task: Task) -> Callable[..., None]:
    """Return an execution as an app without the package has it: nobody hears of its end."""
    heard, signals.task_postrun.receivers = signals.task_postrun.receivers, []
    try:
        return traced(task)
    finally:
        signals.task_postrun.receivers = heard


def traced(task: Task) -> Callable[..., None]:
    """Return a function that executes a task with the arguments it is given, each time as a new message."""
    tracer = build_tracer(task.name, task, app=task.app)
    message = request_of(task)

    def execute(*args: Any) -> None:
        id = f"00000000-0000-4000-8000-{next(_numbers):012x}"
        outcome = tracer(id, args, {}, {**message, "id": id, "root_id": id, "correlation_id": id})
        if outcome.info is not None:
            raise RuntimeError(f"{task.name} did not succeed: {outcome.retval!r}")

    return execute


def request_of(task: Task) -> dict[str, Any]:
    """What a worker hands to the tracer: the message's headers, and what its transport says."""
    delivery = {"exchange": "", "routing_key": "celery", "priority": 0, "redelivered": False}
    headers = task.app.amqp.as_task_v2("", task.name, (0,)).headers
    return {**headers, "hostname": "celery@bench", "reply_to": None, "delivery_info": delivery}
