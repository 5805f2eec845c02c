"""The app of the tests' beats and of the workers that run what they send. Its settings come from the test."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.beat import Scheduler
from celery.signals import before_task_publish

from celery_pglock import AdvisoryLockedTask

app = Celery("clock")
app.conf.update(json.loads(os.environ["FLEET_CONF"]))

if "FLEET_DJANGO" in os.environ:
    import django
    from django.conf import settings

    settings.configure(**json.loads(os.environ["FLEET_DJANGO"]))
    django.setup()


class InMemory(Scheduler):
    """A user's own scheduler: it says when it is built."""

    def setup_schedule(self) -> None:
        print(f"built in {os.getpid()}", flush=True)
        super().setup_schedule()


@before_task_publish.connect
def freeze(**_: Any) -> None:
    """Freeze a beat that is about to publish if the test wants it, once.

    From inside: nothing else in its process has had a turn when it goes on.
    """
    wanted = Path(os.environ["FLEET_FOLDER"], "freeze")
    if wanted.exists():
        wanted.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)


if "worker" in sys.argv:
    # Beats know its name alone.
    @app.task(base=AdvisoryLockedTask, name="elsewhere.build", lock_key=[])
    def build(seconds: float) -> None:
        write("builds", "begin")
        time.sleep(seconds)
        write("builds", "end")


@app.task(base=AdvisoryLockedTask, bind=True, name="note", lock_key=[])
def note(self: Any, seconds: float = 0.0) -> None:
    """Write down the slot that runs."""
    slot = (self.request.headers or {}).get("pglock_slot", {})
    write("runs", f"{slot.get('entry')} {slot.get('due')} {self.request.id}")
    time.sleep(seconds)


def write(journal: str, line: str) -> None:
    with Path(os.environ["FLEET_FOLDER"], journal).open("a") as file:
        file.write(f"{line}\n")
