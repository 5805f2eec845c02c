"""A multi-tenant training pipeline on celery-pglock, played live: run ``make demo``, read `pipeline` first."""
