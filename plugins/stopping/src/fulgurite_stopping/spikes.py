"""The plugin that notices when the loss of a single step is far above those before it."""

import math
from dataclasses import KW_ONLY, asdict, dataclass, field
from numbers import Real
from typing import Any, Literal, get_args

import fulgurite as fg
import jax
from fulgurite.errors import (
    CheckpointError,
    ConfigurationError,
    ModelError,
    check_one_of,
    set_ints,
)
from fulgurite.plugins import hide_constructor_frames
from jaxtyping import Array

from fulgurite_stopping.progress import read_progress
from fulgurite_stopping.rewind import SECONDS_TO_WAIT, read_trained
from fulgurite_stopping.watch import SpikeState, WatchedUpdate

SpikeAction = Literal["warn", "skip", "stop", "rewind"]


@dataclass
class _Progress:
    """What a `SpikeDetection` has done so far.

    Attributes:
        num_spikes: the spikes that it has acted on.
        looked_at: the last two steps at which it looked.
        saved_steps: the steps of the checkpoints, oldest first.
    """

    num_spikes: int = 0
    looked_at: list[int] = field(default_factory=lambda: [0, 0])
    saved_steps: list[int] = field(default_factory=list)


@hide_constructor_frames
@dataclass(frozen=True, eq=False)
class SpikeDetection(fg.Plugin):
    """Looks in every step whether the loss is far above the last `window` losses, and acts on it.

    A spike is above their median by more than `factor - 1` times their size, which is the median of
    their absolute values. Where losses are positive, that is more than `factor` times the median;
    a constant loss of -5 has spikes above 5 with `factor=3`.

    It looks in the compiled step. The number of spikes so far is logged as
    `train/spike_detection/spikes`, and acted on at the next log step, so that nothing waits for the
    device; `skip` acts at once.

    Example:
        from fulgurite_stopping import SpikeDetection

        engine = fg.Engine(
            steps=200, plugins=[SpikeDetection(factor=3, window=20)], on_nonfinite="skip"
        )
        result = engine.fit(model, data)

    Attributes:
        monitor: `train/loss`, or `train/NAME` of a single loss term.
        factor: how far above the median a spike is, as said above.
        window: the number of losses of which the median is taken; there are no spikes before as
            many steps.
        action: `warn` tells of a spike. `skip` leaves the update out, as one that is not finite,
            and needs `Engine(on_nonfinite="skip")`. `stop` ends training. `rewind` continues with
            the weights, the model state and the optimizer state of a checkpoint before the
            spike, the newest that is still there; steps and data continue, so the batches since
            then are not seen again.
    """

    plugin_name = "spike_detection"
    kept_on_skip = True

    monitor: str = "train/loss"
    factor: float = 3.0
    window: int = 100
    _: KW_ONLY
    action: SpikeAction = "warn"
    _progress = fg.PerFit(_Progress)
    _num_skipped = fg.PerFit(int)

    def __post_init__(self) -> None:
        if not isinstance(self.monitor, str) or not self.monitor.startswith("train/"):
            raise ConfigurationError(
                f"SpikeDetection: monitor is {self.monitor!r}; write train/NAME of a loss, as in "
                "train/loss"
            )
        if not isinstance(self.factor, Real) or not 1 < self.factor < math.inf:
            raise ConfigurationError(
                f"SpikeDetection: factor is {self.factor!r}; it must be a number above 1"
            )
        set_ints(self, "window")
        if type(self.window) is not int or self.window < 1:
            raise ConfigurationError(
                f"SpikeDetection: window is {self.window!r}; it must be a positive integer"
            )
        check_one_of(self.action, get_args(SpikeAction), "SpikeDetection: action")

    @fg.hookimpl
    def init_plugin_state(self) -> SpikeState:
        """Return an empty window of losses."""
        return SpikeState.init(self.window)

    @fg.hookimpl
    def wrap_update_rule(self, update_rule: fg.UpdateRule) -> fg.UpdateRule:
        """Return a rule that looks at the loss of each step."""
        return WatchedUpdate(
            update_rule,
            self.registered_name,
            self.factor,
            self.find_loss,
            leaves_out=self.action == "skip",
        )

    @fg.hookimpl
    def step_metrics(self, state: fg.TrainState) -> dict[str, Any]:
        """Log the number of spikes so far."""
        spikes = state.plugin_states[self.registered_name].num_spikes
        return {"spikes": fg.metrics.LastValue.from_values(spikes)}

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Act on the spikes that were logged, and tell of those that nobody acts on any more."""
        return [
            fg.ScheduledAction("look", "log", self.act, "decide"),
            fg.ScheduledAction("look_last", fg.AtEnd(), self.report_last, "act"),
        ]

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Begin behind the spikes that the state has seen, as the one that a fit continues from."""
        if not run.is_resumed:
            num_spikes = int(run.state.plugin_states[self.registered_name].num_spikes)
            object.__setattr__(self, "_progress", _Progress(num_spikes, [run.step, run.step]))
        if self.action == "skip" and run.engine.on_nonfinite != "skip":
            raise ConfigurationError(
                "SpikeDetection: action='skip' leaves an update out as one that is not finite: "
                "give Engine(on_nonfinite='skip') too"
            )

    @fg.hookimpl
    def on_save(self, step: int) -> None:
        """Note that there is a checkpoint."""
        self._note_checkpoint(step)

    @fg.hookimpl
    def on_restore(self, step: int) -> None:
        """Note the checkpoint that the run resumes from."""
        self._note_checkpoint(step)

    @fg.hookimpl
    def get_host_state(self) -> dict[str, Any]:
        """Return what was acted on."""
        return asdict(self._progress)

    @fg.hookimpl
    def set_host_state(self, state: Any, version: int) -> None:
        """Go on from a checkpoint.

        Args:
            state: the value of `get_host_state`.
            version: of the plugin that wrote it.
        """
        progress = read_progress(_Progress, state)
        if len(progress.looked_at) != 2:
            raise ValueError(f"looked_at is {progress.looked_at!r:.100}, which should be two steps")
        object.__setattr__(self, "_progress", progress)

    def find_loss(self, output: fg.Output) -> Array:
        """Return the loss that is monitored."""
        name = self.monitor.partition("/")[2]
        loss = output.loss if name == "loss" else output.losses.get(name)
        if loss is None:
            raise ModelError(
                f"SpikeDetection: there is no loss {name!r}; there are "
                f"{', '.join(['loss', *output.losses])}"
            )
        return loss

    def act(self, run: fg.Run) -> fg.StopTraining | fg.ReplaceState | None:
        """Act on the spikes that were logged since the last time."""
        progress = self._progress
        before_window, _ = progress.looked_at
        progress.looked_at = [progress.looked_at[1], run.step]
        # Only if there are new ones is it worth to wait for the device.
        message = self._describe_new(run) if self._were_new_logged(run) else None
        if message is None:
            return None
        if self.action == "stop":
            return fg.StopTraining(message)
        if self.action == "rewind":
            return self._rewind(run, before_window, message)
        self._notify(run, message)
        return None

    def report_last(self, run: fg.Run) -> None:
        """Tell of the spikes of the last steps, whatever the action: training has ended."""
        message = self._describe_new(run)
        if message is not None:
            self._notify(run, message)

    def _were_new_logged(self, run: fg.Run) -> bool:
        metrics = run.metrics.get("train", {})
        # A window of which all updates were left out has no metrics but the number of those.
        num_skipped = metrics.get("skipped_steps", 0) if self.action == "skip" else 0
        has_skipped = num_skipped > self._num_skipped
        object.__setattr__(self, "_num_skipped", num_skipped)
        num_logged = metrics.get(f"{self.registered_name}/spikes", 0)
        return has_skipped or num_logged > self._progress.num_spikes

    def _describe_new(self, run: fg.Run) -> str | None:
        """Return a message about the spikes that are new, which count as told from now on; None
        without any."""
        spikes = jax.device_get(run.state.plugin_states[self.registered_name])
        num_new = int(spikes.num_spikes) - self._progress.num_spikes
        if num_new <= 0:
            return None
        self._progress.num_spikes = int(spikes.num_spikes)
        message = (
            f"{self.monitor} rose to {float(spikes.value):.6g} at step {int(spikes.step)}; the "
            f"median before it was {float(spikes.median):.6g}"
        )
        return message if num_new == 1 else f"{message} (the last of {num_new} spikes)"

    def _notify(self, run: fg.Run, message: str) -> None:
        ending = ": the update was left out" if self.action == "skip" else ""
        run.notify(self.plugin_name, f"{message}{ending}")

    def _rewind(self, run: fg.Run, step: int, message: str) -> fg.ReplaceState:
        """Return the state with what was trained up to the last checkpoint before a spike.

        Args:
            run: the run.
            step: an earlier step than that of the spike.
            message: says what happened.
        """
        saved_steps = self._progress.saved_steps
        missing: CheckpointError | None = None
        for saved in reversed([saved for saved in saved_steps if saved <= step]):
            # Checkpoints are written one after the other: all but the newest are complete, or have
            # been removed.
            seconds_to_wait = SECONDS_TO_WAIT if saved == saved_steps[-1] else 0.0
            try:
                state = read_trained(run, saved, seconds_to_wait)
            except CheckpointError as error:
                missing = missing or error
                continue
            # What was saved since then has the spike in it.
            self._progress.saved_steps = [other for other in saved_steps if other <= saved]
            run.notify(
                self.plugin_name, f"{message}: training continues with what it had at step {saved}"
            )
            return fg.ReplaceState(state)
        raise ConfigurationError(
            f"SpikeDetection: {message}. There is no checkpoint before it to go back to: save "
            "more often, with fulgurite_checkpoint.Checkpointer, or keep more of them, by its "
            "max_to_keep"
        ) from missing

    def _note_checkpoint(self, step: int) -> None:
        # Older ones may have been removed.
        steps = [saved for saved in self._progress.saved_steps if saved != step]
        self._progress.saved_steps = sorted([*steps, step])[-100:]
