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
        replay = Replay()
        for command in self._record():
            replay.play(*command)
        return replay.messages()

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


class Replay:
    """What the commands of a record did to lists and to Kombu's hash."""

    def __init__(self) -> None:
        self._lists: dict[tuple[int, bytes], deque[bytes]] = defaultdict(deque)
        self._taken: dict[str, str] = {}
        self._noted: dict[str, str] = {}
        self._db = 0

    def play(self, name: bytes, *args: bytes) -> None:
        command = name.upper()
        if command == b"SELECT":
            self._db = int(args[0])
        elif command in (b"LPUSH", b"RPUSH"):
            self._push(command == b"LPUSH", *args)
        elif command == b"RPOP":
            # A BRPOP is written down as one too.
            self._taken |= task_of(self._lists[self._db, args[0]].pop())
        elif command == b"HSET" and args[0] == UNACKED:
            tags = [tag.decode() for tag in args[1::2]]
            self._noted |= {tag: self._taken.pop(tag) for tag in tags}
        elif command == b"HDEL" and args[0] == UNACKED:
            for tag in args[1:]:
                del self._noted[tag.decode()]
        elif command in (b"DEL", b"UNLINK"):
            for key in args:
                self._lists.pop((self._db, key), None)
        elif command in NOT_FOLLOWED:
            raise AssertionError(f"the record holds a command that its reader can't follow: {name!r}")

    def _push(self, left: bool, key: bytes, *messages: bytes) -> None:
        queue = self._lists[self._db, key]
        queue.extendleft(messages) if left else queue.extend(messages)

    def messages(self) -> Messages:
        found = Messages(taken=self._taken, noted=self._noted)
        for queue in self._lists.values():
            for message in queue:
                found.queued |= task_of(message)
        return found


def task_of(message: bytes) -> dict[str, str]:
    """A task's id by its message's delivery tag: nothing for a reply of remote control, say."""
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
