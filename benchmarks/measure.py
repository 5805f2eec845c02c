"""Interleaved rounds: what disturbs the machine disturbs all contenders alike."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class Contender:
    call: Callable[[], object]
    #: The process that serves it, whose CPU time is read.
    server: int | None = None
    #: So many calls are one sample.
    calls: int = 20
    #: Seconds until what it started has ended: each call pays for the one before, and no other contender.
    rest: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Microseconds of one call: the median on the clock, the mean of the CPU here and in the server."""

    wall: float
    client: float
    server: float

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.wall - other.wall, self.client - other.client, self.server - other.server)

    @property
    def cpu(self) -> float:
        return self.client + self.server


@dataclass(frozen=True)
class Ratio:
    """One figure and its limit: an upper one, or with ``at_least`` a lower one."""

    name: str
    value: float
    limit: float
    aim: float | None = None
    at_least: bool = False
    #: The same of CPU time.
    cpu: float | None = None

    @property
    def kept(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(frozen=True)
class Report:
    ratios: list[Ratio]
    costs: Mapping[str, Cost] = field(default_factory=dict)
    note: str = ""

    @property
    def kept(self) -> bool:
        return all(ratio.kept for ratio in self.ratios)


def pin_to_one_core() -> None:
    """Keep this process, and all that it starts from now on, on one core. Only Linux knows how."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def race(contenders: Mapping[str, Contender], rounds: int = 200) -> dict[str, Cost]:
    """Let contenders take turns, and return the medians of their samples."""
    samples: dict[str, list[Cost]] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(rounds):
        for name in order:
            samples[name].append(sample(contenders[name]))
            time.sleep(contenders[name].rest)
        order.append(order.pop(0))
    return {name: median_of(costs[rounds // 10 :]) for name, costs in samples.items()}


def sample(contender: Contender) -> Cost:
    """The median call on the clock: the first ones find the caches full of another contender's."""
    served, used = cpu_of(contender.server), time.process_time()
    calls = [seconds_of(contender.call) for _ in range(contender.calls)]
    client, server = time.process_time() - used, cpu_of(contender.server) - served
    return Cost(median(calls) * 1e6, client / contender.calls * 1e6, server / contender.calls * 1e6)


def seconds_of(call: Callable[[], object]) -> float:
    since = time.perf_counter()
    call()
    return time.perf_counter() - since


def cpu_of(pid: int | None) -> float:
    """Seconds of the CPU that the first thread of a process has had; 0 where nobody tells."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0


def median_of(costs: list[Cost]) -> Cost:
    return Cost(*(median(getattr(cost, name) for cost in costs) for name in ("wall", "client", "server")))
