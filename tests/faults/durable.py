"""A Redis whose messages outlive a restart, and which a Unix socket reaches where no network does.

Its record tells where each message is. Kombu takes a message from its list first, and notes it in a hash as
unacknowledged then. A process that ends in between takes the message with it, and so does a server's end
between the two: no worker ever sees that message again, and no redelivery finds it.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from localservers import Redis

#: Kombu's hash of what is not acknowledged yet.
UNACKED = b"unacked"

#: What would change a list.
NOT_FOLLOWED = set(b"LPOP LREM LTRIM LINSERT LSET LMOVE RPOPLPUSH FLUSHDB FLUSHALL".split())


@dataclass
class Messages:
    """The messages that are not acknowledged: the ids of their tasks by their delivery tags."""

    queued: dict[str, str] = field(default_factory=dict)
    #: Taken from a list, and not noted: on its way at this moment, or lost.
    taken: dict[str, str] = field(default_factory=dict)
    noted: dict[str, str] = field(default_factory=dict)

    def lost(self) -> set[str]:
        """The tasks of which nothing is left but what was taken and not noted.

        A message that was noted is not excused, whatever became of it then.
        """
        return {*self.taken.values()} - {*self.queued.values()} - {*self.noted.values()}


class DurableRedis(Redis):
    """It writes each change down before it answers."""

    def socket_url(self, db: int = 0) -> str:
        return f"redis+socket://{self.folder / 'socket'}?virtual_host={db}"

    def messages(self) -> Messages:
        """Where all messages are that were published and not acknowledged, by what was written down."""
        lists: dict[tuple[int, bytes], deque[bytes]] = defaultdict(deque)
        where = Messages()
        db = 0
        for name, *args in self._record():
            command = name.upper()
            if command == b"SELECT":
                db = int(args[0])
            elif command == b"LPUSH":
                lists[db, args[0]].extendleft(args[1:])
            elif command == b"RPUSH":
                lists[db, args[0]].extend(args[1:])
            elif command == b"RPOP":
                # A BRPOP is written down as one too.
                where.taken.update(task_of(lists[db, args[0]].pop()))
            elif command == b"HSET" and args[0] == UNACKED:
                for tag in map(bytes.decode, args[1::2]):
                    where.noted[tag] = where.taken.pop(tag)
            elif command == b"HDEL" and args[0] == UNACKED:
                for tag in map(bytes.decode, args[1:]):
                    del where.noted[tag]
            elif command in (b"DEL", b"UNLINK"):
                for key in args:
                    lists.pop((db, key), None)
            elif command in NOT_FOLLOWED:
                raise AssertionError(f"the record holds a command that its reader can't follow: {name!r}")
        for messages in lists.values():
            for message in messages:
                where.queued.update(task_of(message))
        return where

    def _record(self) -> Iterator[list[bytes]]:
        """All changes since the first start, in their order."""
        for path in sorted(self.folder.rglob("*.incr.aof")):
            yield from commands(path)

    def _command(self) -> Sequence[str | Path]:
        kept = ["--appendonly", "yes", "--appendfsync", "always", "--dir", self.folder]
        command = list(super()._command())
        # What its parent says last is what counts.
        command[command.index("--appendonly") : command.index("--appendonly") + 2] = kept
        # A record that is rewritten forgets how things came about.
        kept = ["--auto-aof-rewrite-percentage", "0"]
        return [*command, *kept, "--unixsocket", self.folder / "socket"]


def task_of(message: bytes) -> dict[str, str]:
    """A task's id by its message's delivery tag. Nothing for what is no task: a reply of remote control, say."""
    try:
        read = json.loads(message)
        return {read["properties"]["delivery_tag"]: read["headers"]["id"]}
    except (KeyError, TypeError, ValueError):
        return {}


def commands(path: Path) -> Iterator[list[bytes]]:
    """Read a record in Redis's own protocol. The last command may be under way."""
    with path.open("rb") as file:
        while line := file.readline():
            # Redis may note the time.
            if line.startswith(b"#"):
                continue
            try:
                yield [argument(file) for _ in range(int(line[1:]))]
            except EOFError:
                assert not file.read(1), f"{path} is no record"
                return


def argument(file: BinaryIO) -> bytes:
    size = file.readline()[1:]
    text = file.read(int(size) + 2) if size.endswith(b"\r\n") else b""
    if not text.endswith(b"\r\n"):
        raise EOFError
    return text[:-2]
