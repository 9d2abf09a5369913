"""Where loggers are, so that what they write belongs to something that is committed."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from fulgurite.errors import CheckpointError
from fulgurite.plugins import PluginManager, RegisteredPlugin, Wait, format_error

from fulgurite_runs.json_codec import dumps


def flush_loggers(plugins: PluginManager, step: int) -> dict[str, Callable[[], Any]]:
    """Have every logger make its records durable; return functions that wait for its position, by
    plugin name.

    Args:
        plugins: the plugins of an engine.
        step: the number of completed updates.
    """
    get_positions: dict[str, Callable[[], Any]] = {}

    @contextmanager
    def keep_error(logger: RegisteredPlugin) -> Iterator[None]:
        try:
            with Wait(f"logger {logger.name!r}"):
                yield
        except Exception as error:
            failed = Future[Any]()
            failed.set_exception(error)
            get_positions[logger.name] = partial(_wait_for_position, logger, failed)

    for logger, future in plugins.hooks.flush_logger.each(step, guard=keep_error, step=step):
        get_positions[logger.name] = partial(_wait_for_position, logger, future)
    return get_positions


def rewind_loggers(plugins: PluginManager, step: int, positions: Mapping[str, Any]) -> None:
    """Have the loggers drop what they wrote after their positions.

    Args:
        plugins: the plugins of an engine.
        step: the number of completed updates.
        positions: as of `flush_loggers`, by plugin name; others are left as they are.
    """

    def get_arguments(logger: RegisteredPlugin) -> dict[str, Any] | None:
        return {"position": positions[logger.name]} if logger.name in positions else None

    plugins.hooks.rewind_logger.each(step, per_plugin=get_arguments)


def _wait_for_position(logger: Any, future: Any) -> Any:
    """Return the position of a logger.

    If it failed, there is a warning, and the reason is the position, unless the logger is required:
    a log that cannot be written does not end training.

    Args:
        logger: the registered plugin.
        future: what its hook `flush_logger` returned.
    """
    try:
        if not isinstance(future, Future):
            raise TypeError(
                f"hook flush_logger must return a concurrent.futures.Future, not {future!r}"
            )
        position = future.result()
        dumps(position)
        return position
    except Exception as error:
        reason = format_error(error)
        label = f"logger {logger.name!r} ({logger.distribution})"
        if logger.options.required:
            raise CheckpointError(f"{label} cannot say where its records end: {reason}") from error
        warnings.warn(
            f"{label} cannot say where its records end, so that a resumed run may lose or repeat "
            f"some: {reason}",
            stacklevel=1,
        )
        return {"failed": reason}
