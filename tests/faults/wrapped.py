"""An app with Flask's usual ``task_cls``: a class whose ``__call__`` opens the application's context."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from celery import Celery, Task

from celery_pglock import AdvisoryLockedTask

from .work import CONF, work

in_context: ContextVar[bool] = ContextVar("in_context", default=False)


class ContextTask(Task):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = in_context.set(True)
        try:
            return self.run(*args, **kwargs)
        finally:
            in_context.reset(token)


class LockedTask(AdvisoryLockedTask, ContextTask):
    abstract = True


app = Celery("wrapped", task_cls=ContextTask)
app.conf.update(CONF)


@app.task(base=LockedTask, name="in_context", bind=True, lock_name="shop", lock_key="<name>")
def in_context_and_lock(self: Any, name: str, gate: str | None = None) -> bool:
    work(self, name, gate=gate)
    return in_context.get()


@app.task(name="unlocked")
def unlocked() -> bool:
    return in_context.get()
