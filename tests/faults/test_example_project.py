"""The tasks of the example project as they stand, in workers; judged by what they note, and by the server.

Each use of a lock is a check, and each of its lock options has a control: the same check on the same source
without that option, which must fail.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from faults.documents import ROOT, tasks_of, without
from faults.fleet import wait_for
from faults.project import Project, books, database, kill
from localservers import PostgreSQL, Redis

SOURCE = (ROOT / "example_project" / "recipes.py").read_text(encoding="utf-8")
RECIPES = "example_project.recipes"

#: How long something lasts is shown elsewhere, and how often a conflict is tried again.
BOUNDS = ("lock_max_wait", "lock_retry_backoff", "lock_retry_backoff_max")


@dataclass
class Noted:
    """A body of a recipe, as its journal tells."""

    what: str
    began: float
    ended: float | None = None


@dataclass
class Stage:
    """A project, the module whose tasks are played, and a journal of its own."""

    project: Project
    module: str
    journal: Path

    def send(self, task: str, *args, **kwargs):
        return self.project.send(f"{self.module}.{task}", *args, journal=str(self.journal), **kwargs)

    def fate(self, result, what: str) -> str:
        return self.project.fate(result, lambda: self.noted(what))

    def noted(self, what: str = "") -> list[Noted]:
        """The bodies that began, the first of them first."""
        bodies: list[Noted] = []
        for line in self.journal.read_text().split("\n")[:-1] if self.journal.exists() else ():
            at, verb, told = line.split(" ", 2)
            if verb == "begin":
                bodies.append(Noted(told, float(at)))
            else:
                (body,) = (each for each in bodies if each.what == told and each.ended is None)
                body.ended = float(at)
        return [body for body in bodies if body.what.startswith(what)]

    def open(self) -> None:
        """Let a migration end."""
        Path(f"{self.journal}.gate").touch()

    def took_turns(self, what: str = "") -> None:
        bodies = self.noted(what)
        for one, other in itertools.pairwise(bodies):
            assert one.ended is not None
            assert one.ended <= other.began, f"{one} beside {other}"


def block_and_wait(stage: Stage) -> None:
    """A tenant's callers take turns, another tenant does not wait for them."""
    results = [stage.send("onboard", "a", seconds=1.0)]
    assert stage.fate(results[0], "onboard a") == "runs"
    assert stage.project.holders(f"celery:{stage.module}.onboard:tenant:a")
    for _ in range(2):
        results.append(stage.send("onboard", "a", seconds=0.1))
        assert stage.project.fate(results[-1]) == "waits"
    results.append(stage.send("onboard", "b"))
    assert stage.fate(results[-1], "onboard b") == "runs"
    assert len(stage.noted("onboard a")) == 1
    stage.project.wait_done(*results)
    stage.took_turns("onboard a")
    assert len(stage.noted("onboard a")) == 3


def leader_election(stage: Stage) -> None:
    """Of two timers that ring at once one leads, and the next time another may."""
    first = stage.send("scan", seconds=0.8)
    assert stage.fate(first, "scan") == "runs"
    assert stage.project.fate(stage.send("scan", seconds=0.1)) == "is skipped"
    # As one with other arguments is.
    assert stage.project.fate(stage.send("scan", seconds=0.8)) == "is skipped"
    stage.project.wait_done(first)
    stage.project.wait_done(stage.send("scan"))
    assert len(stage.noted("scan")) == 2
    stage.took_turns("scan")


def rate_limiting(stage: Stage) -> None:
    """Of nine calls three begin at once, and never more than three in a second."""
    results = [stage.send("call_partner", number) for number in range(9)]
    wait_for(lambda: all(r.state in ("SUCCESS", "RETRY") for r in results), "an end or a retry of all")
    stage.project.wait_done(*results)
    began = [body.began for body in stage.noted("call")]
    assert len(began) == 9
    assert began[2] - began[0] < 0.9, "three at once"
    # A body begins a little after its lock was granted.
    assert min(later - first for first, later in zip(began, began[3:], strict=False)) > 0.8


def migration_guard(stage: Stage) -> None:
    """A second migration waits, and so does one without a task; one that only tries is refused."""
    project = stage.project
    migrate = [
        "sh",
        "-c",
        f"echo begin >>{stage.journal}; until [ -e {stage.journal}.gate ]; do sleep 0.02; done",
    ]
    first = project.send(f"{stage.module}.migrate", migrate)
    wait_for(lambda: stage.journal.exists() or first.state == "FAILURE", "it migrates")
    refused = project.shell(f"celery -A {RECIPES} pglock run migrate -- true")
    assert refused.wait(60) == os.EX_TEMPFAIL
    second = project.send(f"{stage.module}.migrate", ["sh", "-c", f"echo begin >>{stage.journal}; exit 3"])
    assert project.fate(second, lambda: stage.journal.read_text().count("begin") > 1) == "waits"
    deploy = project.shell(
        f"""python -c 'from {RECIPES} import deploy; deploy(["sh", "-c", "echo deploy >>{stage.journal}"])'"""
    )
    wait_for(lambda: project.waiting() == 2, "the deploy waits too")
    stage.open()
    assert project.wait_done(first, second) == [0, 3]
    assert deploy.wait(60) == 0
    assert stage.journal.read_text().split() == ["begin", "begin", "deploy"]


def readers_and_a_writer(stage: Stage) -> None:
    """Requests run together, the reload alone, and later requests after it."""
    results = [stage.send("serve", number, seconds=1.5) for number in range(2)]
    assert [stage.fate(result, f"serve {n}") for n, result in enumerate(results)] == ["runs", "runs"]
    assert stage.project.holders("celery:configuration")
    reload = stage.send("reload_configuration", seconds=0.5)
    assert stage.fate(reload, "reload") == "waits"
    late = stage.send("serve", 2)
    assert stage.fate(late, "serve 2") == "tries again"
    stage.project.wait_done(*results, reload, late)
    first, second, *_ = stage.noted("serve")
    assert second.began < first.ended
    (reloaded,) = stage.noted("reload")
    assert max(first.ended, second.ended) <= reloaded.began
    assert reloaded.ended <= stage.noted("serve 2")[0].began


def transaction(stage: Stage) -> None:
    """Bookings of an account take turns, each in its own transaction."""
    observer = stage.project.observer
    observer.execute("CREATE TABLE IF NOT EXISTS account (name text, balance int CHECK (balance < 100))")
    observer.execute("INSERT INTO account VALUES (%s, 0)", [stage.module])
    books(stage.project, f"{stage.module}.book", stage.module, "account", "name")


def play(check: Callable[[Stage], None], stage: Stage) -> None:
    try:
        check(stage)
    finally:
        stage.open()


CHECKS: dict[Callable[[Stage], None], tuple[str, ...]] = {
    block_and_wait: ("onboard",),
    leader_election: ("scan",),
    rate_limiting: ("call_partner",),
    migration_guard: ("migrate",),
    readers_and_a_writer: ("serve", "reload_configuration"),
    transaction: ("book",),
}

CONTROLS = [
    (check, task, option)
    for check, tasks in CHECKS.items()
    for task in tasks
    for option in tasks_of(SOURCE)[task]
    if option not in BOUNDS
]


def test_every_task_is_played() -> None:
    """A new one needs a check."""
    assert tasks_of(SOURCE).keys() == {task for tasks in CHECKS.values() for task in tasks}


@pytest.fixture(scope="module")
def whole_project(postgres: PostgreSQL, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The example project as it stands, beside it one with each control, and a worker for all of them."""
    with database(postgres), Redis() as redis:
        project = Project(tmp_path_factory.mktemp("example"), postgres, redis)
        try:
            # The folder and not the checkout around it: the installed package is what is tested.
            (project.folder / "example_project").symlink_to(ROOT / "example_project")
            modules = [f"{task}_without_{option}" for _, task, option in CONTROLS]
            for module, (_, task, option) in zip(modules, CONTROLS, strict=True):
                text = without(SOURCE, task, option)
                project.write(f"{module}.py", f"from {RECIPES} import *\n{text}")
            project.write("everything.py", f"from {RECIPES} import app\nimport {', '.join(modules)}\n")
            project.start_worker("everything")
            yield project
        finally:
            project.close()


@pytest.fixture
def project(whole_project: Project) -> Iterator[Project]:
    with whole_project.tidied():
        yield whole_project


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_recipe_keeps_its_promise(project: Project, check: Callable[[Stage], None], tmp_path: Path) -> None:
    """The task as it stands."""
    play(check, Stage(project, RECIPES, tmp_path / "journal"))


@pytest.mark.parametrize(
    ("check", "task", "option"), CONTROLS, ids=lambda each: getattr(each, "__name__", each)
)
def test_a_recipe_needs_each_of_its_options(
    project: Project, check: Callable[[Stage], None], task: str, option: str, tmp_path: Path
) -> None:
    """The control: without it the promise is seen to be broken."""
    with pytest.raises(AssertionError) as failure:
        play(check, Stage(project, f"{task}_without_{option}", tmp_path / "journal"))
    print(str(failure.value).partition("\n--- ")[0][:500])


def test_one_of_two_loops_leads(project: Project, tmp_path: Path) -> None:
    """Replicas of `orchestrate`: one scans, and the other when that one is killed."""
    journal = tmp_path / "journal"
    code = f"import os; from {RECIPES} import note, orchestrate; orchestrate({{scan}}, 60)"
    scan = f'lambda: note("{journal}", str(os.getpid()))'
    loops = {
        each.pid: each for each in (project.shell(f"exec python -c '{code.format(scan=scan)}'") for _ in "ab")
    }

    def scans(number: int) -> list[int]:
        lines = journal.read_text().splitlines() if journal.exists() else []
        return [int(line.split()[1]) for line in lines] if len(lines) >= number else []

    wait_for(lambda: len(project.groups_with_a_session() & loops.keys()) == 2, "both campaign")
    seen = len(scans(0))
    first = wait_for(lambda: scans(seen + 10), "scans")
    assert len(set(first)) == 1
    kill(loops[first[0]])
    seen = len(scans(0))
    assert wait_for(lambda: scans(seen + 5), "the other's scans")[-1] != first[0]


def test_of_duplicates_one_trains(postgres: PostgreSQL, dbname: str, tmp_path: Path) -> None:
    """Try and skip: the pipeline of the demo as it stands, and what it publishes is not left out."""
    skipped, published = play_pipeline(postgres, dbname, tmp_path, unlocked=False)
    assert skipped == 3
    assert published, "it was published while its tenant was trained"


def test_all_duplicates_train_without_locks(postgres: PostgreSQL, dbname: str, tmp_path: Path) -> None:
    """The control, as `make demo UNLOCKED=1` plays it."""
    skipped, published = play_pipeline(postgres, dbname, tmp_path, unlocked=True)
    assert (skipped, published) == (0, False)


def play_pipeline(postgres: PostgreSQL, dbname: str, folder: Path, *, unlocked: bool) -> tuple[int, bool]:
    """Send four trainings of a tenant and a publishing; tell how many were skipped, and if that came last."""
    with Redis() as redis:
        project = Project(folder, postgres, redis, dbname)
        project.environment |= {
            "REDIS_URL": redis.url(0),
            "DATABASE_URL": postgres.url(dbname),
            "DEMO_RECORDS": str(folder / "records"),
            "UNLOCKED": str(int(unlocked)),
        }

        def records(what: str, task: str) -> list[float]:
            lines = map(json.loads, (folder / "records").read_text().splitlines())
            return [line["at"] for line in lines if (line["what"], line["task"]) == (what, task)]

        try:
            (folder / "example_project").symlink_to(ROOT / "example_project")
            project.start_worker("example_project.pipeline")
            for _ in range(4):
                project.send("example_project.pipeline.train", "t1", 1.0)
            wait_for(lambda: records("start", "train"), "a training")
            project.send("example_project.pipeline.publish", "t1", 0.1)
            wait_for(lambda: records("end", "publish"), "the publishing")
            wait_for(
                lambda: len(records("end", "train")) + len(records("skip", "train")) == 4, "the trainings"
            )
            after = max(records("end", "train")) <= records("start", "publish")[0]
            return len(records("skip", "train")), after
        finally:
            project.close()
