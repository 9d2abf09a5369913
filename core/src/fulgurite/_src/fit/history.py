"""The newest exact scalars of a run, in memory."""

import io
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from fulgurite._src.fit.records import Record
from fulgurite._src.redact import redact_registered
from fulgurite._src.tracebacks import hide_internal_frames
from fulgurite.errors import PathError, did_you_mean

HISTORY_LENGTH = 10_000
"""How many records a history keeps: with `log_every=50`, those of half a million steps. About 5 MB
in memory with ten values each, and 2 MB in a checkpoint."""


class History:
    """The newest exact scalars of a run, kept in memory.

    A run that resumes begins with those that its checkpoint holds, so that they are those of an
    uninterrupted run. Of a long run the oldest are forgotten, so that neither the process nor a
    checkpoint grows with it; loggers have them all.

    Example:
        result = engine.fit(model, data)
        losses = result.history["train/loss"]  # a NumPy array
        steps = result.history.steps("train/loss")
    """

    def __init__(self, records: Iterable[Record] = (), max_length: int = HISTORY_LENGTH) -> None:
        self._records = deque(records, maxlen=max_length)

    @property
    def records(self) -> list[Record]:
        """The records, from the oldest that is kept on."""
        return list(self._records)

    def append(self, record: Record) -> None:
        """Add a record; the oldest is forgotten where there are `max_length` of them."""
        self._records.append(record)

    def names(self) -> list[str]:
        """Return the names of all series, as `SOURCE/NAME`."""
        names = {}
        for record in self._records:
            for name in record.values:
                names[f"{record.source}/{name}"] = None
        return list(names)

    @hide_internal_frames
    def __getitem__(self, name: str) -> np.ndarray:
        """Return the values of `SOURCE/NAME` in step order."""
        return np.asarray([value for _, value in self._find_series(name)])

    @hide_internal_frames
    def steps(self, name: str) -> np.ndarray:
        """Return the steps at which `SOURCE/NAME` was logged."""
        return np.asarray([step for step, _ in self._find_series(name)], dtype=int)

    def find_last_step(self, name: str) -> int | None:
        """Return the last step at which `SOURCE/NAME` was logged; None if it never was."""
        source, _, key = redact_registered(name).partition("/")
        for record in reversed(self._records):
            if record.source == source and key in record.values:
                return record.step
        return None

    def to_dict(self) -> dict[str, dict[int, Any]]:
        """Return the values of every series by step: `history.to_dict()["train/loss"][100]`."""
        return {name: dict(self._find_series(name)) for name in self.names()}

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each step and a column for each series; NaN
        where a series has no value.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas

        frame = pandas.DataFrame(self.to_dict()).sort_index()
        frame.index.name = "step"
        return frame

    def plot(self, *names: str) -> Any:
        """Return a `matplotlib.figure.Figure` with the curves of some series, or of all that are
        single numbers, by step.

        Args:
            names: of the series, as `SOURCE/NAME`.

        Raises:
            PathError: there is no such series.
            ImportError: matplotlib is not installed.
        """
        figure = _make_figure()
        axes = figure.add_subplot(xlabel="step")
        for name in names or self.names():
            values = self[name]
            if values.ndim == 1:
                axes.plot(self.steps(name), values, marker=".", label=name)
            elif names:
                raise PathError(f"{name!r} has values of shape {values.shape[1:]}: plot numbers")
        axes.legend()
        return figure

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __repr__(self) -> str:
        return f"History({', '.join(self.names())})"

    def _find_series(self, name: str) -> list[tuple[int, Any]]:
        name = redact_registered(name)  # as the records have it
        series = []
        for record in self._records:
            for key, value in record.values.items():
                if f"{record.source}/{key}" == name:
                    series.append((record.step, value))
        if not series:
            raise PathError(f"nothing was logged as {name!r}. {did_you_mean(name, self.names())}")
        return series


def _make_figure() -> Any:
    """Return an empty figure, which a notebook shows without pyplot too."""
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", bbox_inches="tight")
            return file.getvalue()

    return NotebookFigure()
