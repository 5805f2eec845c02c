"""The app of the demo, as a project that adopts celery-pglock would write it. All else here is its stage.

Schedulers that know nothing of each other look for tenants that are due, and send messages: of one tenant
there are often several. Two executions must never drive one tenant's pipeline at the same time.
"""

import os

from celery import Celery

from celery_pglock import AdvisoryLockedTask

from .work import work

app = Celery("pipeline", broker=os.environ["REDIS_URL"])
app.conf.pglock_database_url = os.environ["DATABASE_URL"]
# A message leaves the queue when its work is done, so the one of a killed worker is not lost.
app.conf.task_acks_late = True
app.conf.worker_prefetch_multiplier = 1


@app.task(base=AdvisoryLockedTask, lock_name="pipeline", lock_key="tenant:<tenant_id>")
def train(tenant_id: str, seconds: float) -> None:
    """Train the models of a tenant. If somebody is at it already, there is nothing to do: skip."""
    work(tenant_id, seconds)


# With one lock_name for both, nothing is published in the middle of a training.
@app.task(
    base=AdvisoryLockedTask,
    lock_name="pipeline",
    lock_key="tenant:<tenant_id>",
    lock_on_conflict="retry",
    lock_retry_backoff=1,
    lock_retry_backoff_max=2,
)
def publish(tenant_id: str, seconds: float) -> None:
    """Publish what was trained. This must not be left out: if somebody is at the tenant, try again later."""
    work(tenant_id, seconds)


# Two beats run this schedule, both by `celery -A pipeline beat -S pglock`, and one of them sends. What they
# send is read by the stage, and by no worker.
app.conf.beat_schedule = {
    "look": {"task": "look", "schedule": 0.5, "options": {"queue": "schedule"}},
}
app.conf.result_expires = None


# For the demo alone: the control without locks, and a broker that gives up a dead worker within seconds.
app.conf.pglock_enabled = os.environ.get("UNLOCKED", "") in {"", "0"}
app.conf.broker_transport_options = {
    "visibility_timeout": 5,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 2,
}
