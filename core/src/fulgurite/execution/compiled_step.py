"""The compiled step: flat, donated, fused, one executable for every batch structure and shapes."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array

from fulgurite.data.sources import ArrayData
from fulgurite.errors import CompilationError, DataError
from fulgurite.execution.flat_state import FlatState, StateLayout, VectorPacking, Vectors
from fulgurite.lockstep import assert_equal_across_processes
from fulgurite.model.module import Output
from fulgurite.placing import BatchSharding, replicated_sharding, use_mesh
from fulgurite.training.step import TrainStep
from fulgurite.tree.typecheck import format_tree, shape_signature, shape_spec

if TYPE_CHECKING:
    from fulgurite.engine import Engine

# XLA's default scheduler on CPU wakes another thread for every few kernels that are ready at once.
# That costs a step
# with a small state more than it gains: 0.88 against 0.79 of a hand-written one. Large ones and
# convolutions gain.
_SMALL_STATE = 2**20
_SMALL_STEP_OPTIONS: dict[str, Any] = {
    "cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
}


class StepResults(NamedTuple):
    """What leaves a step besides its state: scalars and small arrays packed, and the arrays of
    media."""

    packed: Vectors
    media: list[Array]


class CompiledStep:
    """Runs up to `steps_per_execution` steps in one dispatch of one executable.

    Several steps run in a loop whose trip count is an argument, over a buffer of
    `steps_per_execution` batches. A trigger that splits a dispatch therefore needs no other
    executable, and the bits do not depend on where it splits. What is due at a
    step is an argument, too: work wanted only there is behind `lax.cond` on it. With
    `steps_per_execution=1` there is no loop, because XLA on CPU runs a convolution inside of one on
    a single thread.

    Args:
        step: the traced step of `engine`, for states of `layout`.
        placing: of batches.
        on_compile: told of each executable: name, spec of its batch, executable.
    """

    def __init__(
        self,
        engine: "Engine",
        step: TrainStep,
        layout: StateLayout,
        placing: BatchSharding,
        steps_per_execution: int,
        on_compile: Callable[[str, Any, jax.stages.Compiled], None],
    ) -> None:
        self.steps_per_execution = steps_per_execution
        self._engine, self._step, self._layout, self._on_compile = engine, step, layout, on_compile
        self._placing, self._stacked_sharding = (
            placing,
            placing if steps_per_execution == 1 else placing.with_leading_axis(),
        )
        self._executables: dict[Any, jax.stages.Compiled] = {}
        # What was compiled for each rule, which is kept, so that no other one gets its id.
        self._compiled_specs: dict[int, tuple[Any, list[Any]]] = {}
        self._unpack = VectorPacking([]).unpack
        self._output_tree: Any = None
        self._media_tree: Any = None

    def __call__(
        self, flat: FlatState, batches: Sequence[Any], due: np.ndarray, resident: Any = None
    ) -> tuple[FlatState, StepResults]:
        """The state after one step for each of `batches` (of equal shapes, `steps_per_execution` at
        most), and the last step's output for `output` and `media`. Consumes `flat`; `due` are the
        flags of what is due after the last of the steps; `resident` are the arrays on the device
        that indexed batches are gathered from."""
        key = id(self._step.update_rule), *shape_signature(batches[0])
        executable = self._executables.get(key)
        if executable is None:
            self._placing.check(batches[0], at := f"the batch for step {self._step.step_number}")
            if jax.process_count() > 1:
                told = {"what they train on": at, **self._placing.fingerprint(batches[0])}
                assert_equal_across_processes(self._engine.consensus, "batches of new shapes", told)
        buffer = self._stacked_sharding(
            batches[0]
            if self.steps_per_execution == 1
            else jax.tree.map(self._stack_batches, *batches)
        )
        arguments = (flat.arrays, flat.packed, resident, buffer, np.int32(len(batches)), due)
        if executable is None:
            executable = self._executables[key] = self._compile(batches[0], arguments)
        arrays, packed, output = executable(*arguments)
        return FlatState(arrays, packed), output

    def output(self, results: StepResults) -> Output:
        """The output of a step: loss, metrics and losses."""
        return Output(*jax.tree.unflatten(self._output_tree, self._unpack(results.packed)))

    def media(self, results: StepResults) -> dict[str, Any]:
        """The media of a step, zeros unless it was one that shows them."""
        return jax.tree.unflatten(self._media_tree, results.media)

    def _stack_batches(self, *leaves: Any) -> Any:
        if isinstance(leaves[0], jax.Array):
            return jnp.stack([*leaves, *[leaves[-1]] * (self.steps_per_execution - len(leaves))])
        # What is past the trip count is never read.
        buffer = np.empty((self.steps_per_execution, *leaves[0].shape), leaves[0].dtype)
        np.stack(leaves, out=buffer[: len(leaves)])
        return buffer

    def _compile(self, batch: Any, arguments: Any) -> jax.stages.Compiled:
        spec, at = shape_spec(batch), f"the batch for step {self._step.step_number}"
        _, seen = self._compiled_specs.setdefault(
            id(self._step.update_rule), (self._step.update_rule, [])
        )
        if seen and jax.tree.structure(spec) != jax.tree.structure(seen[0]):
            gap = f"{at} has another structure than those before"
            raise DataError(
                f"{gap}: {format_tree(spec)}, not {format_tree(seen[0])}. Give all of them one"
            )
        cap = self._engine.max_compilations
        if len(seen) >= cap:
            shapes = "\n".join(f"  {format_tree(one)}" for one in seen)
            gap = f"{at}, {format_tree(spec)}, would be shape number {cap + 1} and max_compilations is {cap}"
            fix = "Pad batches to few shapes, the last of an epoch by ArrayData(remainder='pad'), or raise the number"
            raise CompilationError(f"{gap}. Seen so far:\n{shapes}\n{fix}")
        shardings, mesh = self._layout.shardings, self._engine.mesh
        shardings = None if shardings is None else (*shardings, replicated_sharding(mesh))
        run = jax.jit(self._run, donate_argnums=0, out_shardings=shardings)
        with self._engine.plugins.timings.time("compile"), use_mesh(mesh):
            lowered = run.lower(
                *arguments[:3], self._stacked_sharding.specs(arguments[3]), *arguments[4:]
            )
            small = sum(array.nbytes for array in arguments[0]) < _SMALL_STATE
            small = small and "stablehlo.convolution" not in lowered.as_text()
            compiled = lowered.compile(
                _SMALL_STEP_OPTIONS.get(jax.default_backend()) if small else None
            )
        seen.append(spec)
        self._on_compile("step", spec, compiled)
        return compiled

    def _run(self, arrays: Any, packed: Any, resident: Any, buffer: Any, n: Any, due: Any) -> Any:
        arrays = self._layout.apart(arrays)
        if self.steps_per_execution == 1:
            arrays, packed, output = self._run_single_step(resident, buffer, due, arrays, packed)
        else:
            arrays, packed, output = self._run_fused_steps(resident, buffer, n, due, arrays, packed)
        return self._layout.tied(arrays), packed, output

    def _run_fused_steps(
        self, resident: Any, buffer: Any, n: Any, due: Any, arrays: Any, packed: Any
    ) -> Any:
        # Traced once, to learn the shape of its output and to be the loop's body.
        first = jax.tree.map(lambda leaf: leaf[0], buffer)
        jaxpr, shapes = jax.make_jaxpr(self._run_single_step, return_shape=True)(
            resident, first, due, arrays, packed
        )

        def body(index: Any, carry: Any) -> Any:
            batch = jax.tree.map(lambda leaf: leaf[index], buffer)
            arguments = jax.tree.leaves((resident, batch, due & (index == n - 1), *carry[:2]))
            return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(jaxpr)(*arguments))

        output = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[2])
        return jax.lax.fori_loop(0, n, body, (arrays, packed, output))

    def _run_single_step(
        self, resident: Any, batch: Any, due: Any, arrays: Any, packed: Any
    ) -> Any:
        state = self._layout.unflatten_traced(FlatState(arrays, packed))
        state, output = self._step(state, ArrayData.gather(resident, batch), due)
        flat = self._layout.flatten_traced(state)
        leaves, self._output_tree = jax.tree.flatten((output.loss, output.metrics, output.losses))
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        outputs = VectorPacking(shape_spec(leaves))
        self._unpack = jax.jit(outputs.unpack)
        media, self._media_tree = jax.tree.flatten(output.media)
        return flat.arrays, flat.packed, StepResults(outputs.pack(leaves), media)
