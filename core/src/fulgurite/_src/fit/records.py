"""Records, the two streams that they are of, and how they reach the loggers in order."""

import io
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import jax
import numpy as np

from fulgurite._src.model.media import Media
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.plugins.selection import RegisteredPlugin
from fulgurite._src.record_names import LEFT_OUT_MESSAGE, find_fault, split_invalid_names
from fulgurite._src.redact import (
    redact_registered,
    redact_registered_value,
    redact_text,
    redact_value,
)
from fulgurite._src.tracebacks import hide_internal_frames
from fulgurite._src.tree.specs import is_array, is_real_dtype
from fulgurite._src.waits import Wait, WaitAbandoned
from fulgurite.errors import (
    ConfigurationError,
    FulguriteError,
    PathError,
    PluginError,
    StateError,
    did_you_mean,
)

RecordKind = Literal["scalars", "media", "text", "config"]
"""What a record holds, and so which hook of loggers gets it."""
RecordStream = Literal["exact", "telemetry"]
HISTORY_LENGTH = 10_000
"""How many records a history keeps: with `log_every=50`, those of half a million steps. About 5 MB
in memory with ten values each, and 2 MB in a checkpoint."""


@dataclass(frozen=True)
class Record:
    """Something to record.

    Example:
        class PrintLogger:
            @fg.hookimpl
            def log_record(self, record):
                print(record.step, record.source, record.values)


        PrintLogger().log_record(fg.Record("scalars", "train", 10, {"loss": 0.5}))

    Attributes:
        kind: `scalars`; `media`, which are images, histograms and figures; `text`, such as messages
            of the run; or `config`, a description of the run.
        source: where it comes from: `train`, an evaluator's name, a plugin's name.
        step: the number of completed updates.
        values: by name. Scalars are Python numbers or, rarely, NumPy arrays.
        stream: `exact` records depend only on program, configuration, seed and data, and appear
            exactly once; `telemetry` is everything else, and appears at least once.
        attempt: the number of the start of the run that made it; telemetry only.
        wall_time: seconds since 1970; telemetry only.
    """

    kind: RecordKind
    source: str
    step: int
    values: dict[str, Any]
    stream: RecordStream = "exact"
    attempt: int | None = None
    wall_time: float | None = None


def _check_record_types(kind: str, source: str, values: Any) -> str:
    """Raise an error unless a plugin logs values of the types that loggers write; return the call,
    for errors.

    Args:
        kind: the kind of the record.
        source: where the values come from.
        values: by name.

    Raises:
        PluginError: a name, a number or a medium has another type.
    """
    if kind not in get_args(RecordKind):
        raise PluginError(
            f"there are no records of kind {kind!r}. {did_you_mean(kind, get_args(RecordKind))}"
        )
    where = f"run.log_{kind}({source!r}, ...)"
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in (source, *values)):
        raise PluginError(
            f"{where}: pass the source as a string, and the values as a dictionary with strings as "
            f"keys, not {values!r}"
        )
    for name, value in values.items():
        if kind == "scalars" and not _is_number(value):
            raise PluginError(
                f"{where}: {name!r} is of type {type(value).__name__}; pass numbers or arrays of "
                "numbers"
            )
        if kind == "media" and not isinstance(value, Media):
            raise PluginError(
                f"{where}: {name!r} is of type {type(value).__name__}; pass media, such as those "
                "of fulgurite_logging.media"
            )
    return where


def _mask_record(record: Record) -> Record:
    """Return a record without registered secrets: in its source, in names and in texts."""
    values = redact_registered_value(record.values)
    if record.kind == "media":
        values = {name: _mask_media(value) for name, value in values.items()}
    return replace(record, source=redact_registered(record.source), values=values)


def _mask_media(media: Media) -> Media:
    """Return a medium without registered secrets in those of its fields that are texts."""
    values = {field.name: getattr(media, field.name) for field in fields(media)}
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    masked = redact_registered_value(texts)
    return media if masked == texts else replace(media, **masked)


def _is_number(value: Any) -> bool:
    if hasattr(value, "dtype"):
        return is_real_dtype(value.dtype)
    return isinstance(value, bool | int | float)


def check_json_value(value: Any, where: str) -> None:
    """Raise a `ConfigurationError` unless `value` can be written as JSON, with arrays of real
    numbers."""
    if value is None or isinstance(value, bool | int | float | str):
        return
    if is_array(value) and is_real_dtype(value.dtype):
        return
    if isinstance(value, list | tuple):
        for item in value:
            check_json_value(item, where)
        return
    if not isinstance(value, dict):
        raise ConfigurationError(
            f"{where}: {type(value).__name__} cannot be written as JSON: {value!r}"
        )
    for key, item in value.items():
        # `$` begins the keys by which JSON holds arrays and numbers that are not finite.
        if not isinstance(key, str) or key.startswith("$"):
            raise ConfigurationError(
                f"{where}: {key!r} cannot be a key in JSON: keys are strings that do not begin "
                "with '$'"
            )
        check_json_value(item, where)


def _copy_host_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copy_host_arrays(item) for name, item in value.items()}
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, value)


def _make_figure() -> Any:
    """Return an empty figure, which a notebook shows without pyplot too."""
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", bbox_inches="tight")
            return file.getvalue()

    return NotebookFigure()


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


class RecordDispatcher:
    """Takes records in emission order and passes them to the loggers in that
    order.

    A record may wait for values that are still being computed; those after it wait as well, so
    that no logger sees a step before an earlier one, and nobody waits for the device.

    Example:
        from fulgurite.plugins import RecordDispatcher

        dispatcher = RecordDispatcher(engine.plugins)

    Attributes:
        history: the exact scalars.
        messages: what the run and its plugins had to say, see `Run.notify`.
        failures: why loggers failed, by plugin name, and evaluators, as `evaluate.NAME`; each is
            reported once and left out from then on.
        num_records: how many records came about so far.
        attempt: the number of this start of the run, from 1.
        is_exact: whether what is emitted now may be exact; not what an action does that runs by the
            clock.

    Args:
        plugins: whose loggers get the records.
        history: the exact scalars before the first record, of a run that resumes.
        loggers: the names of the plugins that get the records; None for all. In a trial none does.
    """

    def __init__(
        self,
        plugins: PluginManager,
        history: Iterable[Record] = (),
        loggers: Collection[str] | None = None,
    ) -> None:
        self.history = History(history)
        self.failures: dict[str, str] = {}
        self.messages: list[str] = []
        self.num_records = 0
        self.attempt = 1
        self.is_exact = True
        self._plugins = plugins
        self._loggers = loggers
        self._is_closed = False
        self._is_flushing = False
        self._closed_loggers: set[str] = set()
        self._left_out: set[str] = set()
        self._waiting: deque[tuple[list[Any], Callable[[], Record | None]]] = deque()

    def open(self, step: int, **arguments: Any) -> None:
        """Have the loggers open what they write to.

        Args:
            step: at which the fit begins.
            arguments: of the hook `open_logger`.
        """
        self._call_loggers("open_logger", step, self._gets_records, **arguments)

    def close(self, step: int) -> None:
        """Have the loggers write out everything. Nothing comes after it."""
        self._is_closed = True

        def closes_now(name: str) -> bool:
            is_closed = name in self._closed_loggers
            self._closed_loggers.add(name)
            return self._gets_records(name) and not is_closed

        self._call_loggers("close_logger", step, closes_now)

    def notify(self, source: str, message: str, step: int) -> None:
        """Tell the user something, in one sentence; see `Run.notify`.

        Args:
            source: who says it, a plugin's name.
            message: the sentence.
            step: at which it is said.
        """
        message = redact_text(message)
        self.messages.append(message)
        self.emit("text", source, {"message": message}, step, "telemetry")

    def emit(
        self,
        kind: RecordKind,
        source: str,
        values: dict[str, Any],
        step: int,
        stream: RecordStream,
    ) -> None:
        """Pass values by name to the loggers, after the records already emitted.

        Args:
            kind: the kind of the record.
            source: where the values come from.
            values: by name; those on the device are copied to the host in the background.
            step: the number of completed updates.
            stream: of the record, unless it cannot be exact now.
        """
        writable = self.validate(kind, source, values)
        if writable is None:
            return
        if not self.is_exact:
            stream = "telemetry"
        arrays = [leaf for leaf in jax.tree.leaves(writable) if isinstance(leaf, jax.Array)]

        def finish() -> Record:
            on_host = jax.device_get(writable) if arrays else writable
            return Record(kind, source, step, on_host, stream)

        self.enqueue(arrays, finish)

    def enqueue(self, arrays: list[Any], finish: Callable[[], Record | None]) -> None:
        """Pass on a record once the values in it are computed.

        Args:
            arrays: on the device; they are copied to the host in the background.
            finish: returns the record, or None for nothing, once `arrays` are computed.

        Raises:
            StateError: the loggers are closed.
        """
        if self._is_closed:
            raise StateError(
                "the run has ended and its loggers are closed: log before `on_fit_end`"
            )
        for array in arrays:
            array.copy_to_host_async()
        self._waiting.append((arrays, finish))
        self.num_records += 1
        self.flush(wait=False)

    def validate(self, kind: str, source: str, values: Any) -> dict[str, Any] | None:
        """Return what a plugin logs as a record keeps it, whatever the plugin does with its own
        arrays afterwards; None if none of it has a name that can be written.

        Secrets become `***`: in a configuration what looks like one, in strings what was
        registered. What no logger could write is an error here. Otherwise the logger would be the
        one that fails, and would be left out.

        Args:
            kind: the kind of the record.
            source: where the values come from.
            values: by name.

        Raises:
            PluginError: a name, a number or a medium has another type.
            ConfigurationError: strings or a configuration cannot be written as JSON.
        """
        where = _check_record_types(kind, source, values)
        writable = self.select_writable(source, values)
        if values and not writable:
            return None
        if kind in ("text", "config"):
            for name, value in writable.items():
                check_json_value(value, f"{where}: {name!r}")
        if kind == "config":
            return redact_value(writable)
        # Strings are samples as well, in which nothing may be guessed.
        return writable if kind == "text" else _copy_host_arrays(writable)

    def select_writable(self, source: str, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values whose names every logger and a checkpoint can write; none if they
        cannot write the source. Each name that is left out is told once.

        Args:
            source: where the values come from.
            values: by name.
        """
        fault = find_fault(source)
        if fault is not None:
            self._tell_left_out(f"what {source!r:.200} logs", fault)
            return {}
        selected, faults = split_invalid_names(values)
        for name, name_fault in faults.items():
            self._tell_left_out(f"{name!r:.200} of {source!r}", name_fault)
        return selected

    def _tell_left_out(self, what: str, fault: str) -> None:
        message = redact_registered(
            f"{what} {LEFT_OUT_MESSAGE}: a name cannot be written if {fault}"
        )
        if message in self._left_out:
            return
        self._left_out.add(message)
        self.messages.append(message)
        warnings.warn(message, stacklevel=2)

    def flush(self, *, wait: bool) -> None:
        """Pass on everything that waits.

        Args:
            wait: whether to wait for what is still being computed; otherwise it stays, with
                everything after it.
        """
        if self._is_flushing and not wait:
            return  # a logger emits a record: all loggers get the present one first
        was_flushing = self._is_flushing
        self._is_flushing = True
        try:
            while self._waiting:
                arrays, finish = self._waiting[0]
                if not wait and not all(array.is_ready() for array in arrays):
                    return
                self._waiting.popleft()
                with self._plugins.timings.time("wait"):
                    jax.block_until_ready(arrays)
                record = finish()
                if record is not None:
                    self._dispatch(record)
        finally:
            self._is_flushing = was_flushing

    def record_failure(self, name: str, summary: str, error: BaseException, step: int) -> None:
        """Note in `failures` that something failed, which is left out from now on, and warn of it
        once.

        Args:
            name: under which the failure is noted.
            summary: what failed, in words.
            error: why.
            step: at which it failed.
        """
        reason = str(error)
        notes = getattr(error, "__notes__", [])
        if notes:
            reason += f" ({'; '.join(notes)})"
        # With the type, because the text of a KeyError is only the key.
        self.failures[name] = f"{type(error).__name__}: {redact_text(reason)}"
        message = f"{summary}: {self.failures[name]}"
        warnings.warn(message, stacklevel=2)
        values = {"message": message, "failed": name}
        self._dispatch(Record("text", "fulgurite", step, values, "telemetry"))

    def _gets_records(self, name: str) -> bool:
        """Return whether a logger gets records in this run, unless it failed."""
        return self._loggers is None or name in self._loggers

    def _dispatch(self, record: Record) -> None:
        record = _mask_record(record)
        if record.stream == "telemetry":
            record = replace(record, attempt=self.attempt, wall_time=time.time())
        elif record.kind == "scalars":
            self.history.append(record)

        def is_open(name: str) -> bool:
            has_ended = name in self.failures or name in self._closed_loggers
            return self._gets_records(name) and not has_ended

        self._call_loggers("log_record", record.step, is_open, record=record)

    def _call_loggers(
        self, hook: str, step: int, takes_part: Callable[[str], bool], **arguments: Any
    ) -> None:
        """Call a hook of the loggers. The failure of one is reported once and does not end the run,
        unless the logger is required or refuses to begin.

        Args:
            hook: the name of the hook.
            step: the number of completed updates.
            takes_part: returns whether the logger of a name is called.
            arguments: of the hook.
        """

        @contextmanager
        def handle_failure(logger: RegisteredPlugin) -> Iterator[None]:
            try:
                with Wait(f"logger {logger.name!r}"):
                    yield
            except (Exception, WaitAbandoned) as error:
                refuses = hook == "open_logger" and isinstance(error, FulguriteError)
                if refuses or logger.options.required:
                    raise
                if logger.name in self.failures:
                    return
                summary = f"logger {logger.name!r} failed and gets no more records"
                self.record_failure(logger.name, summary, error, step)

        def guard(logger: RegisteredPlugin) -> AbstractContextManager[None] | None:
            return handle_failure(logger) if takes_part(logger.name) else None

        self._plugins.hooks[hook].each(step, guard=guard, **arguments)
