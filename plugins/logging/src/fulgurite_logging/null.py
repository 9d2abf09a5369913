"""A logger that keeps nothing."""

import fulgurite as fg


class NullLogger(fg.Plugin):
    """Take every record and drop it.

    For programs that choose a logger by an argument, and to measure what records cost without one
    that writes: media are computed for it as for any other logger.

    Example:
        from fulgurite_logging import JSONLLogger, NullLogger

        logger = JSONLLogger() if jax.process_index() == 0 else NullLogger()
        engine = fg.Engine(steps=100, run_dir="runs/digits", plugins=[logger])
    """

    plugin_name = "null"

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        """Drop the record."""
