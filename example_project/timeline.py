"""The play as text: a lane for each worker process with the conflicts that it met, and one for each beat.

Needs no colour and no character beyond ASCII.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from .history import EVERY, History, Lane, Run
from .style import TENANTS, Style, letter

LABEL = 9  # columns


class Timeline:
    """Draws on a grid with one column for a slice of time."""

    def __init__(self, history: History, style: Style) -> None:
        self.history = history
        self.style = style
        self.columns = max(40, style.width - LABEL - 1)
        self.slice = max(history.end - history.begin, 1.0) / self.columns
        self.signs = ("↷", "↻", "✖", "•") if style.unicode else ("x", "r", "#", ".")

    def lines(self) -> Iterator[str]:
        yield self._axis()
        for number, lane in enumerate(self.history.lanes):
            new_worker = number > 0 and self.history.lanes[number - 1][0] != lane[0]
            if new_worker:
                yield ""
            yield self._label(lane) + self._bodies(lane)
            yield " " * LABEL + self._marks(lane)
        yield ""
        for beat in self.history.beats:
            yield beat.ljust(LABEL) + self._slots(beat)
        yield ""
        yield from self._legend()

    def _column(self, at: float) -> int:
        return min(int((at - self.history.begin) / self.slice), self.columns - 1)

    def _axis(self) -> str:
        row = [" "] * (self.columns + 6)
        for second in range(0, int(self.slice * self.columns) + 1, 2):
            column = int(second / self.slice)
            row[column : column + len(f"{second} s")] = f"{second} s"
        return self.style.dim(" " * LABEL + "".join(row).rstrip())

    def _label(self, lane: Lane) -> str:
        worker, _ = lane
        processes = [each for each in self.history.lanes if each[0] == worker]
        return f"{worker}.{processes.index(lane) + 1}".ljust(LABEL)

    def _bodies(self, lane: Lane) -> str:
        cells = [" "] * self.columns
        for run in self.history.runs:
            if run.lane == lane:
                self._draw(cells, run)
        return "".join(cells).rstrip()

    def _draw(self, cells: list[str], run: Run) -> None:
        first = self._column(run.start)
        last = max(first, self._column(self.history.end if run.end is None else run.end) - 1)
        for column in range(first, last + 1):
            text = letter(run.tenant) if column == first else " " if self.style.rich else "-"
            cells[column] = self.style.block(run.tenant, text)
        if run.killed:
            cells[min(last + 1, self.columns - 1)] = self.style.alarm(self.signs[2])

    def _marks(self, lane: Lane) -> str:
        cells = [" "] * self.columns
        for run in (run for pair in self.history.overlaps for run in pair):
            if run.lane == lane:
                cells[self._column(run.start)] = self.style.alarm("!")
        for record in self.history.of("skip", "retry"):
            if (record.worker, record.pid) == lane:
                sign = self.signs[record.what == "retry"]
                cells[self._column(record.at)] = self.style.ink(record.tenant, sign)
        return "".join(cells).rstrip()

    def _slots(self, beat: str) -> str:
        """What a beat sent, and its end. A number where several messages share a column."""
        cells = [" "] * self.columns
        columns = Counter(self._column(slot.at) for slot in self.history.slots if slot.worker == beat)
        twice = {self._column(slot.at) for slot in self.history.slots if slot.id in self.history.sent_twice}
        for column, count in columns.items():
            sign = self.signs[3] if count == 1 else str(min(count, 9))
            cells[column] = self.style.alarm("!") if column in twice else sign
        for kill in self.history.of("kill"):
            if kill.worker == beat:
                cells[min(self._column(kill.at) + 1, self.columns - 1)] = self.style.alarm(self.signs[2])
        return "".join(cells).rstrip()

    def _legend(self) -> Iterator[str]:
        yield from self._wrapped(f"{self.style.badge(tenant)} {tenant}" for tenant in TENANTS)
        skip, retry, kill, slot = self.signs
        meanings = [f"{skip} conflict, skipped", f"{retry} conflict, tried again later"]
        meanings.append(f"{self.style.alarm(kill)} killed in mid-body")
        if self.history.overlaps:
            meanings.append(f"{self.style.alarm('!')} overlaps another run of its tenant")
        yield " " * LABEL + "   ".join(meanings)
        sent = [f"{slot} sent by a beat, every {EVERY.total_seconds()} s"]
        sent += ["2 late, together"] if self._has_late_slots() else []
        sent += [f"{self.style.alarm('!')} by both"] if self.history.sent_twice else []
        yield " " * LABEL + "   ".join(sent)

    def _has_late_slots(self) -> bool:
        columns = Counter((slot.worker, self._column(slot.at)) for slot in self.history.slots)
        return max(columns.values(), default=0) > 1

    def _wrapped(self, items: Iterable[str]) -> Iterator[str]:
        items = list(items)
        per_line = max(1, self.columns // 11)
        for start in range(0, len(items), per_line):
            yield " " * LABEL + "  ".join(items[start : start + per_line])
