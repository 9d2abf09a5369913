"""How records reach the loggers, in order."""

import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from fulgurite._src.fit.history import History
from fulgurite._src.fit.records import (
    Record,
    RecordKind,
    RecordStream,
    as_python_numbers,
    check_json_value,
    check_record_types,
    mask_record,
)
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.plugins.selection import RegisteredPlugin
from fulgurite._src.record_names import LEFT_OUT_MESSAGE, find_fault, split_invalid_names
from fulgurite._src.redact import redact_registered, redact_text, redact_value
from fulgurite._src.waits import Wait, WaitAbandoned
from fulgurite.errors import FulguriteError, StateError


class RecordDispatcher:
    """Takes records in emission order and passes them to the loggers in that
    order. Records that come before the loggers are opened wait until then.

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
        num_exact_records: how many of them are exact.
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
        self.num_exact_records = 0
        self.attempt = 1
        self.is_exact = True
        self._plugins = plugins
        self._loggers = loggers
        self._is_open = False
        self._is_closed = False
        self._is_flushing = False
        # Those that open something are closed until then.
        self._closed_loggers = {logger.name for logger in plugins.hooks.open_logger.plugins}
        self._left_out: set[str] = set()
        self._waiting: deque[tuple[list[Any], Callable[[], Record | None]]] = deque()

    def open(self, step: int, **arguments: Any) -> None:
        """Have the loggers open what they write to.

        Args:
            step: at which the fit begins.
            arguments: of the hook `open_logger`.
        """

        def opens_now(name: str) -> bool:
            self._closed_loggers.discard(name)
            return self._gets_records(name)

        try:
            self._call_loggers("open_logger", step, opens_now, **arguments)
        finally:
            self._is_open = True
        self.flush(wait=False)

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
            if kind == "scalars":
                on_host = as_python_numbers(on_host)
            return Record(kind, source, step, on_host, stream)

        self.enqueue(arrays, finish, stream)

    def enqueue(
        self,
        arrays: list[Any],
        finish: Callable[[], Record | None],
        stream: RecordStream = "exact",
    ) -> None:
        """Pass on a record once the values in it are computed.

        Args:
            arrays: on the device; they are copied to the host in the background.
            finish: returns the record, or None for nothing, once `arrays` are computed.
            stream: of the record.

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
        self.num_exact_records += stream == "exact"
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
        where = check_record_types(kind, source, values)
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
        if not self._is_open or (self._is_flushing and not wait):
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
        record = Record("text", "fulgurite", step, values, "telemetry")
        if self._is_open:
            self._dispatch(record)
        else:
            self._waiting.append(([], lambda: record))

    def _gets_records(self, name: str) -> bool:
        """Return whether a logger gets records in this run, unless it failed."""
        return self._loggers is None or name in self._loggers

    def _dispatch(self, record: Record) -> None:
        record = mask_record(record)
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


def _copy_host_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copy_host_arrays(item) for name, item in value.items()}
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, value)
