"""Checks of whole runs: what a plugin changes, and what is the same however the run went."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
from fulgurite.errors import ConfigurationError, FulguriteError
from fulgurite.plugins import LEFT_OUT_MESSAGE, get_options
from fulgurite_runs import check_readable

from fulgurite_testing.compare import find_difference, find_rough_difference
from fulgurite_testing.memory import InMemoryCheckpointer
from fulgurite_testing.subject import (
    HALF,
    CheckError,
    FitRecord,
    PluginUnderTest,
    SaveAt,
    format_error,
)
from fulgurite_testing.tiny import STEPS, tiny_engine

RUN_FILES = ("COMPLETE", "attempts", "checkpoints", "lock", "superseded")
"""What the plugin of the run directory and the checkpointer keep in it."""


def check_hooks(subject: PluginUnderTest) -> None:
    """An engine accepts it: its hooks are known, accept their arguments, and return what they
    should."""
    try:
        plugin = subject.make()
    except Exception as error:
        raise CheckError(f"it cannot be built: {format_error(error)}") from error
    if isinstance(plugin, type):
        raise CheckError(
            f"the function that builds it returns the class {plugin.__name__}, not an instance"
        )
    try:
        hooks = subject.hooks
    except FulguriteError as error:
        raise CheckError(format_error(error)) from error
    if not hooks:
        raise CheckError(
            f"{type(plugin).__name__} implements no hook: mark its methods with @fg.hookimpl"
        )


def check_arguments(subject: PluginUnderTest) -> None:
    """Its class rejects unknown and bad arguments by clear errors."""
    cls = type(subject.make())
    if "__init__" in vars(cls) or cls.__init__ is not object.__init__:
        kinds = [parameter.kind for parameter in inspect.signature(cls).parameters.values()]
        if inspect.Parameter.VAR_KEYWORD in kinds:
            _check_unknown_argument(cls, subject.constructor)
    for bad in subject.bad_arguments:
        _check_bad_arguments(cls, subject.constructor, bad)


def check_trains(subject: PluginUnderTest) -> None:
    """A fit with it runs to the end, and nothing of it fails on the way."""
    result = subject.first_fit.result
    if result.failures:
        raise CheckError(
            "; ".join(f"{name} failed: {error}" for name, error in result.failures.items())
        )
    step = int(result.state.step)
    if result.stop_reason is None and step != STEPS:
        raise CheckError(f"training of {STEPS} steps ended at step {step}")


def check_names(subject: PluginUnderTest) -> None:
    """What it logs has names that every logger and a checkpoint can write."""
    messages = subject.first_fit.result.messages
    problems = [message for message in messages if LEFT_OUT_MESSAGE in message]
    if problems:
        raise CheckError("; ".join(problems))


def check_streams(subject: PluginUnderTest) -> None:
    """The random streams of an engine without it have the same keys with it."""
    root = jax.random.key(0)
    without = tiny_engine(*subject.other_plugins()).make_rng_streams(root)
    streams = tiny_engine(subject.make(), *subject.other_plugins()).make_rng_streams(root)
    for name, stream in without.streams.items():
        for phase in ("init", "train", "eval"):
            if find_difference(without.key(name, phase, 3), streams.key(name, phase, 3)):
                raise CheckError(
                    f"it changes the random stream {name!r} ({stream}): give its stream another "
                    "name"
                )


def check_results(subject: PluginUnderTest) -> None:
    """Nothing of a run changes, unless the plugin says that it does: by hooks whose purpose is
    that, or by a class attribute `changes_results = True`."""
    if subject.changes_results:
        return
    results = [record.result for record in (subject.fit_without_plugin, subject.first_fit)]
    difference = find_rough_difference(
        *((result.module, result.model_state, result.history["train/loss"]) for result in results)
    )
    if difference:
        raise CheckError(
            f"a run ends differently with it: {difference}. If that is its purpose, add a class "
            "attribute changes_results = True"
        )


def check_deterministic(subject: PluginUnderTest) -> None:
    """Two runs with it have the same bits and the same exact records, with two instances or with
    one."""
    first = get_state_and_records(subject.first_fit)
    difference = find_difference(first, get_state_and_records(subject.watched_fit.fit_record))
    if difference:
        raise CheckError(
            f"two runs of one seed differ: {difference}. The exact stream holds what follows from "
            "program, configuration, seed and data; clocks and paths are telemetry: "
            "run.log_scalars(..., stream='telemetry')"
        )
    repeated = subject.fit(subject.first_fit.plugin)
    difference = find_difference(first, get_state_and_records(repeated))
    if difference:
        raise CheckError(
            f"the second fit with one instance is not like the first: {difference}. Keep what "
            "belongs to one fit in fg.PerFit(...), which begins with each fit"
        )


def check_resume(subject: PluginUnderTest) -> None:
    """A run that ends at any moment after it was saved, and is resumed with a new instance, has the
    bits, the exact records and the files of a run that was not interrupted."""
    first = subject.first_fit
    files = read_files(subject, first.run_dir)
    exact_names: list[str] = []
    if files:
        # Files with times in them differ between any two runs.
        others = read_files(subject, subject.watched_fit.fit_record.run_dir)
        exact_names = [name for name, content in files.items() if others.get(name) == content]
    steps = [HALF]
    # A logger is saved once more before it got any record, and resumed from there as well.
    if "rewind_logger" in subject.hooks and "save_checkpoint" not in subject.hooks:
        steps.append(HALF + 1)
    memory = first.memory
    for step in steps:
        memory = InMemoryCheckpointer(
            {
                saved_step: checkpoint
                for saved_step, checkpoint in memory.checkpoints.items()
                if saved_step == step
            }
        )
        second = subject.fit(
            subject.make(),
            run_dir=first.run_dir,
            memory=memory,
            resume=step,
            others=[SaveAt(later) for later in steps if later > step],
        )
        _check_resumed_fit(first, second, step)
        _check_files(files, read_files(subject, first.run_dir), exact_names, step)


def check_host_state(subject: PluginUnderTest) -> None:
    """Its host state is JSON, not too large to be read again, and is restored."""
    missing = {"get_host_state", "set_host_state"} - subject.hooks
    if len(missing) == 1:
        raise CheckError(
            f"it implements one of get_host_state and set_host_state, but not {missing.pop()}"
        )
    if missing:
        return
    plugin = subject.first_fit.plugin
    text = json.dumps(plugin.get_host_state())
    try:
        check_readable(text, "its host state")
    except ConfigurationError as error:
        raise CheckError(f"{error}; arrays belong into init_plugin_state") from error
    new_plugin = subject.make()
    engine = tiny_engine(new_plugin, *subject.other_plugins())
    saved = {"state": json.loads(text), "version": get_options(plugin).state_version}
    engine.plugins.hooks.set_host_state.each(
        per_plugin=lambda registered: saved if registered.plugin is new_plugin else None
    )
    new_text = json.dumps(new_plugin.get_host_state())
    if json.loads(new_text) != json.loads(text):
        raise CheckError(
            f"get_host_state returned {text}; after set_host_state on a new instance it returns "
            f"{new_text}"
        )


def check_fused_steps(subject: PluginUnderTest) -> None:
    """With up to eight steps in a dispatch the run is the same, but for rounding."""
    fused = subject.fit(subject.make(), steps_per_execution=8)
    difference = find_rough_difference(
        get_state_and_records(subject.first_fit), get_state_and_records(fused)
    )
    if difference:
        raise CheckError(
            "with steps_per_execution=8 the run is not the one with steps_per_execution=1: "
            f"{difference}"
        )


def _check_unknown_argument(cls: type, constructor: Callable[..., Any]) -> None:
    try:
        constructor(no_such_argument=object())
    except (FulguriteError, TypeError):
        return
    raise CheckError(
        f"{cls.__name__}(no_such_argument=...) is accepted silently: reject unknown arguments"
    )


def _check_bad_arguments(cls: type, constructor: Callable[..., Any], bad: dict[str, Any]) -> None:
    call = f"{cls.__name__}({', '.join(f'{name}={value!r}' for name, value in bad.items())})"
    try:
        constructor(**bad)
    except FulguriteError as error:
        text = str(error)
        if not any(name in text or repr(value) in text for name, value in bad.items()):
            raise CheckError(
                f"{call} is rejected, but the message does not say which argument: {error}"
            ) from error
    except Exception as error:
        raise CheckError(
            f"{call} raises {format_error(error)}: raise fulgurite.errors.ConfigurationError"
        ) from error
    else:
        raise CheckError(
            f"{call} is accepted: check arguments where the plugin is built, in __post_init__"
        )


def _check_resumed_fit(first: FitRecord, second: FitRecord, step: int) -> None:
    """Raise an error unless a resumed fit ends like one that was not interrupted.

    Args:
        first: the fit that was not interrupted.
        second: the resumed fit.
        step: the step at which it was saved.
    """
    before = [record for record in first.events.list_exact_records() if record.step <= step]
    records = format_records([*before, *second.events.list_exact_records()])
    difference = find_difference(get_state_and_records(first), (second.result.state, records))
    if difference:
        raise CheckError(
            f"a run that was saved at step {step} and resumed with a new instance is not the one "
            f"that was not interrupted: {difference} (records before: "
            f"{[(record.step, record.source) for record in before]}). State on the host belongs "
            "into get_host_state and set_host_state, state on the device into init_plugin_state"
        )


def _check_files(
    files: dict[str, Any], new_files: dict[str, Any], names: list[str], step: int
) -> None:
    """Raise an error unless files are the same after a run was resumed.

    Args:
        files: contents before, by name.
        new_files: contents after it, by name.
        names: the files to compare.
        step: the step from which the run was resumed.
    """
    for name in names:
        if new_files.get(name) != files[name]:
            raise CheckError(
                f"{name} in the run directory is not the same after a run was resumed from step "
                f"{step}: it held {format_size(files[name])} and holds "
                f"{format_size(new_files.get(name, b''))}. Cut it back to where the checkpoint "
                "was, by flush_logger and rewind_logger; a subclass of FileLogger gets the "
                "position. After that the position in the file must be its end, or the next "
                "position is wrong"
            )


def format_size(content: Any) -> str:
    return f"{len(content)} bytes" if isinstance(content, bytes) else repr(content)[:200]


def get_state_and_records(fit_record: FitRecord) -> Any:
    return fit_record.result.state, format_records(fit_record.events.list_exact_records())


def format_records(records: list[fg.Record]) -> list[Any]:
    return [{f"{record.source} at {record.step}": record.values} for record in records]


def read_files(subject: PluginUnderTest, run_dir: Path) -> dict[str, Any]:
    """Return the contents of what plugins wrote into a run directory, by path."""
    contents = {}
    for path in run_dir.rglob("*"):
        name = path.relative_to(run_dir)
        if path.is_file() and name.parts[0] not in RUN_FILES:
            contents[str(name)] = subject.content(path)
    return contents
