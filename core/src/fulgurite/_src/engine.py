"""The engine: what a user configures, calls and subclasses."""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Key, PyTree

import fulgurite._src.hookspecs as hookspecs
from fulgurite._src.data.sources import (
    get_split,
)
from fulgurite._src.evaluation.evaluation import (
    Evaluation,
    EvaluationResult,
    MetricFunctions,
    ShouldStop,
    never_stop,
)
from fulgurite._src.evaluation.service import EvaluationService
from fulgurite._src.evaluation.target import apply_module_view
from fulgurite._src.evaluation.totals import EvaluationTotals
from fulgurite._src.execution.executables import keep_compiled_programs
from fulgurite._src.execution.program_cache import ProgramCache
from fulgurite._src.fit.fit import run_fit
from fulgurite._src.fit.manual_loop import ManualLoop
from fulgurite._src.fit.request import check_request
from fulgurite._src.fit.result import FitResult
from fulgurite._src.fit.scheduler import BoundAction, collect_actions
from fulgurite._src.fit.snapshot import CheckpointSource, InitFrom, PathLike, Resume
from fulgurite._src.fit.start import load_weights
from fulgurite._src.foreign_names import (
    DATA_ARGUMENTS,
    ENGINE_ARGUMENTS,
    FIT_ARGUMENTS,
    hint_at_arguments,
)
from fulgurite._src.guards import GuardedEngine
from fulgurite._src.model.context import Context
from fulgurite._src.model.output import Output
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.plugins.plugin import note_engine
from fulgurite._src.plugins.strategy import choose_sharding
from fulgurite._src.rng import DEFAULT, PARAMS, RngStream, RngStreams
from fulgurite._src.sharding import ShardingStrategy
from fulgurite._src.tracebacks import hide_internal_frames
from fulgurite._src.training.compilations import Compilations
from fulgurite._src.training.forward import Step
from fulgurite._src.training.nonfinite import NonFinitePolicy
from fulgurite._src.training.services import Services
from fulgurite._src.training.settings import Settings, StepsPerExecution
from fulgurite._src.training.state import TrainState
from fulgurite._src.training.update import UpdateRule
from fulgurite._src.triggers import StepRange, Trigger
from fulgurite.errors import ConfigurationError

SET_BY_PROGRAMS = frozenset({"config", "program_file", "run_dir"})
"""Attributes that the constructor sets, and a program that knows more of the run may set again."""
SET_ONCE = frozenset(
    {
        "steps",
        "epochs",
        "seed",
        "steps_per_execution",
        "limit_train_batches",
        "on_nonfinite",
        "max_compilations",
        "fast_dev_run",
        "stop_timeout",
        "plugins",
        "actions",
        "device",
        "sharding",
        "evaluations",
        "services",
        "_programs",
        "_manual_loop",
        "_evaluation_service",
    }
)
"""Attributes that only the constructor may set; a subclass that reused one would change the
engine's settings."""


P = ParamSpec("P")
R = TypeVar("R")


def _entry_point(
    method: "Callable[Concatenate[Engine, P], R]",
) -> "Callable[Concatenate[Engine, P], R]":
    """Make a method of the engine compute on the engine's device, with short tracebacks."""

    @hide_internal_frames
    @wraps(method)
    def call(engine: "Engine", *args: P.args, **kwargs: P.kwargs) -> R:
        if engine.device is None:
            return method(engine, *args, **kwargs)
        with jax.default_device(engine.device):
            return method(engine, *args, **kwargs)

    return call


class Engine(GuardedEngine):
    """Compiles and runs training; plugins do everything else.

    Example:
        engine = fg.Engine(epochs=2, log_every=1)
        result = engine.fit(model, data)
        print(result.metrics["train"]["loss"])

    Args:
        steps: the number of updates of a fit. Either this or `epochs` is given, here or to `fit`.
        epochs: the number of passes over the data.
        seed: for every random stream and for the order of the data, unless that has its own.
        plugins: instances, names, names with arguments, and names to leave out; see
            `PluginManager`.
        autoload: whether installed plugins that ask for it are active without being listed.
        run_dir: the run's directory, for plugins that write.
        steps_per_execution: the largest number of steps in one dispatch. `auto` chooses it from the
            traced program, so that small steps are fused; `explain` says what was chosen and why.
            A number overrides that. Each dispatch moves as many batches, however few of its steps
            run. The bits do not depend on it.
        log_every: when the metric window is closed: an interval in steps, and the end; or a
            trigger; None for never.
        on_nonfinite: what to do with a step whose loss, gradient or update is not finite: `raise`;
            `skip` (the step is counted and otherwise discarded; 100 of them in a row are an error,
            looked for where metrics are logged); or `ignore`.
        max_compilations: the largest number of batch shapes in training, and in each evaluation and
            prediction.
        fast_dev_run: a trial of this many steps and as many batches in each evaluation, with
            nothing written.
        limit_train_batches: use at most this many batches of each epoch.
        compilation_cache_dir: a directory in which JAX keeps all that it compiles from now on, for
            the next process: steps, evaluations and what makes the model.
        stop_timeout: seconds after SIGTERM or Ctrl-C for which a data source, a logger or the
            reading of a checkpoint may keep training waiting; then it is abandoned, and the run
            saved without it. A checkpoint that gets no further for so long is abandoned, too.
        device: the one device to compute on, as `jax.Device` or as `"gpu:1"`, `"cpu"`; by default
            that of JAX. Several devices are a plugin's.
    """

    _set_once = SET_ONCE
    _set_by_programs = SET_BY_PROGRAMS
    _foreign_arguments = ENGINE_ARGUMENTS

    @hide_internal_frames
    def __init__(
        self,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        plugins: Iterable[Any] = (),
        autoload: bool = True,
        run_dir: str | PathLike | None = None,
        steps_per_execution: StepsPerExecution = "auto",
        log_every: int | Trigger | None = 50,
        on_nonfinite: NonFinitePolicy = "raise",
        max_compilations: int = 8,
        fast_dev_run: int | None = None,
        limit_train_batches: int | None = None,
        compilation_cache_dir: str | PathLike | None = None,
        device: Any = None,
        stop_timeout: float = 30.0,
    ) -> None:
        _check_overrides(type(self))
        settings = Settings(
            steps=steps,
            epochs=epochs,
            seed=seed,
            steps_per_execution=steps_per_execution,
            log_every=log_every,
            on_nonfinite=on_nonfinite,
            max_compilations=max_compilations,
            fast_dev_run=fast_dev_run,
            limit_train_batches=limit_train_batches,
            compilation_cache_dir=compilation_cache_dir,
            device=device,
            stop_timeout=stop_timeout,
        )
        self.steps, self.epochs = settings.steps, settings.epochs
        self.seed = settings.seed
        self.steps_per_execution: StepsPerExecution = settings.steps_per_execution
        self.limit_train_batches = settings.limit_train_batches
        self.on_nonfinite: NonFinitePolicy = settings.on_nonfinite
        self.max_compilations = settings.max_compilations
        self.fast_dev_run = settings.fast_dev_run
        self.stop_timeout = settings.stop_timeout
        self.config: dict[str, Any] | None = None
        self.program_file: str | None = None
        self.run_dir = run_dir
        if compilation_cache_dir is not None:
            keep_compiled_programs(str(compilation_cache_dir))
        self.plugins = PluginManager(plugins, hookspecs=hookspecs, autoload=autoload)
        self.actions: list[BoundAction] = collect_actions(self.plugins, settings.log_trigger)
        self.sharding: ShardingStrategy = choose_sharding(self.plugins, device)
        self.device = settings.find_device()
        self.services = _build_services(self, settings)
        self._programs = ProgramCache(self.services)
        self._manual_loop = ManualLoop(self.services, self._programs)
        self._evaluation_service = EvaluationService(self.services)
        self.evaluations: dict[str, Evaluation] = self._evaluation_service.evaluations
        note_engine(self.plugins)  # not before: an engine that could not be built has none

    @_entry_point
    @hint_at_arguments(
        FIT_ARGUMENTS,
        "Engine.fit",
        too_many="it trains on one data source, and evaluations are plugins of "
        "fulgurite-evaluators, fg.Engine(plugins=[Evaluator('val', data, every=100)])",
    )
    def fit(
        self,
        model: Any = None,
        data: Any = None,
        *,
        state: TrainState | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        steps_per_execution: StepsPerExecution | None = None,
        resume: Resume = None,
        init_from: InitFrom = None,
    ) -> FitResult:
        """Train, and return the result.

        Args:
            model: a module, a pair of a module and an `eqx.nn.State`, or a callable called as
                `model(key=key)` that returns either. It stays usable. None with `state`.
            data: any iterable of batches, or an object whose attribute `train` is one.
            state: a state to continue from, for `steps` or `epochs` more; consumed.
            steps: used instead of the engine's.
            epochs: used instead of the engine's.
            steps_per_execution: used instead of the engine's.
            resume: the checkpoint to resume from, read by the active checkpointer: `"auto"` (the
                run's newest, if any), `"latest"`, `"best"`, a step, the path of another run, or a
                `CheckpointRef`. `"never"` starts afresh and sets aside what the run directory
                holds; None starts afresh too, but is an error if that holds a checkpoint.
            init_from: a checkpoint with arrays for the new state: its weights, or what
                `CheckpointRef.map` says.

        Raises:
            NonFiniteError: a loss, gradient or update was not finite.
            SaveError: something failed after the last step; its `result` is what was trained.
            DataError: the data ended early or changed its structure.
            PluginError: another fit uses this engine, or an instance of one of its plugins.
            KeyboardInterrupt, SystemExit: Ctrl-C or SIGTERM has stopped the fit before this one;
                see `forget_stop_request`.
            EvaluationInterrupted: one of them stopped this fit within an action of another.
            FulguriteError: any other mistake, most of them before anything is compiled.
        """
        request = check_request(
            self,
            model,
            data,
            state,
            steps=steps,
            epochs=epochs,
            steps_per_execution=steps_per_execution,
            resume=resume,
            init_from=init_from,
        )
        return run_fit(self, self._programs, self._evaluation_service, request)

    @_entry_point
    def init_state(self, model: Any, data: Any) -> TrainState:
        """Return a new train state for `step`, for batches like the first one of `data`.

        Args:
            model: a module, a pair of a module and an `eqx.nn.State`, or a callable that returns
                either.
            data: any data source that can be iterated again, or an object whose `train` is one.
        """
        return self._manual_loop.init_state(model, data)

    @_entry_point
    def step(
        self,
        state: TrainState,
        batch: Any,
        *,
        returns: tuple[str, ...] = (),
        step_range: StepRange | None = None,
    ) -> tuple[TrainState, Output]:
        """Make one update: return the state after it, and the step's loss, losses and metrics.

        It runs the same program as `fit`. Nothing is read from the device, so a step that was not
        finite shows only in `state.nonfinite`; `check_finite(state)` raises an error for it.

        Args:
            state: the state before; consumed.
            batch: a tree of arrays with a leading example axis.
            returns: further fields that the output shall have, of `preds`, `aux`, `grads` and
                `updates`. They are another executable, and copies of arrays that otherwise never
                leave the step.
            step_range: the steps of the fit that this one is of, for update rules that wait for the
                end of an epoch or of training; a loop of one's own has none.
        """
        return self._manual_loop.step(state, batch, returns, step_range)

    @_entry_point
    def check_finite(self, state: TrainState) -> None:
        """Raise `NonFiniteError` if a step up to this state was not finite. Waits for the
        device."""
        self._manual_loop.check_finite(state)

    def iter_batches(
        self, data: Any, *, steps: int | None = None, epochs: int | None = None, start_step: int = 0
    ) -> Iterator[Any]:
        """Yield the batches that `fit` would take, in the same order.

        Args:
            data: any data source, or an object whose `train` is one.
            steps: how many; the engine's by default.
            epochs: how many; the engine's by default, and one where it has neither.
            start_step: the step of the state from which a fit would continue.
        """
        # No entry point: what a generator yields is computed outside of any context. Batches from
        # arrays on the device are on JAX's own device, from which `step` moves them.
        return self._manual_loop.iter_batches(data, steps, epochs, start_step)

    def train_step(
        self, state: TrainState, batch: Any, ctx: Context, update_rule: UpdateRule
    ) -> tuple[TrainState, Output]:
        """Make one update, pure and traced: subclasses override it; `fit` and `step` both use it.

        The engine does the rest: transformed batches, the check that everything is finite,
        `after_update`, metrics, the step count. Useful inside: `self.forward`,
        `fg.compute_gradients`, `update_rule.apply_gradients`.

        Args:
            state: the state before.
            batch: without its mask.
            ctx: the context of the step.
            update_rule: how a batch becomes an update.

        Returns:
            The state with new module, model state and optimizer state, and the output with `grads`.
            The model state is that of the state; plugins see it as `output.model_state`.
        """
        return update_rule(self.forward, state, batch, ctx)

    def forward(
        self, module: Any, batch: Any, ctx: Context, step: Step = "training_step"
    ) -> Output:
        """Run the module's `training_step`, or another step, with all loss terms.

        Args:
            module: the module.
            batch: without its mask.
            ctx: the context of the step.
            step: the name of a method of the module, or a function `step(module, batch, ctx)`.

        Returns:
            The output; its `loss` is the sum of all terms.
        """
        return self.services.forward(module, batch, ctx, step)

    @_entry_point
    @hint_at_arguments(DATA_ARGUMENTS, "Engine.evaluate")
    def evaluate(
        self,
        model: Any,
        data: Any,
        *,
        name: str = "test",
        num_batches: int | None = None,
        metrics: MetricFunctions | None = None,
        losses: MetricFunctions | None = None,
        weights: InitFrom = None,
    ) -> dict[str, Any]:
        """Return the metrics of a model over one epoch of `data`, exact over batches of unequal
        size.

        Args:
            model: a module, a pair of a module and its state, a train state, or a result of `fit`;
                with `weights` also what `fit` takes.
            data: any data source, or an object whose `evaluations[name]` is one.
            name: the name of the evaluation; its random numbers depend on it.
            num_batches: use at most this many batches.
            metrics: used instead of the module's own, see `Evaluation`.
            losses: used instead of the module's own, see `Evaluation`.
            weights: a checkpoint with the weights, or its path; read by the active checkpointer. Of
                the best one those that were measured, such as an average; see `CheckpointRef.view`.
        """
        model = model if weights is None else self.load_weights(model, weights)
        spec = Evaluation(
            name, get_split(data, "evaluations", name), num_batches, metrics=metrics, losses=losses
        )
        return self._evaluation_service.evaluate(_unwrap_result(model), spec)

    @_entry_point
    def evaluate_step(
        self,
        model: Any,
        batch: Any,
        totals: EvaluationTotals | None = None,
        *,
        name: str = "test",
        metrics: MetricFunctions | None = None,
        losses: MetricFunctions | None = None,
    ) -> EvaluationTotals:
        """Evaluate one more batch, in your own loop: `totals.compute()` gives what `evaluate` does
        over all of its batches. Nothing is read from the device until `compute`.

        Args:
            model: as of `evaluate`; may be another one at each step.
            batch: a tree of arrays with a leading example axis, or an `fg.Batch`.
            totals: what the step before returned; None begins an evaluation.
            name: as of `evaluate`, the same at each step.
            metrics: as of `evaluate`, the same at each step.
            losses: as of `evaluate`, the same at each step.
        """
        spec = Evaluation(name, [batch], metrics=metrics, losses=losses)
        return self._evaluation_service.add_to_totals(_unwrap_result(model), spec, totals)

    @_entry_point
    @hint_at_arguments(DATA_ARGUMENTS, "Engine.predict")
    def predict(
        self,
        model: Any,
        data: Any,
        *,
        num_batches: int | None = None,
        weights: InitFrom = None,
        callback: Callable[[PyTree[np.ndarray]], None] | None = None,
    ) -> PyTree[np.ndarray]:
        """Return what the module's `predict_step` returns for every example of `data`, in order
        and without padding.

        Args:
            model: as of `evaluate`.
            data: as of `evaluate`.
            num_batches: as of `evaluate`.
            weights: as of `evaluate`.
            callback: called with the predictions of each batch, which are not kept then.
        """
        model = model if weights is None else self.load_weights(model, weights)
        spec = Evaluation("predict", get_split(data, "predict"), num_batches)
        return self._evaluation_service.predict(_unwrap_result(model), spec, callback)

    @_entry_point
    def load_weights(self, model: Any, weights: CheckpointSource) -> TrainState:
        """Return a train state for `evaluate` and `predict` from a checkpoint, without optimizer
        state. Needs no data.

        Args:
            model: as of `fit`.
            weights: the checkpoint, or its path; read by the active checkpointer. The module is
                that of `CheckpointRef.view`.
        """
        return load_weights(self, model, weights)

    @_entry_point
    def run_evaluation(
        self, name: str, state: TrainState, should_stop: ShouldStop = never_stop
    ) -> EvaluationResult:
        """Return what an evaluation of a plugin gives for a state.

        Args:
            name: of an evaluation that a plugin declared in `register_evaluations`.
            state: the train state; the evaluation chooses its weights.
            should_stop: called before each batch; True gives up.

        Raises:
            EvaluationInterrupted: `should_stop()` was true.
        """
        return self._evaluation_service.run_evaluation(name, state, should_stop)

    @_entry_point
    def get_metric_types(self, state: TrainState, source: str = "train") -> dict[str, type]:
        """Return the class of each metric that a source of records gives, by name. Nothing is
        compiled.

        Args:
            state: a train state, as `init_state` or a fit gives it.
            source: `train`, or an evaluation that a plugin declared in `register_evaluations`.
        """
        return self._evaluation_service.get_metric_types(state, source)

    @_entry_point
    def get_module_view(self, state: TrainState, name: str) -> Any:
        """Return the module that a plugin derives from a state, such as averaged weights.

        Args:
            state: the train state.
            name: under which a plugin gives it in `module_views`.
        """
        return self.apply_module_view(state, name).module

    @_entry_point
    def apply_module_view(self, state: TrainState, name: str) -> TrainState:
        """Return a state with the module that a plugin derives from it, and with the model state
        that belongs to that.

        Args:
            state: the train state.
            name: under which a plugin gives the module in `module_views`.
        """
        return apply_module_view(self.plugins, state, name)

    def explain(self) -> str:
        """Return what the engine has decided for the programs that it built so far: how many steps
        go into one dispatch, and why."""
        return self._programs.explain()

    @_entry_point
    def explain_sharding(self, batch: PyTree) -> str:
        """Return where each array of a batch goes, a line each: which axis is divided over which
        axis of the mesh, on which devices.

        Args:
            batch: a batch as the data source yields it, or its shapes.
        """
        return self.sharding.describe(batch)

    def make_rng_streams(self, key: Key[Array, ""]) -> RngStreams:
        """Return the random streams over a root key."""
        return self.services.make_rng_streams(key)


def _unwrap_result(model: Any) -> Any:
    """Return the state of a result of `fit`, and any other model as it is."""
    return model.state if isinstance(model, FitResult) else model


def _check_overrides(engine_class: type[Engine]) -> None:
    """Raise a `ConfigurationError` for a step that `fit` would never call."""
    has_step = engine_class.step is not Engine.step
    if has_step and engine_class.train_step is Engine.train_step:
        raise ConfigurationError(
            f"{engine_class.__name__} overrides step; fit never calls it: override train_step"
        )


def _build_services(engine: Engine, settings: Settings) -> Services:
    """Return what the parts of an engine need of it.

    Args:
        engine: which has its plugins, actions and sharding strategy.
        settings: its arguments.
    """
    names = [action.name for action in engine.actions if not action.is_engine_action]
    overridable = (type(engine).train_step, type(engine).forward)
    is_standard = overridable == (Engine.train_step, Engine.forward)
    return Services(
        plugins=engine.plugins,
        rng_streams=tuple(_collect_rng_streams(engine.plugins)),
        sharding=engine.sharding,
        settings=settings,
        due_names=(*names, "log"),
        custom_train_step=None if is_standard else engine.train_step,
        compilations=Compilations(engine.plugins, settings.max_compilations),
    )


def _collect_rng_streams(plugins: PluginManager) -> list[RngStream]:
    """Return the random streams of the engine, and those of plugins, which may replace them."""
    core_streams = {stream.name: stream for stream in (PARAMS, DEFAULT)}
    return list({**core_streams, **plugins.hooks.register_rng_streams.collect_by_name()}.values())
