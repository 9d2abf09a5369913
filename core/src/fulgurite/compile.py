"""The compiled step: flat, donated, fused, one executable for every batch structure and shapes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from fulgurite.annotations import describe, spec_of
from fulgurite.data import ArrayData, Indexed
from fulgurite.errors import CompilationError, DataError
from fulgurite.layout import Flat, Layout
from fulgurite.module import Output
from fulgurite.packing import Packing, Vectors
from fulgurite.step import TrainStep

# The default scheduler wakes another thread for every few kernels that are ready at once, which costs a small step more
# than it gains: 1.3 times against 0.98 of a step without bookkeeping (MLP 64-128-128-10, two cores, jax 0.10.2).
_OPTIONS = {"cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}}

OnCompile = Callable[[str, Any, jax.stages.Compiled], None]


class CompiledStep:
    """Runs up to `fuse` steps in one dispatch of one executable.

    Several steps run in a loop whose trip count is an argument, over a buffer of `fuse` batches. A trigger that splits a
    dispatch therefore needs no other executable, and the bits do not depend on where it splits. What is due at a step is
    an argument too: work wanted only there is behind `lax.cond` on it. With `fuse=1` there is no loop, because XLA on CPU
    runs a convolution inside of one on a single thread.

    Arguments:
        step: the traced step.
        layout: of the states that it takes.
        fuse: the largest number of steps in a dispatch.
        cap: the largest number of executables.
        on_compile: told of each executable with the spec of its batch.
        timed: gives a context that books the time of compiling.
        out_shardings: of the flat state, where the arrays are sharded.
    """

    def __init__(
        self,
        step: TrainStep,
        layout: Layout,
        *,
        fuse: int,
        cap: int,
        on_compile: OnCompile,
        timed: Callable[[], AbstractContextManager[None]],
        out_shardings: Flat | None = None,
    ) -> None:
        self._step = step
        self._layout = layout
        self.fuse = fuse
        self._cap = cap
        self._on_compile = on_compile
        self._timed = timed
        self._out_shardings = out_shardings
        self._executables: dict[Any, jax.stages.Compiled] = {}
        self._outputs: Packing | None = None
        self._output_tree: Any = None

    def __call__(self, flat: Flat, batches: Sequence[Any], due: np.ndarray, resident: Any = None) -> tuple[Flat, Vectors]:
        """The state after one step for each of `batches` (equal shapes), and the last step's output, packed.

        Arguments:
            flat: consumed.
            batches: at least one, at most `fuse`.
            due: bool `(tasks,)`, what is due after the last of them.
            resident: the arrays on the device that indexed batches are gathered from.
        """
        leaves, treedef = jax.tree.flatten(batches[0])
        key = treedef, tuple([(leaf.shape, leaf.dtype) for leaf in leaves])
        buffer = batches[0] if self.fuse == 1 else self._buffered(batches)
        arguments = (flat.arrays, flat.packed, resident, buffer, np.int32(len(batches)), due)
        executable = self._executables.get(key)
        if executable is None:
            executable = self._executables[key] = self._compile(batches[0], arguments)
        arrays, packed, output = executable(*arguments)
        return Flat(arrays, packed), output

    def output(self, vectors: Vectors) -> Output:
        """The output of a step: loss, losses and metrics."""
        assert self._outputs is not None, "no step has been compiled"
        return Output(*jax.tree.unflatten(self._output_tree, self._outputs.unpack(vectors)))

    def _buffered(self, batches: Sequence[Any]) -> Any:
        def stacked(*leaves: Any) -> Any:
            if isinstance(leaves[0], jax.Array):
                return jnp.stack([*leaves, *[leaves[-1]] * (self.fuse - len(leaves))])
            # What is past the trip count is never read.
            buffer = np.empty((self.fuse, *leaves[0].shape), leaves[0].dtype)
            return np.stack(leaves, out=buffer[: len(leaves)]).base

        return jax.tree.map(stacked, *batches)

    def _compile(self, batch: Any, arguments: Any) -> jax.stages.Compiled:
        spec, at = spec_of(batch), f"the batch for step {self._step.at}"
        if self._executables and jax.tree.structure(spec) != (first := next(iter(self._executables)))[0]:
            raise DataError(
                f"{at} has another structure than those before: {describe(spec)}, not {describe(_batch_of(first))}. A source "
                "must yield batches of one structure"
            )
        if len(self._executables) >= self._cap:
            seen = "\n".join(f"  {describe(_batch_of(key))}" for key in self._executables)
            raise CompilationError(
                f"{at}, {describe(spec)}, would be shape number {self._cap + 1} and max_compilations is {self._cap}. Seen so far:\n"
                f"{seen}\nPad the batches to few shapes, for the last one of an epoch by ArrayData(remainder='pad') or "
                "'drop', or raise Engine(max_compilations=)."
            )
        run = jax.jit(
            self._run,
            donate_argnums=0,
            compiler_options=_OPTIONS.get(jax.default_backend()),
            out_shardings=None if self._out_shardings is None else (*self._out_shardings, None),
        )
        with self._timed():
            compiled = run.lower(*arguments).compile()
        self._on_compile("step", spec, compiled)
        return compiled

    def _run(self, arrays: Any, packed: Any, resident: Any, buffer: Any, n: Any, due: Any) -> Any:
        if self.fuse == 1:
            return self._one(resident, buffer, due, arrays, packed)

        def body(index: Any, carry: Any) -> Any:
            batch = jax.tree.map(lambda leaf: leaf[index], buffer)
            return step(resident, batch, due & (index == n - 1), *carry[:2])

        # Traced once, to learn the shape of its output and to be the loop's body.
        first = jax.tree.map(lambda leaf: leaf[0], buffer)
        jaxpr, shapes = jax.make_jaxpr(self._one, return_shape=True)(resident, first, due, arrays, packed)
        treedef = jax.tree.structure(shapes)

        def step(*arguments: Any) -> Any:
            return jax.tree.unflatten(treedef, jaxpr_as_fun(jaxpr)(*jax.tree.leaves(arguments)))

        output = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[2])
        return jax.lax.fori_loop(0, n, body, (arrays, packed, output))

    def _one(self, resident: Any, batch: Any, due: Any, arrays: Any, packed: Any) -> Any:
        if isinstance(batch, Indexed):
            batch = ArrayData.gather(resident, batch)
        state, output = self._step(self._layout.join_traced(Flat(arrays, packed)), batch, due)
        flat = self._layout.split_traced(state)
        leaves, self._output_tree = jax.tree.flatten((output.loss, output.metrics, output.losses))
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        self._outputs = Packing(leaves)
        return flat.arrays, flat.packed, self._outputs.pack(leaves)


def _batch_of(key: Any) -> Any:
    treedef, specs = key
    return jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*spec) for spec in specs])
