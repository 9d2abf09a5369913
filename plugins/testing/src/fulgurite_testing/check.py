"""The conformance check: all that a plugin promises by being one."""

import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from fulgurite_testing.host import closes, no_sync
from fulgurite_testing.processes import processes
from fulgurite_testing.programs import compiled_once
from fulgurite_testing.runs import (
    arguments,
    deterministic,
    fuse,
    hooks,
    host_state,
    results,
    resume,
    streams,
    trains,
)
from fulgurite_testing.subject import Broken, Subject, said
from fulgurite_testing.tiny import TinyModel, tiny_data
from fulgurite_testing.traces import no_captured_arrays, no_effects, same_trace

CHECKS: dict[str, Callable[[Subject], None]] = {
    check.__name__: check
    for check in (
        hooks,
        arguments,
        same_trace,
        no_effects,
        no_captured_arrays,
        trains,
        streams,
        results,
        deterministic,
        resume,
        host_state,
        fuse,
        no_sync,
        closes,
        processes,
    )
}
"""By name, in the order in which they run; the docstring of each says what it promises."""


class PluginFailure(AssertionError):
    """A plugin that breaks promises.

    Attributes:
        failures: what was found, by the name of the check.
    """

    def __init__(self, plugin: Any, failures: dict[str, str]) -> None:
        name = getattr(plugin, "__name__", type(plugin).__name__)
        super().__init__(
            "\n".join(
                [f"{name} does not pass:", *(f"  {one}: {why}" for one, why in failures.items())]
            )
        )
        self.failures = failures


def check_plugin(
    plugin: Any,
    *,
    bad_arguments: Sequence[dict[str, Any]] = (),
    beside: Callable[[], Sequence[Any]] = list,
    model: Any = TinyModel,
    data: Callable[[], Any] = tiny_data,
    skip: Collection[str] = (),
    only: Collection[str] | None = None,
    content: Callable[[Path], Any] = Path.read_bytes,
    distributed: bool = False,
    timeout: float = 10.0,
) -> None:
    """Trains tiny models with a plugin in every way that matters, and raises if it breaks a
    promise.

    Args:
        plugin: a class, or a function without arguments that makes one; or an instance, of which
            each run gets a copy.
        bad_arguments: sets of keyword arguments that its class must reject, each with a
            `FulguriteError` that names one.
        beside: a function that makes the other plugins it needs.
        model, data: what to train; `data` is called for each run.
        skip, only: names of `CHECKS` to leave out, or to run alone.
        content: returns what to compare of a file that it writes, such as the rows of a database,
            whose bytes depend on history.
        distributed: whether to run the check `processes` too, which takes seconds and starts two
            processes.
        timeout: seconds that the plugin may take to close.

    Raises:
        PluginFailure: lists all problems found. After `hooks` or `trains` has failed, nothing else
            is tried.
    """
    if unknown := {*skip, *(only or ())} - CHECKS.keys():
        raise ValueError(f"there is no check {sorted(unknown)[0]!r}; there are {', '.join(CHECKS)}")
    left_out = (
        {*skip, *(() if distributed else ("processes",))}
        if only is None
        else CHECKS.keys() - {*only}
    )
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="fulgurite-testing-") as folder, compiled_once():
        subject = Subject(
            plugin, beside, model, data, bad_arguments, timeout, Path(folder), content
        )
        for name, check in CHECKS.items():
            if name in left_out:
                continue
            try:
                check(subject)
            except Broken as found:
                failures[name] = str(found)
            except Exception as error:
                failures[name] = said(error)
            if name in failures and name in ("hooks", "trains"):
                break
    if failures:
        raise PluginFailure(plugin, failures)
