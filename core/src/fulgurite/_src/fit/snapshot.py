"""References to checkpoints, and what a checkpoint holds."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from fulgurite._src.fit.records import Record, check_json_value
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.record_names import find_fault
from fulgurite._src.tracebacks import hide_constructor_frames
from fulgurite._src.training.state import TrainState
from fulgurite._src.tree.paths import parse_path
from fulgurite._src.triggers import StepRange
from fulgurite.errors import (
    CheckpointError,
    ConfigurationError,
    check_name,
    check_one_of,
    set_ints,
)

SHARED_HOST_STATE = "fulgurite.shared"
"""Where a snapshot holds `run.shared`, among the host states of plugins."""


@runtime_checkable
class PathLike(Protocol):
    """A path that is not a string, like `os.PathLike`; the core itself opens none."""

    def __fspath__(self) -> str: ...


@hide_constructor_frames
@dataclass(frozen=True)
class CheckpointRef:
    """A reference to a checkpoint, which the active checkpointer resolves.

    Example:
        best = fg.CheckpointRef("runs/digits", step="best")
        encoder = fg.CheckpointRef("runs/digits", map={"module.encoder": "module.backbone"})

    Attributes:
        path: of the run directory, or of a checkpoint in it; None is the run itself, wherever its
            checkpointer keeps them.
        step: a step, the newest one, or the best by the checkpointer's metric.
        optional: whether it is fine that there is none.
        map: to read only a part: paths of the new state, each with the path in the checkpoint that
            fills it, such as `{"module.encoder": "module.backbone"}`. None is everything.
        strict: whether every array below the paths of `map` must have its counterpart, on both
            sides, with the same shape and dtype. Otherwise what has the shape is read,
            floating-point numbers in the dtype of the model, and a warning lists the rest, which
            stays as the model makes it; there must be a path in common for each pair.
        view: the module view to evaluate or to predict with, such as `averaged`. None for the
            module that was trained, and of the best checkpoint for the weights that were measured.
        hyperparameters: what a fit that resumes takes of those that `optax.inject_hyperparams`
            keeps in the optimizer's state: the values of the `checkpoint`, or those with which the
            `program` begins now, whatever became of them since.
        dtype: `match` to read floating-point numbers in the dtype of the model; None where it must
            be the same on both sides. A run resumes with its own dtypes.
    """

    path: str | PathLike | None
    step: int | Literal["latest", "best"] = "latest"
    optional: bool = False
    map: dict[str, str] | None = None
    strict: bool = True
    view: str | None = None
    hyperparameters: Literal["checkpoint", "program"] = "checkpoint"
    dtype: Literal["match"] | None = None

    def __post_init__(self) -> None:
        if self.view is not None:
            check_name(self.view, "CheckpointRef: view")
        set_ints(self, "step")
        if self.step not in ("latest", "best") and type(self.step) is not int:
            raise ConfigurationError(
                f"CheckpointRef: step is {self.step!r}; it must be a step, 'latest' or 'best'"
            )
        if not isinstance(self.path, str | PathLike | None):
            raise ConfigurationError(
                f"{type(self.path).__name__} is given where a checkpoint is meant: path must be "
                "that of a run or of a checkpoint, or a CheckpointRef. A module to begin with is "
                "the first argument of fit"
            )
        if not isinstance(self.map, dict | None):
            raise ConfigurationError(
                f"CheckpointRef: map is {type(self.map).__name__}; it must be a dictionary of "
                "paths to paths, such as {'module.encoder': 'module.encoder'}"
            )
        if self.dtype is not None:
            check_one_of(self.dtype, ("match",), "CheckpointRef: dtype")
        check_one_of(
            self.hyperparameters, ("checkpoint", "program"), "CheckpointRef: hyperparameters"
        )
        for path in (*(self.map or ()), *(self.map or {}).values()):
            parse_path(path)


CheckpointSource = CheckpointRef | str | PathLike
"""A reference to a checkpoint, or the path of a run or of a checkpoint."""
InitFrom = CheckpointSource | None
"""What `Engine.fit(init_from=...)` takes."""
Resume = CheckpointSource | int | None
"""What `Engine.fit(resume=...)` takes: besides, a step, "auto", "latest", "best" and "never"."""


class TrainingLength(NamedTuple):
    """How long a fit trains: a number of steps or of epochs; the other is None.

    Example:
        class Announcement:
            @fg.hookimpl
            def on_fit_start(self, run):
                print("training for", run.requested_length.describe())


        engine = fg.Engine(steps=100, plugins=[Announcement()])

    Attributes:
        steps: the number of updates.
        epochs: the number of passes over the data.
    """

    steps: int | None = None
    epochs: int | None = None

    def describe(self) -> str:
        """Return the length in words, such as `100 steps`."""
        return f"{self.epochs} epochs" if self.steps is None else f"{self.steps} steps"


@dataclass(frozen=True)
class Snapshot:
    """Everything that a run needs to continue from where it was.

    Example:
        class ResumeNotice:
            @fg.hookimpl
            def on_fit_start(self, run):
                if run.resumed_from is not None:
                    print("resumed at step", int(run.resumed_from.state.step))

    Attributes:
        state: the train state.
        step_range: of the fit that it belongs to.
        data_position: of the data, after the batch of the last update.
        pending_actions: the actions that were due at this step and did not come to an end.
        host_states: what plugins keep on the host: `{"version": int, "state": JSON}` by plugin
            name.
        metrics: the newest metrics by source.
        requested_length: how long the fit was to train, if that is known.
        history: the exact scalars of the run that `run.history` holds, oldest first.
        stop_reason: why an action has ended training at this step, which is the planned end since.
        is_latest: whether its run has no later one.
        run_dir: of the run that it was read from; None is the run itself.
        num_attempts: how many attempts the run itself had when this was read, if that is known.
        module_view: the weights by which it is the best, if that is why it was read.
        data: of the run, in words; None where nobody knows.
    """

    state: TrainState
    step_range: StepRange
    data_position: Any
    pending_actions: tuple[str, ...] = ()
    host_states: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    requested_length: TrainingLength | None = None
    history: tuple[Record, ...] = ()
    stop_reason: str | None = None
    is_latest: bool = True
    run_dir: str | PathLike | None = None
    num_attempts: int | None = None
    module_view: str = "current"
    data: str | None = None


def read_shared(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """Return `run.shared` as a snapshot holds it; raise `CheckpointError` if it is not such."""
    entry = snapshot.host_states.get(SHARED_HOST_STATE)
    shared = deepcopy(entry["state"]) if entry else {}
    if not isinstance(shared, dict) or not all(isinstance(part, dict) for part in shared.values()):
        raise CheckpointError(
            f"the checkpoint of step {int(snapshot.state.step)} holds {shared!r:.100} as "
            f"run.shared, which is not a dictionary of dictionaries: resume from another checkpoint"
        )
    return shared


@dataclass(frozen=True)
class HostSnapshot:
    """What a run held on the host at a moment, beside its position in the data.

    Attributes:
        host_states: `host_states` of a snapshot: what plugins hold, and what they share as far as
            JSON can hold it.
        metrics: the newest metrics by source.
    """

    host_states: dict[str, Any]
    metrics: dict[str, Any]


def copy_host(
    plugins: PluginManager,
    step: int,
    shared: dict[str, dict[str, Any]],
    metrics: dict[str, dict[str, Any]],
) -> HostSnapshot:
    """Return what a run holds on the host now.

    Args:
        plugins: those whose host states are taken.
        step: the run's step, for errors.
        shared: what plugins share.
        metrics: the newest metrics by source.
    """
    host_states: dict[str, Any] = {}
    answers = plugins.hooks.get_host_state.each(step, accept=lambda _, state: deepcopy(state))
    for plugin, state in answers:
        version = plugin.options.state_version
        host_states[plugin.name] = {"version": version, "state": state}
    shared_json = {
        name: _select_json(values) for name, values in shared.items() if find_fault(name) is None
    }
    if any(shared_json.values()):
        host_states[SHARED_HOST_STATE] = {"version": 1, "state": shared_json}
    return HostSnapshot(host_states, deepcopy(metrics))


def has_logger_with_host_state(plugins: PluginManager) -> bool:
    """Return whether a plugin receives records and has a host state, which may change with each."""
    with_state = {plugin.name for plugin in plugins.hooks.get_host_state.plugins}
    return any(plugin.name in with_state for plugin in plugins.hooks.log_record.plugins)


def _select_json(values: dict[str, Any]) -> dict[str, Any]:
    """Return those of the values that JSON can hold, as they are now."""
    selected = {}
    for name, value in values.items():
        try:
            check_json_value({name: value}, "run.shared")
        except ConfigurationError:
            continue
        selected[name] = deepcopy(value)
    return selected
