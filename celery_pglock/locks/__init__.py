"""Locks on PostgreSQL. Knows psycopg and the standard library, and no Celery."""
