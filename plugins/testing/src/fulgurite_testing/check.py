"""The conformance check: all that a plugin promises by being one."""

import tempfile
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fulgurite_testing.compilation_cache import share_compiled_programs
from fulgurite_testing.host_checks import check_closes, check_no_sync
from fulgurite_testing.interruption_check import check_interruptions
from fulgurite_testing.process_check import check_processes
from fulgurite_testing.run_checks import (
    check_arguments,
    check_deterministic,
    check_fused_steps,
    check_hooks,
    check_host_state,
    check_names,
    check_results,
    check_resume,
    check_streams,
    check_trains,
)
from fulgurite_testing.sharing_checks import check_failed_start, check_shared
from fulgurite_testing.subject import CheckError, PluginUnderTest, format_error
from fulgurite_testing.tiny import TinyModel, tiny_data
from fulgurite_testing.trace_checks import (
    check_no_captured_arrays,
    check_no_effects,
    check_same_trace,
)

CHECKS: dict[str, Callable[[PluginUnderTest], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_hooks,
        check_arguments,
        check_same_trace,
        check_no_effects,
        check_no_captured_arrays,
        check_trains,
        check_names,
        check_streams,
        check_results,
        check_deterministic,
        check_resume,
        check_host_state,
        check_interruptions,
        check_failed_start,
        check_shared,
        check_fused_steps,
        check_no_sync,
        check_closes,
        check_processes,
    )
}
"""By name, in the order in which they run; the docstring of each says what it promises."""


class PluginFailure(AssertionError):
    """A plugin that breaks promises.

    Attributes:
        failures: the problems, by the name of the check.
    """

    def __init__(self, plugin: Any, failures: dict[str, str]) -> None:
        function = plugin.func if isinstance(plugin, partial) else plugin
        name = getattr(function, "__name__", type(plugin).__name__)
        problems = [f"  {check}: {problem}" for check, problem in failures.items()]
        super().__init__("\n".join([f"{name} does not pass:", *problems]))
        self.failures = failures


def check_plugin(
    plugin: Any,
    *,
    bad_arguments: Sequence[dict[str, Any]] = (),
    other_plugins: Callable[[], Sequence[Any]] = list,
    model: Any = TinyModel,
    data: Callable[[], Any] = tiny_data,
    skip: Collection[str] = (),
    only: Collection[str] | None = None,
    content: Callable[[Path], Any] = Path.read_bytes,
    distributed: bool = False,
    timeout: float = 10.0,
) -> None:
    """Train tiny models with a plugin in every way that matters, and raise if it breaks a promise.

    Args:
        plugin: a class, or a function without arguments that builds the plugin; or an instance, of
            which each run gets a copy.
        bad_arguments: sets of keyword arguments that its class must reject, each with a
            `FulguriteError` that names one.
        other_plugins: a function that builds the other plugins it needs.
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
    unknown = {*skip, *(only or ())} - CHECKS.keys()
    if unknown:
        raise ValueError(f"there is no check {min(unknown)!r}; there are {', '.join(CHECKS)}")
    selected = CHECKS.keys() - {*skip} if only is None else {*only}
    if only is None and not distributed:
        selected -= {"processes"}
    failures: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory(prefix="fulgurite-testing-") as folder,
        share_compiled_programs(),
    ):
        subject = PluginUnderTest(
            plugin, other_plugins, model, data, bad_arguments, timeout, Path(folder), content
        )
        for name, check in CHECKS.items():
            if name not in selected:
                continue
            try:
                check(subject)
            except CheckError as error:
                failures[name] = str(error)
            except Exception as error:
                failures[name] = format_error(error)
            if name in failures and name in ("hooks", "trains"):
                break
    if failures:
        raise PluginFailure(plugin, failures)
