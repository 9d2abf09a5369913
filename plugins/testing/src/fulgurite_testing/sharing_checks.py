"""Checks of what an instance keeps: after a start that failed, and while another fit is running."""

from dataclasses import dataclass, field
from typing import Any

import fulgurite as fg
from fulgurite.errors import PluginError
from fulgurite.plugins import find_hookspecs, hookspecs

from fulgurite_testing.compare import find_difference
from fulgurite_testing.memory import InMemoryCheckpointer
from fulgurite_testing.run_checks import get_state_and_records, read_files
from fulgurite_testing.subject import HALF, CheckError, FitRecord, PluginUnderTest

EVENTS_AFTER_A_STEP = {
    "on_epoch_end",
    "on_replace_state",
    "on_evaluate_end",
    "on_compile",
    "on_save",
    "on_exception",
    "on_fit_end",
}
EVENTS_AT_START = {
    name for name, hook in find_hookspecs(hookspecs).items() if hook.kind == "event"
} - EVENTS_AFTER_A_STEP
"""The events of a start. A new one is among them until it is named above, and `_fail_to_resume`
asks for that."""
# In reverse, so that the last are those of which plugins are told least: nothing calls their
# `on_exception` where a context cannot be entered.
PLACES = sorted(EVENTS_AT_START, reverse=True)


def check_failed_start(subject: PluginUnderTest) -> None:
    """After a resume that failed before the first step, at several places, the next fit with the
    instance is like its first: with the same bits, exact records and files."""
    plugin = subject.make()
    first = subject.fit(plugin)
    files = read_files(subject, first.run_dir)
    others = read_files(subject, subject.watched_fit.fit_record.run_dir)
    for place in PLACES:
        _fail_to_resume(subject, plugin, first, place)
    second = subject.fit(plugin)
    difference = find_difference(get_state_and_records(first), get_state_and_records(second))
    new_files = read_files(subject, second.run_dir)
    for name, content in files.items():
        # Files with times in them differ between any two runs.
        is_exact = others.get(name) == content
        if not difference and is_exact and new_files.get(name) != content:
            difference = f"{name} in the run directory has another content"
    if difference:
        raise CheckError(
            "a fit with an instance whose last starts failed, by another plugin, is not like its "
            f"first: {difference}. Keep what belongs to one fit in fg.PerFit(...), which begins "
            "with each fit, whatever became of the one before"
        )


def check_shared(subject: PluginUnderTest) -> None:
    """Two fits with an instance each, one in the middle of the other, are as they are alone. One
    instance in both is refused."""
    first = get_state_and_records(subject.first_fit)
    plugin = subject.make()
    within = _FitWithin(subject, plugin)
    outer = subject.fit(plugin, others=[within])
    if not within.is_refused:
        raise CheckError("one instance takes part in two fits at once")
    for name, record in (("within another", within.record), ("around another", outer)):
        assert record is not None
        difference = find_difference(first, get_state_and_records(record))
        if difference:
            raise CheckError(
                f"a fit {name}, each with an instance of its own, is not as it is alone: "
                f"{difference}. What an instance keeps belongs into its own attributes, not into "
                "the class or the module"
            )


def _fail_to_resume(subject: PluginUnderTest, plugin: Any, first: FitRecord, place: str) -> None:
    """Resume a fit with an instance, and have another plugin fail.

    Args:
        subject: the plugin that is checked.
        plugin: the instance.
        first: the fit.
        place: the hook in which it fails.
    """
    try:
        subject.fit(
            plugin,
            run_dir=first.run_dir,
            memory=InMemoryCheckpointer(dict(first.memory.checkpoints)),
            resume=HALF,
            others=[_make_failing_plugin(place)],
        )
    except _StartError:
        return
    except _StepTakenError as error:
        raise AssertionError(
            f"{place} is not called before the first step: name it in EVENTS_AFTER_A_STEP"
        ) from error
    raise CheckError(f"a fit starts though another plugin raises an exception in {place}")


class _StartError(Exception):
    pass


class _StepTakenError(Exception):
    pass


def _make_failing_plugin(place: str) -> Any:
    """Return a plugin that raises an exception in a hook, after all other plugins.

    Args:
        place: the hook.
    """

    @fg.hookimpl
    def fail(_: Any) -> None:
        raise _StartError(f"on purpose, in {place}")

    def end_after_step(run: fg.Run) -> None:
        raise _StepTakenError(f"step {run.step} was taken")

    @fg.hookimpl
    def register_actions(_: Any) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("end", fg.Every(1), end_after_step)]

    members = {
        # The checkpointer has the loggers go back to the checkpoint first.
        "after": (InMemoryCheckpointer.plugin_name,),
        "register_actions": register_actions,
        place: fail,
    }
    return type("FailingStart", (), members)()


@dataclass(eq=False)
class _FitWithin:
    """Runs another fit in the middle of one.

    Attributes:
        subject: the plugin that is checked.
        plugin: the instance that takes part in the outer fit.
        is_refused: whether that instance may not take part in the inner one.
        record: the inner fit, with another instance.
    """

    subject: PluginUnderTest
    plugin: Any
    is_refused: bool = field(default=False, init=False)
    record: FitRecord | None = field(default=None, init=False)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("fit", fg.At(HALF - 1), self._fit)]

    def _fit(self, run: fg.Run) -> None:
        try:
            self.subject.fit(self.plugin)
        except PluginError:
            self.is_refused = True
        self.record = self.subject.fit(self.subject.make())
