"""The engine: what a user configures, calls and subclasses."""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from inspect import Signature, signature
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Key, PyTree

import fulgurite._src.hookspecs as hookspecs
from fulgurite._src.callbacks import callback_error_context
from fulgurite._src.data.leaves import as_arrays
from fulgurite._src.data.sources import (
    ArrayData,
    as_data,
    get_batch_examples,
    get_device_arrays,
    get_split,
)
from fulgurite._src.evaluation.evaluator import (
    EvaluationResult,
    Evaluator,
    MetricFunctions,
    ShouldStop,
    never_stop,
)
from fulgurite._src.evaluation.service import EvaluationService
from fulgurite._src.evaluation.target import apply_module_view
from fulgurite._src.evaluation.totals import EvaluationTotals
from fulgurite._src.execution.debugging import check_jit_enabled
from fulgurite._src.execution.executables import keep_compiled_programs
from fulgurite._src.execution.program_cache import ProgramCache
from fulgurite._src.fit.fit import run_fit
from fulgurite._src.fit.plan import check_request, open_batches, peek_first_batch
from fulgurite._src.fit.run import FitResult
from fulgurite._src.fit.scheduler import BoundAction, collect_actions
from fulgurite._src.fit.snapshot import CheckpointSource, InitFrom, PathLike, Resume
from fulgurite._src.fit.start import load_weights
from fulgurite._src.foreign_names import (
    DATA_ARGUMENTS,
    ENGINE_ARGUMENTS,
    FIT_ARGUMENTS,
    check_foreign_arguments,
    hint_at_arguments,
)
from fulgurite._src.guards import check_assignment, check_no_class_attributes
from fulgurite._src.model.context import Context
from fulgurite._src.model.output import Output
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.plugins.strategy import PluginShardingStrategy
from fulgurite._src.rng import DEFAULT, PARAMS, RngStream, RngStreams, make_root_key
from fulgurite._src.sharding import ShardingStrategy, SingleDevice
from fulgurite._src.tracebacks import hide_internal_frames
from fulgurite._src.training.compilations import Compilations
from fulgurite._src.training.forward import Step, forward
from fulgurite._src.training.nonfinite import NonFinitePolicy
from fulgurite._src.training.services import Services
from fulgurite._src.training.settings import (
    Settings,
    StepsPerExecution,
)
from fulgurite._src.training.state import TrainState, as_model_init
from fulgurite._src.training.update import UpdateRule
from fulgurite._src.triggers import Trigger, UnboundedRange
from fulgurite.errors import (
    ConfigurationError,
    DataError,
    check_one_of,
)

RETURNABLE = ("preds", "aux", "grads", "updates")
"""Fields of the output that leave a step only where `Engine.step` is asked for them."""

SET_BY_PROGRAMS = frozenset({"config", "program_file", "run_dir"})
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
        "evaluators",
        "services",
        "due_names",
        "_rng_streams",
        "_programs",
        "_evaluations",
    }
)
"""The attributes that the constructor alone sets. A subclass that used one of these names for
something else trained for another number of epochs, or without its plugins."""


P = ParamSpec("P")
R = TypeVar("R")


def _use_device(
    method: "Callable[Concatenate[Engine, P], R]",
) -> "Callable[Concatenate[Engine, P], R]":
    """Make a method of the engine compute on the engine's device."""

    @wraps(method)
    def call(engine: "Engine", *args: P.args, **kwargs: P.kwargs) -> R:
        if engine.device is None:
            return method(engine, *args, **kwargs)
        with jax.default_device(engine.device):
            return method(engine, *args, **kwargs)

    return call


class Engine:
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
            A number overrides that. Each dispatch moves so many batches, however few of its steps
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

    __signature__: ClassVar[Signature]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_no_class_attributes(cls, SET_ONCE | SET_BY_PROGRAMS)
        _set_signature(cls)

    if not TYPE_CHECKING:  # type checkers would take it as leave to set any attribute

        @hide_internal_frames
        def __setattr__(self, name: str, value: Any) -> None:
            """Refuse to overwrite what the engine needs."""
            check_assignment(self, name, value, SET_ONCE)
            super().__setattr__(name, value)

    @hide_internal_frames
    def __new__(cls, *args: Any, **kwargs: Any) -> "Engine":
        """Refuse a step that `fit` would never call, and arguments by their names in other
        libraries, with ours."""
        if cls.step is not Engine.step and cls.train_step is Engine.train_step:
            raise ConfigurationError(
                f"{cls.__name__} overrides step; fit never calls it: override train_step"
            )
        known = signature(cls.__init__).parameters
        check_foreign_arguments(cls.__name__, kwargs, known, ENGINE_ARGUMENTS)
        return super().__new__(cls)

    def __reduce__(self) -> Any:
        """Refuse to be pickled: executables and open files stay in their process."""
        raise TypeError(
            "an Engine cannot be pickled or copied: hand over a function or a configuration that "
            "makes it, and call that in the other process"
        )

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
        self.steps = settings.steps
        self.epochs = settings.epochs
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
        for hook in ("save_checkpoint", "restore_checkpoint"):
            self.plugins.get_single_impl(hook)
        self.actions: list[BoundAction] = collect_actions(self.plugins, settings.log_trigger)
        self.sharding: ShardingStrategy = _choose_sharding(self.plugins, device)
        self.device = None if device is None else _find_device(device)
        self._rng_streams = _collect_rng_streams(self.plugins)
        self.services = self._build_services(settings)
        self.due_names = self.services.due_names
        self._programs = ProgramCache(self.services)
        self._evaluations = EvaluationService(self.services)
        self.evaluators: dict[str, Evaluator] = self._evaluations.evaluators

    @hide_internal_frames
    @hint_at_arguments(
        FIT_ARGUMENTS,
        "Engine.fit",
        too_many="it trains on one data source, and evaluations are plugins of "
        "fulgurite-evaluators, fg.Engine(plugins=[Evaluator('val', data, every=100)])",
    )
    @_use_device
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
        return run_fit(self, self._programs, request)

    @hide_internal_frames
    @_use_device
    def init_state(self, model: Any, data: Any) -> TrainState:
        """Return a new train state for `step`, for batches like the first one of `data`.

        Args:
            model: a module, a pair of a module and an `eqx.nn.State`, or a callable that returns
                either.
            data: any data source that can be iterated again, or an object whose `train` is one.
        """
        data = get_split(data, "train")
        if isinstance(as_data(data).source, Iterator):
            raise DataError(
                "init_state would use up the first batch of an iterator: pass data that can be "
                "iterated again"
            )
        model_init = as_model_init(model)
        with open_batches(self.services, data, 0, restore_on_close=True) as batches:
            first_batch = peek_first_batch(batches, 0)
            examples = get_batch_examples(data)
            program = self._programs.get(
                model_init, examples or (first_batch,), get_device_arrays(data)
            )
            if examples:
                # A batch alone does not say which other structures there are.
                self._programs.use_for_steps(program)
            return program.init_state(model_init, make_root_key(self.seed))

    @hide_internal_frames
    @_use_device
    def step(
        self, state: TrainState, batch: Any, *, returns: tuple[str, ...] = ()
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
        """
        check_jit_enabled()
        for name in returns:
            check_one_of(name, RETURNABLE, "Engine.step: returns")
        batch = as_arrays(batch)
        program = self._programs.get_for_step(state, batch)
        compiled_step = program.get_compiled_step(1, tuple(returns))
        program.select_update_rule(state.step, UnboundedRange(0))
        nothing_due = np.zeros(len(self.services.due_names), bool)
        batches = compiled_step.make_buffer()
        batches.add(batch)
        # The number travels packed, and so is not consumed.
        with callback_error_context(lambda: f"training step {int(state.step) + 1}"):
            flat, results = compiled_step(program.layout.flatten(state), batches, nothing_due)
            return program.layout.unflatten(flat), compiled_step.get_output(results)

    def check_finite(self, state: TrainState) -> None:
        """Raise `NonFiniteError` if a step up to this state was not finite. Waits for the
        device."""
        self._programs.check_finite(state)

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
        if (steps, epochs, self.steps, self.epochs) == (None,) * 4:
            epochs = 1
        steps, epochs = self.services.settings.choose_length(steps, epochs)
        data = get_split(data, "train")
        with open_batches(self.services, data, start_step, epochs=epochs) as batches:
            for item in islice(batches, steps):
                yield ArrayData.gather(get_device_arrays(data), item.batch)

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
        return forward(self.plugins, self.sharding, step, module, batch, ctx)

    @hide_internal_frames
    @hint_at_arguments(DATA_ARGUMENTS, "Engine.evaluate")
    @_use_device
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
            metrics: used instead of the module's own, see `Evaluator`.
            losses: used instead of the module's own, see `Evaluator`.
            weights: a checkpoint with the weights, or its path; read by the active checkpointer. Of
                the best one those that were measured, such as an average; see `CheckpointRef.view`.
        """
        model = model if weights is None else self.load_weights(model, weights)
        spec = Evaluator(
            name, get_split(data, "evaluations", name), num_batches, metrics=metrics, losses=losses
        )
        return self._evaluations.evaluate(_unwrap_result(model), spec)

    @hide_internal_frames
    @_use_device
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
        """Evaluate one batch more, in a loop of one's own: `totals.compute()` gives what `evaluate`
        does over all of its batches. Nothing is read from the device before.

        Args:
            model: as of `evaluate`; may be another one at each step.
            batch: a tree of arrays with a leading example axis, or an `fg.MaskedBatch`.
            totals: what the step before returned; None begins an evaluation.
            name: as of `evaluate`, the same at each step.
            metrics: as of `evaluate`, the same at each step.
            losses: as of `evaluate`, the same at each step.
        """
        spec = Evaluator(name, [batch], metrics=metrics, losses=losses)
        return self._evaluations.add_to_totals(_unwrap_result(model), spec, totals)

    @hide_internal_frames
    @hint_at_arguments(DATA_ARGUMENTS, "Engine.predict")
    @_use_device
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
        spec = Evaluator("predict", get_split(data, "predict"), num_batches)
        return self._evaluations.predict(_unwrap_result(model), spec, callback)

    @hide_internal_frames
    @_use_device
    def load_weights(self, model: Any, weights: CheckpointSource) -> TrainState:
        """Return a train state for `evaluate` and `predict` from a checkpoint, without optimizer
        state. Needs no data.

        Args:
            model: as of `fit`.
            weights: the checkpoint, or its path; read by the active checkpointer. The module is
                that of `CheckpointRef.view`.
        """
        return load_weights(self, model, weights)

    @hide_internal_frames
    @_use_device
    def run_evaluator(
        self, name: str, state: TrainState, should_stop: ShouldStop = never_stop
    ) -> EvaluationResult:
        """Return what an evaluation of a plugin gives for a state.

        Args:
            name: of an evaluation that a plugin declared in `register_evaluators`.
            state: the train state; the evaluation chooses its weights.
            should_stop: called before each batch; True gives up.

        Raises:
            EvaluationInterrupted: `should_stop()` was true.
        """
        return self._evaluations.run_evaluator(name, state, should_stop)

    @_use_device
    def check_evaluators(self, state: TrainState) -> None:
        """Trace the evaluations of plugins by shape, for a state; `fit` does so before its first
        step. Nothing is compiled.

        Args:
            state: the train state, whose shapes are looked at.
        """
        self._evaluations.check_evaluators(state)

    @_use_device
    def get_metric_types(self, state: TrainState, source: str = "train") -> dict[str, type]:
        """Return the class of each metric that a source of records gives, by name. Nothing is
        compiled.

        Args:
            state: a train state, as `init_state` or a fit gives it.
            source: `train`, or an evaluation that a plugin declared in `register_evaluators`.
        """
        return self._evaluations.get_metric_types(state, source)

    def get_module_view(self, state: TrainState, name: str) -> Any:
        """Return the module that a plugin derives from a state, such as averaged weights.

        Args:
            state: the train state.
            name: under which a plugin gives it in `module_views`.
        """
        return self.apply_module_view(state, name).module

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

    @_use_device
    def explain_sharding(self, batch: PyTree) -> str:
        """Return where each array of a batch goes, a line each: which axis is divided over which
        axis of the mesh, on which devices.

        Args:
            batch: a batch as the data source yields it, or its shapes.
        """
        return self.sharding.describe(batch)

    def make_rng_streams(self, key: Key[Array, ""]) -> RngStreams:
        """Return the random streams over a root key."""
        return RngStreams(key, self._rng_streams)

    def _build_services(self, settings: Settings) -> Services:
        names = [action.name for action in self.actions if action.name != "log"]
        return Services(
            hooks=self.plugins,
            make_rng_streams=self.make_rng_streams,
            sharding=self.sharding,
            settings=settings,
            due_names=(*names, "log"),
            compute_update=self.train_step,
            compilations=Compilations(self.plugins, self.max_compilations),
        )


def _set_signature(engine_class: type[Engine]) -> None:
    """Have help, editors and configurations see the arguments of `__init__`: Python takes those of
    `__new__` otherwise, which takes any."""
    whole = signature(engine_class.__init__)
    parameters = list(whole.parameters.values())[1:]
    engine_class.__signature__ = whole.replace(
        parameters=parameters, return_annotation=engine_class
    )


_set_signature(Engine)


def _unwrap_result(model: Any) -> Any:
    """Return the state of a result of `fit`, and any other model as it is."""
    return model.state if isinstance(model, FitResult) else model


def _choose_sharding(plugins: PluginManager, device: Any) -> ShardingStrategy:
    """Return the strategy of a plugin, or that of one device.

    Args:
        plugins: of the engine.
        device: the setting.

    Raises:
        ConfigurationError: both say which devices to compute on.
    """
    strategy = plugins.ask_exclusive("sharding_strategy")
    if strategy is None:
        return SingleDevice()
    if device is not None:
        raise ConfigurationError(
            f"Engine: device is {device!r}, but plugin {strategy[0].name!r} says which devices "
            "to compute on: give only one of them"
        )
    return PluginShardingStrategy(*strategy)


def _collect_rng_streams(plugins: PluginManager) -> list[RngStream]:
    """Return the random streams of the engine, and those of plugins, which may replace them."""
    core_streams = {stream.name: stream for stream in (PARAMS, DEFAULT)}
    return list({**core_streams, **plugins.ask("register_rng_streams")}.values())


def _find_device(device: Any) -> Any:
    """Return a device, given as such or as `PLATFORM` or `PLATFORM:NUMBER`."""
    if isinstance(device, jax.Device):
        return device
    platform, _, number = str(device).partition(":")
    try:
        return jax.local_devices(backend=platform)[int(number or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        devices = ", ".join(f"{known.platform}:{known.id}" for known in jax.local_devices())
        raise ConfigurationError(
            f"Engine: there is no device {device!r}; there are {devices}"
        ) from error
