"""What plugins see of a run, what they can ask of it, and what is left of it in the end."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import equinox as eqx
import jax

from fulgurite.accounts import Accounts
from fulgurite.errors import ConfigurationError, PluginError, StateError, did_you_mean
from fulgurite.feed import Feed
from fulgurite.records import History, Record, RecordKind, RecordStream, kept
from fulgurite.runs import Snapshot
from fulgurite.triggers import Span, Trigger, as_trigger

if TYPE_CHECKING:
    from fulgurite.loop import Loop
    from fulgurite.state import TrainState

Phase = Literal["evaluate", "decide", "log", "act", "save"]
PHASES: tuple[Phase, ...] = ("evaluate", "decide", "log", "act", "save")


@dataclass(frozen=True)
class Stop:
    """What an action returns to end training at this step, as if it were the planned end."""

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason:
            raise ConfigurationError(f"the reason to stop is {self.reason!r}; it must be a non-empty string")


@dataclass(frozen=True)
class Replace:
    """What an action returns to continue from another state of the same structure, such as one kept at an earlier step.
    The run keeps its number of updates and its open metric window."""

    state: "TrainState"


Action = Callable[["Run"], "Stop | Replace | None"]


@dataclass(frozen=True)
class Scheduled:
    """An action of a plugin and when it runs.

    Attributes:
        name: unique within the plugin; errors, accounts and `ctx.due` call it `PLUGIN.NAME`.
        trigger: when it runs; an int is `Every(n)`.
        action: `action(run)`; may return `Stop` or `Replace`. None, in phase `log`, only closes the window.
        phase: actions at one step run in the order of `PHASES`; what `decide` does is saved.
        after, before: names of actions of the same phase that it runs after or before.
    """

    name: str
    trigger: Trigger | int
    action: Action | None
    phase: Phase = "act"
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"Scheduled: name is {self.name!r}; it must be a non-empty string")
        object.__setattr__(self, "trigger", as_trigger(self.trigger))
        if self.phase not in PHASES:
            raise ConfigurationError(f"Scheduled {self.name!r}: phase is {self.phase!r}; there are {', '.join(PHASES)}")
        if not callable(self.action) and (self.action is not None or self.phase != "log"):
            raise ConfigurationError(f"Scheduled {self.name!r}: an action is called with the run; not {self.action!r}")
        for key, value in (("after", self.after), ("before", self.before)):
            if not isinstance(value, tuple):
                raise ConfigurationError(f"Scheduled {self.name!r}: {key} must be a tuple of names, not {value!r}")


@dataclass
class Result:
    """What a fit returns.

    Attributes:
        module: the trained module; it shares its arrays with `state`, so a fit from `state` consumes it.
        model_state: its `eqx.nn.State`, or None.
        state: to continue training: `engine.fit(data=data, state=result.state)`.
        history: the exact scalars of the run.
        metrics: the newest metrics by source: `metrics["train"]`, `metrics["test"]`.
        accounts: where the wall time went.
        stopped: None at the planned end, else why the run stopped earlier: `SIGINT`, `SIGTERM`, or a plugin's reason.
        failed: sinks that failed, by plugin name, and evaluators that were not required, as `evaluate.NAME`, with the
            reason.
        notices: what the run had to say.
    """

    module: Any = field(repr=False)
    model_state: eqx.nn.State | None = field(repr=False)
    state: "TrainState" = field(repr=False)
    history: History
    metrics: dict[str, dict[str, Any]]
    accounts: Accounts = field(repr=False)
    stopped: str | None
    failed: dict[str, str]
    notices: list[str]


class Run:
    """A read-only view of a running fit, valid during the call that receives it.

    Attributes:
        engine: the engine of this run.
        rule: how a batch becomes an update.
        accounts: where the wall time went so far.
        directory: the run's directory, if it has one.
        attempt: which start of the run this is, from 1.
        manifest: a description of this run, as JSON: see `fulgurite.manifest`.
    """

    def __init__(self, loop: "Loop") -> None:
        self._loop = loop
        self.engine: Final = loop.engine
        self.rule: Final = loop.program.rule
        self.accounts: Final = loop.engine.plugins.accounts
        self.directory: Final = loop.engine.run
        self.attempt: Final = loop.emitter.attempt
        self.manifest: Final = loop.manifest

    @property
    def step(self) -> int:
        """The number of updates dispatched to the device; reading any of their results waits for them."""
        return self._loop.step

    @property
    def span(self) -> Span:
        """Origin, end (as far as it is known) and epoch ends of this fit."""
        return self._loop.span

    @property
    def state(self) -> "TrainState":
        """The state after `step` updates. The next step consumes its arrays: copy any that you keep.

        Waits for the device to check that the state is finite, and raises `NonFiniteError` if it is not.
        """
        if not self._loop.between_steps:
            raise StateError("run.state is valid only during the call that `run` was given to; copy what you need")
        return self._loop.state()

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """The newest metrics by source: `metrics["train"]["loss"]`, `metrics["test"]["accuracy"]`. Waits for any that
        are still being computed, so decisions based on them do not depend on timing."""
        self._loop.emitter.flush(wait=True)
        return self._loop.metrics

    @property
    def history(self) -> History:
        """The exact scalars so far; waits as `metrics` does."""
        self._loop.emitter.flush(wait=True)
        return self._loop.emitter.history

    @property
    def resumed(self) -> bool:
        """Whether this fit resumes from a checkpoint and host states were restored; otherwise plugins start afresh."""
        return self._loop.resumed is not None

    @property
    def feed(self) -> Feed:
        """Where the batches come from."""
        return self._loop.feed

    @property
    def emitted(self) -> int:
        """How many records this process has emitted so far."""
        return self._loop.emitter.emitted

    @property
    def stopped(self) -> str | None:
        """Why training is about to stop before its planned end, or None."""
        return self._loop.stopped

    def emit(self, kind: RecordKind, source: str, values: dict[str, Any], *, stream: RecordStream = "exact") -> None:
        """Passes a record of this step to the sinks, after those already emitted. Use `exact` only for values that
        depend on program, configuration, seed and data alone, so never for an action by the clock. Device arrays are
        copied to the host in the background; other values are copied at once."""
        if stream not in get_args(RecordStream):
            raise PluginError(f"run.emit knows no stream {stream!r}. {did_you_mean(stream, get_args(RecordStream))}")
        values, step, stream = kept(kind, source, values), self.step, stream if self._loop.exact else "telemetry"
        arrays = [leaf for leaf in jax.tree.leaves(values) if isinstance(leaf, jax.Array)]
        self._loop.emitter.later(
            arrays, lambda: Record(kind, source, step, jax.device_get(values) if arrays else values, stream)
        )

    def show(self) -> None:
        """Emits the media of the newest step; the action of the scheduled `media.show`."""
        self._loop.show()

    def request_stop(self, reason: str) -> None:
        """Asks to stop training before its planned end, as a signal does, once all processes have agreed: for a reason
        that only this process sees, such as a file. A decision based on metrics returns `Stop` instead."""
        self._loop.request_stop(Stop(reason).reason)

    def evaluate(self, name: str) -> dict[str, Any]:
        """Runs the evaluation `name` on the current state, emits its metrics and returns them."""
        return self._loop.evaluate(name)

    def save(self) -> None:
        """Asks the checkpointer to save: at once in the phase `save`, before it at the end of the step's actions."""
        self._loop.save()

    def snapshot(self) -> Snapshot:
        """Everything needed to continue from here."""
        return self._loop.snapshot()
