"""A fleet in a storm of faults.

``PGLOCK_CHAOS_SECONDS`` says how long it lasts, ``PGLOCK_CHAOS_SEED`` which one it is.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from faults.chaos import Chaos

SECONDS = float(os.environ.get("PGLOCK_CHAOS_SECONDS", "20"))
SEED = int(os.environ.get("PGLOCK_CHAOS_SEED", random.randrange(1_000_000)))


@pytest.mark.timeout(SECONDS + 300)
def test_nothing_overlaps_and_nothing_is_lost_in_a_storm_of_faults(tmp_path: Path) -> None:
    """Killed, stopped, frozen and cut off at random: the history shows one body for each name at a time."""
    report = Chaos(tmp_path, SEED).run(SECONDS)
    print(f"\n{SECONDS:g} s of chaos, PGLOCK_CHAOS_SEED={SEED}\n{report}")
    assert not report.overlaps
    assert not report.unfinished
    assert not report.stuck_names
    assert report.locks == 0
    assert report.sessions == 0
    assert len(report.faults) >= 12, "not every kind of fault happened"


def test_bodies_overlap_without_locks(tmp_path: Path) -> None:
    """The control: the same messages with locks off. It needs no storm."""
    report = Chaos(tmp_path, SEED, pools={"prefork": 3, "threads": 3}, locked=False).run(3.0, faults=False)
    print(f"\n{report}")
    assert report.overlaps
