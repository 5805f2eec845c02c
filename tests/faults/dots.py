"""What stands where a recipe of the documentation has dots: a body that a test sees begin, and lets end."""

from __future__ import annotations

import sys
import time

from celery import current_task

from .work import FOLDER, history


def here(where: str) -> None:
    """Note the beginning, wait until the test opens the gate, and note the end.

    The gate is named for the execution; outside of a task, for the place in the recipe.
    """
    id = current_task.request.id if current_task else where
    with history.body(where, id):
        deadline = time.monotonic() + 60
        while not (FOLDER / "gates" / id).exists() and time.monotonic() < deadline:
            time.sleep(0.01)


if __name__ == "__main__":
    here(" ".join(sys.argv[1:]))
