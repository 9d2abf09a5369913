"""Records, the two streams that they are of, and how they reach the sinks in order."""

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import numpy as np

from fulgurite.encoding import dumps, is_real
from fulgurite.errors import FulguriteError, PathError, PluginError, StateError, did_you_mean
from fulgurite.masking import redact_text
from fulgurite.model.media import Media

if TYPE_CHECKING:
    from fulgurite.fit.run import Run
    from fulgurite.plugins.manager import HookImpl, PluginManager

RecordKind = Literal["scalars", "media", "text", "config"]
RecordStream = Literal["exact", "telemetry"]


@dataclass(frozen=True)
class Record:
    """Something to record.

    Attributes:
        kind: which sink hook receives it.
        source: where it comes from: `train`, an evaluator's name, a plugin's name.
        step: the number of completed updates.
        values: by name. Scalars are Python numbers or, rarely, NumPy arrays.
        stream: `exact` records depend only on program, configuration, seed and data, and appear
            exactly once; `telemetry` is everything else, and appears at least once.
        attempt: which start of the run made it; telemetry only.
        wall: seconds since 1970; telemetry only.
    """

    kind: RecordKind
    source: str
    step: int
    values: dict[str, Any]
    stream: RecordStream = "exact"
    attempt: int | None = None
    wall_time: float | None = None


def validate_record_values(kind: str, source: str, values: Any) -> dict[str, Any]:
    """What a plugin emits, as a record keeps it, whatever the plugin does with its own afterwards.
    What no sink could
    write down is an error here: there, the sink would be the one that failed, and be left out."""
    if kind not in get_args(RecordKind):
        raise PluginError(
            f"run knows no records of {kind!r}. {did_you_mean(kind, get_args(RecordKind))}"
        )
    where = f"run.log_{kind}({source!r}, ...)"
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in (source, *values)):
        raise PluginError(
            f"{where}: the source is a text, and values come by name, as a dictionary; not "
            f"{values!r}"
        )
    if kind in ("text", "config"):
        dumps(values)
    for name, value in values.items():
        if (kind == "scalars" and not _is_number(value)) or (
            kind == "media" and not isinstance(value, Media)
        ):
            what = (
                "numbers and arrays of them"
                if kind == "scalars"
                else "media such as those of fulgurite_logging.media"
            )
            raise PluginError(
                f"{where}: {name!r} is of type {type(value).__name__}; give {what} by name"
            )
    return _copy_host_arrays(values)


def _is_number(value: Any) -> bool:
    return (
        is_real(value.dtype) if hasattr(value, "dtype") else isinstance(value, bool | int | float)
    )


def _copy_host_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copy_host_arrays(one) for name, one in value.items()}
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, value)


class History:
    """The exact scalars of a run, kept in memory: `history["train/loss"]` is an array of values."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def names(self) -> list[str]:
        """What there is, as `SOURCE/NAME`."""
        return list(
            dict.fromkeys(f"{one.source}/{name}" for one in self.records for name in one.values)
        )

    def __getitem__(self, name: str) -> np.ndarray:
        """The values of `SOURCE/NAME` in step order."""
        return np.asarray([value for _, value in self._series(name)])

    def steps(self, name: str) -> np.ndarray:
        """The steps at which `SOURCE/NAME` was logged."""
        return np.asarray([step for step, _ in self._series(name)], dtype=int)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __repr__(self) -> str:
        return f"History({', '.join(self.names())})"

    def _series(self, name: str) -> list[tuple[int, Any]]:
        named = (
            (one.step, f"{one.source}/{key}", value)
            for one in self.records
            for key, value in one.values.items()
        )
        series = [(step, value) for step, one, value in named if one == name]
        if not series:
            raise PathError(f"nothing was logged as {name!r}. {did_you_mean(name, self.names())}")
        return series


class RecordDispatcher:
    """Takes records in the order in which they come about and hands them to the sinks in that
    order.

    A record may wait for values that are still being computed; those behind it wait as well, so
    that no sink sees a step before an earlier one, and nobody waits for the device.

    Attributes:
        emitted: how many records came about so far.
        failed: sinks that failed, by plugin name, and evaluators, as `evaluate.NAME`, with the
            reason; each is told once and left out from then on.
    """

    def __init__(self, plugins: "PluginManager", silent: bool = False) -> None:
        self.history = History()
        self.failures: dict[str, str] = {}
        self.num_records = 0
        self.attempt = 1
        self._plugins = plugins
        self._silent = silent
        self._closed: set[str] | None = None
        self._waiting: deque[tuple[list[Any], Callable[[], Record | None]]] = deque()

    def open(self, run: "Run") -> None:
        """Has the sinks open what they write to."""
        for sink in () if self._silent else self._plugins.implementations("open_logger"):
            self._call(sink, run.step, run=run)

    def close(self, step: int) -> None:
        """Has the sinks write out everything. Nothing comes after it."""
        self._closed = self._closed or set()
        for sink in () if self._silent else self._plugins.implementations("close_logger"):
            if sink.plugin.name in self._closed:
                continue
            self._closed.add(sink.plugin.name)
            self._call(sink, step)

    def enqueue(self, arrays: list[Any], finish: Callable[[], Record | None]) -> None:
        """Hands on what `finish` makes once `arrays` are computed; None is nothing."""
        if self._closed is not None:
            raise StateError(
                "the run has ended and its sinks are closed: emit records before `on_fit_end`"
            )
        for array in arrays:
            array.copy_to_host_async()
        self._waiting.append((arrays, finish))
        self.num_records += 1
        self.flush(wait=False)

    def flush(self, *, wait: bool) -> None:
        """Hands on everything that waits, or with `wait=False` as far as it is computed."""
        while self._waiting and (wait or all(array.is_ready() for array in self._waiting[0][0])):
            arrays, finish = self._waiting.popleft()
            with self._plugins.timings.time("wait"):
                jax.block_until_ready(arrays)
            if (record := finish()) is not None:
                self._dispatch(record)

    def disable(self, name: str, what: str, error: Exception, step: int) -> None:
        """Notes in `failed` that `name` is left out from now on, and tells it once, as `what` and
        the reason."""
        notes = "; ".join(getattr(error, "__notes__", []))
        told = redact_text(
            f"{error}" + (f" ({notes})" if notes else "")
        )  # a KeyError names no secret
        self.failures[name] = f"{type(error).__name__}: {told}"
        notice = f"{what}: {self.failures[name]}"
        warnings.warn(notice, stacklevel=2)
        self._dispatch(Record("text", "fulgurite", step, {"notice": notice}, "telemetry"))

    def _dispatch(self, record: Record) -> None:
        if record.stream == "telemetry":
            record = replace(record, attempt=self.attempt, wall_time=time.time())
        elif record.kind == "scalars":
            self.history.records.append(record)
        for sink in () if self._silent else self._plugins.implementations(f"log_{record.kind}"):
            if sink.plugin.name not in self.failures and sink.plugin.name not in (
                self._closed or ()
            ):
                self._call(sink, record.step, record=record)

    def _call(self, sink: "HookImpl", step: int, **arguments: Any) -> None:
        """Calls a sink; its failure is told once and does not end the run, unless the sink is
        required or refuses to begin."""
        name = sink.plugin.name
        try:
            with self._plugins.timings.time(f"{name}.{sink.hook}"):
                sink(step, **arguments)
        except Exception as error:
            refused = sink.hook == "open_logger" and isinstance(error, FulguriteError)
            if refused or getattr(sink.plugin.plugin, "required", False):
                raise
            if name in self.failures:
                return
            self.disable(name, f"sink {name!r} failed and gets no more records", error, step)
