"""Three pools, one queue, workers that are killed: what happened, told by the bodies themselves."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter

import pytest

from faults.conftest import FleetMaker
from faults.durable import DurableRedis
from faults.fleet import Fleet, Worker

#: The full check has 2,000 messages.
MESSAGES = int(os.environ.get("PGLOCK_HISTORY_MESSAGES", "500"))
NAMES = [f"name {number}" for number in range(20)]
POOLS = {"prefork": 3, "threads": 3, "gevent": 6}

CONF = {
    "broker_transport_options": {"visibility_timeout": 4},
    # A killed worker's messages are never acknowledged, and come again.
    "task_acks_late": True,
    "worker_prefetch_multiplier": 1,
}


class Storm:
    """Messages for three workers, of which now and then one dies."""

    def __init__(self, fleet: Fleet, redis: DurableRedis, seed: int) -> None:
        self.fleet, self.redis = fleet, redis
        self.random = random.Random(seed)
        self.workers: dict[str, Worker] = {}
        self.kills = Counter[str]()

    def start(self) -> None:
        for pool in POOLS:
            self.restart(pool)
        for worker in self.workers.values():
            worker.wait_ready()

    def restart(self, pool: str) -> None:
        self.workers[pool] = self.fleet.worker(pool, POOLS[pool], ready=False)

    def publish(self, messages: int, names: list[str], seconds: float) -> dict[str, tuple[str, str]]:
        sent = {}
        for _ in range(messages):
            task, name = self.random.choice(["late_skip", "late_retry"]), self.random.choice(names)
            id = self.fleet.send(task, name, self.random.uniform(0, seconds)).id
            sent[id] = (task, name)
        return sent

    def kill_one(self) -> bool:
        """Kill a process that runs a body: a whole worker, or a child of prefork."""
        running = [run for run in self.fleet.history.runs() if run.ended is None]
        children = set(self.workers["prefork"].children())
        mains = {worker.pid: pool for pool, worker in self.workers.items()}
        victims = [run.pid for run in running if run.pid in children or run.pid in mains]
        if not victims:
            return False
        victim = self.random.choice(victims)
        if victim in children and self.random.random() < 0.7:
            os.kill(victim, signal.SIGKILL)
            self.kills["child"] += 1
            return True
        pool = mains.get(victim, "prefork")
        self.workers[pool].kill()
        self.kills[pool] += 1
        self.restart(pool)
        return True

    def blow(self, ids: list[str], kills: int, timeout: float) -> dict[str, dict]:
        """Kill so often while the messages are worked on, and wait until nothing is left to do."""
        deadline = time.monotonic() + timeout
        looked, lost = 0.0, set[str]()
        while True:
            stored = self.fleet.results(ids)
            # A task whose retry is on its way has a result too.
            results = {id: stored[id] for id in stored if stored[id]["status"] in ("SUCCESS", "FAILURE")}
            done = results.keys()
            if len(done) == len(ids):
                return results
            due = len(done) * (kills + 1) // len(ids)
            if self.kills.total() < min(due, kills) and self.kill_one():
                continue
            self.fleet.redeliver()
            if len(ids) - len(done) <= self.kills.total() and time.monotonic() - looked > 2:
                looked = time.monotonic()
                lost, before = self.redis.messages().lost(), lost
                # What was on its way at the last look has arrived.
                if done | (lost & before) >= set(ids):
                    return results
            assert time.monotonic() < deadline, self.story(set(ids) - done)
            # Each look costs the workers time.
            time.sleep(0.1)

    def story(self, ids: set[str]) -> str:
        lines = [line for line in self.fleet.history.events() if line.get("id") in ids]
        return f"{len(ids)} messages have no end:\n" + "\n".join(map(str, lines))


@pytest.mark.timeout(400)
def test_no_name_runs_twice_at_a_time_and_no_message_is_lost(
    durable: DurableRedis, make_fleet: FleetMaker
) -> None:
    """Whatever dies: bodies of one name never overlap, and every message ends as run or skipped.

    But for those that Kombu took along: at most one with each death of a worker.
    """
    fleet = make_fleet(**CONF, broker=durable.url(0))
    storm = Storm(fleet, durable, seed=random.randrange(10**6))
    storm.start()
    began = time.monotonic()
    sent = storm.publish(MESSAGES, NAMES, seconds=0.1)
    results = storm.blow(list(sent), kills=max(6, MESSAGES // 50), timeout=60 + MESSAGES / 10)

    runs = fleet.history.runs()
    ended = Counter(run.task_id for run in runs if run.ended is not None)
    killed = [run for run in runs if run.ended is None]
    outcomes = Counter()
    lost = sent.keys() - results.keys()
    assert lost <= durable.messages().lost()
    assert len(lost) <= storm.kills.total() - storm.kills["child"]
    for id in results:
        task, name = sent[id]
        status, result = results[id]["status"], results[id]["result"]
        assert status == "SUCCESS", results[id]
        if result == name:
            assert ended[id], f"{task} {id} has a result, and no body that came to its end"
            outcomes[task, "ran"] += 1
        else:
            assert task == "late_skip", f"a task that retries was skipped: {results[id]}"
            assert result["pglock"] == "skipped"
            outcomes[task, "skipped"] += 1
    again = sum(count - 1 for count in ended.values())
    print(
        f"{len(sent)} messages: {dict(outcomes)}; {len(runs)} bodies, {len(killed)} of them killed by"
        f" {dict(storm.kills)}, {again} ran to"
        f" their end again; {len(lost)} messages lost by Kombu; {time.monotonic() - began:.0f} s"
    )
    assert not fleet.history.overlaps()
    assert killed, "no body was killed: nothing was tested"
    assert min(outcomes.values()) > 0


def test_without_locks_names_run_twice_at_a_time(durable: DurableRedis, make_fleet: FleetMaker) -> None:
    """The control: the same messages and workers with the locks off, and bodies overlap."""
    fleet = make_fleet(**CONF, broker=durable.url(0), pglock_enabled=False)
    storm = Storm(fleet, durable, seed=1)
    storm.start()
    sent = storm.publish(150, NAMES[:5], seconds=0.1)
    storm.blow(list(sent), kills=0, timeout=60)
    assert len(fleet.history.runs()) >= len(sent)
    assert len(fleet.history.overlaps()) > 20
