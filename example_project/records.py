"""The append-only file of what happened, which all processes of the demo write, and from which all is told.

A record is one line, written by one call to a file opened for appending: lines never mix. Its time is
CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

#: The environment's name for the file.
FILE = "DEMO_RECORDS"


@dataclass(frozen=True)
class Record:
    """``what``: sent | start | end | skip | retry | ready | kill | slot.

    A slot is a message of the beat that is named as the worker; its id is when it was due, in ISO 8601.
    """

    what: str
    tenant: str = ""
    task: str = ""
    id: str = ""
    worker: str = ""
    pid: int = field(default_factory=os.getpid)
    at: float = field(default_factory=time.monotonic)


def write(record: Record) -> None:
    line = json.dumps(asdict(record)) + "\n"
    file = os.open(os.environ[FILE], os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


class Reader:
    """Follows the file while it grows."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open()
        self._records: list[Record] = []

    def read(self) -> list[Record]:
        """Return all records so far."""
        self._records += (Record(**json.loads(line)) for line in self._file)
        return self._records

    def close(self) -> None:
        self._file.close()
