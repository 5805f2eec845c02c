"""What every app of a fleet's workers is made of: its settings, its history, and a body."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from .history import Writer

__all__ = ["CONF", "history", "work"]

FOLDER = Path(os.environ["FLEET_FOLDER"])
CONF = json.loads(os.environ["FLEET_CONF"])

history = Writer(FOLDER / "history")


def work(task: Any, name: str, seconds: float = 0.0, gate: str | None = None) -> None:
    """Be a body: for some seconds, or until the test opens the gate (a minute at most)."""
    with history.body(name, task.request.id, task.name) as alive:
        deadline = time.monotonic() + (60 if gate else seconds)
        while (left := deadline - time.monotonic()) > 0 and not (gate and (FOLDER / "gates" / gate).exists()):
            time.sleep(min(left, 0.01))
            alive()
