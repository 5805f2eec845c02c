"""`celery pglock run`: a command under a lock, its signals, its exit code, and no life without the lock."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from celery_pglock.locks.keys import id_of
from integration.judge import Judge, eventually

MIGRATE = id_of("celery:migrate")

PROJECT = """
import os
from celery import Celery
app = Celery("proj", broker="memory://")
app.conf.pglock_database_url = os.environ["TEST_DSN"]
"""

#: A runner that the machine leaves alone for a moment each time that it has started something.
SLOW = """
import subprocess
import time

class Slow(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        time.sleep(0.5)

subprocess.Popen = Slow
"""

Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run(dsn: str, tmp_path: Path, judge: Judge) -> Iterator[Run]:
    """Start `celery -A proj pglock run ...`."""
    (tmp_path / "proj.py").write_text(PROJECT)
    processes = []

    def run(*arguments: str, dsn: str = dsn) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "proj", "pglock", "run", *arguments],
            cwd=tmp_path,
            env={**os.environ, "TEST_DSN": dsn, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()
    judge.sees_nothing_left()


class Terminal:
    """A terminal with an interactive shell, as people use it."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self._ours, theirs = pty.openpty()
        self._seen = ""
        self.shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "--noediting", "-i"],
            cwd=folder,
            env={**os.environ, "TEST_DSN": dsn, "PS1": "", "HISTFILE": "", "LC_ALL": "C"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=own_terminal,
        )
        os.close(theirs)

    def types(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def sees(self, text: str, within: float = 20) -> None:
        """Wait for a text behind the one that was seen last."""
        deadline = time.monotonic() + within
        while text not in self._seen:
            left = deadline - time.monotonic()
            assert left > 0, f"not {text!r}, but {self._seen!r}"
            if select.select([self._ours], [], [], left)[0]:
                self._seen += os.read(self._ours, 4096).decode()
        self._seen = self._seen.partition(text)[2]

    def stops(self) -> None:
        """Press Ctrl-Z, and the shell says so."""
        self.types("\x1a")
        self.sees("Stopped")

    def answers(self) -> None:
        """The shell has the terminal: it computes what the echo of the question does not show."""
        self.types("echo $((6 * 7))th\n")
        self.sees("42th", 5)

    def close(self) -> None:
        self.shell.kill()
        self.shell.wait()
        os.close(self._ours)


def own_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(run: Run, dsn: str, tmp_path: Path) -> Iterator[Terminal]:
    """With `run` for the project, and for the look at what is left."""
    terminal = Terminal(tmp_path, dsn)
    yield terminal
    # To close it hangs up on all that runs there.
    terminal.close()


def under_the_lock(*command: str) -> str:
    runner = [sys.executable, "-m", "celery", "-A", "proj", "pglock", "run", "migrate"]
    return shlex.join([*runner, *command]) + "\n"


def ended(process: subprocess.Popen[str], timeout: float = 30) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    assert "Traceback" not in err
    return process.returncode, out, err


def python(code: str) -> list[str]:
    return ["--", sys.executable, "-u", "-c", code]


#: Says its id, and works until it is told to end.
WORK = "import os, time; print(os.getpid()); time.sleep(60)"


def started(process: subprocess.Popen[str]) -> int:
    """Wait until the command runs, and return its process id."""
    line = process.stdout.readline()
    assert line, process.communicate()
    return int(line)


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def test_a_command_runs_under_the_lock(run: Run, judge: Judge) -> None:
    """A second one meanwhile is refused with 75, and does not run."""
    first = run("migrate", *python(WORK))
    started(first)
    assert judge.held() == {MIGRATE}
    code, out, err = ended(run("migrate", *python("print('ran')")))
    assert (code, out) == (os.EX_TEMPFAIL, "")
    assert "celery:migrate" in err
    first.send_signal(signal.SIGTERM)
    assert ended(first)[0] == 128 + signal.SIGTERM
    assert judge.held() == set()
    # The control: with the name free it runs.
    assert ended(run("migrate", *python("print('ran')")))[:2] == (0, "ran\n")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (python("raise SystemExit(3)"), 3),
        (python("import os; os.kill(os.getpid(), 9)"), 128 + 9),
        (["/no/such/program"], 127),
    ],
    ids=["exit", "killed", "not found"],
)
def test_the_exit_code_is_the_command_s(run: Run, command: list[str], code: int) -> None:
    """Or what a shell would say of it."""
    assert ended(run("migrate", *command))[0] == code


def test_arguments_of_the_command_are_its_own(run: Run) -> None:
    """Also those that look like ours."""
    code = "import sys; print(sys.argv[1:])"
    out = ended(run("migrate", "--wait", "1", *python(code), "--wait", "-x", "--help", "--"))[1]
    assert out == "['--wait', '-x', '--help', '--']\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_signals_are_passed_on(run: Run, judge: Judge, name: str) -> None:
    """The command decides what they mean, and the lock lasts for as long as it does."""
    code = (
        "import os, signal, sys, time\n"
        "def told(*_):\n    print('told')\n    time.sleep(0.3)\n    sys.exit(7)\n"
        f"signal.signal(signal.{name}, told)\nprint(os.getpid())\ntime.sleep(60)"
    )
    process = run("migrate", *python(code))
    started(process)
    process.send_signal(getattr(signal, name))
    assert process.stdout.readline() == "told\n"
    assert judge.held() == {MIGRATE}
    assert ended(process)[0] == 7


def test_a_command_does_not_survive_its_runner(run: Run, judge: Judge) -> None:
    """SIGKILL to the runner, which can do nothing any more: the kernel ends the command."""
    process = run("migrate", *python(WORK))
    pid = started(process)
    process.kill()
    eventually(lambda: not alive(pid), "the command runs on without its lock", within=2)
    eventually(lambda: not judge.held(), "the lock is left", within=2)


def test_children_of_a_command_do_not_survive_its_runner(run: Run, judge: Judge) -> None:
    """A shell that started the real work is no way out."""
    process = run("migrate", "--", "sh", "-c", f"{sys.executable} -u -c '{WORK}'; true")
    pid = started(process)
    try:
        process.kill()
        eventually(lambda: not alive(pid), "the work runs on without its lock", within=2)
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_command_ends_when_its_lock_is_lost(run: Run, judge: Judge) -> None:
    """It may tidy up, the runner says why, and 74 is no code of its own."""
    process = run(
        "migrate",
        *python(
            "import os, signal, sys, time\n"
            "signal.signal(signal.SIGTERM, lambda *_: (print('tidy'), sys.exit(0)))\n"
            "print(os.getpid())\ntime.sleep(60)"
        ),
    )
    pid = started(process)
    since = time.monotonic()
    judge.end(judge.holder(MIGRATE))
    code, out, err = ended(process)
    assert time.monotonic() - since < 3
    assert (code, out) == (os.EX_IOERR, "tidy\n")
    assert "was lost" in err
    assert not alive(pid)


def test_children_of_a_command_end_when_its_lock_is_lost(run: Run, judge: Judge) -> None:
    """The shell alone is not the work."""
    process = run("migrate", "--", "sh", "-c", f"{sys.executable} -u -c '{WORK}'; true")
    pid = started(process)
    try:
        judge.end(judge.holder(MIGRATE))
        eventually(lambda: not alive(pid), "the work runs on without its lock", within=8)
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_stubborn_command_is_killed_when_its_lock_is_lost(run: Run, judge: Judge) -> None:
    """After some seconds in which it may tidy up."""
    process = run(
        "migrate",
        *python(
            "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "print(os.getpid())\ntime.sleep(60)"
        ),
    )
    pid = started(process)
    judge.end(judge.holder(MIGRATE))
    assert ended(process)[0] == os.EX_IOERR
    assert not alive(pid)


def test_seconds_are_waited(run: Run, judge: Judge) -> None:
    """`--wait` bounds the wait, a negative one does not."""
    judge.take(MIGRATE)
    since = time.monotonic()
    assert ended(run("migrate", "--wait", "0.5", *python("print('ran')")))[:2] == (os.EX_TEMPFAIL, "")
    assert time.monotonic() - since >= 0.5
    process = run("migrate", "--wait", "-1", *python("print('ran')"))
    eventually(lambda: waiting_pids(judge), "it waits", within=20)
    judge.give_back()
    assert ended(process)[:2] == (0, "ran\n")


def waiting_pids(judge: Judge) -> list[int]:
    rows = judge.observer.execute("SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
    return [pid for (pid,) in rows]


def test_a_runner_that_waits_can_be_stopped(run: Run, judge: Judge) -> None:
    """It leaves the queue, and the command never runs."""
    judge.take(MIGRATE)
    process = run("migrate", "--wait", "60", *python("print('ran')"))
    eventually(lambda: waiting_pids(judge), "it waits", within=20)
    process.send_signal(signal.SIGINT)
    code, out, _ = ended(process)
    assert code != 0
    assert out == ""
    eventually(lambda: not waiting_pids(judge), "a zombie waits", within=2)


def test_readers_share_and_n_are_let_in(run: Run, judge: Judge) -> None:
    """`--shared` beside `--shared`, and `--limit` so many."""
    kinds = {"readers": ["--shared"], "limited": ["--limit", "2"]}
    for name, options in kinds.items():
        both = [run(name, *options, *python(WORK)) for _ in range(2)]
        for process in both:
            started(process)
        refused = run(name, *([] if name == "readers" else options), *python("print('ran')"))
        assert ended(refused)[:2] == (os.EX_TEMPFAIL, "")
        for process in both:
            process.terminate()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["migrate", "--limit", "2", "--shared", "true"], os.EX_CONFIG),
        (["", "true"], None),
    ],
    ids=["pair", "no name"],
)
def test_what_can_not_work_is_told(run: Run, arguments: list[str], code: int | None) -> None:
    """In words, and before anything runs."""
    got, out, err = ended(run(*arguments))
    assert got == code if code is not None else got != 0
    assert out == ""
    assert err


def test_a_server_that_is_not_there_is_told(run: Run) -> None:
    """69, which is no conflict, and the command does not run."""
    code, out, err = ended(
        run("migrate", *python("print('ran')"), dsn="postgresql://127.0.0.1:1/none?connect_timeout=2")
    )
    assert (code, out) == (os.EX_UNAVAILABLE, "")
    assert "could not be asked" in err


def test_a_command_has_no_part_in_the_lock(run: Run, judge: Judge) -> None:
    """What it leaves behind in the background keeps nothing alive."""
    process = run("migrate", "--", "sh", "-c", "sleep 3 >/dev/null 2>&1 & echo $$")
    assert process.stdout.readline()
    assert ended(process)[0] == 0
    assert judge.held() == set()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_no_signal_finds_a_command_alone(run: Run, tmp_path: Path, name: str) -> None:
    """Not between its start and the runner's next step either."""
    with (tmp_path / "proj.py").open("a") as project:
        project.write(SLOW)
    process = run("migrate", "--", "sh", "-c", f"echo $$; kill -s {name[3:]} $PPID; sleep 20 >/dev/null 2>&1")
    pid = started(process)
    try:
        assert process.wait(10) == (128 + signal.SIGTERM if name == "SIGTERM" else -signal.SIGKILL)
        eventually(lambda: not alive(pid), "the command runs on without its lock", within=2)
    finally:
        if alive(pid):
            os.killpg(pid, signal.SIGKILL)


def test_a_signal_that_is_ignored_is_ignored_by_the_command(run: Run) -> None:
    """As under nohup: the runner takes a signal for itself, and leaves it to the command as it was."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = run("migrate", "--", "sh", "-c", "kill -s HUP $$ $PPID; sleep 0.2; echo $$")
        assert started(process)
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert ended(process)[0] == 0


#: Answers each line that it is given.
ANSWER = ["--", "sed", "-u", "s/^/got /"]


def test_ctrl_z_gives_the_terminal_back(terminal: Terminal, judge: Judge) -> None:
    """Command and runner stop as one job with the lock, and go on as one."""
    terminal.types(under_the_lock(*ANSWER))
    eventually(judge.held, "it runs", within=20)
    terminal.types("one\n")
    terminal.sees("got one")
    terminal.stops()
    terminal.answers()
    assert judge.held() == {MIGRATE}
    terminal.types("fg\n")
    terminal.types("two\n")
    terminal.sees("got two")
    # It has no say in the background: the terminal stops it there.
    terminal.stops()
    terminal.types("bg; wait %1; jobs\n")
    terminal.sees("Stopped")
    terminal.answers()
    terminal.types("fg\n")
    terminal.types("three\n")
    terminal.sees("got three")
    terminal.types("\x04")
    eventually(lambda: not judge.held(), "it is done")
    terminal.answers()


def test_ctrl_z_stops_the_script_too(terminal: Terminal, judge: Judge, tmp_path: Path) -> None:
    """Its shell shares the runner's group, and waits for it."""
    (tmp_path / "script").write_text(f"{under_the_lock(*ANSWER)}echo ended with $?\n")
    terminal.types("sh script\n")
    eventually(judge.held, "it runs", within=20)
    terminal.types("one\n")
    terminal.sees("got one")
    terminal.stops()
    terminal.answers()
    terminal.types("fg\n")
    terminal.types("two\n")
    terminal.sees("got two")
    terminal.types("\x04")
    terminal.sees("ended with 0")
    terminal.answers()


def test_a_pager_has_the_terminal(terminal: Terminal, tmp_path: Path) -> None:
    """What reads a command's output listens to the user, until the command itself asks for him."""
    pager = "sh -c 'read key </dev/tty; echo pager got $key; exec cat'"
    command = python(
        "import os, time\nopen('runs', 'w').close()\nwhile not os.path.exists('ask'): time.sleep(0.01)\n"
        "print('command got', input())"
    )
    terminal.types(f"{under_the_lock(*command).strip()} | {pager}\n")
    terminal.types("one\n")
    terminal.sees("pager got one")
    # The pager may run while the shell has not begun the other half: that would not hear of a stop yet.
    eventually((tmp_path / "runs").exists, "the command runs")
    terminal.stops()
    terminal.answers()
    terminal.types("fg\n")
    (tmp_path / "ask").touch()
    terminal.types("two\n")
    terminal.sees("command got two")
    terminal.answers()


def test_a_command_that_is_fed_by_a_pipe_may_ask_the_user(terminal: Terminal) -> None:
    """For a password, say, as ssh and psql do: its standard input is not the terminal."""
    asks = ["sh", "-c", "cat; read answer </dev/tty; echo got $answer"]
    terminal.types(f"echo fed | {under_the_lock(*asks)}")
    terminal.sees("\r\nfed\r\n")
    terminal.types("secret\n")
    terminal.sees("got secret")
    terminal.answers()


#: Its output is told from the echo of its text.
TELL = "import time\nfor n in range(600): print('line', n); time.sleep(0.1)"


def test_a_command_goes_on_in_the_background(terminal: Terminal, judge: Judge) -> None:
    """It takes the terminal from nobody, and gets it back with `fg`."""
    terminal.types(under_the_lock(*python(TELL)))
    terminal.sees("line 1")
    terminal.stops()
    terminal.types("bg\n")
    terminal.sees("line ")
    terminal.answers()
    # The first line may still be one of the background.
    terminal.types("fg\n")
    terminal.sees("line ")
    terminal.sees("line ")
    terminal.stops()
    terminal.answers()
    terminal.types("fg\n")
    terminal.sees("line ")
    terminal.types("\x03")
    eventually(lambda: not judge.held(), "Ctrl-C ends it")
    terminal.answers()


def test_a_stopped_command_is_killed_with_its_job(terminal: Terminal, judge: Judge) -> None:
    """By the shell's `kill`, which lets it go on as well."""
    terminal.types(under_the_lock(*ANSWER))
    eventually(judge.held, "it runs", within=20)
    terminal.types("one\n")
    terminal.sees("got one")
    terminal.stops()
    terminal.types("kill %1\n")
    eventually(lambda: not judge.held(), "it is ended")
    terminal.answers()


def test_a_stopped_command_ends_when_its_lock_is_lost(run: Run, judge: Judge) -> None:
    """Somebody has stopped the command alone."""
    process = run("migrate", *python(WORK))
    pid = started(process)
    os.kill(pid, signal.SIGSTOP)
    since = time.monotonic()
    judge.end(judge.holder(MIGRATE))
    assert ended(process)[0] == os.EX_IOERR
    assert time.monotonic() - since < 3
