"""The app of the throughput's worker: each body notes when it ran."""

from __future__ import annotations

import os
import time

from celery import Celery

from celery_pglock import AdvisoryLockedTask

from .throughput import RECORD

app = Celery("benchmarks.shop", broker=os.environ["BENCH_BROKER"])
app.conf.update(pglock_database_url=os.environ["BENCH_DATABASE"], task_ignore_result=True)
records = os.open(os.environ["BENCH_RECORDS"], os.O_WRONLY | os.O_APPEND)


def note(batch: int, number: int) -> None:  # noqa: ARG001 - the lock's key
    os.write(records, RECORD.pack(batch, time.monotonic()))


bare = app.task(note, name="bare")
locked = app.task(note, name="locked", base=AdvisoryLockedTask, lock_key="<batch>:<number>")
