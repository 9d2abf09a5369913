"""The engine: what a user configures, calls and subclasses."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import wraps
from inspect import Signature, signature
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypeVar, get_args

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Key, PyTree

import fulgurite._src.hookspecs as hookspecs
from fulgurite._src.attributes import check_assignment, check_no_class_attributes
from fulgurite._src.callbacks import callback_error_context
from fulgurite._src.data.iterator import BatchIterator
from fulgurite._src.data.leaves import as_arrays
from fulgurite._src.data.sources import (
    ArrayData,
    as_data,
    get_array_data_spec,
    get_batch_examples,
    get_device_arrays,
    get_split,
    has_unequal_batches,
    may_pad,
)
from fulgurite._src.evaluation.evaluation import (
    Evaluation,
    EvaluationResult,
    MetricFunctions,
    ShouldStop,
    never_stop,
)
from fulgurite._src.evaluation.loss_trial import choose_sample
from fulgurite._src.evaluation.padding_trial import choose_examples
from fulgurite._src.evaluation.prediction import PredictionRunner
from fulgurite._src.evaluation.runner import EvaluationRunner
from fulgurite._src.evaluation.target import apply_module_view, as_eval_target
from fulgurite._src.evaluation.totals import EvaluationTotals
from fulgurite._src.execution.debugging import check_jit_enabled
from fulgurite._src.execution.dispatch import StepsPerExecution
from fulgurite._src.execution.executables import keep_compiled_programs
from fulgurite._src.execution.program import Program
from fulgurite._src.fit.ending import ResultKeeper
from fulgurite._src.fit.loop import Loop
from fulgurite._src.fit.losses import try_losses, try_padding
from fulgurite._src.fit.run import FitResult
from fulgurite._src.fit.scheduler import BoundAction, collect_actions
from fulgurite._src.fit.signals import StopRequests, raise_unanswered
from fulgurite._src.fit.snapshot import CheckpointSource, InitFrom, PathLike, Resume
from fulgurite._src.fit.start import (
    FitPlan,
    FitRequest,
    check_known_batches,
    check_starting_point,
    fill_missing_state,
    load_snapshot,
    load_weights,
    plan_step_range,
    reserve_plugins,
    restore_host_states,
    select_hyperparameters,
)
from fulgurite._src.fit.without_effect import (
    describe_decayed_buffers,
    describe_hidden_hooks,
    describe_hidden_nonfinite_transforms,
    describe_missing_weights,
    describe_unused_seed,
)
from fulgurite._src.foreign_names import (
    DATA_ARGUMENTS,
    ENGINE_ARGUMENTS,
    FIT_ARGUMENTS,
    check_foreign_arguments,
    hint_at_arguments,
)
from fulgurite._src.model.context import Context
from fulgurite._src.model.output import Output
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.plugins.markers import find_hookspecs
from fulgurite._src.plugins.strategy import PluginShardingStrategy
from fulgurite._src.rng import DEFAULT, PARAMS, RngStreams, make_root_key
from fulgurite._src.sharding import FIT_START, SINGLE_PROCESS, ShardingStrategy, SingleDevice
from fulgurite._src.timing import Timings
from fulgurite._src.tracebacks import hide_internal_frames
from fulgurite._src.training.compilations import Compilations
from fulgurite._src.training.forward import Step, forward
from fulgurite._src.training.nonfinite import NonFinitePolicy
from fulgurite._src.training.services import Services, Settings
from fulgurite._src.training.state import ModelInit, TrainState, as_model_init, check_not_consumed
from fulgurite._src.training.update import UpdateRule
from fulgurite._src.tree.specs import hash_tree, leaf_signature, tree_signature
from fulgurite._src.triggers import AtEnd, Every, Trigger, UnboundedRange
from fulgurite._src.waits import Wait
from fulgurite.errors import (
    ConfigurationError,
    DataError,
    NonFiniteError,
    PluginError,
    StateError,
    as_int,
    check_one_of,
    did_you_mean,
    error_context,
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
        "_evaluation_runners",
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
        """Refuse arguments by their names in other libraries, with ours."""
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
        if type(self).step is not Engine.step and type(self).train_step is Engine.train_step:
            raise ConfigurationError(
                f"{type(self).__name__} overrides step; fit never calls it: override train_step"
            )
        steps, epochs, seed, fast_dev_run = map(as_int, (steps, epochs, seed, fast_dev_run))
        max_compilations, limit_train_batches, log_every, steps_per_execution = map(
            as_int, (max_compilations, limit_train_batches, log_every, steps_per_execution)
        )
        _check_counts(
            steps=steps,
            epochs=epochs,
            steps_per_execution=_get_number(steps_per_execution),
            limit_train_batches=limit_train_batches,
            fast_dev_run=fast_dev_run,
            max_compilations=max_compilations,
        )
        _check_policy(on_nonfinite)
        _check_seed(seed)
        _check_stop_timeout(stop_timeout)
        self.steps = steps
        self.epochs = epochs
        self.seed = seed
        self.steps_per_execution: StepsPerExecution = steps_per_execution
        self.limit_train_batches = limit_train_batches
        self.on_nonfinite: NonFinitePolicy = on_nonfinite
        self.max_compilations = max_compilations
        self.fast_dev_run = fast_dev_run
        self.config: dict[str, Any] | None = None
        self.program_file: str | None = None
        self.run_dir = run_dir
        self.stop_timeout = stop_timeout
        if compilation_cache_dir is not None:
            keep_compiled_programs(str(compilation_cache_dir))
        self.plugins = PluginManager(plugins, hookspecs=hookspecs, autoload=autoload)
        for hook in ("save_checkpoint", "restore_checkpoint"):
            self.plugins.get_single_impl(hook)
        log_trigger = Every(log_every) | AtEnd() if isinstance(log_every, int) else log_every
        self.actions: list[BoundAction] = collect_actions(self.plugins, log_trigger)
        strategy = self.plugins.ask_exclusive("sharding_strategy")
        if strategy and device is not None:
            raise ConfigurationError(
                f"Engine: device is {device!r}, but plugin {strategy[0].name!r} says which devices "
                "to compute on: give only one of them"
            )
        self.device = None if device is None else _find_device(device)
        self.sharding: ShardingStrategy = (
            PluginShardingStrategy(*strategy) if strategy else SingleDevice()
        )
        plugin_streams = self.plugins.ask("register_rng_streams")
        core_streams = {stream.name: stream for stream in (PARAMS, DEFAULT)}
        self._rng_streams = {**core_streams, **plugin_streams}
        self.evaluators: dict[str, Evaluation] = self._register_evaluators()
        self.services = self._build_services()
        self.due_names = self.services.settings.due_names
        self._programs: dict[Any, Program] = {}
        self._step_program: Program | None = None
        self._evaluation_runners: dict[Any, EvaluationRunner | PredictionRunner] = {}

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
        request = self._check_request(
            model, data, state, steps, epochs, steps_per_execution, resume, init_from
        )
        sync = self.sharding.sync
        raise_unanswered(sync)
        # One of several processes cannot stop alone.
        timeout = self.stop_timeout if sync is SINGLE_PROCESS else None
        with (
            reserve_plugins(self, request),
            StopRequests(sync.signals, timeout) as signals,
            ResultKeeper() as keeper,
            ExitStack() as stack,
        ):
            self.plugins.timings = Timings()
            self.plugins.enter_contexts("around_fit", stack, timings=self.plugins.timings)
            with self.plugins.timings.time("start"):
                plan = self._plan_fit(request, stack)
            loop = Loop(self, plan, signals)
            keeper.loop = loop
            # What opens the run's directory compares it with the snapshot, and closes it last. It
            # describes the run before host states are restored, which may be in the fields that
            # are settings of plugins.
            self.plugins.enter_contexts("fit_context", stack, loop.step, run=loop.run)
            restore_host_states(self.plugins, plan.resumed_from)
            result = loop.run_to_end()
            signals.stopped_by = result.stop_reason
            return result

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
        with self._iterate(data, 0, restore_on_close=True) as batches:
            first_batch = _peek_first_batch(batches, 0)
            examples = get_batch_examples(data)
            program = self._get_program(
                model_init, examples or (first_batch,), get_device_arrays(data)
            )
            if examples:
                # A batch alone does not say which other structures there are.
                self._step_program = program
            return program.init_state(model_init, self._make_root_key())

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
        program = self._step_program
        if program is None or not program.layout.matches(state):
            check_not_consumed(state)
            model_init = as_model_init((state.module, state.model_state))
            program = self._get_program(model_init, (batch,), None)
            self._step_program = program
            program.check(state)
        compiled_step = program.get_compiled_step(1, tuple(returns))
        program.select_update_rule(state.step, UnboundedRange(0))
        nothing_due = np.zeros(len(self.services.settings.due_names), bool)
        batches = compiled_step.make_buffer()
        batches.add(batch)
        # The number travels packed, and so is not consumed.
        with callback_error_context(lambda: f"training step {int(state.step) + 1}"):
            flat, results = compiled_step(program.layout.flatten(state), batches, nothing_due)
            return program.layout.unflatten(flat), compiled_step.get_output(results)

    def check_finite(self, state: TrainState) -> None:
        """Raise `NonFiniteError` if a step up to this state was not finite. Waits for the
        device."""
        if self._step_program is not None:
            self._step_program.check_finite(state.nonfinite)
        elif self.on_nonfinite == "raise" and state.nonfinite.step >= 0:
            raise NonFiniteError(int(state.nonfinite.step), "an update that another engine made")

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
        steps, epochs = self._resolve_length(steps, epochs)
        data = get_split(data, "train")
        with self._iterate(data, start_step, epochs=epochs) as batches:
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
            metrics: used instead of the module's own, see `Evaluation`.
            losses: used instead of the module's own, see `Evaluation`.
            weights: a checkpoint with the weights, or its path; read by the active checkpointer. Of
                the best one those that were measured, such as an average; see `CheckpointRef.view`.
        """
        model = model if weights is None else self.load_weights(model, weights)
        spec = Evaluation(
            name, get_split(data, "evaluations", name), num_batches, metrics=metrics, losses=losses
        )
        target = as_eval_target(_unwrap_result(model), self._make_root_key())
        num_batches = self._min_with_dev_run(num_batches)
        return self._get_runner(spec).evaluate(target, spec.data, num_batches).compute()

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
            batch: a tree of arrays with a leading example axis, or an `fg.Batch`.
            totals: what the step before returned; None begins an evaluation.
            name: as of `evaluate`, the same at each step.
            metrics: as of `evaluate`, the same at each step.
            losses: as of `evaluate`, the same at each step.
        """
        spec = Evaluation(name, [batch], metrics=metrics, losses=losses)
        if totals is not None and self._get_runner(spec) is not self._get_runner(totals.evaluation):
            raise ConfigurationError(
                f"evaluate_step of evaluation {name!r} got totals of {totals.evaluation.name!r}, "
                "or of other metrics and losses: give each evaluation totals of its own"
            )
        target = as_eval_target(_unwrap_result(model), self._make_root_key())
        return self._get_runner(spec).evaluate(target, spec.data, None, totals=totals)

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
        spec = Evaluation("predict", get_split(data, "predict"), num_batches)
        target = as_eval_target(_unwrap_result(model), self._make_root_key())
        runner: PredictionRunner = _get_or_build(
            self._evaluation_runners, "predict", lambda: PredictionRunner(self.services)
        )
        return runner.predict(target, spec.data, self._min_with_dev_run(num_batches), callback)

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
        spec = self._get_evaluator(name)
        state = self.apply_module_view(state, spec.module_view)
        target = as_eval_target(state, state.key)
        num_batches = self._min_with_dev_run(spec.num_batches)
        runner = self._get_runner(spec)
        return runner.evaluate(target, spec.data, num_batches, should_stop).get_result()

    @_use_device
    def check_evaluators(self, state: TrainState) -> None:
        """Trace the evaluations of plugins by shape, for a state; `fit` does so before its first
        step. Nothing is compiled.

        Args:
            state: the train state, whose shapes are looked at.
        """
        for name, spec in self.evaluators.items():
            if spec.check_at_start:
                with error_context(lambda name=name: f"evaluator {name!r}, before the first step"):
                    self._check_evaluator(spec, state)

    @_use_device
    def get_metric_types(self, state: TrainState, source: str = "train") -> dict[str, type]:
        """Return the class of each metric that a source of records gives, by name. Nothing is
        compiled.

        Args:
            state: a train state, as `init_state` or a fit gives it.
            source: `train`, or an evaluation that a plugin declared in `register_evaluators`.
        """
        if source == "train":
            window = state.metric_window.values
            metrics = window.metrics | window.running
            return {name: type(metric) for name, metric in metrics.items()}
        return self._check_evaluator(self._get_evaluator(source), state)

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
        lines = []
        for program in dict.fromkeys(self._programs.values()):
            choice = program.dispatch_choice
            if choice is not None:
                lines.append(f"steps_per_execution: {choice.steps}, because {choice.reason}")
        if lines:
            return "\n".join(lines)
        if self.steps_per_execution != "auto":
            return f"steps_per_execution: {self.steps_per_execution}, as it was given"
        return "steps_per_execution: auto; fit chooses when it knows the model and the data"

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
        return RngStreams(key, self._rng_streams.values())

    def _check_request(
        self,
        model: Any,
        data: Any,
        state: TrainState | None,
        steps: int | None,
        epochs: int | None,
        steps_per_execution: StepsPerExecution | None,
        resume: Resume,
        init_from: InitFrom,
    ) -> FitRequest:
        """Return what `fit` was asked for, as far as it can be checked before a batch is read; the
        arguments are those of `fit`."""
        steps_per_execution, resume = as_int(steps_per_execution), as_int(resume)
        _check_counts(steps_per_execution=_get_number(steps_per_execution))
        self.sharding.check_processes()
        start_step = 0
        if state is not None:
            start_step = _get_start_step(model, state)
            model = (state.module, state.model_state)
        request = FitRequest(
            model_init=as_model_init(model),
            data=get_split(data, "train"),
            state=state,
            start_step=start_step,
            length=self._resolve_length(steps, epochs),
            steps_per_execution=steps_per_execution or self.steps_per_execution,
            resume=resume,
            init_from=init_from,
        )
        self._check_run_dir()
        check_starting_point(resume, state, init_from)
        return request

    def _plan_fit(self, request: FitRequest, stack: ExitStack) -> FitPlan:
        """Return everything that a loop needs: its program, the state to train from, the batches.

        Args:
            request: what `fit` was asked for.
            stack: closes the batches when the fit ends.
        """
        start_step = request.start_step
        steps, epochs = request.length
        batches = stack.enter_context(self._iterate(request.data, start_step))
        device_arrays = get_device_arrays(request.data)
        first_batch = _peek_first_batch(batches, start_step)
        examples = get_batch_examples(request.data) or (first_batch,)
        program = self._get_program(request.model_init, examples, device_arrays)
        self._check_same_start(request, batches, first_batch)
        is_weighted = has_unequal_batches(request.data, first_batch)
        needs_means = is_weighted or program.update_rule.needs_mean_loss
        sample = choose_sample(first_batch) if needs_means else None
        padded = choose_examples(first_batch) if may_pad(request.data, first_batch) else None
        del first_batch  # a fit keeps no batch longer than its steps do
        state = request.state
        with Wait("the checkpoint"):
            snapshot = load_snapshot(self, request.resume, program.state_spec)
        if snapshot is not None:
            state = select_hyperparameters(request.resume, snapshot.state)
            start_step = snapshot.step_range.start
            if self.fast_dev_run is not None:
                steps = int(state.step) - start_step + self.fast_dev_run
            # Otherwise the data begins anew, as it has already.
            has_position = snapshot.data_position is not None or batches.is_shared
            if has_position and batches.resume != "restart":
                batches.close()
                position = snapshot.data_position
                with error_context(lambda: f"the run's data was {snapshot.data or 'not noted'}"):
                    batches = stack.enter_context(self._iterate(request.data, start_step, position))
        state = fill_missing_state(self, state, program, request.model_init, request.init_from)
        program.check(state)
        with self.plugins.timings.time("check"):
            messages = try_losses(self.services, program, state, sample, device_arrays)
            messages += try_padding(self.services, program, state, padded, device_arrays)
            messages += self._describe_what_has_no_effect(request, program, state)
        step_range = plan_step_range(snapshot, start_step, steps, epochs, batches.epoch_length)
        check_known_batches(self.sharding, batches, int(state.step), step_range.stop)
        return FitPlan(
            program=program,
            data_iterator=batches,
            state=state,
            step_range=step_range,
            requested_length=request.length,
            steps_per_execution=request.steps_per_execution,
            device_arrays=device_arrays,
            resumed_from=snapshot,
            resume=request.resume,
            messages=messages,
        )

    def _describe_what_has_no_effect(
        self, request: FitRequest, program: Program, state: TrainState
    ) -> list[str]:
        """Return sentences about what the user wrote and nothing uses."""
        return [
            *describe_hidden_hooks(state.module, find_hookspecs(hookspecs)),
            *describe_missing_weights(state.module),
            *describe_unused_seed(self.seed, request.data),
            *describe_decayed_buffers(program),
            *describe_hidden_nonfinite_transforms(program, self.on_nonfinite),
        ]

    def _check_same_start(
        self, request: FitRequest, batches: BatchIterator, first_batch: Any
    ) -> None:
        """Check that all processes train the same thing."""
        steps, epochs = request.length

        def describe() -> dict[str, Any]:
            arrays = request.model_init.arrays if request.state is None else request.state
            return {
                "seed": self.seed,
                "limit_train_batches": self.limit_train_batches,
                "on_nonfinite": self.on_nonfinite,
                "steps_per_execution": request.steps_per_execution,
                "steps": steps,
                "epochs": epochs,
                "batches an epoch": batches.epoch_length,
                "arrays": hash_tree(arrays),
            }

        self.sharding.check_same(FIT_START, describe, first_batch)

    def _register_evaluators(self) -> dict[str, Evaluation]:
        evaluators = self.plugins.ask("register_evaluators")
        if "train" in evaluators:
            raise PluginError(
                "an evaluator is called 'train', which is the source of training's records: "
                "rename it"
            )
        return evaluators

    def _build_services(self) -> Services:
        names = [action.name for action in self.actions if action.name != "log"]
        settings = Settings(
            seed=self.seed,
            on_nonfinite=self.on_nonfinite,
            due_names=(*names, "log"),
        )
        return Services(
            hooks=self.plugins,
            make_rng_streams=self.make_rng_streams,
            sharding=self.sharding,
            settings=settings,
            compute_update=self.train_step,
            compilations=Compilations(self.plugins, self.max_compilations),
        )

    def _get_program(
        self, model_init: ModelInit, batches: tuple[Any, ...], resident: Any
    ) -> Program:
        """Return the program for this kind of model and of batches, built at its first use."""
        model = model_init.model
        if not model:
            model = eqx.filter_eval_shape(
                model_init.build, model_init.arrays, self._make_root_key()
            )
        program = _get_or_build(
            self._programs,
            tree_signature((model, batches, resident)),
            lambda: Program(self.services, model_init, batches, resident),
        )
        # A module that makes functions gives other ones at each call; those in a state are those of
        # the program's own spec.
        spec = program.state_spec
        signature = tree_signature(((spec.module, spec.model_state), batches, resident))
        return _get_or_build(self._programs, signature, lambda: program)

    def _iterate(
        self, data: Any, start_step: int, position: Any = None, **options: Any
    ) -> BatchIterator:
        """Return the batches of a fit that begins at `start_step`."""
        # A later fit is another pass over the data; a resumed one keeps its start and with it the
        # order.
        seed = (self.seed, start_step) if start_step else self.seed
        return BatchIterator(
            data,
            seed=seed,
            position=position,
            limit=self.limit_train_batches,
            process=self.sharding.process_shard(lambda: get_array_data_spec(data)),
            **options,
        )

    def _get_runner(self, spec: Evaluation) -> EvaluationRunner:
        """Return what runs evaluations of this kind, built at its first use."""
        signatures = [
            None if functions is None else _get_functions_signature(functions)
            for functions in (spec.metrics, spec.losses)
        ]
        key = spec.name, spec.new_rng_each_time, *signatures
        return _get_or_build(
            self._evaluation_runners,
            key,
            lambda: EvaluationRunner(self.services, spec),
            size=16 + len(self.evaluators),
        )

    def _get_evaluator(self, name: str) -> Evaluation:
        if name not in self.evaluators:
            raise PluginError(
                f"no evaluator is called {name!r}. {did_you_mean(name, self.evaluators)}"
            )
        return self.evaluators[name]

    def _check_evaluator(self, spec: Evaluation, state: TrainState) -> dict[str, type]:
        target = as_eval_target(self.apply_module_view(state, spec.module_view), state.key)
        return self._get_runner(spec).check(target, spec.data)

    def _check_run_dir(self) -> None:
        if self.run_dir is None or self.fast_dev_run is not None:
            return
        if not self.plugins.implementations("fit_context"):
            raise ConfigurationError(
                f"run_dir is {self.run_dir!r}, and no plugin writes there: install "
                "fulgurite-checkpoint or fulgurite-logging and add a Checkpointer or a file "
                "logger "
                "to the plugins, or leave run_dir out"
            )

    def _make_root_key(self) -> Key[Array, ""]:
        return make_root_key(self.seed)

    def _min_with_dev_run(self, num_batches: int | None) -> int | None:
        """Return the number of batches of an evaluation; None for all of them."""
        num_batches = as_int(num_batches)
        _check_counts(num_batches=num_batches)
        limits = [limit for limit in (num_batches, self.fast_dev_run) if limit is not None]
        return min(limits, default=None)

    def _resolve_length(
        self, steps: int | None, epochs: int | None
    ) -> tuple[int | None, int | None]:
        """Return steps and epochs, of which one is None: as given, or as the engine says."""
        steps, epochs = as_int(steps), as_int(epochs)
        _check_counts(steps=steps, epochs=epochs)
        if self.fast_dev_run is not None:
            return self.fast_dev_run, None
        if steps is None and epochs is None:
            steps, epochs = self.steps, self.epochs
        if (steps is None) == (epochs is None):
            raise ConfigurationError(
                "how long to train: give Engine or fit either steps= or epochs="
            )
        return steps, epochs


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


def _peek_first_batch(batches: BatchIterator, start_step: int) -> Any:
    with error_context(lambda: f"while {batches.label} made the batch for step {start_step + 1}"):
        return batches.peek()


def _get_start_step(model: Any, state: TrainState) -> int:
    """Return the step of a state to continue from."""
    if model is not None:
        raise ConfigurationError("fit takes a model or a state to continue from, not both")
    if not isinstance(state, TrainState):
        raise StateError(
            f"state must be a TrainState, such as result.state, not {type(state).__name__}"
        )
    check_not_consumed(state)
    return int(state.step)


def _get_functions_signature(functions: MetricFunctions) -> tuple[Any, ...]:
    return tuple((name, leaf_signature(function)) for name, function in functions.items())


def _get_or_build(cache: dict[Any, Any], key: Any, build: Callable[[], Any], size: int = 16) -> Any:
    """Return what the cache holds for `key`, built at its first use.

    The `size` entries that were asked for last are kept, because a lambda in a loop is new each
    time.
    """
    value = cache.pop(key, None) or build()
    cache[key] = value
    if len(cache) > size:
        oldest = next(iter(cache))
        del cache[oldest]
    return value


def _get_number(steps_per_execution: StepsPerExecution | None) -> int | None:
    """Return a number of steps that was given; None where there is none to check."""
    return None if steps_per_execution == "auto" else steps_per_execution


def _check_counts(**counts: Any) -> None:
    for name, value in counts.items():
        if value is None:
            continue
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if not is_int or not 1 <= value < 2**31:
            raise ConfigurationError(
                f"{name} is {value!r}; it must be a positive integer below 2**31"
            )


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


def _check_policy(on_nonfinite: Any) -> None:
    if on_nonfinite not in get_args(NonFinitePolicy):
        raise ConfigurationError(
            f"on_nonfinite is {on_nonfinite!r}; choose 'raise', 'skip' or 'ignore'"
        )


def _check_stop_timeout(seconds: Any) -> None:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds < math.inf:
        raise ConfigurationError(
            f"Engine: stop_timeout is {seconds!r}; give seconds, more than 0, such as 30.0"
        )


def _check_seed(seed: Any) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ConfigurationError(
            f"seed is {seed!r}; it must be an integer of 63 bits that is not negative"
        )
