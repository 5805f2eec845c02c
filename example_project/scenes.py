"""What is played. A scene is a function that is handed the stage."""

from __future__ import annotations

import random
from contextlib import suppress

from .history import Run
from .stage import Stage, TookTooLong
from .style import TENANTS

SCHEDULERS = 3
DICE = random.Random(42)


def duplicates(stage: Stage) -> None:
    """Three schedulers look for tenants that are due, four times, and each sends what it finds."""
    stage.progress.say(f"{SCHEDULERS} schedulers send the same work for {len(TENANTS)} tenants")
    for tick in range(4):
        send_due(stage, tick)
        stage.pause(1.6)


def crash(stage: Stage) -> None:
    """A worker is killed in the middle of a training, and its tenant's next message comes at once."""
    await_quiet(stage)
    victim = begin_trainings(stage)
    stage.kill(victim)
    alarm = stage.progress.style.alarm(f"kill -9 {victim.worker}, which was training {victim.tenant}")
    stage.progress.say(alarm)
    successor = send_until_taken(stage, victim)
    stage.progress.say(f"{successor.worker} took {victim.tenant}; a fresh worker comes up")
    stage.start_workers("w4")


def succession(stage: Stage) -> None:
    """The one of two beats that sends is killed, between two of its messages, and the other goes on."""
    stage.await_beats()
    before = len(stage.history.slots)
    stage.wait(lambda: len(stage.history.slots) > before, "a message of the beats", 10)
    leader = stage.history.slots[-1].worker
    stage.pause(0.1)
    stage.kill_beat(leader)
    stage.progress.say(stage.progress.style.alarm(f"kill -9 {leader}, the beat that sends"))
    stage.wait(lambda: stage.history.handover, "a message of the other beat", 10)
    stage.progress.say(f"{stage.history.slots[-1].worker} sends instead")


def drain(stage: Stage) -> None:
    """The play goes on until each message has ended, those of the killed worker too."""
    for tick in range(3):
        send_due(stage, tick)
        stage.pause(1.6)
    # What never ends is told by the verdict.
    with suppress(TookTooLong):
        await_quiet(stage)


SCENES = (duplicates, crash, succession, drain)


def send_due(stage: Stage, tick: int) -> None:
    """Send the work of half the tenants, once for each scheduler."""
    due = TENANTS[tick % 2 :: 2]
    for number, tenant in enumerate(due):
        for _ in range(SCHEDULERS):
            stage.send("train", tenant, DICE.uniform(0.5, 1.1))
        if number % 2 == 0:
            stage.send("publish", tenant, 0.3)


def begin_trainings(stage: Stage) -> Run:
    """Begin three long trainings and return one in its middle."""
    for tenant in TENANTS[:3]:
        stage.send("train", tenant, 2.5)
    stage.wait(lambda: len(stage.history.running) == 3, "the trainings to begin", 10)
    stage.pause(0.6)
    return stage.history.running[0]


def send_until_taken(stage: Stage, victim: Run) -> Run:
    """Send a message for the victim's tenant every 20 ms until one of them runs."""

    def send_and_look() -> Run | None:
        stage.send("train", victim.tenant, 0.8)
        return stage.history.next_after(victim)

    return stage.wait(send_and_look, f"a run of {victim.tenant}", 10)


def await_quiet(stage: Stage) -> None:
    stage.wait(lambda: not stage.history.open, "all messages to end", 30)
