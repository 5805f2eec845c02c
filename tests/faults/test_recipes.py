"""The code blocks of the README and the docs, as they stand: run for real, their promises seen from outside.

Each recipe is a check. The control of each is the same check on the same text without one of its options,
which must fail.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import metadata

import psycopg
import pytest

from faults.documents import ROOT, Block, all_blocks, block, filled_in, table, tasks_of, without
from faults.fleet import flush, wait_for
from faults.judge import TAKE
from faults.project import Project, books, database, kill
from localservers import PostgreSQL, Redis

README, WAYS, BEAT = "README.md", "docs/ways-to-hold.md", "docs/beat.md"

APP = block(README, "celery-pglock", "python")
INSTALL = block(README, "celery-pglock", "console")
HOLDER = block(README, "Who holds tenant 42?", "sql")
MAKE = block(README, "Working on it", "console")
WAIT = block(WAYS, "Wait for the lock", "python")
SHARED = block(WAYS, "Readers and a writer", "python")
LIMIT = block(WAYS, "N at once", "python")
MIN_HOLD = block(WAYS, "A minimum hold: rate limits and late duplicates", "python")
TRANSACTION = block(WAYS, "A lock in a transaction", "python")
NO_TASK = block(WAYS, "Code that is no task", "python")
COMMAND = block(WAYS, "A command", "console")
LEADER = block(WAYS, "A leader", "python")
FENCING = block(WAYS, "Late writers", "sql")
ID = block("docs/names.md", "Names and keys", "sql")
FRAMEWORK = block("docs/operations.md", "Frameworks that wrap `__call__`", "python")
TESTS = block("docs/operations.md", "Tests of your own", "python")
BEATS = block(BEAT, "Many beats, one sender", "console")
LEDGER = block(BEAT, "The ledger", "sql")
ENTRY = block(BEAT, "A task that still runs when its next slot is due", "python")

PLAYED = [value for value in list(globals().values()) if isinstance(value, Block)]

KEYS = [row[:2] for row in table("docs/names.md", "`lock_key`")]

DOTS = "from faults.dots import here\n"

#: How long something lasts is shown elsewhere.
BOUNDS = ("lock_max_wait",)

#: A body without arguments has the name alone for its lock as it is.
SAID_TWICE = [("rebuild", "lock_key")]


def test_every_block_is_played() -> None:
    """A new one needs a test."""
    assert [str(each) for each in all_blocks() if each not in PLAYED] == []


# Tasks.


def excludes(project: Project, module: str) -> None:
    """One tenant once at a time, whatever the other arguments."""
    first = project.send(f"{module}.train", 42)
    assert project.fate(first) == "runs"
    assert len(project.holders(f"celery:{module}.train:tenant:42")) == 1
    assert project.fate(project.send(f"{module}.train", tenant_id=42, full=True)) == "is skipped"
    other = project.send(f"{module}.train", 43)
    assert project.fate(other) == "runs"
    project.finish(first, other)
    assert project.wait_done(first, other) == [None, None]
    again = project.send(f"{module}.train", 42)
    assert project.fate(again) == "runs"


def waits(project: Project, module: str) -> None:
    """One tenant's take turns in their order."""
    first = project.send(f"{module}.onboard", 7)
    assert project.fate(first) == "runs"
    assert len(project.holders(f"celery:{module}.onboard:tenant:7")) == 1
    others = []
    for _ in range(3):
        others.append(project.send(f"{module}.onboard", 7))
        assert project.fate(others[-1]) == "waits"
    beside = project.send(f"{module}.onboard", 8)
    assert project.fate(beside) == "runs"
    for number, result in enumerate([first, *others]):
        ids = {run.task_id for run in project.fleet.history.runs()}
        assert [each.id in ids for each in others] == [n < number for n in range(3)]
        project.finish(result)
        project.wait_done(result)
        if number < 3:
            wait_for(lambda n=number: project.fleet.history.runs(task_id=others[n].id), "the next one's turn")


def shares(project: Project, module: str) -> None:
    """Readers together, a writer alone and before later readers."""
    readers = [project.send(f"{module}.search", query) for query in ("a", "b")]
    assert [project.fate(reader) for reader in readers] == ["runs", "runs"]
    assert len(project.holders("celery:catalogue")) == 1, "one session holds it for both"
    writer = project.send(f"{module}.rebuild")
    assert project.fate(writer) == "waits"
    late = project.send(f"{module}.search", "c")
    assert project.fate(late) == "tries again"
    project.finish(*readers)
    wait_for(lambda: project.fleet.history.runs(task_id=writer.id), "the writer's turn")
    assert not project.fleet.history.runs(task_id=late.id)
    assert project.fate(project.send(f"{module}.search", "d")) == "tries again"
    project.finish(writer, late)
    project.wait_done(*readers, writer, late)


def limits(project: Project, module: str) -> None:
    """Five of seven at once, and one more when one is done."""
    results = [project.send(f"{module}.call_partner", order) for order in range(7)]
    fates = [project.fate(result) for result in results]
    assert sorted(fates) == ["runs"] * 5 + ["tries again"] * 2
    running = [result for result, fate in zip(results, fates, strict=True) if fate == "runs"]
    project.finish(running[0])
    wait_for(lambda: len(runs_of(project, results)) == 6, "one more")
    project.finish(*results)
    project.wait_done(*results)


def limits_the_rate(project: Project, module: str) -> None:
    """Ten of twelve start in this minute, although their bodies are over."""
    results = [project.send(f"{module}.send_mail", f"{n}@example.org", at_once=True) for n in range(12)]
    wait_for(lambda: all(r.state in ("SUCCESS", "RETRY") for r in results), "an end or a retry of all")
    assert len(runs_of(project, results)) == 10
    assert sorted(result.state for result in results) == ["RETRY"] * 2 + ["SUCCESS"] * 10
    # Those two come again, and again.
    project.fleet.logged(f"'celery:{module}.send_mail' is held by", times=5)
    assert len(runs_of(project, results)) == 10


def transacts(project: Project, module: str) -> None:
    """Two bookings of an account, one after the other, each with its transaction."""
    project.observer.execute(
        "CREATE TABLE IF NOT EXISTS accounts (id text PRIMARY KEY, balance int CHECK (balance < 100))"
    )
    project.observer.execute("INSERT INTO accounts VALUES (%s, 0)", [module])
    books(project, f"{module}.book", module, "accounts", "id")


def runs_of(project: Project, results: list) -> set[str]:
    return {result.id for result in results if project.fleet.history.runs(task_id=result.id)}


@dataclass(frozen=True)
class Recipe:
    block: Block
    check: Callable[[Project, str], None]


RECIPES = {
    recipe.check.__name__: recipe
    for recipe in (
        Recipe(APP, excludes),
        Recipe(WAIT, waits),
        Recipe(SHARED, shares),
        Recipe(LIMIT, limits),
        Recipe(MIN_HOLD, limits_the_rate),
        Recipe(TRANSACTION, transacts),
    )
}

CONTROLS = [
    (name, task, option)
    for name, recipe in RECIPES.items()
    for task, options in tasks_of(recipe.block.text).items()
    for option in options
    if option not in BOUNDS and (task, option) not in SAID_TWICE
]


@pytest.fixture(scope="module")
def whole_project(
    postgres: PostgreSQL, redis: Redis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Project]:
    """A module with all the tasks of the documentation, one with each control, and a worker for them."""
    with database(postgres), Redis() as own_redis:
        project = Project(tmp_path_factory.mktemp("recipes"), postgres, own_redis)
        try:
            tasks = "\n\n".join(filled_in(recipe.block.text) for recipe in RECIPES.values())
            project.write("shop.py", DOTS + tasks)
            modules = []
            for name, task, option in CONTROLS:
                text = without(filled_in(RECIPES[name].block.text), task, option)
                modules.append(f"{task}_without_{option}")
                project.write(f"{modules[-1]}.py", f"from shop import *\n{text}")
            for number, (key, _) in enumerate(KEYS):
                modules.append(f"key_{number}")
                project.write(f"{modules[-1]}.py", KEYED.format(key=key.strip("`")))
            project.write("everything.py", f"from shop import app\nimport {', '.join(modules)}\n")
            project.start_worker("everything")
            yield project
        finally:
            project.close()


KEYED = """
from celery_pglock import LockId
from shop import *
@app.task(base=AdvisoryLockedTask, lock_name="shop.train", lock_key={key})
def train(tenant_id, full=False):
    here("train")
"""


@pytest.fixture
def project(whole_project: Project) -> Iterator[Project]:
    with whole_project.tidied():
        yield whole_project


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_keeps_its_promise(project: Project, name: str) -> None:
    """The text as it stands, in a worker, beside all others."""
    RECIPES[name].check(project, "shop")


@pytest.mark.parametrize(("name", "task", "option"), CONTROLS)
def test_a_recipe_needs_each_of_its_options(project: Project, name: str, task: str, option: str) -> None:
    """The control: without it the promise is seen to be broken."""
    with pytest.raises(AssertionError) as failure:
        RECIPES[name].check(project, f"{task}_without_{option}")
    print(str(failure.value).partition("\n--- ")[0][:500])


@pytest.mark.parametrize("number", range(len(KEYS)), ids=[key for key, _ in KEYS])
def test_the_table_of_keys_is_right(project: Project, number: int) -> None:
    """What the lock of `train(42)` is named."""
    told = KEYS[number][1]
    result = project.send(f"key_{number}.train", 42)
    assert project.fate(result) == "runs"
    if "pair" in told:
        assert project.holders_of_pair(*map(int, re.findall(r"\b\d{1,2}\b", told)[-2:]))
    else:
        (text,) = re.findall("`(.*)`", told)
        assert project.holders(text if text.startswith("celery:") else f"celery:shop.train:{text}")


def test_entries_have_options_of_their_own(project: Project) -> None:
    """The entry's slot is put off behind a run, while the task skips elsewhere."""
    check_entry(project, ENTRY.text)
    with pytest.raises(AssertionError, match="is skipped"):
        check_entry(project, ENTRY.text.replace('"retry"', '"skip"'))


def check_entry(project: Project, text: str) -> None:
    """Send it as beat does, by its scheduler's own code."""
    namespace: dict[str, object] = {"app": project.fleet.app}
    exec(text, namespace)
    first = project.send("shop.train", 42)
    assert project.fate(first) == "runs"
    second = project.send_entry(project.fleet.app.conf.beat_schedule, "nightly")
    assert project.fate(second) == "tries again"
    assert project.fate(project.send("shop.train", 42)) == "is skipped"
    project.finish(first, second)
    project.wait_done(second)


# SQL.


def test_sql_tells_who_holds_a_name_and_takes_it_away(project: Project) -> None:
    """The README's question, and what it says beneath it."""
    with psycopg.connect(project.observer.info.dsn, dbname="postgres") as other:
        other.execute(TAKE, ["celery:shop.train:tenant:42"])
        assert project.observer.execute(HOLDER.text).fetchall() == [], "the holder in another database"
    result = project.send("shop.train", 42)
    assert project.fate(result) == "runs"
    ((pid, application, *_),) = project.observer.execute(HOLDER.text).fetchall()
    (run,) = project.fleet.history.runs(task_id=result.id)
    assert application == f"pglock w1@fleet {run.pid}"
    project.observer.execute("SELECT pg_terminate_backend(%s)", [pid])
    wait_for(lambda: result.state == "FAILURE", "the body is interrupted")
    assert type(result.result).__name__ == "LockLost"


def test_sql_computes_the_id_of_a_name(project: Project) -> None:
    """It is the one that is locked."""
    assert project.fate(project.send("shop.train", 42)) == "runs"
    (id,) = project.observer.execute(ID.text).fetchone()
    taken = "SELECT pg_try_advisory_lock(%s)"
    assert project.observer.execute(taken, [id]).fetchone() == (False,)
    assert project.observer.execute(taken, [id + 1]).fetchone() == (True,)
    project.observer.execute("SELECT pg_advisory_unlock_all()")


@pytest.mark.parametrize(("token", "updated"), [(811, 1), (812, 1), (813, 0)])
def test_a_lower_token_is_refused(project: Project, token: int, updated: int) -> None:
    """By the statement of the docs, in a table that such a one needs."""
    project.observer.execute("CREATE TEMPORARY TABLE tenants (id int, model text, token bigint)")
    project.observer.execute("INSERT INTO tenants VALUES (42, 'm1', %s)", [token])
    assert project.observer.execute(FENCING.text).rowcount == updated
    project.observer.execute("DROP TABLE tenants")


# Code that is no task.


def test_a_block_excludes_the_task(project: Project) -> None:
    """It waits its ten seconds, and has its way or not."""
    check_block(project, NO_TASK.text)
    with pytest.raises(AssertionError, match="'block'"):
        check_block(project, NO_TASK.text.replace("tenant:42", "tenant:43"))


def check_block(project: Project, text: str) -> None:
    project.write("script.py", DOTS + filled_in(text))
    for name in ("block", "except LockNotAcquired"):
        (project.folder / "gates" / name).unlink(missing_ok=True)
    with project.held("celery:shop.train:tenant:42"):
        since = time.monotonic()
        script = project.shell("python script.py")
        reached = wait_for(lambda: places(project, since), "its time is up", 30)
        assert reached == ["except LockNotAcquired"]
        assert time.monotonic() - since > 10
        project.fleet.open("except LockNotAcquired")
        assert script.wait(30) == 0
        since = time.monotonic()
        script = project.shell("python script.py")
        wait_for(project.waiting, "it waits")
    assert wait_for(lambda: places(project, since), "it is let in") == ["block"]
    assert project.fate(project.send("shop.train", 42)) == "is skipped"
    project.fleet.open("block")
    assert script.wait(30) == 0
    last = project.send("shop.train", 42)
    assert project.fate(last) == "runs"
    project.finish(last)
    project.wait_done(last)


def places(project: Project, since: float) -> list[str]:
    """The dots that were reached."""
    return [run.name for run in project.fleet.history.runs() if run.started > since]


@pytest.mark.parametrize("line", COMMAND.lines)
def test_a_command_of_two_deploys_runs_once_at_a_time(project: Project, line: str) -> None:
    """The second waits, and then has its turn."""
    # What they would run.
    project.write("bin/alembic", '#!/bin/sh\nexec python -m faults.dots alembic "$@"\n')
    (project.folder / "bin" / "alembic").chmod(0o755)
    project.write("manage.py", "import sys\nfrom faults.dots import here\nhere(' '.join(sys.argv))\n")
    command = line.partition(" -- ")[2]
    check_command(project, line, command.removeprefix("python "))
    with pytest.raises(AssertionError, match="waits"):
        check_command(project, command, command.removeprefix("python "))


def check_command(project: Project, line: str, place: str) -> None:
    gate = project.folder / "gates" / place
    gate.unlink(missing_ok=True)
    since = time.monotonic()
    first = project.shell(line)
    wait_for(lambda: places(project, since) == [place], "the first one runs")
    second = project.shell(line)
    wait_for(lambda: project.waiting() or len(places(project, since)) > 1, "the second one")
    assert places(project, since) == [place], "the second one waits"
    project.fleet.open(place)
    assert (first.wait(60), second.wait(60)) == (0, 0)
    one, other = (run for run in project.fleet.history.runs() if run.started > since)
    assert one.ended < other.started


@pytest.mark.timeout(180)
def test_one_of_two_loops_leads(project: Project) -> None:
    """The other takes over when it is killed."""
    check_leader(project, LEADER.text)
    with pytest.raises(AssertionError, match="one scans"):
        check_leader(project, LEADER.text.replace("if leader.is_leader:", "if True:"))


def check_leader(project: Project, text: str) -> None:
    project.write("loop.py", f"{SCANS}\n{text}")
    since = time.monotonic()
    loops = {each.pid: each for each in (project.shell("exec python loop.py") for _ in range(2))}
    wait_for(lambda: len(noted_since(project, "loops", since)) == 2, "both loop", 40)
    # They look at one distance: where each scans, they take turns.
    since = time.monotonic()
    scans = wait_for(lambda: noted_since(project, "scan", since, 2), "two scans", 40)
    (leading,) = wait_for(lambda: project.holders("celery:orchestrator"), "a leader")
    assert len(set(scans)) == 1, f"one scans, but {scans} did"
    application = "SELECT application_name FROM pg_stat_activity WHERE pid = %s"
    (name,) = project.observer.execute(application, [leading]).fetchone()
    assert name.endswith(f" {scans[0]}")
    kill(loops[scans[0]])
    since = time.monotonic()
    (other, *_) = wait_for(lambda: noted_since(project, "scan", since), "the other's scan")
    assert other != scans[0]
    for loop in loops.values():
        kill(loop)


SCANS = """
from faults.work import history
def scan_tenants():
    history.note("scan")
history.note("loops")
"""


def noted_since(project: Project, event: str, since: float, number: int = 1) -> list[int]:
    """The processes that noted an event, once for each time, if that was often enough."""
    pids = [each["pid"] for each in project.fleet.history.events(event) if each["at"] > since]
    return pids if len(pids) >= number else []


def test_a_class_that_wraps_calls_goes_behind_the_lock(project: Project) -> None:
    """The body runs under the lock and inside of the other's context; the other order is refused."""
    project.write("flask_app.py", f"{FLASK}\n{FRAMEWORK.text}\n{CALLS}")
    assert output(project, "python flask_app.py") == "inside True\n"
    with project.held("celery:f:x=1"):
        assert "'pglock': 'skipped'" in output(project, "python flask_app.py")
    swapped = FRAMEWORK.text.replace("AdvisoryLockedTask, FlaskTask", "FlaskTask, AdvisoryLockedTask")
    assert swapped != FRAMEWORK.text
    project.write("flask_app.py", f"{FLASK}\n{swapped}\n{CALLS}")
    assert "FlaskTask defines __call__ in front of AdvisoryLockedTask" in output(
        project, "python flask_app.py"
    )


@pytest.mark.parametrize("fixture", [TESTS.text, TESTS.text.replace("enabled = False", "enabled = True")])
def test_tests_of_ones_own_need_no_database(project: Project, fixture: str) -> None:
    """Neither an execution nor its hold asks PostgreSQL."""
    project.write("shop.py", APP.text.replace("///shop", "//nowhere.invalid/shop"))
    project.write("test_shop.py", f"{fixture}\n{TEST}")
    passed = "1 passed" in output(project, "python -m pytest -p no:cacheprovider test_shop.py || true")
    assert passed == (fixture == TESTS.text)


TEST = """
from shop import train

def test_train():
    assert train.apply((42,)).state == "SUCCESS"
"""

FLASK = """
from contextlib import contextmanager
from celery import Celery, Task
from celery_pglock import AdvisoryLockedTask

class app:
    name, inside = "web", False
    @classmethod
    @contextmanager
    def app_context(cls):
        cls.inside = True
        yield
        cls.inside = False

class FlaskTask(Task):
    def __call__(self, *args, **kwargs):
        with app.app_context():
            return self.run(*args, **kwargs)
"""

CALLS = """
@celery_app.task(name="f", lock_key=["x"])
def f(x):
    return f"inside {app.inside}"
print(f.apply((1,)).get())
"""


def output(project: Project, line: str) -> str:
    shell = project.shell(line)
    shell.wait(60)
    return project.said(shell)


# Beats.

TOLD_BEATS = """
import os
from celery import signals
from faults.work import history
app.conf.beat_schedule = {"each second": {"task": "shop.train", "schedule": 1.0, "args": (44,)}}
app.conf.pglock_beat_ledger = os.environ.get("LEDGER")
@signals.before_task_publish.connect
def tell(headers, **_):
    history.note("sent", slot=headers.get("pglock_slot"))
"""


@pytest.fixture
def start_beats(project: Project, redis: Redis) -> Callable[[list[str]], list]:
    """Start each line on what stands for a host of its own, with the README's app and a schedule."""
    flush(redis.url(15))
    for host in range(2):
        project.write(f"host{host}/shop.py", f"{DOTS}{filled_in(APP.text)}{TOLD_BEATS}")

    def start(lines: list[str], **settings: str) -> list:
        env = {"CELERY_BROKER_URL": redis.url(15), "C_FORCE_ROOT": "1", **settings}
        return [project.shell(line, f"host{host}", env) for host, line in enumerate(lines)]

    return start


@pytest.mark.timeout(180)
def test_of_the_beats_one_sends(project: Project, start_beats: Callable[..., list]) -> None:
    """Whichever line started it, and the other one when it is killed."""
    since = time.monotonic()
    shells = start_beats(BEATS.lines)
    wait_for(
        lambda: len(project.groups_with_a_session() & {shell.pid for shell in shells}) == 2, "both ask", 60
    )
    wait_for(lambda: project.holders("celery:beat"), "a leader")
    sent = wait_for(lambda: noted_since(project, "sent", since, 5), "five messages")
    assert len(set(sent)) == 1
    # A beat is in the group of its shell.
    (leading,) = (shell for shell in shells if shell.pid == os.getpgid(sent[0]))
    kill(leading)
    since = time.monotonic()
    (other, *_) = wait_for(lambda: noted_since(project, "sent", since), "the other's message")
    assert os.getpgid(other) == next(shell.pid for shell in shells if shell is not leading)


@pytest.mark.timeout(180)
def test_plain_beats_all_send(project: Project, start_beats: Callable[..., list]) -> None:
    """The control: the same lines without the scheduler."""
    since = time.monotonic()
    start_beats([line.replace(" -S pglock", "").replace(" --scheduler pglock", "") for line in BEATS.lines])
    wait_for(lambda: len(set(noted_since(project, "sent", since))) == 2, "messages of both", 60)


@pytest.mark.timeout(180)
def test_a_ledger_is_made_by_hand(project: Project, start_beats: Callable[..., list]) -> None:
    """By a role that may, for one that may not: until then nobody leads."""
    project.observer.execute("CREATE ROLE shop LOGIN; REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    try:
        since = time.monotonic()
        (shell,) = start_beats(BEATS.lines[:1], PGUSER="shop", LEDGER="celery_pglock_beat")
        told = 'GRANT SELECT, INSERT, UPDATE, DELETE ON "celery_pglock_beat" TO'
        assert told.replace('"', "") in LEDGER.text
        wait_for(lambda: told in project.said(shell), "the log says what to run", 60)
        assert noted_since(project, "sent", since) == []
        project.observer.execute(LEDGER.text)
        wait_for(lambda: noted_since(project, "sent", since), "a message", 60)
        rows = "SELECT count(*) FROM celery_pglock_beat WHERE sent_at IS NOT NULL"
        wait_for(lambda: project.observer.execute(rows).fetchone()[0], "a row of what was sent")
        kill(shell)
    finally:
        project.observer.execute(
            "DROP OWNED BY shop; DROP ROLE shop; DROP TABLE IF EXISTS celery_pglock_beat"
        )


# Setting up.


def test_the_extra_exists() -> None:
    """What is not published can't be installed by the line itself."""
    (line,) = INSTALL.lines
    assert line.startswith('pip install "celery-pglock[binary]"')
    assert "binary" in metadata("celery-pglock").get_all("Provides-Extra")
    assert [line for line in metadata("celery-pglock").get_all("Requires-Dist") if "psycopg[binary]" in line]


@pytest.mark.parametrize("line", [*MAKE.lines, "make demo UNLOCKED=1"])
def test_make_knows_the_target(line: str) -> None:
    """Each of them is a whole run of its own: here it is only told what it would do."""
    assert "make demo UNLOCKED=1" in MAKE.text
    told = subprocess.run(
        f"{line.partition('#')[0]} --dry-run",
        shell=True,
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert ("pytest" if "test" in line else "-m example_project") in told.stdout
