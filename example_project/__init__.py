"""A multi-tenant training pipeline, played live by `make demo`. Read `pipeline` first, then `scenes`."""
