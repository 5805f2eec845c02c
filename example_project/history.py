"""What the records add up to: the runs of bodies, their overlaps, what is still open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property
from itertools import combinations

from .records import Record

Lane = tuple[str, int]

#: What the beats send, again and again.
EVERY = timedelta(seconds=0.5)


@dataclass(frozen=True)
class Run:
    """One run of a body, from its first line to its last, to its death, or to now (``end`` is None)."""

    tenant: str
    task: str
    id: str
    worker: str
    pid: int
    start: float
    end: float | None = None
    killed: bool = False

    @property
    def lane(self) -> Lane:
        return self.worker, self.pid

    def overlaps(self, other: Run) -> bool:
        """Whether both drove one tenant at the same time."""
        if self.tenant != other.tenant:
            return False
        ends = [float("inf") if run.end is None else run.end for run in (self, other)]
        return self.start < ends[1] and other.start < ends[0]


class History:
    """The records of one moment, put together."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records

    def of(self, *what: str) -> list[Record]:
        return [record for record in self.records if record.what in what]

    @cached_property
    def runs(self) -> list[Run]:
        """In the order of their starts."""
        running: dict[tuple[int, str], Run] = {}
        ended = []
        for each in sorted(self.of("start", "end"), key=lambda record: record.at):
            if each.what == "start":
                run = Run(each.tenant, each.task, each.id, each.worker, each.pid, each.at)
                running[each.pid, each.id] = run
            else:
                ended.append(replace(running.pop((each.pid, each.id)), end=each.at))
        open_or_killed = map(self._unless_killed, running.values())
        return sorted([*ended, *open_or_killed], key=lambda run: run.start)

    def _unless_killed(self, run: Run) -> Run:
        at = next((kill.at for kill in self.of("kill") if kill.worker == run.worker), None)
        return run if at is None else replace(run, end=max(at, run.start), killed=True)

    @property
    def running(self) -> list[Run]:
        return [run for run in self.runs if run.end is None]

    @property
    def killed(self) -> list[Run]:
        return [run for run in self.runs if run.killed]

    @cached_property
    def overlaps(self) -> list[tuple[Run, Run]]:
        return [pair for pair in combinations(self.runs, 2) if pair[0].overlaps(pair[1])]

    @property
    def open(self) -> list[Record]:
        """Messages that neither ran to their end nor were skipped."""
        done = {record.id for record in self.of("end", "skip")}
        return [sent for sent in self.of("sent") if sent.id not in done]

    @cached_property
    def lanes(self) -> list[Lane]:
        """The worker processes that did something, by worker."""
        return sorted({(each.worker, each.pid) for each in self.of("start", "skip", "retry")})

    @cached_property
    def begin(self) -> float:
        return min((record.at for record in self.of("sent", "slot")), default=0.0)

    @cached_property
    def end(self) -> float:
        return max((record.at for record in self.records), default=self.begin)

    def next_after(self, dead: Run) -> Run | None:
        """The next run of a killed run's tenant."""
        later = (run for run in self.runs if run.tenant == dead.tenant and run.start > dead.start)
        return next(later, None)

    # The beats.

    @property
    def slots(self) -> list[Record]:
        """What the broker got of the beats' schedule, in the order in which it came."""
        return self.of("slot")

    @property
    def beats(self) -> list[str]:
        """Those that have sent something."""
        return sorted({slot.worker for slot in self.slots})

    @cached_property
    def sent_twice(self) -> list[str]:
        return [due for due, count in Counter(slot.id for slot in self.slots).items() if count > 1]

    @cached_property
    def left_out(self) -> list[str]:
        """The slots between the first and the last that nobody sent."""
        due = sorted({datetime.fromisoformat(slot.id) for slot in self.slots})
        count = (due[-1] - due[0]) // EVERY if due else 0
        every = [due[0] + number * EVERY for number in range(count)]
        return [slot.isoformat() for slot in every if slot not in due]

    @property
    def handover(self) -> tuple[Record, Record] | None:
        """The death of the beat that sent, and the first message of the next one."""
        for kill in self.of("kill"):
            if kill.worker in self.beats:
                after = [slot for slot in self.slots if slot.at > kill.at and slot.worker != kill.worker]
                return (kill, after[0]) if after else None
        return None

    def is_second_try(self, run: Run) -> bool:
        """Whether it is the run of a killed run's message."""
        return not run.killed and any(dead.id == run.id for dead in self.killed)
