"""Takeovers of two beats, beside celery-redbeat: ``PYTHONPATH=tools:. python -m benchmarks.beat_takeover``.

One entry a second. The leader is killed with SIGKILL, again and again; then what holds the lock is restarted
under a leader. RedBeat is measured with its defaults and with the shortest lease that it can sensibly have:
five times a longest sleep of a second.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from localservers import PostgreSQL, Redis

KILLS = int(os.environ.get("KILLS", "10"))

#: Seconds that a beat has to find out who leads, when it has come up.
LOOKS_WITHIN = 3.0

#: Seconds after which nobody is waited for any more.
PATIENCE = 60.0

app = Celery("beats", broker=os.environ.get("BROKER"))
app.conf.update(json.loads(os.environ.get("CONF", "{}")))
app.conf.update(
    beat_schedule={"second": {"task": "second", "schedule": 1.0}},
    result_expires=None,
    task_default_queue="beats",
)


class Contest:
    """Two beats of one kind on a broker of their own."""

    def __init__(self, broker: str, scheduler: str, options: Sequence[str], conf: dict[str, Any]) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.command = [
            sys.executable,
            "-m",
            "celery",
            "-A",
            __spec__.name,
            "beat",
            "-S",
            scheduler,
            *options,
        ]
        self.environment = {**os.environ, "BROKER": broker, "CONF": json.dumps(conf)}
        self.queue = redis.Redis.from_url(broker)
        self.beats: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        number = len(self.beats)
        with (self.folder / f"{number}.log").open("wb") as log:
            beat = subprocess.Popen(
                [*self.command, "-l", "INFO", "-s", str(self.folder / f"{number}.schedule")],
                env=self.environment,
                stdout=log,
                stderr=log,
            )
        self.beats.append(beat)
        return beat

    def start_and_wait(self) -> None:
        """Start one, and wait until it can take over."""
        self.start()
        while not all("beat: Starting" in self.log_of(beat) for beat in self.beats):
            time.sleep(0.1)
        time.sleep(LOOKS_WITHIN)

    def log_of(self, beat: subprocess.Popen[bytes]) -> str:
        return (self.folder / f"{self.beats.index(beat)}.log").read_text()

    def next_message(self, patience: float = PATIENCE) -> float | None:
        """Wait for a message and return when it came, None if none does."""
        deadline = time.time() + patience
        while self.queue.rpop("beats") is None:
            if time.time() > deadline:
                return None
            time.sleep(0.005)
        return time.time()

    def sending(self) -> subprocess.Popen[bytes]:
        """The beat that sent last."""
        sent = [(last_send(self.log_of(beat)), beat) for beat in self.beats if beat.poll() is None]
        return max(sent, key=lambda each: each[0])[1]

    def close(self) -> None:
        for beat in self.beats:
            if beat.poll() is None:
                beat.kill()
            beat.wait()
        self.queue.close()


def last_send(log: str) -> str:
    lines = [line for line in log.splitlines() if "Sending due task" in line]
    return lines[-1] if lines else ""


def kill_leaders(contest: Contest) -> tuple[list[float], list[int], int]:
    """What came of each kill.

    The seconds to the next message; the messages of the gap, less the seconds of it: 0 where each second
    was sent once; and the kills after which no message came in time.
    """
    takeovers, balances, given_up = [], [], 0
    for _ in range(KILLS):
        contest.start_and_wait()
        contest.queue.delete("beats")
        began = contest.next_message()
        time.sleep(0.3)
        leader = contest.sending()
        leader.send_signal(signal.SIGKILL)
        leader.wait()
        killed = time.time()
        came = contest.next_message()
        if came is None:
            given_up += 1
            break
        takeovers.append(came - killed)
        balances.append(balance(contest, began, came))
    return takeovers, balances, given_up


def balance(contest: Contest, began: float | None, came: float) -> int:
    """The messages since one that came before the gap, less the seconds from then to the last of them."""
    count, last = 1, came
    while last < came + 3:
        following = contest.next_message(3.0)
        if following is None:
            break
        count, last = count + 1, following
    return count - round(last - (began or came))


def restart_store(contest: Contest, store: Any) -> str:
    """Restart what holds the lock, and tell what became of the two beats."""
    while sum(beat.poll() is None for beat in contest.beats) < 2:
        contest.start_and_wait()
    store.stop()
    time.sleep(1)
    store.start()
    began = time.time()
    contest.queue.delete("beats")
    came = contest.next_message()
    time.sleep(5)
    running = sum(beat.poll() is None for beat in contest.beats[-2:])
    after = "no message" if came is None else f"the next message after {came - began:.1f} s"
    return f"{after}, {running} of 2 beats run"


def main() -> None:
    with ExitStack() as stack:
        postgres = stack.enter_context(PostgreSQL())
        broker, store = stack.enter_context(Redis()), stack.enter_context(Redis())
        pglock = {"pglock_database_url": postgres.url()}
        redbeat = {"redbeat_redis_url": store.url()}
        contests = {
            "pglock": (postgres, "pglock", [], pglock),
            "pglock, ledger": (postgres, "pglock", [], {**pglock, "pglock_beat_ledger": "beats"}),
            "redbeat, a sleep of 1 s": (store, "redbeat.RedBeatScheduler", ["--max-interval", "1"], redbeat),
            "redbeat, as it comes": (store, "redbeat.RedBeatScheduler", [], redbeat),
        }
        print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} CPUs,"
              f" load {os.getloadavg()[0]:.0f}", flush=True)  # fmt: skip
        for number, (name, (holder, *how)) in enumerate(contests.items()):
            contest = Contest(broker.url(number), *how)
            contest.start()
            try:
                takeovers, balances, given_up = kill_leaders(contest)
                told = f"no takeover within {PATIENCE:.0f} s" if given_up else (
                    f"median {statistics.median(takeovers):.2f} s, maximum {max(takeovers):.2f} s"
                )  # fmt: skip
                gaps = f"messages of the gap, less its seconds: {balances}"
                print(f"{name}: killed {len(takeovers) + given_up} times: {told}; {gaps}", flush=True)
                print(f"{name}: its store restarts: {restart_store(contest, holder)}", flush=True)
            finally:
                contest.close()


if __name__ == "__main__":
    main()
