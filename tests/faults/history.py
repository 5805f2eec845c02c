"""What bodies did, written by the bodies themselves, and judged afterwards.

Each body appends a line when it starts, some while it works and one when it ends. `O_APPEND` keeps the lines
of many processes whole, and `CLOCK_MONOTONIC` is one clock for all processes of a machine, so the order of
events needs no server and no lock. A body that was killed has no last line: its end is its last sign of
life, so that an overlap is only claimed where both bodies were seen alive.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Writer:
    """The bodies' side. Make one for each process or for each line: it keeps nothing but the path."""

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def note(self, event: str, **fields: Any) -> None:
        """Append one event, with its time, process and thread (a greenlet, where threads are patched)."""
        fields = {"event": event, "at": time.monotonic(), "pid": os.getpid(), **fields}
        line = json.dumps({**fields, "thread": threading.get_ident()}) + "\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    @contextmanager
    def body(self, name: str, task_id: str | None, task: str = "") -> Iterator[Callable[[], None]]:
        """Note a body's start and its end. Yields a function that notes a sign of life in between."""
        run = uuid.uuid4().hex
        self.note("start", run=run, name=name, id=task_id, task=task)
        try:
            yield lambda: self.note("alive", run=run)
        finally:
            self.note("end", run=run)


@dataclass
class Run:
    """One body that started. ``ended`` is None while it runs, and for ever if it was killed."""

    run: str
    name: str
    task_id: str
    task: str
    pid: int
    thread: int
    started: float
    last_seen: float
    ended: float | None = None


class History:
    """The tests' side: what was written so far."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def events(self, event: str | None = None) -> list[dict[str, Any]]:
        """Every line so far, in the order of its writing; those of one kind, if asked."""
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return []
        # The last line may be under way.
        lines = [json.loads(line) for line in text.split("\n")[:-1]]
        return [line for line in lines if event in (None, line["event"])]

    def runs(self, name: str | None = None, task_id: str | None = None) -> list[Run]:
        """The bodies that started, the oldest first."""
        runs: dict[str, Run] = {}
        for line in self.events():
            if line["event"] == "start":
                runs[line["run"]] = Run(
                    run=line["run"],
                    name=line["name"],
                    task_id=line["id"],
                    task=line["task"],
                    pid=line["pid"],
                    thread=line["thread"],
                    started=line["at"],
                    last_seen=line["at"],
                )
            elif line["event"] in ("alive", "end"):
                runs[line["run"]].last_seen = line["at"]
                if line["event"] == "end":
                    runs[line["run"]].ended = line["at"]
        return [
            run
            for run in runs.values()
            if (name is None or run.name == name) and (task_id is None or run.task_id == task_id)
        ]

    def overlaps(self) -> list[tuple[Run, Run]]:
        """The pairs of bodies with one name that were alive at one time."""
        by_name: dict[str, list[Run]] = defaultdict(list)
        for run in self.runs():
            by_name[run.name].append(run)
        found = []
        for runs in by_name.values():
            runs.sort(key=lambda run: run.started)
            for number, first in enumerate(runs):
                for second in runs[number + 1 :]:
                    if second.started >= first.last_seen:
                        continue
                    found.append((first, second))
        return found
