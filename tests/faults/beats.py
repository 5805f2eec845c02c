"""Real beats for tests, and a reader that takes what they send from the broker.

    def test_something(beats):
        first = beats.start()
        beats.leader(first)                       # waits until it leads
        second = beats.start()
        first.kill()
        sent = beats.reader.wait_for(lambda sends: ...)

A beat is ``python -m celery -A faults.clock beat -S pglock`` from the test's own folder. Nobody but the
reader takes messages from the queue, so that what it has read is all that was sent.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import redis

from .fleet import TESTS, Worker, wait_for

#: Three entries of a second each, unless a test says otherwise.
EVERY_SECOND = {name: {"task": "note", "schedule": 1.0} for name in ("a", "b", "c")}


@dataclass(frozen=True)
class Send:
    """One message, as the broker had it."""

    entry: str
    due: datetime | None
    arrived: float
    headers: dict[str, Any]


class Reader(threading.Thread):
    """Takes every message from a queue, and notes when."""

    def __init__(self, broker: str, queue: str) -> None:
        super().__init__(daemon=True)
        self.sends: list[Send] = []
        self._client = redis.Redis.from_url(broker)
        self._queue = queue
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stopped.is_set():
            got = self._client.brpop([self._queue], timeout=0.2)
            if got is not None:
                self.sends.append(send_of(got[1]))

    def close(self) -> None:
        self._stopped.set()
        self.join()
        self._client.close()

    def since(self, moment: float) -> list[Send]:
        return [send for send in list(self.sends) if send.arrived >= moment]

    def wait(self, count: int, since: float = 0.0, timeout: float = 20.0) -> list[Send]:
        """Wait for so many sends after a moment."""
        wait_for(lambda: len(self.since(since)) >= count, f"{count} messages", timeout)
        return self.since(since)


def send_of(raw: bytes) -> Send:
    headers = json.loads(raw)["headers"]
    slot = headers.get("pglock_slot", {})
    due = datetime.fromisoformat(slot["due"]) if slot else None
    return Send(slot.get("entry", headers["task"]), due, time.time(), headers)


class Beat(Worker):
    """One beat."""

    def leads(self) -> bool:
        """Whether the last that it said of itself is that it leads."""
        said = [line for line in self.text().splitlines() if "this beat " in line]
        return bool(said) and "this beat leads: " in said[-1]

    def wait_leading(self, timeout: float = 20.0) -> float:
        wait_for(self.leads, lambda: f"{self!r} leads:\n{self.text()[-3000:]}", timeout)
        return time.time()

    def wait_following(self, timeout: float = 20.0) -> None:
        wait_for(
            lambda: "this beat follows: " in self.text(),
            lambda: f"{self!r} follows:\n{self.text()[-3000:]}",
            timeout,
        )


class Beats:
    """Beats of one schedule, on one broker and one database. ``conf``: their settings."""

    def __init__(self, folder: Path, broker: str, dsn: str, **conf: Any) -> None:
        self.folder = folder
        self.dsn = dsn
        self.broker = broker
        self.beats: list[Beat] = []
        self.conf = {
            "broker_url": broker,
            "task_default_queue": "clock",
            "pglock_database_url": dsn,
            "beat_schedule": EVERY_SECOND,
            "result_expires": None,
            **conf,
        }
        self.reader = Reader(broker, "clock")

    def start(
        self,
        *options: str,
        env: Mapping[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        command: tuple[str, ...] = ("beat", "-S", "pglock"),
        **conf: Any,
    ) -> Beat:
        """Start a beat with a schedule file of its own, and do not wait for it."""
        name = f"beat{len(self.beats) + 1}"
        line = [*prefix, sys.executable, "-m", "celery", "-A", "faults.clock", *command, "-l", "INFO",
                "-s", str(self.folder / f"{name}.schedule"), *options]  # fmt: skip
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("CELERY_")},
            "PYTHONPATH": str(TESTS),
            "PYTHONUNBUFFERED": "1",
            "C_FORCE_ROOT": "1",
            "FLEET_FOLDER": str(self.folder),
            "FLEET_CONF": json.dumps({**self.conf, **conf}),
            **(env or {}),
        }
        beat = Beat(name, line, self.folder, environment)
        self.beats.append(beat)
        return beat

    def start_leader(self, *options: str, **more: Any) -> Beat:
        beat = self.start(*options, **more)
        beat.wait_leading()
        return beat

    def start_follower(self, *options: str, **more: Any) -> Beat:
        beat = self.start(*options, **more)
        beat.wait_following()
        return beat

    def leader(self, timeout: float = 20.0) -> Beat:
        """The one beat that leads."""

        def leading() -> list[Beat]:
            return [beat for beat in self.beats if beat._process.poll() is None and beat.leads()]

        return wait_for(leading, "a leader", timeout)[0]

    def leader_besides(self, other: Beat, timeout: float = 20.0) -> Beat:
        """The beat that leads where another one used to."""

        def leading() -> list[Beat]:
            return [beat for beat in self.beats if beat is not other and beat.leads()]

        return wait_for(leading, "another leader", timeout)[0]

    def wait_logged(self, beat: Beat, text: str, timeout: float = 20.0) -> None:
        wait_for(lambda: text in beat.text(), lambda: f"{text!r}:\n{beat.text()[-3000:]}", timeout)

    def close(self) -> None:
        for beat in self.beats:
            beat.close()
        self.reader.close()


def counts(sends: list[Send]) -> Counter[tuple[str, datetime | None]]:
    """How often each slot was sent."""
    return Counter((send.entry, send.due) for send in sends)


def missing(sends: list[Send], every: timedelta = timedelta(seconds=1)) -> list[tuple[str, datetime]]:
    """The slots between the first and the last one of each entry that were not sent."""
    gaps = []
    for name in {send.entry for send in sends}:
        sent = {send.due for send in sends if send.entry == name and send.due is not None}
        slot = min(sent)
        while slot < max(sent):
            if slot not in sent:
                gaps.append((name, slot))
            slot += every
    return gaps
