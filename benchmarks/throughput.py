"""Locked tasks against bare ones through Redis and a prefork worker.

All messages lie in the queue, in alternating batches, before the worker starts: it is never short of work,
and no publisher takes the processor from it.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

from localservers import PostgreSQL, Redis

from .measure import Ratio, Report

#: Bare and locked ones take turns.
BATCHES = 40
TASKS = 250
TIMEOUT = 300.0

#: What a body notes: the number of its batch, and the moment.
RECORD = struct.Struct("<id")


def through_a_worker() -> Report:
    """Tasks a second, with locks and without."""
    with PostgreSQL() as postgres, Redis() as redis, tempfile.NamedTemporaryFile() as records:
        os.environ |= {"BENCH_BROKER": redis.url(), "BENCH_DATABASE": postgres.url()}
        os.environ["BENCH_RECORDS"] = records.name
        publish()
        with worker():
            ends = ends_of_batches(Path(records.name))
    took = [end - before for before, end in pairwise([0.0, *ends])]
    # The first two carry the start of the processes and of their sessions.
    bare, locked = median(took[2::2]), median(took[3::2])
    return Report(
        [Ratio("throughput, locked / bare", bare / locked, 0.95, at_least=True)],
        note=f"{TASKS / bare:.0f} bare and {TASKS / locked:.0f} locked tasks a second, prefork -c 2",
    )


def publish() -> None:
    from .shop import bare, locked

    for batch in range(BATCHES):
        for number in range(TASKS):
            (locked if batch % 2 else bare).delay(batch, number)


@contextmanager
def worker() -> Iterator[None]:
    options = ["-c", "2", "-P", "prefork", "-l", "ERROR", "--without-gossip", "--without-mingle"]
    command = [sys.executable, "-W", "ignore", "-m", "celery", "-A", "benchmarks.shop", "worker", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def ends_of_batches(records: Path) -> list[float]:
    """Wait for the last record, and return when each batch was done."""
    deadline = time.monotonic() + TIMEOUT
    while records.stat().st_size < BATCHES * TASKS * RECORD.size:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the worker was not done within {TIMEOUT:.0f} s")
        time.sleep(0.1)
    ends = [0.0] * BATCHES
    for batch, moment in RECORD.iter_unpack(records.read_bytes()):
        ends[batch] = max(ends[batch], moment)
    return ends
