"""Real beats for tests, and a reader that takes what they send from the broker.

    def test_something(beats):
        first = beats.start()
        beats.leader(first)                       # waits until it leads
        second = beats.start()
        first.kill()
        sent = beats.reader.wait_for(lambda sends: ...)

A beat is ``celery -A faults.clock beat -S pglock`` from the test's own folder, see `nursery`. Nobody but the
reader takes messages from the queue, so that what it has read is all that was sent.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import redis

from .fleet import Worker, wait_for

#: The length of the interval of each entry.
EVERY = timedelta(seconds=0.25)


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

    def wait_decided(self, timeout: float = 20.0) -> None:
        """Wait until it leads or follows."""
        wait_for(
            lambda: "this beat " in self.text(), lambda: f"{self!r} says:\n{self.text()[-3000:]}", timeout
        )

    def wait_following(self, timeout: float = 20.0) -> None:
        wait_for(
            lambda: "this beat follows: " in self.text(),
            lambda: f"{self!r} follows:\n{self.text()[-3000:]}",
            timeout,
        )


class Beats:
    """Beats of one schedule, on one broker and one database. ``conf``: their settings.

    They send often and poll often, unless a test says otherwise.
    """

    def __init__(self, folder: Path, broker: str, dsn: str, every: timedelta = EVERY, **conf: Any) -> None:
        self.every = every
        self.folder = folder
        self.dsn = dsn
        self.broker = broker
        self.beats: list[Beat] = []
        self.conf = {
            "broker_url": broker,
            "task_default_queue": "clock",
            "pglock_database_url": dsn,
            "beat_schedule": self.entries("abc"),
            "pglock_beat_poll": 0.2,
            "result_expires": None,
            **conf,
        }
        self.reader = Reader(broker, "clock")

    def start(
        self,
        *options: str,
        env: Mapping[str, str] | None = None,
        command: tuple[str, ...] = ("beat", "-S", "pglock"),
        **conf: Any,
    ) -> Beat:
        """Start a beat with a schedule file of its own, and do not wait for it."""
        name = f"beat{len(self.beats) + 1}"
        schedule = self.folder / f"{name}.schedule"
        arguments = ["-A", "faults.clock", *command, "-l", "INFO", "-s", str(schedule), *options]
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("CELERY_")},
            "C_FORCE_ROOT": "1",
            "FLEET_FOLDER": str(self.folder),
            "FLEET_CONF": json.dumps({**self.conf, **conf}),
            **(env or {}),
        }
        beat = Beat(name, arguments, self.folder, environment)
        self.beats.append(beat)
        return beat

    def entries(self, names: Iterable[str], **more: Any) -> dict[str, dict[str, Any]]:
        """A schedule of these entries."""
        seconds = self.every.total_seconds()
        return {name: {"task": "note", "schedule": seconds, **more} for name in names}

    def missing(self, of: Iterable[str] | None = None) -> list[tuple[str, datetime]]:
        """The slots between the first and the last one of each entry that were not sent."""
        sends = list(self.reader.sends)
        gaps = []
        for name in {send.entry for send in sends} if of is None else of:
            sent = {send.due for send in sends if send.entry == name and send.due is not None}
            slot = min(sent)
            while slot < max(sent):
                if slot not in sent:
                    gaps.append((name, slot))
                slot += self.every
        return gaps

    def wait_between_slots(self, entries: str = "abc", timeout: float = 20.0) -> None:
        """Wait until all entries of a slot are sent, and told: nothing is under way for a while."""

        def all_sent() -> bool:
            last = max((send.due for send in self.reader.sends if send.entry in entries), default=None)
            return {send.entry for send in self.reader.sends if send.due == last} >= set(entries)

        self.reader.wait(2 * len(entries))
        wait_for(lambda: not all_sent(), "the next slot", timeout)
        wait_for(all_sent, "all entries of a slot", timeout)
        time.sleep(self.every.total_seconds() / 5)

    def pair(self, **more: Any) -> tuple[Beat, Beat]:
        """Start two, and return the one that leads and the one that follows it."""
        one, other = self.start(**more), self.start(**more)
        leader = self.leader()
        follower = other if leader is one else one
        follower.wait_following()
        return leader, follower

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
