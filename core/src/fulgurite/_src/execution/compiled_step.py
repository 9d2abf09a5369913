"""The compiled step: flat, donated, fused, one executable for every batch structure and shapes."""

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from fulgurite._src.data.sources import ArrayData
from fulgurite._src.execution.batch_buffer import BatchBuffer
from fulgurite._src.execution.debugging import has_invalid_numbers, is_debugging_numbers
from fulgurite._src.execution.executables import (
    Compilation,
    CompilationQueue,
    choose_compiler_options,
)
from fulgurite._src.execution.flat_state import FlatState, StateLayout, VectorPacking
from fulgurite._src.execution.step_parts import (
    Dispatch,
    OutputLayout,
    StepCompilation,
    StepResults,
    list_argument_specs,
)
from fulgurite._src.model.output import Output
from fulgurite._src.training.services import Services
from fulgurite._src.training.step import TrainStep
from fulgurite._src.tree.paths import leaves_with_paths
from fulgurite._src.tree.specs import (
    describe_structures,
    format_tree,
    shape_signature,
    shape_spec,
)
from fulgurite.errors import DataError


class CompiledStep:
    """Run up to `steps_per_execution` steps of one update rule in one dispatch of one executable.

    Several steps run in a loop whose trip count is an argument, over a buffer of
    `steps_per_execution` batches. A trigger that splits a dispatch therefore needs no other
    executable, and the bits do not depend on where it splits. What is due at a step is an argument,
    too: work that is wanted only there is behind `lax.cond` on it. With `steps_per_execution=1`
    there is no loop, because XLA on CPU runs a convolution inside of one on a single thread.

    Args:
        services: of the engine.
        step: the traced step, for states of `layout`.
        layout: how states cross `jax.jit`.
        batch_structures: those that a batch may have.
        steps_per_execution: the size of the buffer.
        runs_in_loop: whether there is a loop, which there must be for several steps.
        returns: fields of the output that leave the step as well, such as `preds`.
    """

    def __init__(
        self,
        services: Services,
        step: TrainStep,
        layout: StateLayout,
        batch_structures: set[Any],
        steps_per_execution: int,
        *,
        runs_in_loop: bool,
        returns: tuple[str, ...] = (),
    ) -> None:
        self.steps_per_execution = steps_per_execution
        self._runs_in_loop = runs_in_loop
        self._services = services
        self._step = step
        self._layout = layout
        self._sharding = services.sharding
        self._batch_structures = batch_structures
        self._executables: dict[Any, jax.stages.Compiled] = {}
        self._begun: dict[Any, StepCompilation] = {}
        self._output_layouts: dict[Any, OutputLayout] = {}
        # Set by the trace, which knows it first.
        self._traced_output_layout: OutputLayout | None = None
        self._compiled_specs: list[Any] = []
        self._returns = returns

    def make_buffer(self) -> BatchBuffer:
        """Return an empty buffer for the batches of one dispatch."""
        # XLA sees that the slice of a buffer for one batch does not change in the loop, and fuses
        # a step of attention in another way than with a longer one.
        size = max(self.steps_per_execution, 2) if self._runs_in_loop else 1
        return BatchBuffer(size, is_stacked=self._runs_in_loop)

    def compile_ahead(
        self,
        queue: CompilationQueue,
        flat: FlatState | None,
        batch: Any,
        due: np.ndarray,
        steps_done: int,
        device_arrays: Any,
    ) -> bool:
        """Have the step compiled behind other work, and return whether it was not; `prepare` waits
        for it.

        Args:
            queue: when.
            flat: a state; None for a new one that is yet to be made.
            batch: a batch, whose shapes count.
            due: of the shape of what `run` takes.
            steps_done: the number of updates before, for errors.
            device_arrays: the arrays on the device that indexed batches are gathered from.
        """
        flat = flat or self._layout.make_flat_spec()
        key = _find_step_key(flat, batch)
        if key in self._executables or key in self._begun:
            return False
        self._check_new_batch(batch, steps_done)
        buffer = self.make_buffer()
        buffer.add(batch)
        arguments = (*self._make_arguments(flat, buffer, device_arrays), due)
        self._begun[key] = self._lower(batch, arguments, steps_done)
        queue.add(self._begun[key].compilation)
        return True

    def prepare(
        self,
        flat: FlatState,
        buffer: BatchBuffer,
        due: np.ndarray,
        steps_done: Any,
        device_arrays: Any = None,
        patience: float | None = None,
    ) -> Dispatch:
        """Return a step for each batch, ready to `run`: with checked batches and an executable.

        If it raises, the state is still there.

        Args:
            flat: the state before.
            buffer: from `make_buffer`, with one batch and more.
            due: of the shape of what `run` takes.
            steps_done: the number of updates before, for errors; it may be on the device still.
            device_arrays: the arrays on the device that indexed batches are gathered from.
            patience: the seconds after a signal for which to wait for the compiler, as of `Wait`.
        """
        key = _find_step_key(flat, buffer.first)
        executable = self._executables.get(key)
        if executable is None and key not in self._begun:
            self._check_new_batch(buffer.first, steps_done)
        arguments = self._make_arguments(flat, buffer, device_arrays)
        if executable is None:
            compilation = self._begun.pop(key, None)
            if compilation is None or not compilation.fits((*arguments, due)):
                compilation = self._lower(buffer.first, (*arguments, due), steps_done)
            executable = self._finish(compilation, patience)
            self._executables[key] = executable
            self._output_layouts[key] = compilation.output_layout
        return Dispatch(executable, arguments, self._output_layouts[key], steps_done)

    def run(self, dispatch: Dispatch, due: np.ndarray) -> tuple[FlatState, StepResults]:
        """Run the steps of a dispatch, and return the state and the last step's results.

        Args:
            dispatch: from `prepare`; its state is consumed.
            due: what is due after the last of the steps, in the order of `Services.due_names`.
        """
        arrays, packed, results = dispatch.executable(*dispatch.arguments, due)
        results = results._replace(output_layout=dispatch.output_layout)
        if is_debugging_numbers():
            self._debug_numbers(dispatch, due, FlatState(arrays, packed), results)
        return FlatState(arrays, packed), results

    def _debug_numbers(
        self, dispatch: Dispatch, due: np.ndarray, flat: FlatState, results: StepResults
    ) -> None:
        """Where `jax_debug_nans` or `jax_debug_infs` is set and a step has given such a number, run
        the steps again, operation by operation, so that JAX raises its error at the line of the
        user.

        Args:
            dispatch: that was run; its state is not donated while the numbers are debugged.
            due: as of `run`.
            flat: the state after it.
            results: of its last step.
        """
        on_host = jax.device_get(flat.packed)
        numbers = dispatch.output_layout.unpack_on_host(jax.device_get(results.packed))
        is_nonfinite = self._layout.packing.get_subtree(on_host, "nonfinite").step >= 0
        if not is_nonfinite and not has_invalid_numbers((numbers, flat.arrays)):
            return
        arguments = jax.tree.map(jnp.asarray, (*dispatch.arguments, due))
        arrays, packed, device_arrays, batches, count, flags = arguments
        for index in range(int(count)):
            step_number = int(dispatch.steps_done) + index + 1
            batch = batches
            if self._runs_in_loop:
                batch = jax.tree.map(lambda leaf, index=index: leaf[index], batches)
            with self._sharding.mesh_context():
                arrays, packed, _ = self._run_single_step(
                    step_number, device_arrays, batch, flags, arrays, packed
                )

    def get_output(self, results: StepResults) -> Output:
        """Return the output of a step: loss, metrics and losses, and the fields asked for."""
        layout = results.output_layout
        assert layout is not None
        leaves = layout.unpack(results.packed)
        loss, metrics, losses = jax.tree.unflatten(layout.output, leaves)
        fields = jax.tree.unflatten(layout.fields, results.fields)
        return Output(loss, metrics, losses, **fields)

    def get_media(self, results: StepResults) -> dict[str, Any]:
        """Return the media of a step, zeros unless they were due."""
        assert results.output_layout is not None
        return jax.tree.unflatten(results.output_layout.media, results.media)

    def _check_new_batch(self, batch: Any, steps_done: Any) -> None:
        """Check a batch of new shapes: that it divides by the devices, and is alike on all
        processes."""
        where = f"the batch for step {int(steps_done) + 1}"
        self._sharding.check_batch(batch, where)
        self._sharding.check_same(
            "batches of new shapes", lambda: {"what they train on": where}, batch
        )

    def _make_arguments(
        self, flat: FlatState, buffer: BatchBuffer, device_arrays: Any
    ) -> tuple[Any, ...]:
        """Return the arguments of a dispatch, with its batches where the step finds them."""
        batches = self._sharding.shard_batch(
            buffer.get_batches(), beside=flat, is_stacked=self._runs_in_loop
        )
        return flat.arrays, flat.packed, device_arrays, batches, np.int32(buffer.count)

    def _lower(self, batch: Any, arguments: tuple[Any, ...], steps_done: Any) -> StepCompilation:
        """Return the compilation of the step for batches of these shapes, within the cap on
        compilations; it has yet to start."""
        batch_spec = shape_spec(batch)
        step_number = int(steps_done) + 1
        self._check_spec(batch_spec, f"the batch for step {step_number}")
        shardings = self._layout.shardings
        out_shardings = None if shardings is None else (*shardings, self._sharding.replicated)
        # JAX takes the trace of an equal function where that one is alive still, and methods of one
        # object are equal. A `partial` equals no other one, so the trace is made here, and sets
        # `_traced_output_layout`.
        donated = () if is_debugging_numbers() else 0
        run = jax.jit(
            partial(self._run, step_number), donate_argnums=donated, out_shardings=out_shardings
        )
        state_and_data, (batches, count, due) = arguments[:3], arguments[3:]
        timings = self._services.timings
        with (
            timings.time("compile", calls=0),
            timings.describe("tracing"),
            self._sharding.mesh_context(),
        ):
            batches_spec = self._sharding.get_batch_spec(batches, is_stacked=self._runs_in_loop)
            traced = run.trace(*state_and_data, batches_spec, count, due)
            lowered = traced.lower()
            options = choose_compiler_options(traced.jaxpr, arguments[0])
            compilation = Compilation(lowered, arguments, options)
        assert self._traced_output_layout is not None
        return StepCompilation(
            compilation,
            list_argument_specs(arguments),
            batch_spec,
            traced,
            self._traced_output_layout,
        )

    def _finish(self, step: StepCompilation, patience: float | None) -> jax.stages.Compiled:
        """Wait for the executable of the step, and report it."""
        timings = self._services.timings
        with timings.time("compile"):
            executable = step.compilation.wait(patience)
        timings.background_seconds["compile"] += step.compilation.background_seconds
        if step.batch_spec not in self._compiled_specs:
            self._compiled_specs.append(step.batch_spec)
        lowered = step.compilation.lowered
        self._services.compilations.report(
            "step", step.batch_spec, step.traced, lowered, executable
        )
        return executable

    def _check_spec(self, spec: Any, where: str) -> None:
        """Check a new batch spec against those that may be and those that were compiled before.

        Args:
            spec: the shapes of the batch.
            where: which batch it is, for errors.
        """
        specs = self._compiled_specs
        if jax.tree.structure(spec) not in self._batch_structures:
            text, known = format_tree(spec), ""
            if specs:
                text, known = describe_structures(spec, specs[0])
                known = f", not {known}"
            raise DataError(
                f"{where} has another structure than those before: {text}{known}. "
                "Give all of them one, or declare a batch of each: fg.DataSource(source, "
                "batch_examples=(...))"
            )
        _warn_of_other_dtypes(where, spec, specs)
        if spec not in specs:
            self._services.compilations.check_limit(where, spec, specs)

    # The rest is traced. You can skip `_run` and `_run_fused_steps`, which only repeat, and read
    # `_run_single_step`: what a dispatch does for each of its batches.

    def _run(
        self,
        step_number: int,
        arrays: Any,
        packed: Any,
        device_arrays: Any,
        batches: Any,
        count: Any,
        due: Any,
    ) -> tuple[Any, Any, StepResults]:
        """Run the steps of a dispatch: the function that is compiled. Its arguments are those of
        `Dispatch` and what is due, the state first, because that is donated."""
        if not self._runs_in_loop:
            return self._run_single_step(step_number, device_arrays, batches, due, arrays, packed)
        return self._run_fused_steps(
            step_number, device_arrays, batches, count, due, arrays, packed
        )

    def _run_fused_steps(
        self,
        step_number: int,
        device_arrays: Any,
        batches: Any,
        count: Any,
        due: Any,
        arrays: Any,
        packed: Any,
    ) -> tuple[Any, Any, StepResults]:
        """Run the step on the first `count` batches of a buffer, in a loop on the device."""
        # The step is traced before the loop, once: a loop begins with results of the shapes that it
        # ends with, and only a trace tells these. The trace then is the body of the loop.
        first = jax.tree.map(lambda leaf: leaf[0], batches)
        # A function equal to no other one, as in `_lower`.
        run_single_step = partial(self._run_single_step, step_number)
        jaxpr, shapes = jax.make_jaxpr(run_single_step, return_shape=True)(
            device_arrays, first, due, arrays, packed
        )
        run_traced_step = jaxpr_as_fun(jaxpr)
        result_tree = jax.tree.structure(shapes)

        def body(index: Any, carry: Any) -> Any:
            arrays, packed, _ = carry
            batch = jax.tree.map(lambda leaf: leaf[index], batches)
            # A dispatch ends where something is due, so that it is due at its last step alone.
            due_now = due & (index == count - 1)
            leaves = jax.tree.leaves((device_arrays, batch, due_now, arrays, packed))
            return jax.tree.unflatten(result_tree, run_traced_step(*leaves))

        results = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[2])
        return jax.lax.fori_loop(0, count, body, (arrays, packed, results))

    def _run_single_step(
        self, step_number: int, device_arrays: Any, batch: Any, due: Any, arrays: Any, packed: Any
    ) -> tuple[Any, Any, StepResults]:
        """Run the step on one batch: unflatten the state, train, and flatten what leaves."""
        state = self._layout.unflatten_traced(FlatState(arrays, packed))
        batch = ArrayData.gather(device_arrays, batch)
        state, output = self._step(state, batch, due, step_number=step_number)
        flat = self._layout.flatten_traced(state)
        # Numbers leave packed in a few vectors, as those of the state do. What they are is known
        # from here on, so the trace notes it for the host.
        leaves, output_tree = jax.tree.flatten((output.loss, output.metrics, output.losses))
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        packing = VectorPacking(shape_spec(leaves))
        media, media_tree = jax.tree.flatten(output.media)
        fields = {name: getattr(output, name) for name in self._returns}
        arrays, fields_tree = jax.tree.flatten(fields)
        self._traced_output_layout = OutputLayout(
            jax.jit(packing.unpack), packing.unpack, output_tree, media_tree, fields_tree
        )
        results = StepResults(packing.pack(leaves), media, list(map(jnp.asarray, arrays)))
        return flat.arrays, flat.packed, results


def _find_step_key(flat: FlatState, batch: Any) -> tuple[Any, ...]:
    """Return what the executables of one step differ by."""
    place = flat.arrays[0].sharding if flat.arrays else None
    return place, is_debugging_numbers(), *shape_signature(batch)


def _warn_of_other_dtypes(where: str, spec: Any, known_specs: list[Any]) -> None:
    """Warn of a batch with a dtype that no batch of its structure before it had: training
    continues with it, in another precision."""
    alike = [
        known for known in known_specs if jax.tree.structure(known) == jax.tree.structure(spec)
    ]
    if not alike:
        return
    known_dtypes = [tuple(leaf.dtype for leaf in jax.tree.leaves(known)) for known in alike]
    for index, (path, leaf) in enumerate(leaves_with_paths(spec)):
        before = {dtypes[index] for dtypes in known_dtypes}
        if leaf.dtype not in before:
            warnings.warn(
                f"{where} has another dtype than those before: {path or 'it'} is {leaf.dtype}, not "
                f"{', '.join(sorted(map(str, before)))}. The step is compiled again and trains on "
                "it as it is; cast it where the batch is made if that is a mistake",
                stacklevel=2,
            )
