"""One beat of many: what ``celery -A proj beat -S pglock`` runs."""

from .scheduler import ElectedScheduler

__all__ = ["ElectedScheduler"]
