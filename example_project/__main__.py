"""Play the scenes, draw what happened, and judge it. The exit status is 0 where all guarantees held."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from localservers import MissingServer, ServerFailed

from .history import History
from .picture import write_picture
from .progress import Progress
from .scenes import SCENES
from .stage import Interrupted, Stage, StageFailed
from .style import Style
from .timeline import Timeline
from .verdict import Verdict

LOCKED = os.environ.get("UNLOCKED", "") in {"", "0"}
PICTURE = Path("build", "demo-timeline.html" if LOCKED else "demo-timeline-unlocked.html")


def main() -> int:
    style = Style()
    try:
        verdict = play(Progress(style))
    except Interrupted as interrupted:
        signum = interrupted.args[0]
        print(f"ended by {signal.Signals(signum).name}: all that was started is gone", file=sys.stderr)
        return 128 + signum
    except (StageFailed, ServerFailed, MissingServer) as failure:
        print(f"the demo could not go on: {failure}", file=sys.stderr)
        return 1
    report(verdict, style)
    return 0 if verdict.passed else 1


def play(progress: Progress) -> Verdict:
    with Stage(progress) as stage:
        stage.start_workers("w1", "w2", "w3")
        stage.start_beats("b1", "b2")
        stage.await_workers()
        progress.say("3 prefork workers with 2 processes each, and 2 beats of one schedule")
        for scene in SCENES:
            scene(stage)
        # Put together now: with the stage goes the file of the records.
        history = History(list(stage.history.records))
        progress.say("all messages have ended: stopping")
    return Verdict(history, LOCKED, stage.sessions, stage.freed_after)


def report(verdict: Verdict, style: Style) -> None:
    print()
    for line in Timeline(verdict.history, style).lines():
        print(line)
    print()
    for name, value, meaning in verdict.figures():
        print(f"{name:>10}  {style.bold(f'{value:>7}')}  {style.dim(meaning)}")
    print(f"\n   picture  {write_picture(verdict, PICTURE)}\n")
    for sentence in verdict.sentences():
        print(style.bold(sentence) if verdict.passed else style.alarm(sentence))


if __name__ == "__main__":
    sys.exit(main())
