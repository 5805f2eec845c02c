"""The play as a page that needs nothing but itself: lanes for worker processes, colours for tenants."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from string import Template

from .history import History, Lane, Run
from .records import Record
from .style import COLOURS, letter
from .verdict import Verdict, milliseconds

WIDTH, LEFT, TOP = 1200, 56, 30
BAR, LANE, GAP = (
    24,
    42,
    14,
)  # heights: a bar, the lane that holds it and its conflicts, the space between workers

BEAT = 28  # the height of a beat's lane

SIGNS = (
    ('<circle cx="7" cy="7" r="4" fill="currentColor"/>', "conflict, skipped"),
    ('<circle cx="7" cy="7" r="4" class="retry" stroke="currentColor"/>', "conflict, tried again later"),
    ('<path class="kill" d="M3 3l8 8m0-8l-8 8"/>', "killed in mid-body"),
    (
        '<path d="M11.5 7a4.5 4.5 0 1 1-1.6-3.4M10.2 1v3h-3" fill="none" stroke="currentColor"/>',
        "its message again",
    ),
    ('<circle class="slot" cx="7" cy="7" r="3.2"/>', "sent by a beat"),
)


def write_picture(verdict: Verdict, path: Path) -> Path:
    """Write the page and return its whole path."""
    template = Template(Path(__file__).with_name("picture.html").read_text(encoding="utf-8"))
    page = template.substitute(
        title="Three workers, twelve tenants" + ("" if verdict.locked else ", no locks"),
        status="passed" if verdict.passed else "failed",
        sentence=escape(" ".join(verdict.sentences())),
        figures="".join(cards(verdict)),
        svg="\n".join(Drawing(verdict.history).parts()),
        legend="".join(legend()),
        highlights="\n".join(highlights()),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path.resolve()


def cards(verdict: Verdict) -> Iterator[str]:
    for name, value, meaning in verdict.figures():
        bad = {"overlaps": verdict.history.overlaps, "slots": verdict.history.sent_twice}.get(name)
        alarm = ' class="alarm"' if bad else ""
        yield f"<div{alarm}><dt>{name}</dt><dd>{value}<small>{escape(meaning)}</small></dd></div>"


def legend() -> Iterator[str]:
    for tenant, colour in COLOURS.items():
        yield f'<li class="tenant t-{tenant}" style="background:{colour}">{tenant}</li>'
    for sign, meaning in SIGNS:
        yield f'<li class="sign"><svg viewBox="0 0 14 14">{sign}</svg> {meaning}</li>'


def highlights() -> Iterator[str]:
    """While the pointer is on a tenant, the others stand back."""
    for tenant in COLOURS:
        yield f"  figure:has(.t-{tenant}:hover) .tenant:not(.t-{tenant}) {{ opacity: .15; }}"


class Drawing:
    """Places everything of a history in one SVG."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.per_second = (WIDTH - LEFT - 10) / max(history.end - history.begin, 1.0)
        self.tops = dict(self._places())
        below = max(self.tops.values(), default=TOP) + LANE + GAP
        self.beat_tops = {beat: below + number * BEAT for number, beat in enumerate(history.beats)}
        self.height = below + len(history.beats) * BEAT + 8

    def parts(self) -> Iterator[str]:
        yield f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="timeline">'
        yield from self._lanes()
        yield from self._axis()
        yield from (self._run(run) for run in self.history.runs)
        yield from (self._clash(*pair) for pair in self.history.overlaps)
        for lane in self.tops:
            yield from self._conflicts(lane)
        yield from self._kills()
        for beat in self.history.beats:
            yield from self._beat(beat)
        yield "</svg>"

    def _places(self) -> Iterator[tuple[Lane, int]]:
        top, worker = TOP - GAP, ""
        for lane in self.history.lanes:
            top += GAP if lane[0] != worker else 0
            worker = lane[0]
            yield lane, top
            top += LANE

    def _x(self, at: float) -> float:
        return round(LEFT + (at - self.history.begin) * self.per_second, 1)

    def _clock(self, at: float) -> str:
        return f"{at - self.history.begin:.2f} s"

    def _axis(self) -> Iterator[str]:
        for second in range(0, int(self.history.end - self.history.begin) + 1, 2):
            x = self._x(self.history.begin + second)
            yield f'<path class="grid" d="M{x} {TOP - 6}V{self.height - 8}"/>'
            yield f'<text class="soft" x="{x}" y="14" text-anchor="middle">{second} s</text>'

    def _lanes(self) -> Iterator[str]:
        number, worker = 0, ""
        for lane, top in self.tops.items():
            number, worker = (number + 1 if lane[0] == worker else 1), lane[0]
            begin, end = self._life(worker)
            place = f'x="{begin}" y="{top}" width="{end - begin:.1f}" height="{LANE - 4}"'
            yield f'<rect class="lane" {place} rx="6"/>'
            text = f"{worker}.{number}<title>process {lane[1]} of {worker}</title>"
            yield f'<text class="label" x="{LEFT - 10}" y="{top + 19}" text-anchor="end">{text}</text>'

    def _life(self, worker: str) -> tuple[float, float]:
        """From where to where a worker's lanes go."""
        begin = (self._x(each.at) for each in self.history.of("ready") if each.worker == worker)
        end = (self._x(each.at) for each in self.history.of("kill") if each.worker == worker)
        return max(LEFT, next(begin, LEFT)), next(end, WIDTH)

    def _run(self, run: Run) -> str:
        end = self.history.end if run.end is None else run.end
        x, y = self._x(run.start), self.tops[run.lane] + 3
        width = max(3.0, self._x(end) - x - 1)
        name = run.tenant if width > 42 else letter(run.tenant) if width > 11 else ""
        if self.history.is_second_try(run):
            name += " \N{CLOCKWISE OPEN CIRCLE ARROW}"
        title = f"{run.task} {run.tenant} on {run.worker}: {self._clock(run.start)} to {self._clock(end)}, "
        title += self._fate(run)
        shape = f'x="{x}" y="{y}" width="{width:.1f}" height="{BAR}" rx="4" fill="{COLOURS[run.tenant]}"'
        text = f'<text class="name" x="{x + 5}" y="{y + 16}">{name}</text>'
        return f'<g class="tenant t-{run.tenant}"><rect {shape}><title>{title}</title></rect>{text}</g>'

    def _fate(self, run: Run) -> str:
        if run.killed:
            return "killed"
        return "the killed worker's message once more" if self.history.is_second_try(run) else "to its end"

    def _clash(self, one: Run, other: Run) -> str:
        """Mark the time that two runs shared, on both."""
        start = max(one.start, other.start)
        end = min(self.history.end if run.end is None else run.end for run in (one, other))
        x, width = self._x(start), max(2.0, self._x(end) - self._x(start) - 1)
        title = f"<title>{one.tenant} is worked on twice for {milliseconds(end - start)}</title>"
        place = f'x="{x}" width="{width:.1f}" height="4"'
        tops = (self.tops[run.lane] + 3 for run in (one, other))
        bars = (f'<rect class="clash" {place} y="{top}">{title}</rect>' for top in tops)
        return f'<g class="tenant t-{one.tenant}">{"".join(bars)}</g>'

    def _conflicts(self, lane: Lane) -> Iterator[str]:
        last = 0.0
        for record in self.history.of("skip", "retry"):
            if (record.worker, record.pid) == lane:
                # Those of one instant stand side by side.
                last = max(self._x(record.at), last + 6)
                yield self._conflict(record, last)

    def _conflict(self, record: Record, x: float) -> str:
        colour = COLOURS[record.tenant]
        fill = f'class="retry" stroke="{colour}"' if record.what == "retry" else f'fill="{colour}"'
        decision = "tried again later" if record.what == "retry" else "skipped"
        title = f"{record.task} {record.tenant} met a conflict at {self._clock(record.at)}: {decision}"
        y = self.tops[record.worker, record.pid] + BAR + 9
        dot = f'<circle cx="{x:.1f}" cy="{y}" r="2.8" {fill}><title>{title}</title></circle>'
        return f'<g class="tenant t-{record.tenant}">{dot}</g>'

    def _beat(self, beat: str) -> Iterator[str]:
        """A lane of what a beat sent, up to its end."""
        top = self.beat_tops[beat]
        kill = next((each.at for each in self.history.of("kill") if each.worker == beat), None)
        end = WIDTH if kill is None else self._x(kill)
        place = f'x="{LEFT}" y="{top}" width="{end - LEFT:.1f}" height="{BEAT - 6}"'
        yield f'<rect class="lane" {place} rx="6"/>'
        yield f'<text class="label" x="{LEFT - 10}" y="{top + 15}" text-anchor="end">{beat}</text>'
        for slot in self.history.slots:
            if slot.worker == beat:
                title = f"<title>{beat} sent the slot {slot.id} at {self._clock(slot.at)}</title>"
                sent = "slot twice" if slot.id in self.history.sent_twice else "slot"
                place = f'cx="{self._x(slot.at)}" cy="{top + 11}" r="3.2"'
                yield f'<circle class="{sent}" {place}>{title}</circle>'
        if kill is not None:
            yield f'<path class="kill" d="M{end - 6} {top + 5}l12 12m0 -12l-12 12"/>'
        if kill is not None and self.history.handover is not None:
            after = self.history.handover[1]
            text = f"kill -9 {beat}: {after.worker} sends {milliseconds(after.at - kill)} later"
            yield f'<text class="alarm-text" x="{end + 12}" y="{top + 15}">{text}</text>'

    def _kills(self) -> Iterator[str]:
        for dead in self.history.killed:
            x, y = self._x(dead.end or 0.0), self.tops[dead.lane] + 3 + BAR / 2
            yield f'<path class="kill" d="M{x - 6} {y - 6}l12 12m0 -12l-12 12"/>'
        for dead in self.history.killed[:1]:
            yield from self._takeover(dead)

    def _takeover(self, dead: Run) -> Iterator[str]:
        """Lead the eye from the kill to the next run of the same tenant."""
        x, y = self._x(dead.end or 0.0), self.tops[dead.lane] + 3 + BAR / 2
        text = f"kill -9 {dead.worker}"
        successor = self.history.next_after(dead)
        if successor is not None:
            to_x, to_y = self._x(successor.start), self.tops[successor.lane] + 3 + BAR / 2
            bow = 26 if to_y > y else -26
            curve = f"M{x + 8} {y}C{x + 60} {y + bow} {to_x + 60} {to_y - bow} {to_x + 3} {to_y}"
            yield f'<path class="takeover" d="{curve}"/>'
            after = milliseconds(successor.start - (dead.end or 0.0))
            text += f": {successor.worker} has {dead.tenant} {after} later"
        yield f'<text class="alarm-text" x="{x + 12}" y="{y - 6}">{text}</text>'
