"""The jitted programs of evaluations, without modules at their borders, and what one batch hands to
the next.

**The carry of an evaluation.** To read what is evaluated you can skip this and read `step.py`. An
evaluation is a loop over batches whose sums stay on the device:

1. `EvaluationStep.evaluate` takes an `EvaluationCarry`, a tree, and returns the next one.
2. As a tree of metrics it would cost more to hand over than a small batch costs to compute. So it
   crosses `jax.jit` as a list of arrays, and a `CarryLayout` turns one into the other.
3. `Carry` is that list with its layout. There is one for each structure of batches, because batches
   of another structure may have other metrics; `EvaluationTotals` merges them at the end.
4. The first batch is handed zeros with `has_batches` false, which it replaces. So the program has
   one signature, and is compiled once.
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from fulgurite._src.evaluation.target import EvalTarget
from fulgurite._src.execution.debugging import (
    has_invalid_numbers,
    is_debugging_numbers,
    is_jit_disabled,
    read_trace_settings,
)
from fulgurite._src.execution.executables import Compilation, CompilationQueue
from fulgurite._src.execution.flat_state import VectorPacking, get_wide_dtype
from fulgurite._src.execution.step_parts import list_argument_specs
from fulgurite._src.metrics.accumulator import MetricAccumulator
from fulgurite._src.metrics.columns import find_columns
from fulgurite._src.training.services import Services
from fulgurite._src.tree.specs import (
    check_same_structure,
    is_real_dtype,
    shape_signature,
    shape_spec,
)

AnyProgram = TypeVar("AnyProgram")


class EvaluationCarry(NamedTuple):
    """What one batch of an evaluation hands to the next, as a tree.

    Attributes:
        accumulator: the metrics so far.
        collected_names: the names of the collecting metrics, with None for each; which there are
            may not change from batch to batch either.
        has_batches: whether there was a batch.
    """

    accumulator: MetricAccumulator
    collected_names: dict[str, None]
    has_batches: Bool[Array, ""]

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of every kind by name, with None for those that collect: what has one
        structure in all batches of one structure."""
        return self.accumulator.by_name | self.collected_names


class CarryLayout:
    """How what one batch of an evaluation hands to the next crosses `jax.jit`: single numbers in
    few vectors, then the arrays.

    A small perceptron has eight numbers in loss and accuracy. As arguments and results of their own
    they took 20 of the 170 µs of a batch.

    Attributes:
        spec: the tree, with shapes and dtypes.

    Args:
        carry: the tree, traced or on a device.
    """

    def __init__(self, carry: Any) -> None:
        self.spec = shape_spec(carry)
        specs, self._treedef = jax.tree.flatten(self.spec)
        self._are_packed = [leaf.shape == () and is_real_dtype(leaf.dtype) for leaf in specs]
        indices = [index for index, is_packed in enumerate(self._are_packed) if is_packed]
        positions = {index: position for position, index in enumerate(indices)}
        columns = [[positions[index] for index in column] for column in find_columns(self.spec)]
        self._packing = VectorPacking([specs[index] for index in indices], columns=columns)

    def flatten(self, carry: Any) -> list[Any]:
        """Return the arrays of a tree; traced."""
        leaves = list(zip(jax.tree.leaves(carry), self._are_packed, strict=True))
        numbers = [leaf for leaf, is_packed in leaves if is_packed]
        arrays = [leaf for leaf, is_packed in leaves if not is_packed]
        return [*arrays, *self._packing.pack(numbers)]

    def unflatten(self, flat: list[Any]) -> Any:
        """Return the tree of these arrays, on the device or on the host."""
        num_arrays = self._are_packed.count(False)
        arrays = iter(flat[:num_arrays])
        numbers = iter(self._packing.unpack(flat[num_arrays:]))
        leaves = [next(numbers) if is_packed else next(arrays) for is_packed in self._are_packed]
        return self._treedef.unflatten(leaves)


class Carry(NamedTuple):
    """What one batch of an evaluation hands to the next, as it crosses `jax.jit`.

    Attributes:
        arrays: on the device.
        layout: of the tree in them.
    """

    arrays: list[Any]
    layout: CarryLayout

    def read(self) -> MetricAccumulator:
        """Return the metrics so far, on the host. Waits for the device."""
        carry: EvaluationCarry = self.layout.unflatten(jax.device_get(self.arrays))
        return carry.accumulator


class EvaluationProgram:
    """A jitted validation step whose results leave it as lists of arrays.

    To flatten metrics in Python, twice for each batch, took longer than a batch of a small
    perceptron.

    Attributes:
        carry_layout: of the carry, once the program was traced, or continues a carry.
        collected_treedef: that of the collecting metrics.
        media_treedef: that of the media.
        jitted: the program, to be traced.

    Args:
        function: `function(leaves, batch, device_arrays, index, carry)` returns the new carry, the
            collecting metrics and the media, as trees; its carry is None at first.
        sharding: where the results lie; None for anywhere.
    """

    carry_layout: CarryLayout | None = None
    collected_treedef: Any
    media_treedef: Any

    def __init__(self, function: Callable[..., Any], sharding: Any) -> None:
        self._function = function
        self._sharding = sharding
        self._zeros: list[Any] | None = None
        self.jitted = jax.jit(self._call_flat, out_shardings=sharding)

    def run(
        self, executable: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Return what the program gives.

        Args:
            executable: of the program, from `EvaluationProgramCache.prepare`.
            arguments: the carry last.
        """
        results = executable(*arguments)
        if is_debugging_numbers():
            assert self.carry_layout is not None
            carry = self.carry_layout.unflatten(jax.device_get(results[0]))
            if has_invalid_numbers(carry):
                # Operation by operation, so that JAX raises its error at the line of the user.
                self._call_flat(*arguments)
        return results

    def init_carry(self, arguments: tuple[Any, ...]) -> Carry:
        """Return zeros as the carry for a first batch, which replaces them.

        Args:
            arguments: of the program, but for the carry.
        """
        zeros = self._zeros
        if zeros is None:
            specs = jax.eval_shape(self.jitted, *arguments, None)[0]
            on_host = [np.zeros(leaf.shape, leaf.dtype) for leaf in specs]
            zeros = jax.device_put(on_host, self._sharding)
            self._zeros = zeros
        assert self.carry_layout is not None
        return Carry(zeros, self.carry_layout)

    def continue_carry(self, carry: Carry, where: str) -> None:
        """Have the program continue what other batches of this structure have summed up, which may
        have been those of another target.

        Args:
            carry: of those batches.
            where: what is wrong if it does not fit, for the error.
        """
        if self.carry_layout is None:
            self.carry_layout = carry.layout
            return
        previous: EvaluationCarry = carry.layout.spec
        new: EvaluationCarry = self.carry_layout.spec
        check_same_structure(previous.metrics, new.metrics, where)

    def _call_flat(self, *arguments: Any) -> tuple[list[Any], list[Any], list[Any]]:
        *others, carry = arguments
        if carry is not None:
            assert self.carry_layout is not None
            carry = self.carry_layout.unflatten(carry)
        carry, collected, media = self._function(*others, carry)
        carry = jax.tree.map(jnp.asarray, carry)
        self.carry_layout = CarryLayout(carry)
        collected_leaves, self.collected_treedef = jax.tree.flatten(collected)
        media_leaves, self.media_treedef = jax.tree.flatten(media)
        return self.carry_layout.flatten(carry), collected_leaves, media_leaves


class EvaluationProgramCache(Generic[AnyProgram]):
    """The programs of one kind of evaluation step, by target and by structure of the batches, and
    their executables.

    Args:
        services: what the engine provides.
        name: how records and errors call the step, such as `evaluate.test`.
        make_program: returns the program for a target.
    """

    def __init__(
        self,
        services: Services,
        name: str,
        make_program: Callable[[EvalTarget], AnyProgram],
    ) -> None:
        self._services = services
        self._name = name
        self._make_program = make_program
        self._programs: dict[Any, AnyProgram] = {}
        # By target, the shapes of the batches that its programs were compiled for.
        self._batch_specs: dict[Any, dict[Any, Any]] = {}
        self._begun: dict[Any, tuple[Compilation, jax.stages.Traced]] = {}
        self._executables: dict[Any, Callable[..., Any]] = {}

    def get(self, target: EvalTarget, batch: Any) -> AnyProgram:
        """Return the program for a target and batches of this structure."""
        key = target.key, jax.tree.structure(batch)
        if key not in self._programs:
            self._programs[key] = self._make_program(target)
        return self._programs[key]

    def compile_ahead(
        self,
        queue: CompilationQueue,
        target: EvalTarget,
        jitted: jax.stages.Wrapped,
        arguments: tuple[Any, ...],
    ) -> None:
        """Have a program compiled behind other work; `prepare` waits for it.

        Args:
            queue: when.
            target: what is evaluated.
            jitted: the program.
            arguments: of the program; the second is the batch.
        """
        key = target.key, *_sign_arguments(arguments)
        if key not in self._begun and key not in self._executables:
            self._begun[key] = self._lower(jitted, arguments)
            queue.add(self._begun[key][0])

    def prepare(
        self,
        target: EvalTarget,
        index: int,
        jitted: jax.stages.Wrapped,
        arguments: tuple[Any, ...],
        patience: float | None = None,
    ) -> Callable[..., Any]:
        """Return the executable of a program, or the program where JAX is to debug it. If the batch
        has new shapes, enforce the limit and notify plugins of the executable.

        Args:
            target: what is evaluated.
            index: the number of the batch.
            jitted: the program.
            arguments: of the program; the second is the batch.
            patience: the seconds after a signal for which to wait for the compiler, as of `Wait`.
        """
        if is_jit_disabled():
            return jitted
        key = target.key, *_sign_arguments(arguments)
        if key not in self._executables:
            executable = self._compile(key, target, index, jitted, arguments, patience)
            # An executable takes numbers of less than a byte in a layout of its own; jit converts.
            self._executables[key] = jitted if _has_narrow_numbers(arguments) else executable
        # JAX finds the line of the user only for what it compiles where it is called.
        return jitted if is_debugging_numbers() else self._executables[key]

    def _compile(
        self,
        key: Any,
        target: EvalTarget,
        index: int,
        jitted: jax.stages.Wrapped,
        arguments: tuple[Any, ...],
        patience: float | None,
    ) -> jax.stages.Compiled:
        """Return the executable of a program, which is new or was begun with; the arguments are
        `key` and those of `prepare`."""
        batch = arguments[1]
        batch_spec = shape_spec(batch)
        signature = shape_signature(batch)
        specs = self._batch_specs.setdefault(target.key, {})
        compilations, timings = self._services.compilations, self._services.timings
        if signature not in specs:
            where = f"batch {index} of {self._name}"
            compilations.check_limit(where, batch_spec, list(specs.values()))
        begun = self._begun.pop(key, None)
        compilation, traced = begun or self._lower(jitted, arguments)
        with timings.time("compile"):
            executable = compilation.wait(patience)
        timings.background_seconds["compile"] += compilation.background_seconds
        if signature not in specs:
            specs[signature] = batch_spec
            compilations.report(self._name, batch_spec, traced, compilation.lowered, executable)
        return executable

    def _lower(
        self, jitted: jax.stages.Wrapped, arguments: tuple[Any, ...]
    ) -> tuple[Compilation, jax.stages.Traced]:
        """Return the compilation of a program, which has yet to start, and what was traced."""
        timings = self._services.timings
        with timings.time("compile", calls=0), timings.describe("tracing"):
            traced = jitted.trace(*arguments)
            return Compilation(traced.lower(), arguments), traced


def _has_narrow_numbers(arguments: tuple[Any, ...]) -> bool:
    """Return whether a program gets numbers of less than a byte."""
    return any(get_wide_dtype(leaf.dtype) is not None for leaf in jax.tree.leaves(arguments))


def _sign_arguments(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what the executables of one program differ by: shapes and dtypes of the arguments,
    where they lie, and the settings by which JAX traces."""
    leaves, treedef = jax.tree.flatten(arguments)
    places = tuple(getattr(leaf, "sharding", None) for leaf in leaves)
    return treedef, tuple(list_argument_specs(leaves)), places, read_trace_settings()
