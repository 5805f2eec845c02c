"""What a session can be asked. A request carries its own answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import psycopg

from .errors import LockError
from .hold import Hold
from .holders import Holder
from .keys import LockId

__all__ = [
    "Acquire",
    "Answer",
    "FindHolder",
    "Ping",
    "Release",
    "Request",
    "Statement",
    "batches",
    "refuse",
]


class Answer(Enum):
    """What came of one `Acquire`."""

    GRANTED = "granted"
    #: Somebody else holds the name.
    CONFLICT = "conflict"
    #: This very execution is under way elsewhere: its message came a second time.
    SAME_EXECUTION = "same execution"
    #: Nobody could say: ``Acquire.error`` tells why.
    UNKNOWN = "unknown"


@dataclass(eq=False)
class Acquire:
    """Ask for a hold, together with the identity of the execution that asks.

    The identity is asked for first and kept whatever becomes of the name.
    """

    hold: Hold
    identity: Hold | None = None
    #: Seconds to stand in PostgreSQL's queue; None: for ever; 0: not at all.
    wait: float | None = 0.0
    answer: Answer = Answer.UNKNOWN
    error: LockError | None = None


@dataclass(eq=False)
class Release:
    """Give a hold back. Does nothing for one that is not held."""

    hold: Hold


@dataclass(eq=False)
class FindHolder:
    """Ask who holds an id; with ``kindred`` any other with its first half."""

    id: LockId
    kindred: bool = False
    holder: Holder | None = None
    error: LockError | None = None


@dataclass(eq=False)
class Ping:
    """Ask for a sign of life. Owed unlocks ride along."""


@dataclass(eq=False)
class Statement:
    """Run a statement that is no question about locks. Neither rows nor an error: it was not answered."""

    text: str
    rows: list[list[bytes | None]] | None = None
    error: psycopg.Error | LockError | None = None


Request = Acquire | Release | FindHolder | Ping | Statement


#: A row of PostgreSQL has room for 1664 columns.
MOST_COLUMNS = 500


def batches(requests: Sequence[Request]) -> Iterable[Sequence[Request]]:
    """Split requests, in their order, into what one statement can ask.

    Two questions for one id don't go together: what the second may ask depends on the first one's answer.
    """
    return [requests] if len(requests) == 1 else split(requests)


def split(requests: Sequence[Request]) -> Iterator[Sequence[Request]]:
    batch: list[Request] = []
    ids: set[LockId] = set()
    for request in requests:
        if isinstance(request, Statement):
            if batch:
                yield batch
            yield [request]
            batch, ids = [], set()
            continue
        asked = ids_in(request)
        if ids & asked or len(batch) >= MOST_COLUMNS:
            yield batch
            batch, ids = [], set()
        batch.append(request)
        ids |= asked
    if batch:
        yield batch


def ids_in(request: Request) -> set[LockId]:
    """All that a request may occupy or free: of a limited hold each slot, which is an id of its own."""
    if not isinstance(request, (Acquire, Release)):
        return set()
    ids = {request.hold.id.beside(slot) for slot in range(request.hold.limit)}
    if isinstance(request, Acquire) and request.identity is not None:
        ids.add(request.identity.id)
    return ids


def refuse(requests: Sequence[Request], error: LockError) -> None:
    """Let an error be the answer."""
    for request in requests:
        if isinstance(request, Acquire):
            request.answer, request.error = Answer.UNKNOWN, error
        elif isinstance(request, (FindHolder, Statement)):
            request.error = error
