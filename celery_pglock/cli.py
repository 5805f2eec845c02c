"""``celery -A proj pglock run NAME -- COMMAND``: flock(1) for a fleet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from typing import NoReturn

import click
from celery.bin.base import CeleryCommand
from celery.exceptions import ImproperlyConfigured

from .advisory import advisory_lock
from .locks.errors import LockError, LockLost, LockNotAcquired, LockSetupError
from .locks.hold import Hold

__all__ = ["pglock"]

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)

#: Seconds between SIGTERM and SIGKILL for a command whose lock is lost.
GRACE = 5.0

#: Seconds between two looks at the command and the lock.
LOOK_EVERY = 0.05

#: Waits for the end of the runner, which closes its pipe however it comes, and ends the command's group.
HEIR = 'read -r _; kill -s KILL -- "-$0"'


@click.group(name="pglock")
def pglock() -> None:
    """PostgreSQL advisory locks."""


@pglock.command(cls=CeleryCommand, context_settings={"ignore_unknown_options": True})
@click.argument("name")
@click.option("--wait", type=float, default=0.0, help="Seconds to wait for the lock; negative: for ever.")
@click.option("--shared", is_flag=True, help="Share the lock with others that share it.")
@click.option("--limit", type=click.IntRange(min=1), default=1, help="So many may hold it at once.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(  # noqa: PLR0917 - click passes them by name
    ctx: click.Context, name: str, wait: float, shared: bool, limit: int, command: tuple[str, ...]
) -> None:
    """Run COMMAND while holding the lock NAME.

    Passes signals on, and the command's exit code (128 + n when signal n ended it). 75: the lock is taken.
    69: PostgreSQL could not be asked. 78: the set-up can't work. 74: the lock was lost and the command ended.
    """
    mode = "shared" if shared else "exclusive"
    try:
        with advisory_lock(name, None if wait < 0 else wait, mode=mode, limit=limit, app=ctx.obj.app) as lock:
            code = run_under(lock, command)
    except LockNotAcquired as exc:
        end(exc, os.EX_TEMPFAIL)
    except LockLost as exc:
        end(exc, os.EX_IOERR)
    except (LockSetupError, ImproperlyConfigured, TypeError, ValueError) as exc:
        end(exc, os.EX_CONFIG)
    except LockError as exc:
        end(exc, os.EX_UNAVAILABLE)
    sys.exit(code)


def end(error: Exception, code: int) -> NoReturn:
    click.echo(f"pglock: {error}", err=True)
    sys.exit(code)


def run_under(lock: Hold, command: tuple[str, ...]) -> int:
    """Run a command to its end, or to that of the lock, with all that it starts."""
    in_foreground = os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    try:
        process = subprocess.Popen(command, preexec_fn=partial(lead_a_group, in_foreground=in_foreground))
    except OSError as exc:
        click.echo(f"pglock: {command[0]}: {exc.strerror}", err=True)
        return 127 if isinstance(exc, FileNotFoundError) else 126
    for number in FORWARDED:
        signal.signal(number, lambda received, _: signal_group(process, received))
    heir = subprocess.Popen(
        ["sh", "-c", HEIR, str(process.pid)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        return wait_under(lock, process)
    finally:
        heir.kill()
        heir.communicate()
        if in_foreground:
            give_terminal_to(os.getpgrp())


def wait_under(lock: Hold, process: subprocess.Popen[bytes]) -> int:
    while process.poll() is None:
        if lock.lost:
            stop(process)
            break
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_EVERY)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a command that has lost its lock."""
    signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY)
    signal_group(process, signal.SIGKILL)
    process.wait()


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the command and to what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def lead_a_group(*, in_foreground: bool) -> None:
    """Begin a process group, so that a signal reaches all of it, and let it have the terminal."""
    os.setpgid(0, 0)
    if in_foreground:
        give_terminal_to(os.getpid())


def give_terminal_to(group: int) -> None:
    previous = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(0, group)
    signal.signal(signal.SIGTTOU, previous)
