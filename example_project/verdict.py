"""The figures, counted in the records or seen by PostgreSQL, and whether the guarantees held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .history import History, Run

FREE_WITHIN = 1.0  # seconds from the kill of a holder until its name is free


@dataclass(frozen=True)
class Verdict:
    """What one play has shown."""

    history: History
    locked: bool
    sessions: Counter[int]
    freed_after: float | None

    @property
    def most_sessions(self) -> int:
        return max((self.sessions[pid] for _, pid in self.history.lanes), default=0)

    def figures(self) -> Iterator[tuple[str, str, str]]:
        """Yield each figure with its name and what it means."""
        history = self.history
        yield "overlaps", str(len(history.overlaps)), "pairs of runs that drove one tenant at the same time"
        yield "messages", str(len(history.of("sent"))), f"{len(history.open)} of them lost"
        ended = len(history.of("end"))
        yield "runs", str(len(history.runs)), f"{ended} to the end, {len(history.killed)} killed"
        yield "skips", str(len(history.of("skip"))), "train messages whose tenant was being worked on"
        yield "retries", str(len(history.of("retry"))), "publish messages put off for the same reason"
        if self.locked:
            yield from self._after_the_kill()
        processes = f"the most that any of {len(history.lanes)} worker processes had open (pg_stat_activity)"
        beats = " and ".join(history.beats)
        sent = f"messages of {beats}: {len(history.sent_twice)} slots twice, {len(history.left_out)} left out"
        yield "slots", str(len(history.slots)), sent
        if self.locked and history.handover is not None:
            kill, after = history.handover
            words = f"from kill -9 of {kill.worker} until {after.worker} sent"
            yield "next beat", milliseconds(after.at - kill.at), words
        yield "sessions", str(self.most_sessions), processes

    def _after_the_kill(self) -> Iterator[tuple[str, str, str]]:
        if self.freed_after is not None:
            freed = "from kill -9 until pg_locks showed no lock of the dead process"
            yield "lock free", milliseconds(self.freed_after), freed
        for dead in self.history.killed[:1]:
            successor = self.history.next_after(dead)
            if successor is not None:
                yield (
                    "next body",
                    milliseconds(successor.start - (dead.end or 0.0)),
                    takeover(dead, successor),
                )

    @property
    def passed(self) -> bool:
        return not any(self.failures())

    def sentences(self) -> Iterator[str]:
        """Say what the play has shown."""
        if not self.passed:
            yield from (f"FAILED: {failure}." for failure in self.failures())
        elif self.locked:
            yield "No tenant was driven by two runs at a time, and no message was lost."
            yield "Of two beats one sent: nothing twice and nothing left out, though it was killed."
        else:
            overlaps = len(self.history.overlaps)
            yield f"Without locks, {overlaps} pairs of runs drove one tenant at the same time."
            yield f"Both beats sent: {len(self.history.sent_twice)} slots of the schedule came twice."
            yield "This is the control: with locks, the same play must have none."

    def failures(self) -> Iterator[str]:
        """Yield each guarantee that did not hold."""
        history = self.history
        if history.open:
            ids = ", ".join(sent.id for sent in history.open)
            yield f"{len(history.open)} messages neither ran to their end nor were skipped: {ids}"
        if not self.locked:
            if not history.overlaps:
                yield "the control shows no overlap: this play could not have found a missing lock"
            if not history.sent_twice:
                yield "the control shows no slot twice: this play could not have found a second sender"
            return
        if history.overlaps:
            one, other = history.overlaps[0]
            which = f"first {one.tenant} on {one.worker} and {other.worker}"
            yield f"{len(history.overlaps)} pairs of runs drove one tenant at the same time, {which}"
        if history.sent_twice:
            yield f"{len(history.sent_twice)} slots of the schedule were sent twice: {history.sent_twice}"
        if history.left_out:
            yield f"{len(history.left_out)} slots of the schedule were left out: {history.left_out}"
        if history.handover is None:
            yield "no beat took over from the one that was killed"
        if self.freed_after is None or self.freed_after > FREE_WITHIN:
            yield f"the killed worker's lock was not seen to be free within {FREE_WITHIN:.0f} s"
        if not history.of("skip") or not history.of("retry"):
            yield "no conflict was met: this play shows nothing"
        if self.most_sessions != 1:
            yield f"a worker process had {self.most_sessions} sessions, not 1"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def takeover(dead: Run, successor: Run) -> str:
    return f"from kill -9 of {dead.worker} until {successor.worker} began {dead.tenant}'s next message"
