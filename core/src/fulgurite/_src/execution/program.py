"""What an engine builds for one kind of model: update rule, traced step, layout, executables."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding
from jaxtyping import Array, Key

from fulgurite._src.data.sources import ArrayData
from fulgurite._src.execution.compiled_step import CompiledStep
from fulgurite._src.execution.dataflow import find_needed_arguments
from fulgurite._src.execution.debugging import check_jit_enabled
from fulgurite._src.execution.dispatch import (
    DispatchChoice,
    choose_loop,
    choose_steps_per_execution,
    count_batch_bytes,
)
from fulgurite._src.execution.executables import compile_lowered
from fulgurite._src.execution.flat_state import FlatState, StateLayout, VectorPacking, Vectors
from fulgurite._src.metrics.conversion import to_number
from fulgurite._src.model.module import (
    Module,
    OptimizerSpec,
    as_optimizer_specs,
    get_method,
    is_floating_array,
)
from fulgurite._src.plugins.answers import check_not_among, record_answers
from fulgurite._src.plugins.manager import HookImpl, PluginManager
from fulgurite._src.rng import fold_name, make_root_key
from fulgurite._src.sharding import ShardingStrategy
from fulgurite._src.training.metric_window import MetricWindow
from fulgurite._src.training.nonfinite import NonFiniteTracker
from fulgurite._src.training.services import Services
from fulgurite._src.training.state import ModelInit, TrainState
from fulgurite._src.training.step import TrainStep
from fulgurite._src.training.update import GradientUpdate, UpdateRule
from fulgurite._src.tree.paths import leaves_with_paths
from fulgurite._src.tree.specs import (
    check_same_structure,
    copy_arrays,
    format_tree,
    is_array,
    shape_spec,
)
from fulgurite._src.tree.typecheck import check_module_fields, check_static_fields
from fulgurite._src.triggers import StepRange
from fulgurite.errors import ModelError, NonFiniteError, PluginError, StateError

# What JAX raises where Python needs the value of a traced array.
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_HOW_WITHOUT_VALUES = (
    "Arrays have no values there, because one program serves all modules of a kind: make a number "
    "such as a learning rate a Python number or a static field, eqx.field(static=True); an "
    "optimizer that needs the initial weights can keep the params of its init in its state"
)


class Program:
    """The training program of one kind of model and of batch, used by every `fit` and `step` on it.

    Building it runs the whole step on shapes, so that a mistake is found before anything is
    compiled.

    Attributes:
        update_rule: how a batch becomes an update.
        step: the traced step.
        state_spec: the train state as `jax.ShapeDtypeStruct`s, with shardings where there are some.
        layout: how states cross `jax.jit`.
        module_text: the module as text, in which everything that is no array shows by its value.
        dispatch_choice: how many steps go into one dispatch, and why, if that was asked last.
        has_tried_losses: whether it was tried if the losses are means over examples.
        has_tried_padding: whether it was tried if padding counts in them.

    Args:
        services: of the engine.
        model_init: where the module comes from.
        batches: a batch of each structure to train on, or their shapes.
        resident: the arrays on the device that indexed batches are gathered from.
    """

    def __init__(
        self, services: Services, model_init: ModelInit, batches: Sequence[Any], resident: Any
    ) -> None:
        check_jit_enabled()
        self._services = services
        self._hooks = services.hooks
        key = jax.random.key(0)
        self.update_rule = self._build_update_rule(model_init, key)
        self.step = TrainStep(services, self.update_rule.for_step(0, StepRange(0)))
        self._batch_structures = {jax.tree.structure(batch) for batch in batches}
        self._batch_bytes = max(map(count_batch_bytes, map(shape_spec, batches)))
        self._metric_specs = WindowSpec({}, {}, ())
        self._step_programs: list[ClosedJaxpr] = []
        with services.sharding.mesh_context():
            _, without_metrics = self._trace(
                self._init_state, model_init, model_init.arrays, key, key
            )
            # No generator: it would make of a plugin's StopIteration an error that names nobody.
            self._metric_specs = unite_metric_specs(
                [self._trace_step_metrics(without_metrics, batch, resident) for batch in batches]
            )
            window = eqx.filter_eval_shape(MetricWindow.zeros, *self._metric_specs)
            self.state_spec = without_metrics.replace(metric_window=window)
        self._shardings = get_state_shardings(self._hooks, services.sharding, self.state_spec)
        self.layout = StateLayout(self.state_spec, self._shardings)
        if self._shardings is not None:
            self.state_spec = with_shardings(self.state_spec, self._shardings)
        # Once per program: a module of 196 arrays takes 60 ms to print, and every fit describes it.
        self.module_text = eqx.tree_pformat(self.state_spec.module, struct_as_array=True)
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
        self._compiled_steps: dict[tuple[int, tuple[str, ...]], CompiledStep] = {}

    def init_state(self, model_init: ModelInit, key: Key[Array, ""]) -> TrainState:
        """Return a new state, with the shardings that plugins ask for.

        On one device it is made operation by operation, as by hand: 20 residual layers took 10 s to
        compile as one program, and take 0.4. Divided among devices it is one program, because no
        device may ever have more of it than its own part.

        Args:
            model_init: where the module comes from.
            key: the root key.
        """
        params_key = key
        if model_init.model is None:
            # Folded out here, once a process: XLA takes longer for a fold than for the rest of a
            # small model.
            params_key = self._services.make_rng_streams(key).key("params", "init")
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

    def select_update_rule(self, step: Any, step_range: StepRange) -> None:
        """Take the update rule that holds from the update after `step` on.

        Args:
            step: the number of completed updates; it may be on the device still.
            step_range: of the fit.
        """
        self.step.steps_done = step
        self.step.update_rule = self.update_rule.for_step(step, step_range)

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
        self, steps_per_execution: int, returns: tuple[str, ...] = ()
    ) -> CompiledStep:
        """Return the compiled step of one kind.

        Args:
            steps_per_execution: the largest number of steps in one dispatch.
            returns: fields of the output that leave the step as well.
        """
        key = steps_per_execution, returns
        if key not in self._compiled_steps:
            self._compiled_steps[key] = CompiledStep(
                self._services,
                self.step,
                self.layout,
                self._batch_structures,
                steps_per_execution,
                runs_in_loop=self._loop_choice.runs_in_loop or steps_per_execution > 1,
                returns=returns,
            )
        return self._compiled_steps[key]

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
            name = self.step.finite_check_names[int(nonfinite.term_index)]
            raise NonFiniteError(int(nonfinite.step), name)

    def _build_update_rule(self, model_init: ModelInit, key: Key[Array, ""]) -> UpdateRule:
        update_rules: list[UpdateRule] = []

        # Traced arrays are arrays to `eqx.is_array`, which masks of weight decay go by, and shapes
        # are not: with shapes, such a mask was False everywhere. What is computed without the
        # module is computed at once, so that an optimizer may keep it. The rule leaves the trace
        # through the list, because it is no array.
        def build(arrays: Any) -> None:
            module, _ = build_module(self._hooks, model_init, arrays, key)
            with jax.ensure_compile_time_eval():
                update_rules.append(self._build_update_rule_for(module))

        jax.eval_shape(build, model_init.arrays)
        return update_rules[0]

    def _build_update_rule_for(self, module: Any) -> UpdateRule:
        get_method(module, "training_step")
        optimizers = self._get_optimizers(module)
        update_rule = self._hooks.ask("make_update_rule", module=module, optimizers=optimizers)
        if update_rule is None:
            first = next(iter(optimizers.values()))
            if len(optimizers) != 1 or type(first) is not OptimizerSpec:
                raise PluginError(
                    f"the optimizers {', '.join(optimizers)} need an update rule of a plugin: add "
                    "MultiOptimizer() of fulgurite-optimizers to the plugins, or give one "
                    "fg.OptimizerSpec"
                )
            update_rule = GradientUpdate(first)
        policy = self._services.settings.on_nonfinite
        for hook in self._hooks.implementations("wrap_update_rule"):
            wrapped = hook(None, module=module, rule=update_rule, on_nonfinite=policy)
            update_rule = wrapped or update_rule
        self._check_trainable(module, update_rule)
        return update_rule

    def _check_trainable(self, module: Any, update_rule: UpdateRule) -> None:
        """Raise `ModelError` if a module has arrays, and none that a gradient could change."""
        leaves = leaves_with_paths(module)
        is_standard = self._services.compute_update.__qualname__ == "Engine.train_step"
        has_floats = any(is_floating_array(leaf) for _, leaf in leaves)
        # A rule of a plugin may train others, and an engine of one's own anything.
        is_trained = any(jax.tree.leaves(update_rule.trainable_mask(module)))
        if has_floats or is_trained or not is_standard:
            return
        arrays = [f"{path} is {format_tree(leaf)}" for path, leaf in leaves if is_array(leaf)]
        if arrays:
            raise ModelError(
                f"{type(module).__name__} has no array of floating-point numbers, so there is "
                f"nothing to train: {', '.join(arrays)}. Make the weights arrays of floats, such "
                "as jnp.zeros(4)"
            )

    def _get_optimizers(self, module: Any) -> dict[str, OptimizerSpec]:
        """Return the optimizers of a plugin or of the module, after the gradient transformations of
        plugins."""
        self._optimizer_source = source = f"{type(module).__name__}.configure_optimizers"
        try:
            configured = self._hooks.ask("configure_optimizers", module=module)
            if configured is None:
                configured = get_method(module, "configure_optimizers")(module)
            else:
                hooks = self._hooks.implementations("configure_optimizers")
                names = ", ".join(hook.plugin.name for hook in hooks)
                source = f"hook configure_optimizers of {names}"
                self._optimizer_source += f", or the {source},"
        except _NEEDS_VALUES as error:
            raise ModelError(
                f"{self._optimizer_source} asked for the value of an array of the module. "
                f"{_HOW_WITHOUT_VALUES}"
            ) from error
        optimizers = dict(as_optimizer_specs(configured, source))
        for name, optimizer in optimizers.items():
            transforms = optax.chain(optax.identity(), *self._get_gradient_transforms(module, name))
            optimizers[name] = replace(optimizer, gradient_transform=transforms)
        return optimizers

    def _get_gradient_transforms(self, module: Any, optimizer: str) -> list[Any]:
        transforms = []
        for hook in self._hooks.implementations("gradient_transform"):
            root = fold_name(make_root_key(self._services.settings.seed), f"optimizer:{optimizer}")
            key = fold_name(root, f"plugin:{hook.plugin.name}")
            transform = hook(None, module=module, optimizer=optimizer, key=key)
            transforms.append(transform or optax.identity())
        return transforms

    def _init_state(
        self,
        model_init: ModelInit,
        arrays: Any,
        key: Key[Array, ""],
        params_key: Key[Array, ""],
    ) -> TrainState:
        module, model_state = build_module(self._hooks, model_init, arrays, params_key)
        check_module_fields(module)
        check_static_fields(module)
        return TrainState(
            step=jnp.int32(0),
            module=module,
            model_state=model_state,
            opt_state=copy_arrays(self.update_rule.init(module)),
            key=key,
            metric_window=MetricWindow.zeros(*self._metric_specs),
            nonfinite=NonFiniteTracker.init(module),
            plugin_states=init_plugin_states(self._hooks, module, model_state, key),
        )

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

    def _trace_step_metrics(self, state: TrainState, batch: Any, resident: Any) -> Any:
        """Return the metrics and the running metrics of a step, by name, as
        `jax.ShapeDtypeStruct`s, and keep its program.

        Args:
            state: without metrics in its window.
            batch: a batch.
            resident: the arrays on the device that indexed batches are gathered from.
        """
        arguments = state, shape_spec(batch), shape_spec(resident)
        program, metrics = self._trace(self._compute_step_metrics, *arguments)
        self._step_programs.append(program)
        return metrics

    def _trace(self, function: Callable[..., Any], *arguments: Any) -> tuple[ClosedJaxpr, Any]:
        """Return the program of a function, and its result with `jax.ShapeDtypeStruct`s for arrays.

        Args:
            function: of trees of arrays and of anything else.
            arguments: with arrays, or with specs of them.

        Raises:
            PluginError: a hook returned an array of another trace, one that is over.
            ModelError: the update rule holds an array of the module that it was built for, which
                is such an array.
        """
        with record_answers() as answers:
            program, arrays, static = eqx.filter_make_jaxpr(function)(*arguments)
        held = [const for const in program.consts if isinstance(const, Tracer)]
        if held:
            check_not_among(held, answers)
            raise ModelError(
                f"{self._optimizer_source} gave an optimizer an array of the module, or one "
                f"computed from it, {format_tree(held[0])}. {_HOW_WITHOUT_VALUES}"
            )
        return program, eqx.combine(arrays, static)

    def _compute_step_metrics(self, state: TrainState, batch: Any, resident: Any) -> Any:
        due = jnp.zeros(len(self._services.settings.due_names), bool)
        record = self.step.update(state, ArrayData.gather(resident, batch), due)
        return record.metrics, record.running_metrics


class WindowSpec(NamedTuple):
    """The metrics of training steps, as `jax.ShapeDtypeStruct`s.

    Attributes:
        metrics: merged over a window, by name.
        running: carried from step to step, by name.
        optional: the names of those that batches of some structures do not have.
    """

    metrics: dict[str, Any]
    running: dict[str, Any]
    optional: tuple[str, ...]


def unite_metric_specs(specs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> WindowSpec:
    """Return the metrics of steps on batches of several structures together.

    Args:
        specs: the metrics and the running metrics of a step on each structure.

    Raises:
        ModelError: two structures have a metric of one name and of different kinds.
    """
    united: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    names_by_structure = []
    for kinds in specs:
        names_by_structure.append({name for kind in kinds for name in kind})
        for of_one, of_all in zip(kinds, united, strict=True):
            for name, spec in of_one.items():
                check_same_structure(
                    of_all.setdefault(name, spec),
                    spec,
                    f"the metric {name!r} on batches of another structure",
                )
    in_all = set.intersection(*names_by_structure)
    optional = sorted(set.union(*names_by_structure) - in_all)
    return WindowSpec(*united, tuple(optional))


def build_module(
    hooks: PluginManager, model_init: ModelInit, arrays: Any, key: Key[Array, ""]
) -> tuple[Any, eqx.nn.State | None]:
    """Return the module as plugins transform it, and its state. Traced.

    Args:
        hooks: of the plugins.
        model_init: where the module comes from.
        arrays: of its model.
        key: for a model that is yet to be made, and for what plugins add to it.
    """
    module, model_state = model_init.build(arrays, key)
    for hook in hooks.implementations("transform_module"):

        def transform(module: Any, key: Key[Array, ""], hook: HookImpl = hook) -> Any:
            plugin_key = fold_name(key, f"transform_module:{hook.plugin.name}")
            new_module = hook(None, module=module, key=plugin_key)
            return module if new_module is None else new_module

        if isinstance(module, Module):
            module = module.apply_transform(transform, key)
        else:
            module = transform(module, key)
    return module, model_state


def init_plugin_states(
    hooks: PluginManager, module: Any, model_state: Any, key: Key[Array, ""]
) -> dict[str, Any]:
    """Return the state of each plugin that has one, by the plugin's name. Traced.

    Args:
        hooks: the plugins.
        module: the module.
        model_state: its `eqx.nn.State`, or None.
        key: the root key.

    Raises:
        PluginError: a plugin's state holds something that is no array.
    """
    plugin_states = {}
    for hook in hooks.implementations("init_plugin_state"):
        name = hook.plugin.name
        plugin_key = fold_name(key, f"plugin:{name}")
        plugin_state = hook(None, module=module, key=plugin_key, model_state=model_state)
        if isinstance(module, Module):
            plugin_state = module.adapt_plugin_state(name, plugin_state)
        for path, leaf in leaves_with_paths(plugin_state):
            if not is_array(leaf):
                raise PluginError(
                    f"plugin {name!r}, hook init_plugin_state: {path} is {leaf!r}; a plugin's "
                    "state holds nothing but arrays: turn numbers into arrays, and leave others "
                    "out with eqx.filter(tree, eqx.is_array)"
                )
        if plugin_state is not None:
            plugin_states[name] = plugin_state
    return copy_arrays(plugin_states)


def get_state_shardings(
    hooks: PluginManager, sharding: ShardingStrategy, spec: TrainState
) -> list[NamedSharding] | None:
    """Return a sharding for each array of a train state, in the order of its leaves.

    Args:
        hooks: the plugins, each of which may say where its own state lies.
        sharding: says where everything else lies.
        spec: the state, with `jax.ShapeDtypeStruct`s for arrays.

    Returns:
        The shardings; None where the state is not sharded.

    Raises:
        PluginError: the strategy did not return one for each array.
    """
    shardings = sharding.shard_state(spec)
    if shardings is None:
        return None
    for hook in hooks.implementations("plugin_state_sharding"):
        name = hook.plugin.name
        answer = hook(None, plugin_state=spec.plugin_states.get(name), mesh=sharding.mesh)
        if answer is not None:
            plugin_states = {**shardings.plugin_states, name: answer}
            shardings = shardings.replace(plugin_states=plugin_states)
    leaves = jax.tree.leaves(shardings)
    arrays = [leaf for leaf in jax.tree.leaves(spec) if isinstance(leaf, jax.ShapeDtypeStruct)]
    are_named = all(isinstance(leaf, NamedSharding) for leaf in leaves)
    if len(leaves) != len(arrays) or not are_named:
        raise PluginError(
            f"shard_state of {sharding.name} must return a NamedSharding for each of the "
            f"{len(arrays)} arrays of the state and None for its other leaves; it returned "
            f"{len(leaves)} leaves"
        )
    return leaves


def with_shardings(spec: TrainState, shardings: list[Any]) -> TrainState:
    """Return the spec of a state with a sharding for each array.

    Args:
        spec: a state of `jax.ShapeDtypeStruct`s.
        shardings: of its arrays, in the order of the leaves.
    """
    remaining = iter(shardings)

    def add_sharding(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(sharding=next(remaining))
        return leaf

    return jax.tree.map(add_sharding, spec)


def _mark_as_closed(packing: VectorPacking, packed: Vectors) -> Vectors:
    window: MetricWindow = packing.get_subtree(packed, "metric_window")
    return packing.replace_subtree(packed, "metric_window", window, window.close())


# Without shardings, the programs of all engines share it.
_jitted_mark_as_closed = jax.jit(_mark_as_closed, static_argnums=0)
