"""What an engine builds for one kind of model: update rule, traced step, layout, executables."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array, Key

from fulgurite._src.data.sources import ArrayData
from fulgurite._src.execution.build import (
    WindowSpec,
    build_update_rule,
    get_state_shardings,
    init_train_state,
    trace_program,
    unite_metric_specs,
    with_shardings,
)
from fulgurite._src.execution.compiled_step import CompiledStep
from fulgurite._src.execution.dataflow import find_needed_arguments
from fulgurite._src.execution.debugging import check_jit_enabled, read_trace_settings
from fulgurite._src.execution.dispatch import (
    DispatchChoice,
    choose_loop,
    choose_steps_per_execution,
    count_batch_bytes,
)
from fulgurite._src.execution.executables import compile_lowered
from fulgurite._src.execution.flat_state import FlatState, StateLayout, VectorPacking, Vectors
from fulgurite._src.identity import ByIdentity
from fulgurite._src.metrics.accumulator import MetricAccumulator
from fulgurite._src.metrics.conversion import to_number
from fulgurite._src.rng import make_root_key
from fulgurite._src.training.metric_window import MetricWindow
from fulgurite._src.training.nonfinite import NonFiniteTracker
from fulgurite._src.training.services import Services
from fulgurite._src.training.state import ModelInit, TrainState
from fulgurite._src.training.step import TrainStep
from fulgurite._src.training.update import UpdateRule
from fulgurite._src.tree.paths import leaves_with_paths
from fulgurite._src.tree.specs import check_same_structure, shape_spec
from fulgurite._src.triggers import StepRange
from fulgurite.errors import ModelError, NonFiniteError, StateError


class Program:
    """The training program of one kind of model and of batch, used by every `fit` and `step` on it.

    Building it runs the whole step on shapes, so that a mistake is found before anything is
    compiled.

    Example:
        from fulgurite.plugins import Program, as_model_init

        batch = next(iter(engine.iter_batches(data, epochs=1)))
        program = Program(engine.services, as_model_init(model), (batch,), None)
        program.state_spec.module  # the module, with a `jax.ShapeDtypeStruct` for each array

    Attributes:
        update_rule: how a batch becomes an update; `update_rule.for_step` says which rule applies
            at a step, and each of these rules has its own traced and compiled steps.
        step: the traced step of the rule that applies at the first update.
        trace_settings: the settings of JAX by which it is traced.
        state_spec: the train state as `jax.ShapeDtypeStruct`s, with shardings where there are some.
        layout: how states cross `jax.jit`.
        dispatch_choice: how many steps go into one dispatch, and why, if that was asked last.
        has_tried_losses: whether the check that the losses are means over examples has run.
        has_tried_padding: whether the check that padding does not count in them has run.

    Args:
        services: of the engine.
        model_init: where the module comes from.
        batches: a batch of each structure to train on, or their shapes.
        device_arrays: the arrays on the device that indexed batches are gathered from.
    """

    def __init__(
        self, services: Services, model_init: ModelInit, batches: Sequence[Any], device_arrays: Any
    ) -> None:
        check_jit_enabled()
        self.trace_settings = read_trace_settings()
        self._services = services
        self._plugins = services.plugins
        self.update_rule, self._optimizer_origin = build_update_rule(services, model_init)
        self._finite_check_names: list[str] = []
        self._steps: dict[ByIdentity, TrainStep] = {}
        self.step = self._get_step(self.update_rule.for_step(0, StepRange(0)))
        self._batch_structures = {jax.tree.structure(batch) for batch in batches}
        self._batch_bytes = max(map(count_batch_bytes, map(shape_spec, batches)))
        self._window_spec = WindowSpec(MetricAccumulator({}, {}), ())
        self._step_programs: list[ClosedJaxpr] = []
        with services.sharding.mesh_context():
            key = make_root_key(0)
            _, without_metrics = self._trace(
                partial(self._init_state, model_init), model_init.arrays, key, key
            )
            # A list: inside a generator a plugin's StopIteration would become a RuntimeError that
            # does not name the plugin.
            self._window_spec = unite_metric_specs(
                [
                    self._trace_step_metrics(without_metrics, batch, device_arrays)
                    for batch in batches
                ]
            )
            window = eqx.filter_eval_shape(MetricWindow.zeros, *self._window_spec)
            self.state_spec = without_metrics.replace(metric_window=window)
        self._shardings = get_state_shardings(self._plugins, services.sharding, self.state_spec)
        self.layout = StateLayout(self.state_spec, self._shardings)
        if self._shardings is not None:
            self.state_spec = with_shardings(self.state_spec, self._shardings)
        self._mark_as_closed = _jitted_mark_as_closed
        if self._shardings is not None:
            self._mark_as_closed = jax.jit(
                _mark_as_closed,
                static_argnums=0,
                out_shardings=services.sharding.replicated,
            )
        self.dispatch_choice: DispatchChoice | None = None
        self.has_tried_losses = False
        self.has_tried_padding = False
        self._loop_choice = choose_loop(
            self._step_programs, is_sharded=services.sharding.mesh is not None
        )
        self._compiled_steps: dict[tuple[int, ByIdentity, tuple[str, ...]], CompiledStep] = {}

    # Once per program: a module of 196 arrays takes 60 ms to print, and every fit with a run
    # directory describes it.
    @cached_property
    def module_text(self) -> str:
        """The module as a string, in which all but arrays shows by its value."""
        return eqx.tree_pformat(self.state_spec.module, struct_as_array=True)

    def init_state(self, model_init: ModelInit, key: Key[Array, ""]) -> TrainState:
        """Return a new state, with the shardings that plugins ask for.

        On one device it is made operation by operation, as by hand: 20 residual layers took 10 s to
        compile as one program, and take 0.4. Divided among devices it is one program, because no
        device may ever have more of it than its own part.

        Args:
            model_init: where the module comes from.
            key: the root key.
        """
        # Folded out here, once a process: XLA takes longer for a fold than for the rest of a small
        # model.
        params_key = self._services.make_params_key(model_init, key)
        if self._shardings is None:
            state = self._init_state(model_init, model_init.arrays, key, params_key)
            return self._fill_spec(self._select_arrays(state))
        with self._services.sharding.mesh_context():
            initialize = self.make_initializer(model_init)
            # What a callable does may change, so that it is traced each time; within
            # `jax.eval_shape` nothing is made.
            if model_init.model is None and not isinstance(key, Tracer):
                arguments = (None, key, params_key)
                initialize = compile_lowered(initialize.lower(*arguments), arguments)
            model_arrays = self._services.sharding.put_on_mesh(model_init.arrays)
            return self._fill_spec(initialize(model_arrays, key, params_key))

    def make_initializer(self, model_init: ModelInit) -> Any:
        """Return the jitted function `(model_init.arrays, key, params_key)` that gives the arrays
        of a new state, in the order of its leaves.

        No device ever has more of them than its own part.
        """

        def init_arrays(arrays: Any, *keys: Key[Array, ""]) -> list[Array]:
            return self._select_arrays(self._init_state(model_init, arrays, *keys))

        return jax.jit(init_arrays, out_shardings=self._shardings)

    def check(self, state: TrainState) -> None:
        """Check that a state has the structure that this engine's module and plugins give.

        Raises:
            StateError: it names the path that differs.
        """
        try:
            check_same_structure(self.state_spec, state, "the state that was given")
        except ModelError as error:
            raise StateError(
                f"the state does not fit this engine, model and data: {error}"
            ) from error

    def get_compiled_step(
        self, steps_per_execution: int, update_rule: UpdateRule, returns: tuple[str, ...] = ()
    ) -> CompiledStep:
        """Return the compiled step of one kind.

        Args:
            steps_per_execution: the largest number of steps in one dispatch.
            update_rule: the rule that applies, from `update_rule.for_step`.
            returns: fields of the output that leave the step as well.
        """
        key = steps_per_execution, ByIdentity(update_rule), returns
        if key not in self._compiled_steps:
            self._compiled_steps[key] = CompiledStep(
                self._services,
                self._get_step(update_rule),
                self.layout,
                self._batch_structures,
                steps_per_execution,
                runs_in_loop=self._loop_choice.runs_in_loop or steps_per_execution > 1,
                returns=returns,
            )
        return self._compiled_steps[key]

    def _get_step(self, update_rule: UpdateRule) -> TrainStep:
        """Return the traced step of a rule. All of them name what they check in one list, because a
        state may be read after another rule has come to apply."""
        key = ByIdentity(update_rule)
        if key not in self._steps:
            self._steps[key] = TrainStep(self._services, update_rule, self._finite_check_names)
        return self._steps[key]

    def choose_steps_per_execution(self, interval: float, epoch_length: float) -> DispatchChoice:
        """Return how many steps go into one dispatch where the user does not say it.

        Args:
            interval: the mean number of steps from one at which anything is due to the next.
            epoch_length: the number of batches in an epoch.
        """
        self.dispatch_choice = choose_steps_per_execution(
            self._loop_choice, self._batch_bytes, interval, epoch_length
        )
        return self.dispatch_choice

    def close_window(self, flat: FlatState) -> tuple[FlatState, Vectors]:
        """Return the state with its metric window closed, and arrays for `read_window`.

        It is a small dispatch of its own on the packed vectors, not a flag of the step: a clock can
        close a window, which nobody knows before the step is dispatched. The metrics are computed
        on the host: a program for 300 of them took 3 s to compile.
        """
        packed = self._mark_as_closed(self.layout.packing, flat.packed)
        return FlatState(flat.arrays, packed), flat.packed

    def read_window(self, values: Vectors, previous: dict[str, Any]) -> dict[str, Any] | None:
        """Return the metrics of a closed window as Python numbers.

        Args:
            values: from `close_window`.
            previous: the metrics before: a window in which every step was skipped has nothing but
                the number of skipped steps, and only if that has grown.

        Returns:
            The metrics by name; None where there is nothing to tell.

        Raises:
            NonFiniteError: a step was not finite.
        """
        packed = jax.device_get(values)
        window: MetricWindow = self.layout.packing.get_subtree(packed, "metric_window")
        nonfinite: NonFiniteTracker = self.layout.packing.get_subtree(packed, "nonfinite")
        self.check_finite(nonfinite)
        has_steps = bool(window.count) and not window.closed
        metrics = window.read()
        has_skipped = nonfinite.skipped > previous.get("skipped_steps", 0)
        if self._services.settings.on_nonfinite == "skip" and (has_steps or has_skipped):
            metrics["skipped_steps"] = to_number(nonfinite.skipped)
        return metrics or None

    def read_nonfinite(self, flat: FlatState) -> NonFiniteTracker:
        """Return what a state knows of steps that were not finite; waits for the device."""
        return self.layout.packing.get_subtree(jax.device_get(flat.packed), "nonfinite")

    def check_finite(self, nonfinite: NonFiniteTracker) -> None:
        """Raise `NonFiniteError` for a state that must not be acted on."""
        if self._services.settings.on_nonfinite == "raise" and nonfinite.step >= 0:
            name = self._finite_check_names[int(nonfinite.term_index)]
            raise NonFiniteError(int(nonfinite.step), name)

    def _init_state(self, model_init: ModelInit, *arguments: Any) -> TrainState:
        return init_train_state(
            self._plugins, self.update_rule, self._window_spec, model_init, *arguments
        )

    def _trace(self, function: Any, *arguments: Any) -> tuple[ClosedJaxpr, Any]:
        return trace_program(function, arguments, self._optimizer_origin)

    def _select_arrays(self, state: TrainState) -> list[Array]:
        """Return the arrays of a state, in the order of its leaves."""
        pairs = zip(jax.tree.leaves(self.state_spec), jax.tree.leaves(state), strict=True)
        return [leaf for spec, leaf in pairs if isinstance(spec, jax.ShapeDtypeStruct)]

    def _fill_spec(self, arrays: list[Array]) -> TrainState:
        """Return the state of this program with these arrays, in the order of its leaves."""
        remaining = iter(arrays)
        return jax.tree.map(
            lambda leaf: next(remaining) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf,
            self.state_spec,
        )

    def list_without_gradient(self) -> list[str]:
        """Return the paths of the arrays of the module that no metric of training, such as its
        loss, is computed from other than behind `jax.lax.stop_gradient`."""
        paths = [
            path
            for path, leaf in leaves_with_paths(self.state_spec.module)
            if isinstance(leaf, jax.ShapeDtypeStruct)
        ]
        unneeded = set(paths)
        for program in self._step_programs:
            results = [True] * len(program.jaxpr.outvars)
            needed = find_needed_arguments(program, results, blocked="stop_gradient")
            # The arguments are the arrays of the state: first its step, then the module.
            pairs = zip(paths, needed[1 : 1 + len(paths)], strict=True)
            unneeded -= {path for path, is_needed in pairs if is_needed}
        return [path for path in paths if path in unneeded]

    def _trace_step_metrics(
        self, state: TrainState, batch: Any, device_arrays: Any
    ) -> MetricAccumulator:
        """Return the metrics of a step as `jax.ShapeDtypeStruct`s, and keep its program.

        Args:
            state: without metrics in its window.
            batch: a batch.
            device_arrays: the arrays on the device that indexed batches are gathered from.
        """
        arguments = state, shape_spec(batch), shape_spec(device_arrays)
        program, metrics = self._trace(self._compute_step_metrics, *arguments)
        self._step_programs.append(program)
        return metrics

    def _compute_step_metrics(
        self, state: TrainState, batch: Any, device_arrays: Any
    ) -> MetricAccumulator:
        due = jnp.zeros(len(self._services.due_names), bool)
        batch = ArrayData.gather(device_arrays, batch)
        outcome = self.step.update(state, batch, due, step_number=1)
        return outcome.metrics


def _mark_as_closed(packing: VectorPacking, packed: Vectors) -> Vectors:
    window: MetricWindow = packing.get_subtree(packed, "metric_window")
    return packing.replace_subtree(packed, "metric_window", window, window.close())


# Without shardings, the programs of all engines share it.
_jitted_mark_as_closed = jax.jit(_mark_as_closed, static_argnums=0)
