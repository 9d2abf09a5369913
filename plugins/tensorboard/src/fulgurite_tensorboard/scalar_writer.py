"""Numbers for TensorBoard from a program without an engine."""

import time
from collections.abc import Collection
from contextlib import AbstractContextManager
from operator import index
from pathlib import Path
from typing import Any

import fulgurite as fg
import numpy as np
from fulgurite.errors import ConfigurationError, StateError
from fulgurite.plugins import hide_constructor_frames

from fulgurite_tensorboard.events import EventFile, build_summary_event
from fulgurite_tensorboard.plugin import (
    check_sources,
    find_source_error,
    get_next_name,
    get_split,
)
from fulgurite_tensorboard.summaries import build_summary


@hide_constructor_frames
class TensorBoardWriter(AbstractContextManager["TensorBoardWriter", None]):
    """Write numbers for TensorBoard in a program of your own; with an engine, use
    `TensorBoardLogger`.

    Each call reaches the operating system at once. A folder that has event files already gets
    another one.

    Example:
        from fulgurite_tensorboard import TensorBoardWriter

        with TensorBoardWriter("tensorboard", sources=("train", "test")) as writer:
            for step in range(3):
                writer.scalar("loss", 1 / (step + 1), step)
            writer.scalar("accuracy", 0.9, 3, source="test")

    Args:
        folder: where to write; each source gets a folder in it.
        sources: those that there may be; None for any.
    """

    def __init__(self, folder: Any, *, sources: Collection[str] | None = None) -> None:
        check_sources(sources, "TensorBoardWriter")
        self._folder = Path(folder)
        self._sources = sources
        self._files: dict[str, EventFile] | None = {}

    def scalar(self, name: str, value: Any, step: int, *, source: str = "train") -> None:
        """Write a number.

        Args:
            name: the tag; TensorBoard draws tags of the same name into one chart.
            value: a number, or an array of one, which is waited for.
            step: where in the chart.
            source: whose folder it goes to.

        Raises:
            ConfigurationError: `value` is not a real number, or the source is not one of
                `sources`.
            StateError: the writer was closed.
        """
        number = np.asarray(value)
        if number.size != 1 or not np.can_cast(number.dtype, np.float64, "same_kind"):
            raise ConfigurationError(
                f"TensorBoardWriter: {source}/{name} is {value!r}; give one real number"
            )
        record = fg.Record("scalars", source, index(step), {name: float(number.item())})
        summary = build_summary(record, _raise)
        self._get_file(record).append(build_summary_event(record.step, time.time(), summary))

    def flush(self) -> None:
        """Make everything that was written durable."""
        for file in (self._files or {}).values():
            file.sync()

    def close(self) -> None:
        """Make everything durable, and close the files."""
        files, self._files = self._files, None
        for file in (files or {}).values():
            file.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _get_file(self, record: fg.Record) -> EventFile:
        if self._files is None:
            raise StateError("this TensorBoardWriter is closed: make another one")
        error = find_source_error(record.source, self._sources)
        if error is not None:
            raise error
        split = get_split(record)
        if split not in self._files:
            folder = self._folder / split
            folder.mkdir(parents=True, exist_ok=True)
            self._files[split] = EventFile(folder / get_next_name(folder))
        return self._files[split]


def _raise(name: str, error: Exception) -> None:
    raise error
