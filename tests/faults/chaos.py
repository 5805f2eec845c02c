"""Faults of all kinds at random moments, against a fleet of mixed pools with late acknowledgment.

Messages flow all the while. Whatever is struck comes back: a killed worker is replaced, a server starts
again, a proxy goes on. At the end the faults stop, and what was sent has to be done. Nothing here asks the
package: bodies write the history, the result backend tells what is done, PostgreSQL tells what is held.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from celery import states
from kombu.exceptions import OperationalError
from kombu.utils.uuid import uuid
from redis.exceptions import RedisError

from localservers import PostgreSQL

from .durable import DurableRedis
from .fleet import Fleet, Worker, alive, wait_for
from .history import Run
from .proxy import Proxy

POOLS = {"prefork": 3, "threads": 3, "gevent": 4, "solo": 1}
NAMES = [f"n{number}" for number in range(6)]
LOSS_TIMEOUT = 3.0

#: Seconds between the moment in which a server lets names go by itself and that in which the bodies have
#: stopped: the documented tenth of a second, and what a busy machine adds.
WINDOW = 0.1 + 0.4

#: Messages a second.
RATE = 12.0

OURS = "FROM pg_stat_activity WHERE application_name LIKE 'pglock %'"


@dataclass
class Report:
    """What was done, and what came of it."""

    faults: Counter[str] = field(default_factory=Counter)
    #: When each fault was over.
    times: list[tuple[float, str]] = field(default_factory=list)
    sent: int = 0
    runs: int = 0
    interrupted: int = 0
    ended_alone: int = 0
    lost_locks: int = 0
    in_window: int = 0
    overlaps: list[tuple[Run, Run]] = field(default_factory=list)
    #: Tasks without a result, less those whose message is lost.
    unfinished: list[str] = field(default_factory=list)
    #: Tasks whose message Kombu took from its list and never noted: by Redis's own record.
    lost_by_kombu: list[str] = field(default_factory=list)
    #: How often that could have happened: at each end of a process and of the broker under a process.
    chances_to_lose: int = 0
    #: Workers that could not end since nobody reads a result that a child of theirs writes.
    unread: list[str] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)
    stuck_names: list[str] = field(default_factory=list)
    locks: int = 0
    sessions: int = 0

    def __str__(self) -> str:
        faults = "\n".join(f"  {count:4} {fault}" for fault, count in sorted(self.faults.items()))
        return (
            f"{self.sent} messages, {self.runs} bodies ({self.interrupted} without an end),"
            f" {self.lost_locks} lost locks, results {dict(self.states)},"
            f" {self.ended_alone} workers ended by themselves, {len(self.unread)} hung in billiard\n"
            f"{sum(self.faults.values())} faults:\n{faults}\n"
            f"overlaps: {len(self.overlaps)}, and {self.in_window} inside a documented window\n"
            f"lost messages: {len(self.unfinished)}, and {len(self.lost_by_kombu)} by Kombu's transport"
            f" ({self.chances_to_lose} chances); stuck names: {len(self.stuck_names)},"
            f" locks left: {self.locks}, sessions left: {self.sessions}\n"
            + "".join(f"overlap of {first}\n      and {second}\n" for first, second in self.overlaps)
            + "".join(f"at {at:.3f} {what}\n" for at, what in self.times if self.overlaps)
            + "".join(f"lost: {id}\n" for id in self.unfinished)
            + "".join(f"lost by Kombu: {id}\n" for id in self.lost_by_kombu)
        )


class Chaos:
    """One run. Use it once, from the main thread."""

    def __init__(
        self, folder: Path, seed: int, *, pools: Mapping[str, int] = POOLS, locked: bool = True
    ) -> None:
        self.pools = pools
        self.random = random.Random(seed)
        self.report = Report()
        self.server, self.redis = PostgreSQL(), DurableRedis()
        self.proxy = Proxy(self.server.port)
        url = f"postgresql://postgres@127.0.0.1:{self.proxy.port}/postgres"
        self.fleet = Fleet(
            folder,
            self.redis.url(0),
            self.redis.url(1),
            url,
            pglock_loss_timeout=LOSS_TIMEOUT,
            pglock_enabled=locked,
            # Judged at the end, however long it rains.
            result_expires=86_400,
        )
        # Only of the one that asks for redelivery: for the workers nothing is late.
        self.fleet.app.conf.broker_transport_options = {"visibility_timeout": 1}
        self.workers: dict[str, Worker] = {}
        self._leaving: list[Worker] = []
        self._ids: list[str] = []
        #: When names became free without an end of their bodies: first and last moment.
        self._losses: list[tuple[float, float]] = []
        self._flow = threading.Event()
        self._childless_since: float | None = None

    def run(self, seconds: float, *, faults: bool = True) -> Report:
        """Start all, let it rain, and judge."""
        with self.server, self.redis, self.proxy:
            try:
                for pool in self.pools:
                    self._start(pool)
                for worker in self.workers.values():
                    worker.wait_ready(60)
                producer = threading.Thread(target=self._produce)
                producer.start()
                try:
                    self._rain(seconds) if faults else time.sleep(seconds)
                finally:
                    self._flow.set()
                    producer.join()
                self._judge(self._calm_down())
            finally:
                self.fleet.close()
        return self.report

    # What flows.

    def _start(self, pool: str) -> None:
        self.workers[pool] = self.fleet.worker(pool, self.pools[pool], app="faults.bodies", ready=False)

    def _supervise(self) -> None:
        """Replace what ended by itself: Kombu does not survive each restart of a broker."""
        for pool, worker in list(self.workers.items()):
            if not alive(worker.pid):
                self.report.ended_alone += 1
                self.report.chances_to_lose += 1
                worker.close()
                self._start(pool)
        # A main process that billiard holds in its shutdown stays, with no child left and nothing to do.
        if self._children():
            self._childless_since = None
        elif self._childless_since is None:
            self._childless_since = time.monotonic()
        elif time.monotonic() - self._childless_since > 20:
            self._childless_since = None
            self.report.unread.append(self.workers["prefork"].name)
            self.workers["prefork"].kill()

    def _produce(self) -> None:
        draw = random.Random(self.random.random())
        while not self._flow.wait(1 / RATE):
            self._send(draw.choice(NAMES), draw.choice((0.02, 0.1, 0.4)))

    def _send(self, name: str, seconds: float) -> str:
        """Publish, and again until the broker took it: it may be down."""
        id = uuid()
        signature = self.fleet.signature("late_lost_retry", name, "steps", seconds)
        for _ in range(200):
            try:
                signature.apply_async(task_id=id, retry=False)
            except (OperationalError, RedisError, OSError):  # noqa: PERF203
                time.sleep(0.05)
            else:
                self._ids.append(id)
                return id
        raise AssertionError("the broker did not come back")

    # What strikes.

    def _rain(self, seconds: float) -> None:
        faults: list[tuple[int, Callable[[], str | None]]] = [
            (4, self._kill_child),
            (1, self._kill_worker),
            (1, self._stop_worker),
            (2, self._terminate_child),
            (4, self._soft_limit),
            (6, self._end_a_session),
            (1, self._restart_server),
            (1, self._crash_server),
            (3, self._freeze),
            (3, self._redeliver),
            (1, self._restart_broker),
            (2, self._stall_shortly),
            (1, self._stall),
        ]
        weights = [weight for weight, _ in faults]
        # Each once before chance decides.
        first = [fault for _, fault in faults]
        self.random.shuffle(first)
        begin = time.monotonic()
        while (since := time.monotonic() - begin) < seconds or (first and since < 3 * seconds + 30):
            time.sleep(self.random.uniform(0.05, 0.5))
            self._supervise()
            fault = first.pop() if first else self.random.choices(faults, weights)[0][1]
            happened = fault()
            if happened is not None:
                self.report.faults[happened] += 1
                self.report.times.append((time.monotonic(), happened))
            elif len(first) < len(faults):
                first.insert(0, fault)

    def _children(self) -> list[int]:
        return self.workers["prefork"].children()

    def _signal_child(self, signum: signal.Signals) -> bool:
        children = self._children()
        if children:
            os.kill(self.random.choice(children), signum)
        return bool(children)

    def _kill_child(self) -> str | None:
        return "child killed" if self._signal_child(signal.SIGKILL) else None

    def _terminate_child(self) -> str | None:
        return "child terminated" if self._signal_child(signal.SIGTERM) else None

    def _soft_limit(self) -> str | None:
        """As the soft time limit comes, but only where a body runs: elsewhere it meets billiard."""
        runs = [run for run in self.fleet.history.runs() if run.ended is None and run.pid in self._children()]
        if not runs:
            return None
        os.kill(runs[-1].pid, signal.SIGUSR1)
        return "soft limit"

    def _kill_worker(self) -> str | None:
        pool = self.random.choice(list(self.pools))
        self.workers[pool].kill()
        self.report.chances_to_lose += 1
        self._start(pool)
        return f"{pool} worker killed"

    def _stop_worker(self) -> str | None:
        pool = self.random.choice(list(self.pools))
        self.workers[pool].signal(signal.SIGTERM)
        self._leaving.append(self.workers[pool])
        self._start(pool)
        return f"{pool} worker stopped"

    def _end_a_session(self) -> str | None:
        at = time.monotonic()
        pids = [pid for (pid,) in self.server.execute(f"SELECT pid {OURS}")]
        if not pids:
            return None
        self.server.execute("SELECT pg_terminate_backend(%s, 5000)", [self.random.choice(pids)])
        self._losses.append((at, time.monotonic()))
        return "session ended"

    def _restart_server(self) -> str:
        return self._strike_server("fast", "server restarted")

    def _crash_server(self) -> str:
        return self._strike_server("immediate", "server crashed")

    def _strike_server(self, mode: str, what: str) -> str:
        at = time.monotonic()
        self.server.restart(mode)  # type: ignore[arg-type]
        self._losses.append((at, time.monotonic()))
        return what

    def _freeze(self) -> str | None:
        worker = self.workers[self.random.choice(list(self.pools))]
        pids = [pid for pid in (worker.pid, *worker.children()) if alive(pid)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(self.random.uniform(0.2, 0.8))
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        return "worker frozen"

    def _redeliver(self) -> str:
        self._redeliver_all()
        return "all redelivered"

    def _restart_broker(self) -> str:
        self.redis.stop()
        self.redis.start()
        self.report.chances_to_lose += sum(alive(worker.pid) for worker in self.fleet.workers)
        return "broker restarted"

    def _stall_shortly(self) -> str:
        self.proxy.stall()
        time.sleep(self.random.uniform(0.1, LOSS_TIMEOUT / 4))
        self.proxy.resume()
        return "proxy stalled shortly"

    def _stall(self) -> str:
        self.proxy.stall()
        time.sleep(self.random.uniform(1.0, 1.3) * LOSS_TIMEOUT)
        self.proxy.resume()
        return "proxy stalled"

    # What is left.

    def _calm_down(self) -> list[str]:
        """Let all that was sent be done. What died with a worker comes back by redelivery.

        Returns what has no end.
        """
        deadline = time.monotonic() + 90
        looked, lost, gone = 0.0, set[str](), set[str]()
        while set(self._pending()) - gone and time.monotonic() < deadline:
            if time.monotonic() - looked > 3:
                looked = time.monotonic()
                self._redeliver_all()
                # What was on its way at the last look has arrived.
                lost, before = self.redis.messages().lost(), lost
                gone = lost & before
            self._supervise()
            time.sleep(0.2)
        pending = self._pending()
        ids = {name: self._send(name, 0.0) for name in NAMES}
        until = time.monotonic() + 20
        while time.monotonic() < until and any(id in self._pending() for id in ids.values()):
            time.sleep(0.1)
        self.report.stuck_names = [name for name, id in ids.items() if id in self._pending()]
        return pending

    def _redeliver_all(self) -> None:
        # Ten messages at a time.
        for _ in range(5):
            self.fleet.redeliver()

    def _pending(self) -> list[str]:
        done = self.fleet.results(list(self._ids))
        return [id for id in self._ids if done.get(id, {}).get("status") not in states.READY_STATES]

    def _judge(self, pending: list[str]) -> None:
        report = self.report
        try:
            wait_for(lambda: self._count_locks() == 0, "", 5)
        except AssertionError:
            report.locks = self._count_locks()
        for worker in self.workers.values():
            worker.signal(signal.SIGTERM)
        until = time.monotonic() + 60
        for worker in [*self.workers.values(), *self._leaving]:
            self._let_end(worker, max(0.1, until - time.monotonic()))
        try:
            wait_for(lambda: self._count_sessions() == 0, "", 5)
        except AssertionError:
            report.sessions = self._count_sessions()
        # Now that nothing is on its way any more.
        lost = self.redis.messages().lost()
        report.lost_by_kombu = [id for id in pending if id in lost]
        report.unfinished = [id for id in pending if id not in lost]
        report.sent = len(self._ids)
        report.states.update(str(result["status"]) for result in self.fleet.results(list(self._ids)).values())
        runs = self.fleet.history.runs()
        report.runs = len(runs)
        report.interrupted = sum(run.ended is None for run in runs)
        report.lost_locks = len(self.fleet.history.events("lost"))
        for first, second in self.fleet.history.overlaps():
            if self._is_documented(first):
                report.in_window += 1
            else:
                report.overlaps.append((first, second))

    def _let_end(self, worker: Worker, timeout: float) -> None:
        """Wait until a worker has ended, or see what it hangs in."""
        try:
            worker.wait_ended(timeout)
        except AssertionError:
            if not hangs_in_billiard(worker.text()):
                raise
            self.report.unread.append(worker.name)

    def _is_documented(self, first: Run) -> bool:
        """Whether a server had let the name go before, and the body stopped in time.

        In time is also what wakes in a process that showed no sign of life since then: one whose hub is
        blocked is as good as frozen.
        """
        return any(
            first.started <= end and begin <= first.last_seen <= max(end, self._woke(first.pid, end)) + WINDOW
            for begin, end in self._losses
        )

    def _woke(self, pid: int, since: float) -> float:
        """When a process that was silent for longer than a window was seen again."""
        signs = [event["at"] for event in self.fleet.history.events() if event["pid"] == pid]
        after = min((at for at in signs if at > since), default=since)
        before = max((at for at in signs if at <= after and at != after), default=after)
        return after if after - before > WINDOW else since

    def _count_locks(self) -> int:
        ((count,),) = self.server.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
        return int(count)

    def _count_sessions(self) -> int:
        ((count,),) = self.server.execute(f"SELECT count(*) {OURS}")
        return int(count)


def hangs_in_billiard(log: str) -> bool:
    """Whether a worker's stacks tell that it waits for a child whose result it does not read any more.

    When the broker is gone, the main process forgets the jobs of which it has not read yet that a child took
    them on (`AsynPool.flush`), and a warm shutdown reads results only as long as it knows of a job
    (`ResultHandler.on_stop_not_started`). A result that is longer than a pipe holds, as the traceback of a
    result that could not be stored is, then blocks its child for ever. No task is on that child's stack, and
    no lock in its hands: these were counted before.
    """
    stacks = re.findall(r"Current thread .*\n((?:  File .*\n)+)", log)
    if not stacks:
        return False
    *children, main = stacks
    return (
        "celery_pglock" not in main
        and bool(re.search(r'billiard/pool.py", line \d+ in join\n', main))
        and any(BLOCKED_CHILD.match(stack) for stack in children)
    )


#: From the innermost call on.
BLOCKED_CHILD = re.compile(
    r'  File ".*/billiard/connection.py", line \d+ in _send\n'
    r'(  File ".*/billiard/(connection|queues).py", line \d+ in \w+\n)+'
    r'  File ".*/billiard/pool.py", line \d+ in workloop\n'
)
