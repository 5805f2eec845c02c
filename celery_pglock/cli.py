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

FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGTSTP,
)

#: By these a terminal stops a job. Who stops the command by SIGSTOP lets it go on as well.
JOB_CONTROL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)

#: Seconds between SIGTERM and SIGKILL for a command whose lock is lost.
GRACE = 5.0

#: Seconds between two looks at the command and the lock.
LOOK_EVERY = 0.05

#: Is told the command's group, waits for the end of the runner, which closes its pipe however it comes, and
#: ends the group.
HEIR = 'read -r group || exit; read -r _; kill -s KILL -- "-$group"'


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
            code = Job(lock).run(command)
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


class Job:
    """A command under a lock, and what it starts: a process group, and one job with its runner to a shell."""

    def __init__(self, lock: Hold) -> None:
        self.lock = lock
        self.command: subprocess.Popen[bytes] | None = None
        #: Signals that came before there was a command.
        self.early: list[int] = []
        #: A pager that shows the output needs the terminal: then the command gets it when it asks.
        self.has_reader = not os.isatty(1)
        self.terminal = open_terminal()
        self.in_foreground = self.has_terminal() and not self.has_reader

    def run(self, arguments: tuple[str, ...]) -> int:
        """Run a command to its end, or to that of the lock, and return what a shell would say of it."""
        # Both come before the command: it lives at no moment without one who ends it.
        ignored = [number for number in FORWARDED if signal.getsignal(number) is signal.SIG_IGN]
        for number in FORWARDED:
            signal.signal(number, lambda received, _: self.send(received))
        heir = subprocess.Popen(["sh", "-c", HEIR], stdin=subprocess.PIPE, start_new_session=True)
        begin = partial(self.begin, heir, ignored)
        try:
            self.command = command = subprocess.Popen(arguments, preexec_fn=begin)
        except OSError as exc:
            click.echo(f"pglock: {arguments[0]}: {exc.strerror}", err=True)
            return 127 if isinstance(exc, FileNotFoundError) else 126
        else:
            for early in self.early:
                self.send(early)
            return self.wait(command)
        finally:
            heir.kill()
            heir.communicate()
            if self.in_foreground:
                self.give_terminal_to(os.getpgrp())

    def begin(self, heir: subprocess.Popen[bytes], ignored: list[signal.Signals]) -> None:
        """Begin a process group, so that a signal reaches all of it. Called in the command's process."""
        assert heir.stdin is not None
        os.setpgid(0, 0)
        os.write(heir.stdin.fileno(), b"%d\n" % os.getpid())
        if self.in_foreground:
            self.give_terminal_to(os.getpid())
        # Whoever ignores a signal has his command ignore it, as under nohup.
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    def send(self, number: int) -> None:
        """Send a signal to the command and to what it started."""
        if self.command is None:
            self.early.append(number)
        else:
            with suppress(ProcessLookupError):
                os.killpg(self.command.pid, number)

    def wait(self, command: subprocess.Popen[bytes]) -> int:
        while command.poll() is None:
            if self.lock.lost:
                self.end(command)
                break
            if (number := stopped_by(command)) in JOB_CONTROL:
                self.stop(number)
            elif self.has_terminal() and not self.has_reader:
                self.enter_foreground()
            with suppress(subprocess.TimeoutExpired):
                command.wait(LOOK_EVERY)
        return command.returncode if command.returncode >= 0 else 128 - command.returncode

    def end(self, command: subprocess.Popen[bytes]) -> None:
        """End a command that has lost its lock."""
        self.send(signal.SIGTERM)
        # One that is stopped does not hear it otherwise.
        self.send(signal.SIGCONT)
        deadline = time.monotonic() + GRACE
        while command.poll() is None and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY)
        self.send(signal.SIGKILL)
        command.wait()

    def stop(self, number: int) -> None:
        """Stop as the command was stopped, since the shell looks at its own child, and go on with it."""
        asks = number != signal.SIGTSTP
        if not asks or not self.has_terminal():
            if self.in_foreground:
                self.give_terminal_to(os.getpgrp())
            handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.killpg(os.getpgrp(), signal.SIGTSTP)
            # Here it goes on, in the foreground or not.
            signal.signal(signal.SIGTSTP, handler)
            self.in_foreground = False
        if self.has_terminal() and (asks or not self.has_reader):
            self.enter_foreground()
        # What became of the lock meanwhile the watch sees in a moment.
        time.sleep(LOOK_EVERY)
        if not self.lock.lost:
            self.send(signal.SIGCONT)

    def enter_foreground(self) -> None:
        """Pass the terminal on, which the shell gives to the runner."""
        assert self.command is not None
        self.give_terminal_to(self.command.pid)
        self.in_foreground = True

    def has_terminal(self) -> bool:
        """Whether the terminal listens to this process."""
        try:
            return os.tcgetpgrp(self.terminal) == os.getpgrp()
        except OSError:
            return False

    def give_terminal_to(self, group: int) -> None:
        previous = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        # Somebody may have hung up.
        with suppress(OSError):
            os.tcsetpgrp(self.terminal, group)
        signal.signal(signal.SIGTTOU, previous)


def stopped_by(command: subprocess.Popen[bytes]) -> int | None:
    """Return the signal that has just stopped a command."""
    pid, status = os.waitpid(command.pid, os.WNOHANG | os.WUNTRACED)
    if pid and os.WIFSTOPPED(status):
        return os.WSTOPSIG(status)
    if pid:
        command.returncode = os.waitstatus_to_exitcode(status)
    return None


def open_terminal() -> int:
    """The terminal of this process, which its standard input need not be."""
    try:
        return os.open("/dev/tty", os.O_RDWR)
    except OSError:
        return 0
