"""Check of actions that are interrupted in their middle."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import fulgurite as fg
from fulgurite.plugins import EvaluationResult

from fulgurite_testing.compare import find_difference
from fulgurite_testing.events import EventRecorder
from fulgurite_testing.memory import InMemoryCheckpointer
from fulgurite_testing.run_checks import format_records, format_size, read_files
from fulgurite_testing.subject import CheckError, FitRecord, PluginUnderTest, format_error
from fulgurite_testing.watch import watch_actions

STAGES = ("evaluate", "decide", "log", "act")
"""The stages of the actions that are interrupted: those whose effects are saved."""


class Interruption(Exception):
    """Ends an action, as a failing disk would."""


def check_interruptions(subject: PluginUnderTest) -> None:
    """A run each of whose actions is interrupted once, after it changed what it keeps on the host
    and before it emits a record, and which is resumed with a new instance each time, has the bits,
    the exact records, the host state and the files of a run that was not interrupted."""
    if "register_actions" not in subject.hooks or "save_checkpoint" in subject.hooks:
        return
    num_calls = Counter[str]()

    def count_call(name: str, action: Callable[[Any], Any], run: Any) -> Any:
        num_calls[name] += 1
        return action(run)

    whole = subject.fit(watch_actions(subject.make(), count_call, STAGES), others=[SaveEachStep()])
    interrupter = Interrupter({name: number // 2 + 1 for name, number in num_calls.items()})
    resumed, records = _fit_with_interruptions(subject, interrupter)
    difference = find_difference(
        (whole.result.state, format_records(whole.events.list_exact_records())),
        (resumed.result.state, format_records(records)),
    ) or _find_difference_on_host(subject, whole, resumed)
    if difference:
        actions = ", ".join(repr(name) for name in interrupter.interrupted)
        raise CheckError(
            f"a run that was interrupted in the middle of its action {actions}, and resumed with "
            f"a new instance, is not the one that was not interrupted: {difference}. The action is "
            "done again, from the host state before it: what it changes on the host belongs into "
            "get_host_state and set_host_state, and files are written so that writing them again "
            "changes nothing"
        )


@dataclass(eq=False)
class Interrupter:
    """Interrupts each action once.

    Attributes:
        numbers: which call of an action is interrupted, counted from 1, by its name.
        interrupted: the names of the actions that were.
        last_step: where the last one of them was.
    """

    numbers: dict[str, int]
    interrupted: list[str] = field(default_factory=list)
    last_step: int | None = None
    _num_calls: Counter[str] = field(default_factory=Counter)

    def call_action(self, name: str, action: Callable[[Any], Any], run: fg.Run) -> Any:
        """Call an action, and interrupt it if it is its turn.

        Args:
            name: of the action.
            action: called with the run.
            run: the run.
        """
        self._num_calls[name] += 1
        if name in self.interrupted or self._num_calls[name] != self.numbers[name]:
            return action(run)
        self.interrupted.append(name)
        self.last_step = run.step
        num_records = run.num_records
        answer = action(InterruptingRun(run))
        if run.num_records > num_records:
            # It let the engine emit a record, and what has been emitted is not done again.
            return answer
        raise Interruption(f"the action {name!r} is interrupted at its end")


class InterruptingRun(fg.Run):
    """A run that interrupts what uses it, at its first record or evaluation."""

    def __init__(self, run: fg.Run) -> None:
        vars(self).update(vars(run))

    def run_evaluation(self, name: str, state: fg.TrainState) -> EvaluationResult:
        """Run an evaluation that ends before its first batch, as after a signal.

        Args:
            name: of the evaluation.
            state: the train state to evaluate.
        """
        self.request_stop("interrupted")
        return super().run_evaluation(name, state)

    def _interrupt(self, *_: Any, **__: Any) -> NoReturn:
        raise Interruption("the action is interrupted at its first record")

    log_scalars = log_media = log_text = log_config = notify = emit_media = _interrupt
    report_evaluation = _interrupt


class SaveEachStep:
    """Saves at each step, so that what plugins do as they are saved is the same in every run."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("save", 1, fg.Run.save, stage="save")]


@dataclass(frozen=True, eq=False)
class SavingRecorder(EventRecorder):
    """Keeps the records, and saves a run that an exception ends.

    Attributes:
        memory: where it is saved.
    """

    memory: InMemoryCheckpointer = field(default_factory=InMemoryCheckpointer)
    plugin_name = "saving_recorder"

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Forget the checkpoint that the run continues from, so that its step is saved again."""
        self.memory.checkpoints.pop(run.step, None)

    @fg.hookimpl
    def on_exception(self, run: fg.Run) -> None:
        """Save."""
        run.save()


def _fit_with_interruptions(
    subject: PluginUnderTest, interrupter: Interrupter
) -> tuple[FitRecord, list[fg.Record]]:
    """Return the last of the fits that make up a run with interruptions, and the exact records of
    all of them.

    Args:
        subject: the plugin.
        interrupter: interrupts its actions.
    """
    run_dir = subject.create_run_dir()
    memory = InMemoryCheckpointer()
    records: list[fg.Record] = []
    while True:
        num_interrupted = len(interrupter.interrupted)
        recorder = SavingRecorder(memory=memory)
        fit_record = None
        try:
            fit_record = subject.fit(
                watch_actions(subject.make(), interrupter.call_action, STAGES),
                run_dir=run_dir,
                memory=memory,
                resume=max(memory.checkpoints, default=None),
                others=[recorder, SaveEachStep()],
            )
        except Exception as error:
            if len(interrupter.interrupted) == num_interrupted:
                raise
            if interrupter.last_step not in memory.checkpoints:
                raise CheckError(
                    "a run that was interrupted in the middle of its action "
                    f"{interrupter.interrupted[-1]!r} could not be saved: {format_error(error)}"
                ) from error
        records += recorder.list_exact_records()
        if fit_record is not None and len(interrupter.interrupted) == num_interrupted:
            return fit_record, records


def _find_difference_on_host(
    subject: PluginUnderTest, whole: FitRecord, resumed: FitRecord
) -> str | None:
    """Return None if two runs leave the same host state and files, as far as these do not differ
    between any two runs, else a description of the first difference.

    Args:
        subject: the plugin.
        whole: the run that was not interrupted.
        resumed: the last fit of the one that was.
    """
    first = subject.first_fit
    if "get_host_state" in subject.hooks:
        # As JSON, in which a tuple is a list and the members of an object have no order.
        states = [
            json.loads(json.dumps(fit.plugin.get_host_state())) for fit in (first, whole, resumed)
        ]
        if states[0] == states[1] != states[2]:
            return f"get_host_state returns {states[1]} and {states[2]}"
    first_files, files, resumed_files = (
        read_files(subject, fit.run_dir) for fit in (first, whole, resumed)
    )
    for name, content in files.items():
        if first_files.get(name) == content != resumed_files.get(name):
            size = format_size(resumed_files.get(name, b""))
            return f"{name} in the run directory holds {format_size(content)} and {size}"
    return None
