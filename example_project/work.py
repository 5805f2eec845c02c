"""What stands for hours of training, and tells what happens inside the workers."""

from __future__ import annotations

import time
from typing import Any

from celery import Task, current_task
from celery.signals import worker_ready

from celery_pglock import lock_conflict

from .records import Record, write


def work(tenant: str, seconds: float) -> None:
    """Write down the beginning, work, write down the end."""
    tell("start", current_task, tenant)
    time.sleep(seconds)
    tell("end", current_task, tenant)


@lock_conflict.connect(weak=False)
def on_conflict(sender: Any = None, decision: str = "", **_: Any) -> None:
    request = sender.request
    tell(decision, sender, (request.args or list(request.kwargs.values()))[0])


@worker_ready.connect(weak=False)
def on_ready(sender: Any = None, **_: Any) -> None:
    write(Record("ready", worker=short(sender.hostname)))


def tell(what: str, task: Task, tenant: str) -> None:
    request = task.request
    write(Record(what, tenant, task.name.rpartition(".")[2], request.id, short(request.hostname)))


def short(hostname: str) -> str:
    return hostname.partition("@")[0]
