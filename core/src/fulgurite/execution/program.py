"""What an engine makes of one kind of model: optimizers, slices, the traced step, its layout and
executables."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Key

from fulgurite.data.sources import ArrayData
from fulgurite.errors import ConfigurationError, ModelError, NonFiniteError, PluginError, StateError
from fulgurite.execution.compiled_step import CompiledStep
from fulgurite.execution.flat_state import FlatState, StateLayout, VectorPacking, Vectors
from fulgurite.model.module import get_method
from fulgurite.placing import (
    BatchSharding,
    put_shared,
    replicated_sharding,
    state_shardings,
    use_mesh,
)
from fulgurite.plugins.manager import PluginManager
from fulgurite.rng import fold_name
from fulgurite.training.metric_window import MetricWindow, to_number
from fulgurite.training.nonfinite import NonFiniteTracker
from fulgurite.training.state import (
    ModelInit,
    TrainState,
    check_same_structure,
    copy_arrays,
    is_array,
)
from fulgurite.training.step import TrainStep
from fulgurite.training.update import GradientUpdate, OptimizerSpec, UpdateRule, as_optimizer_specs
from fulgurite.tree.paths import leaves_with_paths
from fulgurite.tree.typecheck import shape_spec
from fulgurite.triggers import StepRange

if TYPE_CHECKING:
    from fulgurite.engine import Engine
    from fulgurite.fit.run import Run


class Program:
    """Built once for a kind of model and of batch, and reused by every `fit` and `step` on it.

    Building it runs the whole step on shapes, so that a mistake is found before anything is
    compiled.
    """

    def __init__(self, engine: "Engine", source: ModelInit, batch: Any, resident: Any) -> None:
        if getattr(jax.config, "jax_disable_jit", False) or not hasattr(jax.jit(abs), "lower"):
            gap = "jax_disable_jit or EQX_ON_ERROR=breakpoint is set, but training is one compiled program"
            raise ConfigurationError(
                f"{gap}: unset it, and look into the step with jax.debug.breakpoint or print"
            )
        self._engine, self._plugins = engine, engine.plugins
        self.run: Run | None = None
        key = jax.random.key(0)
        self.rule = self._update_rule(source, key)
        self.step = TrainStep(engine, self.rule.for_step(0, StepRange(0)))
        self._metrics: Any = ({}, {})
        with use_mesh(engine.mesh):
            bare: TrainState = eqx.filter_eval_shape(
                self._init_state, source, source.arrays, key, key
            )
            self._metrics = eqx.filter_eval_shape(
                self._step_metrics, bare, shape_spec(batch), shape_spec(resident)
            )
            self.state_spec = bare.replace(
                metric_window=eqx.filter_eval_shape(MetricWindow.empty, *self._metrics)
            )
        self._shardings = state_shardings(self._plugins, self.state_spec, engine.mesh)
        self.layout = StateLayout(self.state_spec, self._shardings)
        if self._shardings is not None:
            self.state_spec = with_shardings(self.state_spec, self._shardings)
        self.module_text = eqx.tree_pformat(self.state_spec.module, struct_as_array=True)
        self.placing = BatchSharding.from_hooks(self._plugins, batch, engine.mesh)
        whole = None if self._shardings is None else replicated_sharding(engine.mesh)
        self._close = (
            _close if whole is None else jax.jit(_closed, static_argnums=0, out_shardings=whole)
        )
        self._compiled: dict[int, CompiledStep] = {}
        self._initializer: tuple[bytes, Any] = (b"", None)

    def init_state(self, source: ModelInit, key: Key[Array, ""]) -> TrainState:
        """A new state from the root key, made under jit with the shardings that plugins ask for."""
        # Folded out here, once a process: XLA takes longer for a fold than for the rest of a small
        # model.
        params = self._engine.make_rng_streams(key).key("params", "init")
        with use_mesh(self._engine.mesh):
            initialize = self.initializer(source)
            # What a callable does may change, so that it is traced each time; within
            # `jax.eval_shape` nothing is made.
            if source.model is None and not isinstance(key, Tracer):
                lowered = initialize.lower(None, key, params)
                text = sha256(lowered.as_text().encode()).digest()
                # Where arrays that the callable holds are no part of the text, it cannot tell.
                if text != self._initializer[0] or getattr(
                    jax.config, "jax_use_simplified_jaxpr_constants", False
                ):
                    self._initializer = text, lowered.compile()
                initialize = self._initializer[1]
            made = iter(initialize(put_shared(source.arrays, self._engine.mesh), key, params))
        return jax.tree.map(
            lambda leaf: next(made) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf,
            self.state_spec,
        )

    def initializer(self, source: ModelInit) -> Any:
        """The jitted function `(source.arrays, key, params)` that gives the arrays of a new state,
        in the order of its leaves; `params` is the key of the module. No device ever has more of
        them than its own part."""

        def arrays(given: Any, *keys: Key[Array, ""]) -> list[Array]:
            made = zip(
                jax.tree.leaves(self.state_spec),
                jax.tree.leaves(self._init_state(source, given, *keys)),
                strict=True,
            )
            return [leaf for spec, leaf in made if isinstance(spec, jax.ShapeDtypeStruct)]

        return jax.jit(arrays, out_shardings=self._shardings)

    def select_update_rule(self, step: Any, span: StepRange) -> None:
        """Takes the update rule that holds from the update after `step` on."""
        self.step.steps_done, self.step.update_rule = step, self.rule.for_step(step, span)

    def check(self, state: TrainState) -> None:
        """A state of another structure than this engine's module and plugins give is an error that
        names the place."""
        try:
            check_same_structure(self.state_spec, state, "the state that was given")
        except ModelError as error:
            raise StateError(
                f"the state does not fit this engine, model and data: {error}"
            ) from error

    def compiled(self, fuse: int) -> CompiledStep:
        """The compiled step for up to `fuse` steps a dispatch."""
        if fuse not in self._compiled:
            step = CompiledStep(
                self._engine, self.step, self.layout, self.placing, fuse, self._on_compile
            )
            self._compiled[fuse] = step
        return self._compiled[fuse]

    def flags(self, due: Sequence[bool]) -> np.ndarray:
        """What is due, in the order of the step's tasks; `log` is whether anything closes the
        window."""
        pairs = list(zip(self._engine.tasks, due, strict=True))
        log = any(yes for task, yes in pairs if task.closes_window)
        return np.asarray([*(yes for task, yes in pairs if task.name != "log"), log])

    def close(self, flat: FlatState) -> tuple[FlatState, Any]:
        """The state with its window closed, and arrays for `closing`."""
        packed, values = self._close(self.layout.packing, flat.packed)
        return FlatState(flat.arrays, packed), values

    def read_window(self, values: Any, told: dict[str, Any]) -> dict[str, Any] | None:
        """The metrics of a closed window as Python numbers; of one without a step how many were
        skipped, if those are more than in `told`, else None. Raises if a step was not finite."""
        metrics, steps, health = jax.device_get(values)
        self.check_finite(health)
        metrics = metrics if steps else {}
        if self._engine.on_nonfinite == "skip" and (
            steps or health.skipped > told.get("skipped_steps", 0)
        ):
            metrics["skipped_steps"] = health.skipped
        return {name: to_number(value) for name, value in metrics.items()} or None

    def read_nonfinite(self, flat: FlatState) -> NonFiniteTracker:
        """The health of a state; waits for the device."""
        return self.layout.packing.get_subtree(jax.device_get(flat.packed), "nonfinite")

    def check_finite(self, health: NonFiniteTracker) -> None:
        """Raises `NonFiniteError` for the health of a state that must not be acted on."""
        if self._engine.on_nonfinite == "raise" and health.step >= 0:
            raise NonFiniteError(
                int(health.step), self.step.finite_check_names[int(health.term_index)]
            )

    def _update_rule(self, source: ModelInit, key: Key[Array, ""]) -> UpdateRule:
        made: list[UpdateRule] = []

        # Traced arrays are arrays to `eqx.is_array`, which masks of weight decay go by, and shapes
        # are not.
        def make(arrays: Any) -> None:
            module = source.build(arrays, key)[0]
            with jax.ensure_compile_time_eval():
                made.append(self._update_rule_of(module))

        jax.eval_shape(make, source.arrays)
        return made[0]

    def _update_rule_of(self, module: Any) -> UpdateRule:
        get_method(module, "training_step")
        owners = ", ".join(
            hook.plugin.name for hook in self._plugins.implementations("configure_optimizers")
        )
        given, source = (
            self._plugins.call_exclusive("configure_optimizers", module=module),
            f"hook configure_optimizers of {owners}",
        )
        if given is None:
            configure = get_method(module, "configure_optimizers")
            given, source = configure(module), f"{type(module).__name__}.configure_optimizers"
        phases = dict(as_optimizer_specs(given, source))
        for name, phase in list(phases.items()):
            before = [optax.identity()]
            for hook in self._plugins.implementations("gradient_transform"):
                root = fold_name(jax.random.key(self._engine.seed), f"optimizer:{name}")
                key = fold_name(root, f"plugin:{hook.plugin.name}")
                before += [hook(None, module=module, optimizer=name, key=key) or optax.identity()]
            phases[name] = replace(phase, gradient_transform=optax.chain(*before))
        update_rule = self._plugins.call_exclusive("make_update_rule", module=module, phases=phases)
        first = next(iter(phases.values()))
        if update_rule is None and (len(phases) != 1 or type(first) is not OptimizerSpec):
            fix = (
                "add MultiOptimizer() of fulgurite-optimizers to the plugins, or give one fg.Phase"
            )
            raise PluginError(
                f"the optimizers {', '.join(phases)} need an update rule of a plugin: {fix}"
            )
        update_rule = update_rule or GradientUpdate(first)
        for hook in self._plugins.implementations("wrap_update_rule"):
            update_rule = hook(None, module=module, rule=update_rule) or update_rule
        return update_rule

    def _init_state(
        self, source: ModelInit, arrays: Any, key: Key[Array, ""], params: Key[Array, ""]
    ) -> TrainState:
        module, model_state = source.build(arrays, params)
        return TrainState(
            step=jnp.int32(0),
            module=module,
            model_state=model_state,
            opt_state=copy_arrays(self.rule.init(module)),
            key=key,
            metric_window=MetricWindow.empty(*self._metrics),
            nonfinite=NonFiniteTracker.init(module),
            plugin_states=init_plugin_states(self._plugins, module, key),
        )

    def _step_metrics(self, state: TrainState, batch: Any, resident: Any) -> Any:
        batch = ArrayData.gather(resident, batch)
        return self.step.update(state, batch, jnp.zeros(len(self.step.tasks), bool))[2:4]

    def _on_compile(self, name: str, batch_spec: Any, compiled: jax.stages.Compiled) -> None:
        step = None if self.run is None else self.run.step
        self._plugins.call(
            "on_compile", step, run=self.run, name=name, batch_spec=batch_spec, compiled=compiled
        )


def _closed(packing: VectorPacking, packed: Vectors) -> tuple[Vectors, Any]:
    window: MetricWindow = packing.get_subtree(packed, "metric_window")
    values = window.compute(), window.steps, packing.get_subtree(packed, "nonfinite")
    return packing.set_subtree(packed, "metric_window", window.close()), values


# Without shardings, the programs of all engines share it.
_close = jax.jit(_closed, static_argnums=0)


def init_plugin_states(plugins: PluginManager, module: Any, key: Key[Array, ""]) -> dict[str, Any]:
    """The slice of each plugin that has one. Traced."""
    made = {
        hook.plugin.name: hook(
            None, module=module, key=fold_name(key, f"plugin:{hook.plugin.name}")
        )
        for hook in plugins.implementations("init_plugin_state")
    }
    for name, own in made.items():
        if bad := [
            f"{path} is {leaf!r}" for path, leaf in leaves_with_paths(own) if not is_array(leaf)
        ]:
            fix = "a slice has arrays alone; make some of numbers, and leave others out: eqx.filter(tree, eqx.is_array)"
            raise PluginError(f"plugin {name!r}, hook init_plugin_state: {bad[0]}; {fix}")
    return copy_arrays({name: own for name, own in made.items() if own is not None})


def with_shardings(like: TrainState, shardings: list[Any]) -> TrainState:
    """The same kind of state, with a sharding for each array."""
    given = iter(shardings)

    def place(leaf: Any) -> Any:
        return leaf.update(sharding=next(given)) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    return jax.tree.map(place, like)
