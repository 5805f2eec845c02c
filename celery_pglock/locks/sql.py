"""The SQL of session locks: expressions, one for each question, and how their values read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .errors import LockSetupError
from .hold import Hold
from .holders import Expression, matches
from .keys import LockId
from .requests import Answer

__all__ = [
    "DRAW",
    "OWN_LOCKS",
    "QUEUED",
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

#: The processes of the server that wait for an advisory lock.
QUEUED = "SELECT string_agg(pid::text, ' ') FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"

#: Draw a number that is greater than every one before, in the whole cluster. An id under which nothing was
#: written is drawn again after a crash of the server. A message in the log makes its transaction one that is
#: written, and the commit flushes the log, also for a role that does not wait for that.
DRAW = """
    SELECT pg_current_xact_id(), pg_logical_emit_message(true, 'pglock', ''), set_config(
        'synchronous_commit', coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on'), true)
"""

#: The arguments of PostgreSQL's functions, whose number tells the two key spaces apart.
ARGUMENTS = {1: "(?)", 2: "(?, ?)"}


def try_lock(hold: Hold, *, xact: bool = False) -> Expression:
    """0 if the session (the transaction) got it, -1 if another has it."""
    function = TRY_LOCK[xact, hold.shared]
    return f"{function}{ARGUMENTS[len(hold.id)]}::int - 1", hold.id


def queue_up(hold: Hold, *, xact: bool = False) -> Expression:
    """0 when it is got: PostgreSQL's function returns nothing, which has the length 0."""
    function = LOCK[xact, hold.shared]
    return f"length({function}{ARGUMENTS[len(hold.id)]}::text)", hold.id


def unlock(hold: Hold) -> Expression:
    return unlock_id(hold.occupied, shared=hold.shared)


def unlock_id(id: LockId, *, shared: bool) -> Expression:
    return UNLOCK[shared] + ARGUMENTS[len(id)], id


def if_locked(identity: Hold, question: Expression, *, xact: bool = False) -> Expression:
    """Ask the question only with another lock in hand, else NULL."""
    text, values = question
    return f"CASE WHEN {TRY_LOCK[xact, False]}(?) THEN {text} END", (*identity.id, *values)


LOCK = {
    (xact, shared): f"pg_advisory_{'xact_' * xact}lock{'_shared' * shared}"
    for xact in (False, True)
    for shared in (False, True)
}
TRY_LOCK = {kind: function.replace("pg_", "pg_try_") for kind, function in LOCK.items()}
UNLOCK = {False: "pg_advisory_unlock", True: "pg_advisory_unlock_shared"}


def milliseconds(wait: float | None) -> str:
    """Seconds as PostgreSQL's timeouts take them; None: for ever, which they write as 0."""
    return "0" if wait is None else str(min(max(1, math.ceil(wait * 1000)), 2**31 - 1))


#: A slot that nobody gets.
REFUSED: Expression = ("-1", ())


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


def try_slot(hold: Hold, own: Sequence[int]) -> Expression:
    """Ask for the first free one of a name's slots, but for those that this session has.

    CASE, since the order of an AND is the planner's to choose, and a slot of our own would be granted again.
    """
    *rest, last = hold.id
    kind = "int" if rest else "bigint"
    # `LockId.beside`, for a column ``slot``.
    beside = f"(?::{kind} {'-' if last > 0 else '+'} slot::int)::{kind}"
    arguments = ", ".join(["?"] * len(rest) + [beside])
    attempt = f"CASE WHEN slot = ANY (?::int[]) THEN false ELSE pg_try_advisory_lock({arguments}) END"
    text = f"coalesce((SELECT slot FROM generate_series(0, ?::int) AS slot WHERE {attempt} LIMIT 1), -1)"
    return text, (hold.limit - 1, f"{{{','.join(map(str, own))}}}", *hold.id)


def nobody_waits_for(id: LockId) -> Expression:
    """0 if nobody waits for an id that this session shares, else -1: readers must not starve a writer."""
    condition, values = matches(id)
    return f"EXISTS (SELECT FROM pg_locks WHERE NOT granted AND {condition})::int * -1", values
