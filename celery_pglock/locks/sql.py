"""The SQL of session locks: expressions, one for each question, and how their values read.

Ids are written as quoted literals: so a statement can be sent as it is, behind every pooler, or taken apart
into its text and its values, for a session that prepares it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .errors import LockSetupError
from .hold import Hold
from .holders import matches
from .keys import LockId
from .requests import Answer

__all__ = [
    "OWN_LOCKS",
    "REFUSED",
    "answer_of",
    "if_locked",
    "milliseconds",
    "nobody_waits_for",
    "queue_up",
    "truth",
    "try_lock",
    "try_slot",
    "unlock",
    "unlock_id",
]

OWN_LOCKS = """
    SELECT classid::bigint, objid::bigint, objsubid, (mode = 'ShareLock')::int FROM pg_locks
    WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted
"""


def try_lock(hold: Hold, *, xact: bool = False) -> str:
    """0 if the session (the transaction) got it, -1 if another has it."""
    return f"pg_try_advisory_{'xact_' if xact else ''}{kind(shared=hold.shared)}({sql(hold.id)})::int - 1"


def queue_up(hold: Hold, *, xact: bool = False) -> str:
    """0 when it is got: PostgreSQL's function returns nothing, which has the length 0."""
    function = f"pg_advisory_{'xact_' if xact else ''}{kind(shared=hold.shared)}"
    return f"length({function}({sql(hold.id)})::text)"


def unlock(hold: Hold) -> str:
    return unlock_id(hold.occupied, shared=hold.shared)


def unlock_id(id: LockId, *, shared: bool) -> str:
    return f"pg_advisory_un{kind(shared=shared)}({sql(id)})"


def if_locked(identity: Hold, question: str, *, xact: bool = False) -> str:
    """Ask the question only with another lock in hand, else NULL."""
    return f"CASE WHEN pg_try_advisory_{'xact_' if xact else ''}lock({sql(identity.id)}) THEN {question} END"


def milliseconds(wait: float | None) -> str:
    """Seconds as PostgreSQL's timeouts take them; None: for ever, which they write as 0."""
    return "0" if wait is None else str(min(max(1, math.ceil(wait * 1000)), 2**31 - 1))


#: A slot that nobody gets.
REFUSED = "-1"


def answer_of(slot: bytes | None) -> Answer:
    """Read the slot that was got. Raises `LockSetupError` for what is none, which is no refusal either."""
    if slot is None or not slot.lstrip(b"-").isdigit():
        raise LockSetupError(f"the server of pglock_database_url answers {slot!r} when asked for a lock")
    return Answer.GRANTED if int(slot) >= 0 else Answer.CONFLICT


def truth(value: bytes | None) -> bool:
    """Read a boolean. Raises `LockSetupError` for anything else, which must not pass for a refusal."""
    if value not in (b"t", b"f"):
        raise LockSetupError(f"the server of pglock_database_url answers {value!r} when asked for a lock")
    return value == b"t"


def kind(*, shared: bool) -> str:
    return "lock_shared" if shared else "lock"


def try_slot(hold: Hold, own: Sequence[int]) -> str:
    """Ask for the first free one of a name's slots, but for those that this session has.

    CASE, since the order of an AND is the planner's to choose, and a slot of our own would be granted again.
    """
    mine = f"slot = ANY ('{{{','.join(map(str, own))}}}'::int[])"
    attempt = f"CASE WHEN {mine} THEN false ELSE pg_try_advisory_lock({sql_of_slot(hold.id)}) END"
    slots = f"generate_series(0, '{hold.limit - 1}'::int) AS slot"
    return f"coalesce((SELECT slot FROM {slots} WHERE {attempt} LIMIT 1), -1)"


def nobody_waits_for(id: LockId) -> str:
    """0 if nobody waits for an id that this session shares, else -1: readers must not starve a writer."""
    return f"EXISTS (SELECT FROM pg_locks WHERE NOT granted AND {matches(id)})::int * -1"


def sql(id: LockId) -> str:
    """An id as the arguments of PostgreSQL's functions, whose number tells the two key spaces apart.

    Quoted, since a bare negative number is an operator at work for the parser.
    """
    return f"'{id[0]}'" if len(id) == 1 else f"'{id[0]}', '{id[1]}'"


def sql_of_slot(id: LockId) -> str:
    """`LockId.beside`, for a column ``slot``."""
    *rest, last = id
    kind = "int" if rest else "bigint"
    beside = f"('{last}'::{kind} {'-' if last > 0 else '+'} slot::int)::{kind}"
    return ", ".join([*(f"'{key}'" for key in rest), beside])
