"""Checks of whole runs: what a plugin changes, and what is the same however the run went."""

import inspect
import json
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
from fulgurite.errors import FulguriteError

from fulgurite_testing.bits import about_same, same_bits
from fulgurite_testing.memory import Memory
from fulgurite_testing.subject import HALF, Broken, Ran, Saving, Subject, said
from fulgurite_testing.tiny import tiny_engine

OF_THE_RUN = ("COMPLETE", "attempts", "checkpoints", "lock", "superseded")
"""In a run's directory, what the engine and its checkpointer keep there."""


def hooks(subject: Subject) -> None:
    """An engine takes it: its hooks are known, take what they are given, and give what they
    should."""
    try:
        plugin = subject.make()
    except Exception as error:
        raise Broken(f"it cannot be made: {said(error)}") from error
    if isinstance(plugin, type):
        raise Broken(f"what makes it gives the class {plugin.__name__}, not an instance")
    try:
        names = subject.hooks
    except FulguriteError as error:
        raise Broken(said(error)) from error
    if not names:
        raise Broken(
            f"{type(plugin).__name__} implements no hook: mark its methods with @fg.hookimpl"
        )


def arguments(subject: Subject) -> None:
    """Its class refuses arguments that it does not know, and those that are said to be bad, by
    clear errors."""
    cls = type(subject.make())
    if "__init__" in vars(cls) or cls.__init__ is not object.__init__:
        kinds = [one.kind for one in inspect.signature(cls).parameters.values()]
        if inspect.Parameter.VAR_KEYWORD in kinds:
            try:
                cls(no_such_argument=object())
            except (FulguriteError, TypeError):
                pass
            else:
                raise Broken(
                    f"{cls.__name__}(no_such_argument=...) is accepted silently: reject unknown "
                    f"arguments"
                )
    for bad in subject.bad_arguments:
        shown = f"{cls.__name__}({', '.join(f'{name}={value!r}' for name, value in bad.items())})"
        try:
            cls(**bad)
        except FulguriteError as error:
            if not any(
                name in str(error) or repr(value) in str(error) for name, value in bad.items()
            ):
                raise Broken(
                    f"{shown} is refused, but the message does not say which argument: {error}"
                ) from error
        except Exception as error:
            raise Broken(
                f"{shown} fails by {said(error)}: raise fulgurite.errors.ConfigurationError"
            ) from error
        else:
            raise Broken(
                f"{shown} is taken: check arguments where the plugin is made, in __post_init__"
            )


def trains(subject: Subject) -> None:
    """A fit with it comes to its end, and nothing of it fails on the way."""
    if failed := subject.ran.result.failures:
        raise Broken("; ".join(f"{name} failed: {why}" for name, why in failed.items()))
    if subject.ran.result.stop_reason is None and int(subject.ran.result.state.step) != 8:
        raise Broken(f"training of 8 steps ended at step {int(subject.ran.result.state.step)}")


def streams(subject: Subject) -> None:
    """The random streams of an engine without it have the same keys with it."""
    plain, own = tiny_engine(*subject.beside()), tiny_engine(subject.make(), *subject.beside())
    root = jax.random.key(0)
    for name, stream in plain.make_rng_streams(root).streams.items():
        mine = own.make_rng_streams(root)
        for phase in ("init", "train", "eval"):
            keys = [one.key(name, phase, 3) for one in (plain.make_rng_streams(root), mine)]
            if same_bits(*keys):
                raise Broken(
                    f"it changes the random stream {name!r} ({stream}): give its own a name of its "
                    f"own"
                )


def results(subject: Subject) -> None:
    """Nothing of a run changes, unless the plugin says that it does: by hooks that are there for
    that, or by a class attribute `changes_results = True`."""
    if subject.changes_results:
        return
    parts = [
        (ran.result.module, ran.result.model_state, ran.result.history["train/loss"])
        for ran in _pair(subject)
    ]
    if difference := about_same(*parts):
        raise Broken(
            f"a run ends differently with it: {difference}. If that is what it is for, say so: a "
            f"class attribute "
            "changes_results = True"
        )


def deterministic(subject: Subject) -> None:
    """Two runs with it have the same bits and the same exact records, of two instances or of
    one."""
    if difference := same_bits(_whole(subject.ran), _whole(subject.again.ran)):
        raise Broken(
            f"two runs of one seed differ: {difference}. The exact stream holds what follows from "
            f"program, "
            "configuration, seed and data; clocks and paths are telemetry: run.emit(..., "
            "stream='telemetry')"
        )
    if difference := same_bits(_whole(subject.ran), _whole(subject.fit(subject.ran.plugin))):
        raise Broken(
            f"the second fit with one instance is not like the first: {difference}. What it keeps "
            f"on the host begins "
            "anew in on_fit_start, unless run.is_resumed"
        )


def resume(subject: Subject) -> None:
    """A run that ends at any moment after it was saved, and is gone on with in a new instance, has
    the bits, the exact records and the files of one that was not."""
    ran = subject.ran
    files = _files(subject, ran.run)
    # Those with clocks in them differ between any two runs.
    exact = (
        [
            name
            for name, held in files.items()
            if _files(subject, subject.again.ran.run).get(name) == held
        ]
        if files
        else []
    )
    # A logger is saved once more before it was given anything, and gone on with from there as well.
    steps = [
        HALF,
        *[HALF + 1] * ("rewind_logger" in subject.hooks and "save_checkpoint" not in subject.hooks),
    ]
    memory = ran.memory
    for step in steps:
        memory = Memory({at: held for at, held in memory.kept.items() if at == step})
        others = [Saving(one) for one in steps if one > step]
        second = subject.fit(subject.make(), run=ran.run, memory=memory, resume=step, others=others)
        begun = [one for one in ran.events.exact() if one.step <= step]
        both = second.result.state, _records([*begun, *second.events.exact()])
        if difference := same_bits(_whole(ran), both):
            raise Broken(
                f"a run that was saved at step {step} and resumed in a new instance is not the one "
                f"that went through: "
                f"{difference} (records before: {[(one.step, one.source) for one in begun]}). What "
                f"it keeps on the "
                "host goes through get_host_state and set_host_state, what it keeps on the device "
                "through plugin_state"
            )
        now = _files(subject, ran.run)
        if wrong := [name for name in exact if now.get(name) != files[name]]:
            raise Broken(
                f"{wrong[0]} in the run's directory is not the same after a run was resumed from "
                f"step {step}: it held "
                f"{_size(files[wrong[0]])} and holds {_size(now.get(wrong[0], b''))}. Cut it back "
                f"to where the "
                "checkpoint was, by durable and rewind; a subclass of FileLogger is given the "
                "position. Where a file "
                "was cut back the place in it must be its end, or the next position is wrong"
            )


def host_state(subject: Subject) -> None:
    """What it keeps on the host is JSON, and comes back."""
    if missing := {"get_host_state", "set_host_state"} - subject.hooks:
        if len(missing) == 1:
            raise Broken(
                f"it implements one of get_host_state and set_host_state, and not {missing.pop()}"
            )
        return
    state, version = (
        subject.ran.plugin.get_host_state(),
        getattr(subject.ran.plugin, "state_version", 1),
    )
    text = json.dumps(state)
    new = subject.make()
    engine = tiny_engine(new, *subject.beside())
    for hook in engine.plugins.implementations("set_host_state"):
        if hook.plugin.plugin is new:
            hook(None, state=json.loads(text), version=version)
    if (back := json.dumps(new.get_host_state())) != text:
        raise Broken(
            f"get_host_state gave {text}; after set_host_state into a new instance it gives {back}"
        )


def fuse(subject: Subject) -> None:
    """With up to eight steps in a dispatch the run is the same, but for rounding."""
    fused = subject.fit(subject.make(), steps_per_execution=8)
    if difference := about_same(_whole(subject.ran), _whole(fused)):
        raise Broken(
            f"with steps_per_execution=8 the run is not the one with steps_per_execution=1: "
            f"{difference}"
        )


def _size(content: Any) -> str:
    return f"{len(content)} bytes" if isinstance(content, bytes) else repr(content)[:200]


def _pair(subject: Subject) -> tuple[Ran, Ran]:
    return subject.without, subject.ran


def _whole(ran: Ran) -> Any:
    return ran.result.state, _records(ran.events.exact())


def _records(records: list[fg.Record]) -> list[Any]:
    return [{f"{one.source} at {one.step}": one.values} for one in records]


def _files(subject: Subject, run: Path) -> dict[str, Any]:
    """What plugins wrote into a run's directory, by path."""
    paths = {path.relative_to(run): path for path in run.rglob("*") if path.is_file()}
    return {
        str(name): subject.content(path)
        for name, path in paths.items()
        if name.parts[0] not in OF_THE_RUN
    }
