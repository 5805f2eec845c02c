"""One frozen value that says where the locks live and how they behave."""

from __future__ import annotations

from dataclasses import dataclass, field

import psycopg
from psycopg.conninfo import conninfo_to_dict

__all__ = ["Settings"]

#: What tells a database from another in a URL or conninfo.
PLACE = ("service", "host", "hostaddr", "port", "dbname")


@dataclass(frozen=True)
class Settings:
    """What a process has to know to take a lock.

    ``database_url`` is a libpq URL or conninfo; ``""`` leaves all to libpq's ``PG*`` variables.
    """

    # Kept out of the repr: it may hold a password, and reprs end up in logs.
    database_url: str = field(repr=False)
    namespace: str = "celery"
    session_pooler: bool = False
    #: Seconds after which a silent network counts as a lost lock.
    loss_timeout: float = 10.0
    #: Seconds after which the server ends the session of a process that is frozen; None: never.
    freeze_timeout: float | None = None
    #: Seconds after which a lock counts as lost while ``database_url`` leads to another server; None: never.
    failover_timeout: float | None = 60.0

    def same_database(self, other: Settings) -> bool:
        """Whether both lead to one database, as far as their texts tell."""
        if self.database_url == other.database_url:
            return True
        try:
            mine, its = (conninfo_to_dict(each.database_url) for each in (self, other))
        except psycopg.Error:
            return False
        return all(mine.get(part) == its.get(part) for part in PLACE)

    @property
    def locate_every(self) -> float | None:
        """Seconds between two looks at where ``database_url`` leads: what one just missed, the next sees."""
        return None if self.failover_timeout is None else self.failover_timeout / 2
