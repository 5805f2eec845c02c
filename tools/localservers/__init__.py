"""Real servers on this machine, for as long as the process that starts them lives.

Tests, example project and benchmarks start them as context managers. Each has its own port of the loopback
interface and its own temporary folder, needs no root and no Docker, and dies with its owner.
"""

from .pgbouncer import PgBouncer
from .postgres import PostgreSQL
from .process import MissingServer, ServerFailed, free_port
from .rabbitmq import RabbitMQ
from .redis import Redis

__all__ = ["MissingServer", "PgBouncer", "PostgreSQL", "RabbitMQ", "Redis", "ServerFailed", "free_port"]
