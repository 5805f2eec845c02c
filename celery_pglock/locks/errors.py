"""All that the package raises.

Raw values go to ``Exception.args`` and the sentence is built in ``__str__``:
Celery rebuilds an exception as ``cls(*args)`` in other processes and from JSON.
"""

from __future__ import annotations

__all__ = [
    "LockDeadlock",
    "LockError",
    "LockKeyError",
    "LockLost",
    "LockNotAcquired",
    "LockSetupError",
    "LockUnavailable",
]


class LockError(Exception):
    """Base of every error that this package raises."""

    __module__ = "celery_pglock"


class _ReasonError(LockError):
    """An error whose one value is the reason."""

    _text = "{}"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)

    def __str__(self) -> str:
        return self._text.format(self.args[0])


class LockKeyError(_ReasonError):
    """No stable name can be made from the arguments, or from the key that was asked for.

    ``args``: the reason.
    """

    __module__ = "celery_pglock"


class LockNotAcquired(LockError):
    """Somebody else holds the name, for as long as there was to wait.

    ``args``: what is locked, the seconds since the first conflict, the conflicts met.
    """

    __module__ = "celery_pglock"

    def __init__(self, lock: str, waited: float = 0.0, conflicts: int = 1) -> None:
        super().__init__(lock, waited, conflicts)

    def __str__(self) -> str:
        lock, waited, conflicts = self.args
        if conflicts <= 1 and not waited:
            return f"lock {lock!r} is held by another"
        tries = "" if conflicts <= 1 else f" and {conflicts} tries"
        return f"lock {lock!r} is held by another: not acquired after {waited:.1f} s{tries}"


class LockLost(LockError):
    """The lock was gone before the work was done: others may have run beside it.

    ``args``: what was locked, how the loss showed.
    """

    __module__ = "celery_pglock"

    def __init__(self, lock: str, reason: str = "its session ended") -> None:
        super().__init__(lock, reason)

    def __str__(self) -> str:
        lock, reason = self.args
        return f"lock {lock!r} was lost: {reason}"


class LockUnavailable(_ReasonError):
    """The lock could not be asked for. Never a sign that somebody else holds the name.

    ``args``: the reason.
    """

    __module__ = "celery_pglock"
    _text = "the lock could not be asked for: {}"


class LockDeadlock(_ReasonError):
    """A wait that could never have ended: PostgreSQL ended it, or it was refused.

    ``args``: the reason.
    """

    __module__ = "celery_pglock"


class LockSetupError(_ReasonError):
    """What was set up can't work, now or later: the text names the setting to change.

    ``args``: the reason.
    """

    __module__ = "celery_pglock"
