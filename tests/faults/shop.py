"""The app of the workers that fault tests start: ``celery -A faults.shop worker``.

`Fleet` configures it by the environment.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import psycopg
from celery import Celery, signals
from celery.backends.redis import RedisBackend
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

from celery_pglock import AdvisoryLockedTask, advisory_lock, is_skipped

from .judge import holders
from .work import CONF, history, work

app = Celery("shop")
app.conf.update(CONF)


class SlowBackend(RedisBackend):
    """A result backend that takes its time to store: ``result_backend="faults.shop:SlowBackend"``."""

    def store_result(self, task_id: str, result: Any, state: str, *args: Any, **kwargs: Any) -> Any:
        if state == "SUCCESS":
            history.note("storing", id=task_id)
            time.sleep(float(os.environ.get("FLEET_SLOW_STORE", "0")))
        return super().store_result(task_id, result, state, *args, **kwargs)


@signals.worker_process_init.connect
def on_process_init(**_: Any) -> None:
    history.note("process")


@signals.before_task_publish.connect
def on_publish(headers: dict[str, Any], **_: Any) -> None:
    history.note("published", id=headers["id"], copy=headers.get("pglock"))


@signals.task_received.connect
def on_received(request: Any, **_: Any) -> None:
    history.note(
        "received",
        id=request.id,
        copy=request.request_dict.get("pglock"),
        content_type=request.content_type,
        compression=request.message.headers.get("compression"),
    )


def locked(name: str, **options: Any) -> Any:
    """Make a locked task. All of them share one lock name, so that they exclude each other."""
    options = {"lock_name": "shop", "lock_key": "<name>", "lock_retry_backoff": 1, **options}

    @app.task(base=AdvisoryLockedTask, name=name, bind=True, **options)
    def body(self: Any, name: str, seconds: float = 0.0, gate: str | None = None) -> str:
        work(self, name, seconds, gate)
        return name

    return body


# Named for what becomes of a conflict.
locked("skip")
locked("retry", lock_on_conflict="retry", lock_retry_backoff_max=2)
locked("raises", lock_on_conflict="raise")
locked("give_up", lock_on_conflict="retry", lock_max_wait=2)
locked("go_on", lock_skip_result="went on")
locked("choose", lock_on_conflict=lambda conflict: "retry" if conflict.conflicts < 2 else "skip")

# With late acknowledgment.
LATE = {"acks_late": True, "task_reject_on_worker_lost": True, "reject_on_worker_lost": True}
EXACTLY = {"lock_retry_jitter": False}
locked("late_skip", **LATE)
locked("late_retry", lock_on_conflict="retry", lock_retry_backoff_max=2, **LATE)
locked("late_patient", lock_on_conflict="retry", lock_retry_backoff=6, **EXACTLY, **LATE)
locked("every_3", lock_on_conflict="retry", lock_retry_backoff=3, lock_retry_backoff_max=3, **EXACTLY)


@app.task(base=AdvisoryLockedTask, name="pair", bind=True, lock_name="shop", lock_key="<pair[0]>")
def pair(self: Any, pair: list[Any]) -> str:
    """Take one argument, as ``map`` wants it: a name and seconds."""
    work(self, *pair)
    return pair[0]


@app.task(name="plain")
def plain(result: Any = None) -> Any:
    """Stand behind others, unlocked."""
    history.note("plain", result=result, skipped=is_skipped(result))
    return result


@app.task(name="total")
def total(results: list[Any]) -> list[Any]:
    """Stand behind a chord, unlocked."""
    history.note("total", results=results)
    return results


@app.task(name="failed")
def failed(*args: Any) -> None:
    """Stand behind a failure: ``link_error`` calls it with the failed task's id, or more."""
    history.note("failed", args=repr(args))


# Bodies that publish their own successor.


@app.task(base=AdvisoryLockedTask, name="retries_itself", bind=True, lock_name="shop", lock_key="<name>")
def retries_itself(self: Any, name: str, times: int = 2) -> int:
    with history.body(name, self.request.id, self.name):
        try:
            if self.request.retries < times:
                raise self.retry(countdown=0, max_retries=times)
        finally:
            linger_under_lock(self, name)
        return self.request.retries


@app.task(base=AdvisoryLockedTask, name="replaces_itself", bind=True, lock_name="shop", lock_key="<name>")
def replaces_itself(self: Any, name: str, times: int = 2) -> Any:
    with history.body(name, self.request.id, self.name):
        try:
            if times:
                raise self.replace(self.si(name, times - 1))
        finally:
            linger_under_lock(self, name)
        return "replaced"


@app.task(
    base=AdvisoryLockedTask,
    name="fails_twice",
    bind=True,
    lock_name="shop",
    lock_key="<name>",
    autoretry_for=(ConnectionError,),
    retry_backoff=False,
    default_retry_delay=0,
)
def fails_twice(self: Any, name: str) -> int:
    with history.body(name, self.request.id, self.name):
        try:
            if self.request.retries < 2:
                raise ConnectionError("once more")
        finally:
            linger_under_lock(self, name)
        return self.request.retries


def send_later(signature: Any, seconds: float) -> Any:
    """Publish it when the body that made it is over."""
    threading.Timer(seconds, signature.delay).start()
    return signature


@app.task(base=AdvisoryLockedTask, name="sends_itself", bind=True, lock_name="shop", lock_key="<name>")
def sends_itself(self: Any, name: str, how: str = "") -> str:
    """Publish its own request once more, for itself or under another id, and stay for a while."""
    with history.body(name, self.request.id, self.name):
        if not how:
            return "sent"
        signature = self.signature_from_request(args=("elsewhere" if how == "other id" else name,))
        sent = {
            "delay": signature.delay,
            "apply_async": signature.apply_async,
            "countdown": lambda: signature.apply_async(countdown=1),
            "later": lambda: send_later(signature, 4.0),
            "other id": lambda: signature.apply_async(task_id="other id"),
        }[how]()
        history.note("sent", id=sent.id)
        # Long enough to be met by a message that was sent at once, or in a second.
        time.sleep(2.5)
        return "sends"


@app.task(base=AdvisoryLockedTask, name="late_tries", bind=True, lock_name="shop", lock_key="<name>", **LATE)
def late_tries(self: Any, name: str, countdown: int) -> str:
    """Retry once. Each try has a gate of its own."""
    work(self, name, 0.0, f"try {self.request.retries}")
    if not self.request.retries:
        raise self.retry(countdown=countdown)
    return "real"


@app.task(base=AdvisoryLockedTask, name="goes_on", bind=True, lock_name="shop", lock_key="<name>")
def goes_on(self: Any, name: str, countdown: int) -> str:
    """Retry once, and succeed all the same: the state is SUCCESS before the retry has run."""
    work(self, name)
    if not self.request.retries:
        self.retry(countdown=countdown, throw=False)
    return f"try {self.request.retries}"


@app.task(
    base=AdvisoryLockedTask, name="late_progress", bind=True, lock_name="shop", lock_key="<name>", **LATE
)
def late_progress(self: Any, name: str, gate: str) -> str:
    self.update_state(state="PROGRESS", meta={"done": 50})
    work(self, name, gate=gate)
    return name


@app.task(
    base=AdvisoryLockedTask, name="late_failure", bind=True, lock_name="shop", lock_key="<name>", **LATE
)
def late_failure(self: Any, name: str, gate: str) -> None:
    work(self, name, gate=gate)
    raise ValueError(name)


class Unhurried(AdvisoryLockedTask):
    """What it is told of its retry takes longer than the countdown."""

    abstract = True

    def on_retry(self, *_: Any) -> None:
        history.note("on_retry")
        time.sleep(3)


@app.task(
    base=Unhurried,
    name="unhurried",
    bind=True,
    lock_name="shop",
    lock_key="<name>",
    lock_on_conflict="wait",
    lock_on_lost="retry",
    lock_retry_backoff=1,
)
def unhurried(self: Any, name: str) -> str:
    work(self, name, 0.0, "end")
    return "done"


def linger_under_lock(task: Any, name: str) -> None:
    """Give a successor that was published too early the time to arrive, and ask the server who holds what."""
    time.sleep(0.1)
    with psycopg.connect(os.environ["FLEET_DSN"]) as observer:
        history.note("finally", name=name, id=task.request.id, holders=holders(observer, name))


# Bodies that end badly, or have children.


@app.task(base=AdvisoryLockedTask, name="ends", bind=True, lock_name="shop", lock_key="<name>")
def ends(self: Any, name: str, how: str) -> None:
    with history.body(name, self.request.id, self.name):
        endings = {
            "error": lambda: 1 / 0,
            "ignore": lambda: throw(Ignore()),
            "reject": lambda: throw(Reject("no", requeue=False)),
            "system exit": lambda: throw(SystemExit(3)),
            "keyboard interrupt": lambda: throw(KeyboardInterrupt()),
            "os._exit": lambda: os._exit(9),
            "recursion": recurse,
        }
        endings[how]()


def throw(exc: BaseException) -> None:
    raise exc


def recurse() -> None:
    recurse()


@app.task(base=AdvisoryLockedTask, name="soft_limited", bind=True, lock_name="shop", lock_key="<name>")
def soft_limited(self: Any, name: str) -> str:
    try:
        work(self, name, seconds=60)
    except SoftTimeLimitExceeded:
        return "stopped in time"
    return "never stopped"


@app.task(base=AdvisoryLockedTask, name="waits_inside", bind=True, lock_name="shop", lock_key="<name>")
def waits_inside(self: Any, name: str, other: str) -> str:
    """Tidy up under its own lock, when its soft time limit ends a wait for another one."""
    try:
        with advisory_lock(f"shop:{other}", wait=None, app=app):
            return "never stopped"
    except SoftTimeLimitExceeded:
        work(self, name, seconds=0.5)
        self.lock.check()
        return "tidied up"


@app.task(base=AdvisoryLockedTask, name="has_child", bind=True, lock_name="shop", lock_key="<name>")
def has_child(self: Any, name: str, how: str, gate: str | None = None) -> None:
    """Start a child that outlives its parent, and go on as a body."""
    if how == "fork":
        child = os.fork()
        if child == 0:
            # Celery's handler would unwind the worker's own loop in the child.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(30)
            os._exit(0)
    elif how == "multiprocessing":
        # Celery's children are daemons, which may have no children by the book.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        context = multiprocessing.get_context("fork")
        is_up = context.Event()
        process = context.Process(target=stay, args=(is_up,), daemon=True)
        process.start()
        # Before, a SIGTERM is lost: Celery's handler raises, and Python drops what is raised while it forks.
        is_up.wait(10)
        child = process.pid or 0
    else:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"]).pid
    history.note("child", child=child)
    work(self, name, gate=gate)
    os.kill(child, 9)
    os.waitpid(child, 0)


def stay(is_up: Any) -> None:
    """Be a child that is there."""
    is_up.set()
    time.sleep(30)


@app.task(base=AdvisoryLockedTask, name="calls_in_child", bind=True, lock_name="shop", lock_key="<name>")
def calls_in_child(self: Any, name: str, gate: str | None = None) -> None:
    """Let a forked child run a locked task of its own and close everything on its way out."""
    child = os.fork()
    if child == 0:
        try:
            app.tasks["skip"].apply((f"{name}'s child",))
            sys.exit(0)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    work(self, name, gate=gate)


@app.task(name="message", base=AdvisoryLockedTask, bind=True, lock_name="shop", lock_key="<name>",
          lock_on_conflict="retry", lock_retry_backoff=1, lock_retry_backoff_max=1)  # fmt: skip
def message(self: Any, name: str, payload: Any = None) -> Any:
    """Tell what arrived: the request as the body sees it."""
    request = self.request
    told = {
        key: getattr(request, key, None)
        for key in (
            "id", "root_id", "parent_id", "group", "group_index", "retries", "expires", "timelimit",
            "ignore_result", "argsrepr", "kwargsrepr", "shadow", "reply_to", "stamps", "stamped_headers",
            "replaced_task_nesting", "compression",
        )
    }  # fmt: skip
    info = request.delivery_info or {}
    told["priority"], told["queue"] = info.get("priority"), info.get("routing_key")
    told["headers"] = dict(request.headers or {})
    told["payload"] = repr(payload)
    with history.body(name, request.id, self.name):
        history.note("message", name=name, **json.loads(json.dumps(told, default=repr)))
    return "arrived"
