"""What a plugin schedules, and what its actions return."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fulgurite._src.redact import redact_text
from fulgurite._src.tracebacks import hide_constructor_frames
from fulgurite._src.training.state import TrainState
from fulgurite._src.triggers import Trigger, as_trigger
from fulgurite.errors import ConfigurationError, check_name

ActionStage = Literal["evaluate", "decide", "log", "act", "save"]
STAGES: tuple[ActionStage, ...] = ("evaluate", "decide", "log", "act", "save")
"""The order in which the actions of one step run."""


@dataclass(frozen=True)
class StopTraining:
    """What an action returns to end training at this step, as if it were the planned end.

    Example:
        def stop_at_low_loss(run):
            if run.metrics["train"]["loss"] < 0.1:
                return fg.StopTraining("the loss is small")


        # In the stage `act`, in which the window that ends at this step is known.
        stop = fg.ScheduledAction("stop", 100, stop_at_low_loss)
    """

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason:
            raise ConfigurationError(
                f"the reason to stop is {self.reason!r}; it must be a non-empty string"
            )
        # It stands in checkpoints and messages, and may be the text of an error.
        object.__setattr__(self, "reason", redact_text(self.reason))


@dataclass(frozen=True)
class ReplaceState:
    """What an action returns to continue from another state of the same structure, such as one that
    was kept at an earlier step. The run keeps its number of updates. It keeps its open metric
    window and what was not finite, too, unless the state is one of the same step.

    Example:
        def reset_optimizer(run):
            opt_state = run.update_rule.init(run.state.module)
            return fg.ReplaceState(run.state.replace(opt_state=opt_state))


        reset = fg.ScheduledAction("reset", fg.At(500), reset_optimizer, stage="decide")
    """

    state: TrainState


Action = Callable[..., Any]
"""`action(run)`, called with the `Run`, returns `StopTraining`, `ReplaceState` or None. The actions
of an `ActionSchedule` get and return anything."""


@hide_constructor_frames
@dataclass(frozen=True)
class ScheduledAction:
    """An action of a plugin and when it runs.

    Example:
        class Notes:
            @fg.hookimpl
            def register_actions(self):
                return [fg.ScheduledAction("note", fg.Every(100), self.note)]

            def note(self, run):
                print(run.step, run.metrics["train"])

    Attributes:
        name: unique within the plugin; errors, timings and `ctx.is_due` call it `PLUGIN.NAME`.
        trigger: when it runs; an int is `Every(n)`, a str the full name of another action, with
            which it runs: `log`, or `PLUGIN.NAME` as in `evaluator:test.evaluate`.
        action: `action(run)`; may return `StopTraining` or `ReplaceState`. None, in stage `log`,
            only closes the metric window.
        stage: actions at one step run in the order of `STAGES`; what comes before `save` is saved.
            In `decide` evaluations of this step are known, and metrics of training are those of the
            window before; in `act` they are those of the window that ends here, if one does.
        after, before: names of actions of the same stage that it runs after or before; `*` stands
            for all others.
    """

    name: str
    trigger: Trigger | int | str
    action: Action | None
    stage: ActionStage = "act"
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name, "ScheduledAction: name")
        if not isinstance(self.trigger, str):
            object.__setattr__(self, "trigger", as_trigger(self.trigger))
        if self.stage not in STAGES:
            raise ConfigurationError(
                f"ScheduledAction {self.name!r}: stage is {self.stage!r}; "
                f"there are {', '.join(STAGES)}"
            )
        only_closes_window = self.action is None and self.stage == "log"
        if not callable(self.action) and not only_closes_window:
            raise ConfigurationError(
                f"ScheduledAction {self.name!r}: an action is called with the run; "
                f"not {self.action!r}"
            )
        for option, names in (("after", self.after), ("before", self.before)):
            if not isinstance(names, tuple):
                raise ConfigurationError(
                    f"ScheduledAction {self.name!r}: {option} must be a tuple of names, "
                    f"not {names!r}"
                )
