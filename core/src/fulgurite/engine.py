"""The engine: what a user configures, calls and subclasses."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Key, PyTree

from fulgurite.consensus import LOCAL, ProcessSync
from fulgurite.data.iterator import BatchIterator
from fulgurite.data.sources import ArrayData, as_array, as_data, get_device_arrays, get_split
from fulgurite.encoding import dumps
from fulgurite.errors import (
    ConfigurationError,
    DataError,
    NonFiniteError,
    PluginError,
    StateError,
    did_you_mean,
    error_context,
)
from fulgurite.evaluation import Evaluation, EvaluatorSpec, Functions, Interrupt, Show
from fulgurite.execution.program import Program
from fulgurite.explain import explain_engine
from fulgurite.fit.loop import Loop
from fulgurite.fit.run import FitResult
from fulgurite.fit.signals import StopRequests
from fulgurite.fit.start import (
    InitFrom,
    Place,
    Resume,
    fill_missing_state,
    plan_step_range,
    resolve_checkpoint,
    restore_run,
)
from fulgurite.fit.tasks import BoundAction, collect_actions
from fulgurite.lockstep import check_same_start
from fulgurite.manifest import build_manifest
from fulgurite.model.context import Context
from fulgurite.model.module import Output
from fulgurite.placing import check_processes, process_shard
from fulgurite.plugins.manager import PluginManager
from fulgurite.rng import DEFAULT, PARAMS, RngStream, RngStreams
from fulgurite.runs import RunDirectory
from fulgurite.timing import Timings
from fulgurite.training.nonfinite import Policy
from fulgurite.training.state import (
    ModelInit,
    TrainState,
    as_model_init,
    check_not_consumed,
    leaf_signature,
    tree_signature,
)
from fulgurite.training.step import Step, forward
from fulgurite.triggers import AtEnd, Every, Trigger, UnboundedRange
from fulgurite.weights import as_eval_target, get_module_view, load_weights


class Engine:
    """Compiles and runs training; plugins do everything else.

    Args:
        steps: the number of updates of a fit. Either this or `epochs` is given, here or to `fit`.
        epochs: the number of passes over the data.
        seed: for every random stream and for the order of the data.
        plugins: instances, names, names with arguments, and names to leave out; see
            `PluginManager`.
        autoload: whether installed plugins that ask for it are active without being listed.
        run: the run's directory, for plugins that write.
        steps_per_execution: the largest number of steps in one dispatch; helps with small steps,
            not with convolutions on a CPU. Each dispatch moves `steps_per_execution` batches,
            however few of its steps run.
        log_every: when the metric window is closed: an interval in steps, and the end; or a
            trigger; None for never.
        nonfinite: what to do with a step whose loss, gradient or update is not finite: `raise`;
            `skip` (the step is counted and otherwise discarded); or `ignore`.
        max_compilations: the largest number of batch shapes in training; evaluations have no limit.
        dev_run: a trial of this many steps and as many batches in each evaluation, with nothing
            written.
        limit: use at most this many batches of each epoch.
        compilation_cache: a directory in which compiled programs are kept for the next process.
    """

    def __init__(
        self,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        plugins: Iterable[Any] = (),
        autoload: bool = True,
        run_dir: str | os.PathLike[str] | None = None,
        steps_per_execution: int = 1,
        log_every: int | Trigger | None = 50,
        on_nonfinite: Policy = "raise",
        max_compilations: int = 8,
        fast_dev_run: int | None = None,
        limit_train_batches: int | None = None,
        compilation_cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if type(self).step is not Engine.step and type(self).train_step is Engine.train_step:
            raise ConfigurationError(
                f"{type(self).__name__} overrides step; fit never calls it: override train_step"
            )
        counts = {
            "steps": steps,
            "epochs": epochs,
            "steps_per_execution": steps_per_execution,
            "limit_train_batches": limit_train_batches,
            "fast_dev_run": fast_dev_run,
        }
        _check_counts(**counts, max_compilations=max_compilations)
        if on_nonfinite not in ("raise", "skip", "ignore"):
            raise ConfigurationError(
                f"nonfinite is {on_nonfinite!r}; choose 'raise', 'skip' or 'ignore'"
            )
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ConfigurationError(
                f"seed is {seed!r}; it must be an integer of 63 bits that is not negative"
            )
        self.steps, self.epochs, self.seed, self.steps_per_execution, self.limit_train_batches = (
            steps,
            epochs,
            seed,
            steps_per_execution,
            limit_train_batches,
        )
        self.on_nonfinite: Policy = on_nonfinite
        self.max_compilations, self.fast_dev_run = max_compilations, fast_dev_run
        self.config: dict[str, Any] | None = None
        self.run_dir = None if run_dir is None else RunDirectory(run_dir)
        if compilation_cache_dir is not None:
            jax.config.update("jax_compilation_cache_dir", os.fspath(compilation_cache_dir))
        self.plugins = PluginManager(plugins, autoload=autoload)
        for hook in ("save_checkpoint", "restore_checkpoint"):
            self.plugins.get_single_impl(hook)
        log = Every(log_every) | AtEnd() if isinstance(log_every, int) else log_every
        self.tasks: list[BoundAction] = collect_actions(self.plugins, log)
        self.mesh: jax.sharding.Mesh | None = self.plugins.call_exclusive("mesh")
        self.consensus: ProcessSync = self.plugins.call_exclusive("consensus") or LOCAL
        streams = self.plugins.collect_by_name("register_rng_streams", "random stream", RngStream)
        self._rng_streams = {stream.name: stream for stream in (PARAMS, DEFAULT)} | streams
        self.evaluators: dict[str, EvaluatorSpec] = self.plugins.collect_by_name(
            "register_evaluators", "evaluator", EvaluatorSpec
        )
        if "train" in self.evaluators:
            raise PluginError(
                "an evaluator is called 'train', which is the source of training's records; rename it"
            )
        self._programs: dict[Any, Program] = {}
        self._stepping: Program | None = None
        self._evaluations: dict[Any, Evaluation] = {}

    def fit(
        self,
        model: Any = None,
        data: Any = None,
        *,
        state: TrainState | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        steps_per_execution: int | None = None,
        resume: Resume = None,
        init_from: InitFrom = None,
    ) -> FitResult:
        """Trains, and returns the result.

        Args:
            model: a module, a pair of a module and an `eqx.nn.State`, or a callable called as
                `model(key=key)` that returns either. It stays usable. None with `state`.
            data: any iterable of batches, or an object whose attribute `train` is one.
            state: a state to continue from, for `steps` or `epochs` more; consumed.
            steps, epochs, steps_per_execution: used instead of the engine's.
            resume: the checkpoint to resume from, read by the active checkpointer: `"auto"` (the
                run's newest, if any), `"latest"`, `"best"`, a step, the path of another run, or a
                `CheckpointRef`. `"never"` starts afresh and sets aside what the run directory
                holds; None starts afresh too, but is an error if that holds a checkpoint.
            init_from: a checkpoint with arrays for the new state: its weights, or what
                `CheckpointRef.map` says.

        Raises:
            NonFiniteError: a loss, gradient or update was not finite.
            DataError: the data ended early or changed its structure.
            FulguriteError: any other mistake, most of them before anything is compiled.
        """
        _check_counts(steps_per_execution=steps_per_execution)
        check_processes(self.mesh, self.consensus)
        steps, epochs = self._length(steps, epochs)
        data = get_split(data, "train")
        self.plugins.timings = Timings()
        origin = 0 if state is None else _step_of_given_state(model, state)
        source = as_model_init(model if state is None else (state.module, state.model_state))
        directory = self.run_dir if self.fast_dev_run is None else None
        with StopRequests(self.consensus.signals) as signals, ExitStack() as stack:
            if directory is not None:
                self.consensus.broadcast(lambda: stack.enter_context(directory.lock()))
            reference = resolve_checkpoint(resume, directory, state, init_from)
            feed = stack.enter_context(self._feed(data, origin))
            with self.plugins.timings.time("start"):
                first = _peek_first_batch(feed, origin)
                if steps_per_execution is None:
                    steps_per_execution = self.steps_per_execution
                program = self._program(source, first, get_device_arrays(data))
                given = source.arrays if state is None else state
                check_same_start(
                    self,
                    given,
                    first,
                    program.placing,
                    feed,
                    steps=steps,
                    epochs=epochs,
                    steps_per_execution=steps_per_execution,
                )
                del first  # a fit keeps no batch longer than its steps do
                # Before plugins are given what they kept, which may be in the fields that are their
                # settings.
                manifest = build_manifest(
                    self, program.module_text, feed.description, steps=steps, epochs=epochs
                )
                snapshot = (
                    None if reference is None else restore_run(self, reference, program.state_spec)
                )
                if snapshot is not None:
                    state, origin = snapshot.state, snapshot.step_range.start
                    steps = (
                        steps
                        if self.fast_dev_run is None
                        else int(state.step) - origin + self.fast_dev_run
                    )
                    if (
                        snapshot.data_position is not None or feed.shared
                    ):  # else it begins anew, as it has already
                        feed.close()
                        feed = stack.enter_context(self._feed(data, origin, snapshot.data_position))
                state = fill_missing_state(self, state, program, source, init_from)
                program.check(state)
            span = plan_step_range(snapshot, origin, steps, epochs, feed.epoch_length)
            attempt = 1
            if directory is not None:
                # What it goes on from stays: its own checkpoint, or what the former fit left.
                path = (
                    directory.path
                    if reference is None or reference.path is None
                    else reference.path
                )
                own = directory.is_at(path) if snapshot else origin > 0 and resume != "never"
                step, newest = (
                    int(state.step) if own else None,
                    snapshot is None or snapshot.is_latest,
                )
                attempt = self.consensus.broadcast(
                    lambda: directory.start_attempt(dumps(manifest), step, newest)
                )
            return Loop(
                self,
                program,
                feed,
                state,
                span,
                epochs=epochs,
                steps_per_execution=steps_per_execution,
                resident=get_device_arrays(data),
                signals=signals,
                resumed=snapshot,
                directory=directory,
                attempt=attempt,
                manifest=manifest,
            ).run_to_end()

    def init_state(self, model: Any, data: Any) -> TrainState:
        """A new train state for `step`, made for batches like the first one of `data`."""
        data = get_split(data, "train")
        if isinstance(as_data(data).source, Iterator):
            raise DataError(
                "init would use up the first batch of an iterator: pass data that can be iterated again"
            )
        source = as_model_init(model)
        with self._feed(data, 0, restore_on_close=True) as feed:
            return self._program(
                source, _peek_first_batch(feed, 0), get_device_arrays(data)
            ).init_state(source, self._root_key())

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Output]:
        """One update: the state after it and the step's loss, losses and metrics. Consumes `state`.

        It runs the same program as `fit`. Nothing is read from the device, so a step that was not
        finite shows only in `state.nonfinite`; `check_finite(state)` raises an error for it.
        """
        if not all(isinstance(leaf, np.ndarray | jax.Array) for leaf in jax.tree.leaves(batch)):
            batch = jax.tree_util.tree_map_with_path(as_array, batch)
        program = self._stepping
        if program is None or not program.layout.matches(state):
            check_not_consumed(state)
            self._stepping = program = self._program(
                as_model_init((state.module, state.model_state)), batch, None
            )
            program.check(state)
        compiled = program.compiled(1)
        program.select_update_rule(state.step, UnboundedRange(0))
        flat, output = compiled(
            program.layout.flatten(state), [batch], program.flags([False] * len(self.tasks))
        )
        return program.layout.unflatten(flat), compiled.output(output)

    def check_finite(self, state: TrainState) -> None:
        """Raises `NonFiniteError` if a step up to this state was not finite. Waits for the
        device."""
        if self._stepping is not None:
            self._stepping.check_finite(state.nonfinite)
        elif self.on_nonfinite == "raise" and state.nonfinite.step >= 0:
            raise NonFiniteError(int(state.nonfinite.step), "an update that another engine made")

    def iter_batches(
        self, data: Any, *, steps: int | None = None, epochs: int | None = None, start_step: int = 0
    ) -> Iterator[Any]:
        """The batches that `fit` would take, in the same order: for the engine's steps or epochs,
        else for one epoch; with `origin`, those of a fit that continues from a state of that
        step."""
        if (steps, epochs, self.steps, self.epochs) == (None,) * 4:
            epochs = 1
        steps, epochs = self._length(steps, epochs)
        data = get_split(data, "train")
        with self._feed(data, start_step, epochs=epochs) as feed:
            for item in islice(feed, steps):
                yield ArrayData.gather(get_device_arrays(data), item.batch)

    def train_step(self, state: TrainState, batch: Any, ctx: Context) -> tuple[TrainState, Output]:
        """One update, pure and traced: subclasses override it; both `fit` and `step` use it.

        Returns the state with new module, model state and optimizer state, and the output with
        `grads`. The engine still does the rest (transformed batches, health, `after_update`,
        metrics, the step count). Useful inside: `self.forward`, `fg.compute_gradients`, `ctx.rule`.
        """
        assert ctx.rule is not None
        return ctx.rule(self.forward, state, batch, ctx)

    def forward(
        self, module: Any, batch: Any, ctx: Context, step: Step = "training_step"
    ) -> Output:
        """The module's `training_step`, or another step, with all loss terms; the output's `loss`
        is their sum."""
        return forward(self.plugins, step, module, batch, ctx)

    def evaluate(
        self,
        model: Any,
        data: Any,
        *,
        name: str = "test",
        num_batches: int | None = None,
        metrics: Functions | None = None,
        losses: Functions | None = None,
        weights: InitFrom = None,
    ) -> dict[str, Any]:
        """The metrics of a model over one epoch of `data`, exact over batches of unequal size.

        Args:
            model: a module, a pair of a module and its state, a train state, or a result of `fit`;
                with `weights` also what `fit` takes.
            data: any data source, or an object whose `evaluations[name]` is one.
            name: the name of the evaluation; its random numbers depend on it.
            limit: use at most this many batches.
            metrics, losses: used instead of the module's own, see `EvaluatorSpec`.
            weights: a checkpoint with the weights, or its path; read by the active checkpointer.
        """
        model = model if weights is None else self.load_weights(model, weights)
        spec = EvaluatorSpec(
            name, get_split(data, "evaluations", name), num_batches, metrics=metrics, losses=losses
        )
        subject = as_eval_target(model, self._root_key())
        return self._evaluation(spec).evaluate(
            subject, spec.data, self._limit(num_batches), lambda: False, None
        )

    def predict(
        self,
        model: Any,
        data: Any,
        *,
        num_batches: int | None = None,
        weights: InitFrom = None,
        callback: Callable[[PyTree[np.ndarray]], None] | None = None,
    ) -> PyTree[np.ndarray]:
        """What the module's `predict_step` returns for every example of `data`, in order and
        without padding.

        With `callback` the predictions are passed to it batch by batch instead, and not kept. The
        other arguments are those of `evaluate`.
        """
        model = model if weights is None else self.load_weights(model, weights)
        spec = EvaluatorSpec("predict", get_split(data, "predict"), num_batches)
        subject = as_eval_target(model, self._root_key())
        return self._evaluation(spec).predict(
            subject, spec.data, self._limit(num_batches), callback
        )

    def load_weights(self, model: Any, weights: Place) -> TrainState:
        """A train state for `evaluate` and `predict` from a checkpoint, without optimizer state.
        Needs no data."""
        return load_weights(self, model, weights)

    def run_evaluator(
        self, name: str, state: TrainState, interrupted: Interrupt, show: Show | None = None
    ) -> dict[str, Any]:
        """The metrics of the evaluation that a plugin declared as `name`, with its weights; `show`
        gets its media."""
        if name not in self.evaluators:
            raise PluginError(
                f"no evaluator is called {name!r}. {did_you_mean(name, self.evaluators)}"
            )
        spec = self.evaluators[name]
        return self._evaluation(spec).evaluate_state(
            spec, state, self._limit(spec.num_batches), interrupted, show
        )

    def get_module_view(self, state: TrainState, name: str) -> Any:
        """The module that a plugin derives from a state under the name `name`, such as averaged
        weights."""
        return get_module_view(self.plugins, state, name)

    def explain(self) -> str:
        """What this engine will do, and why: the order of plugins and hooks, who owns which slot,
        what is due when."""
        return explain_engine(self)

    def set_run(self, run: str | os.PathLike[str]) -> None:
        """Sets the run's directory, as `--run` does."""
        self.run_dir = RunDirectory(run)

    def make_rng_streams(self, key: Key[Array, ""]) -> RngStreams:
        """The random streams over a root key."""
        return RngStreams(key, self._rng_streams.values())

    def _program(self, source: ModelInit, batch: Any, resident: Any) -> Program:
        made = source.model or eqx.filter_eval_shape(source.build, source.arrays, self._root_key())
        key = tree_signature((made, batch, resident))
        program = _get_or_build(self._programs, key, lambda: Program(self, source, batch, resident))
        # A module that makes functions gives other ones at each call; those in the state are those
        # of `like`.
        own = tree_signature(
            ((program.state_spec.module, program.state_spec.model_state), batch, resident)
        )
        return _get_or_build(self._programs, own, lambda: program)

    def _feed(self, data: Any, origin: int, position: Any = None, **options: Any) -> BatchIterator:
        # A later fit is another pass over the data; a resumed one keeps its origin and with it the
        # order.
        seed = (self.seed, origin) if origin else self.seed
        share = process_shard(self.plugins, data, self.mesh)
        return BatchIterator(
            data,
            seed=seed,
            position=position,
            limit=self.limit_train_batches,
            process=share,
            **options,
        )

    def _evaluation(self, spec: EvaluatorSpec) -> Evaluation:
        given = spec.metrics, spec.losses
        own = [
            one if one is None else tuple((name, leaf_signature(of)) for name, of in one.items())
            for one in given
        ]
        key = spec.name, spec.new_rng_each_time, *own
        return _get_or_build(
            self._evaluations, key, lambda: Evaluation(self, spec), 16 + len(self.evaluators)
        )

    def _root_key(self) -> Key[Array, ""]:
        return jax.random.key(self.seed)

    def _limit(self, limit: int | None) -> int | None:
        _check_counts(limit=limit)
        return min(
            (count for count in (limit, self.fast_dev_run) if count is not None), default=None
        )

    def _length(self, steps: int | None, epochs: int | None) -> tuple[int | None, int | None]:
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


def _peek_first_batch(feed: BatchIterator, origin: int) -> Any:
    with error_context(lambda: f"while the data source made the batch for step {origin + 1}"):
        return feed.peek()


def _step_of_given_state(model: Any, state: TrainState) -> int:
    """The step of a state to go on from."""
    if model is not None:
        raise ConfigurationError("fit takes a model or a state to continue from, not both")
    if not isinstance(state, TrainState):
        raise StateError(
            f"state must be a TrainState, such as result.state, not {type(state).__name__}"
        )
    check_not_consumed(state)
    return int(state.step)


def _get_or_build(made: dict[Any, Any], key: Any, make: Callable[[], Any], size: int = 16) -> Any:
    """What is made for `key`. The `size` asked for last are kept, because a lambda in a loop is new
    each time."""
    found = made[key] = made.pop(key, None) or make()
    if len(made) > size:
        del made[next(iter(made))]
    return found


def _check_counts(**counts: Any) -> None:
    for name, value in counts.items():
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31
        ):
            raise ConfigurationError(
                f"{name} is {value!r}; it must be a positive integer below 2**31"
            )
