"""Tasks whose locks live in transactions, and no others, so that a pooler may stand before the server."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from celery import Celery

from celery_pglock import AdvisoryLockedTask

from .history import Writer

history = Writer(Path(os.environ["FLEET_FOLDER"]) / "history")

app = Celery("pooled")
app.conf.update(json.loads(os.environ["FLEET_CONF"]))


@app.task(base=AdvisoryLockedTask, name="transfer", bind=True, lock_scope="transaction", lock_key="<name>",
          lock_on_conflict="wait", lock_max_wait=30)  # fmt: skip
def transfer(self: Any, name: str, n: int) -> None:
    """Read, think and write: what only one may do at a time."""
    with history.body(name, self.request.id, self.name):
        connection = self.lock.connection
        (balance,) = connection.execute("SELECT balance FROM account WHERE name = %s", [name]).fetchone()
        time.sleep(0.05)
        connection.execute("UPDATE account SET balance = %s WHERE name = %s", [balance + n, name])
