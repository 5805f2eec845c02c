"""The same locks for code that is no task: scripts, web requests, loops."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from datetime import timedelta

from celery import Celery, current_app
from celery._state import _get_active_apps  # type: ignore[attr-defined]

from .config import read_settings, settings_of
from .durations import seconds_of
from .locks.advisory import AdvisoryLock
from .locks.hold import Hold
from .locks.keys import LockId, full_name, id_of
from .locks.leader import Leader as SettledLeader
from .locks.settings import Settings

__all__ = ["Leader", "advisory_lock"]

logger = logging.getLogger(__name__)


def advisory_lock(
    name: str | LockId,
    wait: float | timedelta | None = 0,
    *,
    mode: str = "exclusive",
    limit: int = 1,
    scope: str = "session",
    min_hold: float | timedelta = 0,
    abort: bool = False,
    app: Celery | None = None,
    database_url: str | None = None,
) -> AdvisoryLock:
    """Return a context manager that holds a lock for one block of code, and yields its `Hold`.

    ``name`` is what follows the namespace in the name of a task's lock: ``"shop.train:tenant:42"`` meets the
    task. ``wait=0`` tries once, seconds (or a timedelta) wait that long in PostgreSQL's queue, None for ever.
    With ``abort`` the block is interrupted when the lock is lost; without it ``.check()`` and ``.lost`` tell.
    The database is that of ``database_url``, else of the app, else of the environment. Without ``app`` it is
    Celery's current one, or the only one of the process, since an app is current only in the thread that made
    it.

    Raises `LockNotAcquired`, `LockUnavailable`, `LockSetupError`, and `LockLost` at the end of a block whose
    lock was lost; `TypeError` where neither app nor database is named and it is not clear which app is meant.
    """
    check_options(mode, limit, scope, min_hold)
    settings = settings_for(app, database_url)
    warn_of_namespace(settings, name)
    hold = new_hold(
        settings, name, shared=mode == "shared", limit=limit, min_hold=seconds("min_hold", min_hold) or 0.0
    )
    return AdvisoryLock(
        settings, hold, wait=seconds("wait", wait), in_transaction=scope == "transaction", abort=abort
    )


class Leader(SettledLeader):
    """One leader among many processes: ``with Leader("orchestrator", on_gain=...) as leader: ...``.

    It campaigns in a thread of its own, again after each loss, every ``poll`` seconds, and hands over at once
    when it is stopped. ``leader.is_leader`` tells; ``on_gain`` and ``on_loss`` are called in that thread.
    """

    def __init__(
        self,
        name: str | LockId,
        *,
        poll: float | timedelta = 1.0,
        on_gain: Callable[[], object] | None = None,
        on_loss: Callable[[], object] | None = None,
        app: Celery | None = None,
        database_url: str | None = None,
    ) -> None:
        settings = settings_for(app, database_url)
        warn_of_namespace(settings, name)
        super().__init__(
            settings,
            lambda: new_hold(settings, name),
            poll=interval("poll", poll),
            on_gain=on_gain,
            on_loss=on_loss,
        )


def settings_for(app: Celery | None, database_url: str | None) -> Settings | None:
    """The settings of the app, or of the current one, with another database if one is named."""
    if app is None:
        app = app_of_this_thread(sure=database_url is None)
    return settings_of(app) if database_url is None else read_settings(app, database_url)


def app_of_this_thread(*, sure: bool) -> Celery:
    """The current app, and where there is none the only one of the process, or Celery's default.

    An app is current in the thread that made it. The default one of other threads has no settings: under its
    namespace they would lock names that no task has. To be ``sure`` raises `TypeError` for several.
    """
    app: Celery = current_app._get_current_object()  # type: ignore[attr-defined]
    if app.main != "default" or app.set_as_current:  # type: ignore[attr-defined]
        return app
    others = [other for other in _get_active_apps() if other is not app]
    if sure and len(others) > 1:
        # Some may be gone, and not collected yet.
        gc.collect()
        others = [other for other in _get_active_apps() if other is not app]
    if sure and len(others) > 1:
        raise TypeError(
            "no Celery app is current in this thread, and there are several: name one (app=), or make one the"
            " default of all threads by its set_default()"
        )
    return others[0] if len(others) == 1 else app


def warn_of_namespace(settings: Settings | None, name: object) -> None:
    """Warn of a name that was pasted from a log: the namespace is put in front of it once more."""
    if settings is not None and isinstance(name, str) and name.startswith(f"{settings.namespace}:"):
        logger.warning(
            "lock %r: its whole name is %r, since the namespace is put in front",
            name,
            f"{settings.namespace}:{name}",
        )


def new_hold(settings: Settings | None, name: str | LockId, **options: object) -> Hold:
    if isinstance(name, LockId):
        return Hold(name, settings=settings, **options)  # type: ignore[arg-type]
    if not isinstance(name, str) or not name:
        raise TypeError(f"a lock's name is a text or a LockId, not {name!r}")
    text = full_name(settings.namespace if settings is not None else "", name, None)
    return Hold(id_of(text), text, settings=settings, **options)  # type: ignore[arg-type]


def check_options(mode: str, limit: int, scope: str, min_hold: float | timedelta) -> None:
    """Refuse what makes no sense, alone or together."""
    if mode not in ("exclusive", "shared"):
        raise ValueError(f'mode: "exclusive" or "shared", not {mode!r}')
    if scope not in ("session", "transaction"):
        raise ValueError(f'scope: "session" or "transaction", not {scope!r}')
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"limit: a whole number >= 1, not {limit!r}")
    if limit > 1 and (mode == "shared" or scope == "transaction"):
        raise ValueError('limit: needs mode="exclusive" and scope="session"')
    if min_hold and (mode == "shared" or scope == "transaction"):
        raise ValueError('min_hold: needs mode="exclusive" and scope="session"')


def seconds(argument: str, value: float | timedelta | None) -> float | None:
    """Read an argument in seconds, None for ever. Raises `TypeError` or `ValueError`."""
    try:
        return None if value is None else seconds_of(value)
    except (TypeError, ValueError) as exc:
        raise type(exc)(f"{argument}: {exc}") from None


def interval(argument: str, value: float | timedelta) -> float:
    """Read an argument in seconds that is neither 0 nor for ever."""
    number = seconds(argument, value)
    if not number:
        raise ValueError(f"{argument}: seconds > 0, not {value!r}")
    return number
