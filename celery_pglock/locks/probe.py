"""Whether a server can lock at all: asked before any body runs.

Some servers that speak PostgreSQL's protocol answer the same to everybody. A product's name would not tell
them from others, so two connections ask for one lock.
"""

from __future__ import annotations

import secrets

from .errors import LockSetupError, LockUnavailable
from .hold import Hold
from .keys import LockId
from .line import ask_once, close_warm
from .process import application_name
from .requests import Acquire, Answer, Release
from .server import IN_RECOVERY, OnStandby, SessionBroken, refuse_standby
from .session import Session
from .settings import Settings
from .transaction import Transaction

__all__ = ["probe", "prove_exclusion"]

#: The pair space's first key of the lock that proves exclusion, so that it meets no named lock.
PROOF_SUBSYSTEM = 0x70676C6B

_proven: set[Settings] = set()


def probe(settings: Settings, *, transactions: bool = False) -> None:
    """Connect once and check the server for one of the scopes.

    Raises `LockSetupError` or `LockUnavailable`.
    """
    try:
        if transactions:
            prove_transactions(settings)
        else:
            prove_sessions(settings)
    except OnStandby as exc:
        raise LockSetupError(str(exc)) from exc


def prove_sessions(settings: Settings) -> None:
    session = Session(settings, application_name())
    try:
        session.set_up()
        prove_exclusion(session, settings)
    finally:
        session.close("it was only asked whether it works")


def prove_exclusion(session: Session, settings: Settings) -> None:
    """Let the first session for a database prove that its locks exclude another session.

    What a worker's main process has proved at its start, its children need not prove again. Raises
    `LockSetupError` or `LockUnavailable`.
    """
    if settings in _proven:
        return
    other = Session(settings, application_name())
    first, second = rivals()
    try:
        other.set_up()
        session.perform([first])
        other.perform([second])
        session.perform([Release(first.hold)])
    except SessionBroken as exc:
        raise LockUnavailable(str(exc)) from exc
    finally:
        other.close("its work is done")
    check(first, second)
    _proven.add(settings)


def prove_transactions(settings: Settings) -> None:
    """Let two transactions try one lock."""
    try:
        # A standby would refuse the transactions, but not say why.
        refuse_standby(ask_once(settings, IN_RECOVERY))
        scopes = [Transaction(settings) for _ in range(2)]
        asked = [scope.acquire(rival.hold) for scope, rival in zip(scopes, rivals(), strict=True)]
        for scope, rival in zip(scopes, asked, strict=True):
            scope.release(rival.hold, success=False)
    finally:
        close_warm()
    check(*asked)


def rivals() -> tuple[Acquire, Acquire]:
    """Two who want one lock."""
    id = LockId(PROOF_SUBSYSTEM, secrets.randbits(31))
    return Acquire(Hold(id)), Acquire(Hold(id))


def check(first: Acquire, second: Acquire) -> None:
    """Raise what kept them from asking, and `LockSetupError` unless the first alone got the lock."""
    for asked in (first, second):
        if asked.error is not None:
            raise asked.error
    if (first.answer, second.answer) != (Answer.GRANTED, Answer.CONFLICT):
        raise LockSetupError(
            "the advisory locks of the server of pglock_database_url do not exclude: asked by two sessions"
            " for one lock it must answer yes and no. Name a PostgreSQL server"
        )
