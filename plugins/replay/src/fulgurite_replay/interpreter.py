"""A traced step executed operation by operation, and from which operation on it is not finite.

Masks are often made of infinities, and a gradient may be NaN where nothing uses it. So it is not
the first number that is not finite that counts: each such number knows the operation that it comes
from, and only those from which the results come are named.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from fulgurite_replay.culprits import Culprit, IndexFault, Operand, find_example
from fulgurite_replay.example_axes import NO_AXES, Axes, drop_first, find_axes
from fulgurite_replay.indices import find_outside
from fulgurite_replay.jaxprs import (
    CALLS,
    execute_equation,
    find_last_uses,
    find_needed_carry,
    find_needed_variables,
    get_called_program,
    is_empty_loop,
    split_scan,
)
from fulgurite_replay.places import Frame, Place, PlaceFinder, find_frames, is_backward, join_scopes
from fulgurite_replay.values import Value, get_first, look_at, stack

_BATCH = re.compile(r"batch\b")
"""With which the labels of arrays of the batch begin."""
_LOOPS = frozenset({"scan", "while", "cond"})
# The operations after which an array still is what it was.
_LABEL_KEEPING = frozenset(
    {"convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze", "copy"}
)


@dataclass(frozen=True)
class _Scope:
    """What an operation is within.

    Attributes:
        names: the name stacks.
        loops: iterations and branches.
        frames: the calls that led to the innermost operation of these.
        of_loss: which of the results a loss is computed from, without a gradient in between. A
            number that is made while the loss is, and that the loss does not need, such as a factor
            of a derivative, is of the backward pass.
    """

    names: str = ""
    loops: tuple[str, ...] = ()
    frames: tuple[Frame, ...] = ()
    of_loss: tuple[bool, ...] = ()


class Interpreter:
    """Executes programs operation by operation.

    What runs a program of its own, such as a loop, is executed as a whole first, and only taken
    apart if its results are not finite, or indices are looked at.

    Example:
        from fulgurite_replay.interpreter import Interpreter
        from fulgurite_replay.places import PlaceFinder

        numbers = [jnp.array([1.0, 0.0])]
        program = jax.make_jaxpr(jnp.log)(*numbers)
        interpreter = Interpreter(PlaceFinder(engine.plugins), num_examples=2)
        (culprit,) = interpreter.find_culprits(program, numbers, ["x"], [True], [True])

    Attributes:
        index_faults: the operations so far whose indices are outside of an array.

    Args:
        places: finds where operations come from.
        num_examples: of the batch.
        checks_indices: whether to look at indices.
    """

    def __init__(
        self, places: PlaceFinder, num_examples: int, *, checks_indices: bool = False
    ) -> None:
        self._places = places
        self._num_examples = num_examples
        self._checks_indices = checks_indices
        self._num_operations = 0
        # Operations and lines that made numbers for a loss that are not finite.
        self._of_loss: set[tuple[str, Frame | None]] = set()
        self.index_faults: list[IndexFault] = []

    def find_culprits(
        self,
        program: ClosedJaxpr,
        arguments: Sequence[Any],
        labels: Sequence[str | None],
        needed: Sequence[bool],
        of_loss: Sequence[bool],
    ) -> list[Culprit | None]:
        """Return for each result of a program the operation from which it is not finite; None for a
        finite one, and for one that is not needed.

        Args:
            program: the traced step.
            arguments: its arrays.
            labels: what these are called.
            needed: True for the results that are computed.
            of_loss: True for the losses among the results.
        """
        pairs = zip(arguments, labels, strict=True)
        values = [self.receive(array, label) for array, label in pairs]
        scope = _Scope(of_loss=tuple(of_loss))
        results = self._run_closed(program, values, scope, needed)
        return [value.culprit for value in results]

    def receive(self, array: Any, label: str | None) -> Value:
        """Return an array that the step does not make itself."""
        value = replace(look_at(array, label), example_axes=self._find_example_axes(array, label))
        if value.is_finite:
            return value
        kind = "nan" if value.has_nan else "inf"
        operand = Operand.describe(array, label)
        example = find_example(array, value.example_axes)
        place = Place((), "step")
        return replace(value, culprit=Culprit(-1, kind, "given", place, (), operand, example))

    def _find_example_axes(self, array: Any, label: str | None) -> Axes:
        is_of_batch = label is not None and _BATCH.match(label) is not None
        if is_of_batch and array.ndim > 0 and array.shape[0] == self._num_examples:
            return frozenset({0})
        return NO_AXES

    def _run(
        self,
        program: Jaxpr,
        constants: Sequence[Value],
        arguments: Sequence[Value],
        scope: _Scope,
        needed: Sequence[bool] | None = None,
    ) -> list[Value]:
        """Return the results of a program.

        Args:
            program: the program.
            constants: of the program.
            arguments: of the program.
            scope: what it is within.
            needed: True for the results that are computed, in the place of the others is nothing;
                None for all.
        """
        values: dict[Any, Value] = dict(zip(program.constvars, constants, strict=True))
        values |= zip(program.invars, arguments, strict=True)
        last_uses = find_last_uses(program)

        def read(variable: Any) -> Value:
            if isinstance(variable, Literal):
                dtype = getattr(variable.aval, "dtype", None)
                return self.receive(np.asarray(variable.val, dtype), None)
            return values[variable]

        flags = [True] * len(program.outvars) if needed is None else needed
        variables = find_needed_variables(program, flags)
        loss_variables = find_needed_variables(program, scope.of_loss, is_backward)
        for index, equation in enumerate(program.eqns):
            outputs = [variable in variables for variable in equation.outvars]
            if needed is not None and not any(outputs):
                continue
            inputs = [read(variable) for variable in equation.invars]
            of_loss = tuple(variable in loss_variables for variable in equation.outvars)
            results = self._execute(
                program, equation, inputs, replace(scope, of_loss=of_loss), outputs
            )
            values |= zip(equation.outvars, results, strict=True)
            for variable in last_uses.get(index, ()):
                values.pop(variable, None)
        pairs = zip(program.outvars, flags, strict=True)
        return [read(variable) if flag else Value(None) for variable, flag in pairs]

    def _execute(
        self,
        program: Jaxpr,
        equation: JaxprEqn,
        inputs: Sequence[Value],
        scope: _Scope,
        needed: Sequence[bool],
    ) -> list[Value]:
        """Return the results of an operation of a program, of the whole step those needed."""
        self._num_operations += 1
        axes = find_axes(equation, [value.example_axes for value in inputs])
        has_program = equation.primitive.name in CALLS | _LOOPS and not is_empty_loop(equation)
        if has_program and self._is_outermost_call(equation, scope):
            return _set_axes(self._enter(equation, inputs, scope, needed), axes)
        if has_program and self._checks_indices:
            return _set_axes(self._enter(equation, inputs, scope), axes)
        if self._checks_indices:
            self._check_indices(equation, inputs, scope)
        arrays = execute_equation(program, equation, [value.array for value in inputs])
        outputs = _set_axes(list(map(look_at, arrays)), axes)
        if all(output.is_finite for output in outputs):
            return _keep_label(equation, inputs, outputs)
        if has_program and not any(value.has_nan for value in inputs):
            return _set_axes(self._enter(equation, inputs, scope), axes)
        return self._blame(equation, inputs, outputs, scope)

    def _is_outermost_call(self, equation: JaxprEqn, scope: _Scope) -> bool:
        """Return whether an operation is a call that is within no other one, such as that of the
        whole step: it is taken apart without a trial, and only for the results that are needed."""
        return not scope.names and equation.primitive.name in CALLS

    def _blame(
        self,
        equation: JaxprEqn,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        scope: _Scope,
    ) -> list[Value]:
        """Return the results of an operation, each with what made it not finite: what made an input
        so, or the operation itself."""
        bad_inputs = [value for value in inputs if value.culprit is not None]
        culprits = [value.culprit for value in bad_inputs]
        of_nan = [value.culprit for value in bad_inputs if value.has_nan]
        of_step = [culprit for culprit in culprits if culprit is not None and not culprit.is_given]
        itself: Culprit | None = None
        blamed = []
        for output in outputs:
            if output.is_finite:
                culprit = None
            elif output.has_nan and of_nan:
                culprit = get_first(of_nan)
            elif of_step:
                culprit = get_first(of_step)
            elif culprits and not output.has_nan:
                # An infinity that the program was given, such as a mask, and that stays one.
                culprit = culprits[0]
            else:
                itself = itself or self._make_culprit(equation, inputs, outputs, scope)
                culprit = itself
            blamed.append(replace(output, culprit=culprit))
        return blamed

    def _make_culprit(
        self,
        equation: JaxprEqn,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        scope: _Scope,
    ) -> Culprit:
        bad = next(output for output in outputs if not output.is_finite)
        place = self._find_place(equation, scope)
        return Culprit(
            self._num_operations,
            "nan" if bad.has_nan else "inf",
            equation.primitive.name,
            place,
            tuple(Operand.describe(value.array, value.label) for value in inputs),
            Operand.describe(bad.array),
            find_example(bad.array, bad.example_axes),
        )

    def _find_place(self, equation: JaxprEqn, scope: _Scope) -> Place:
        place = self._places.find(equation, scope.frames, scope.names, scope.loops)
        if place.part != "forward pass":
            return place
        known = (equation.primitive.name, place.user_frame)
        if any(scope.of_loss):
            self._of_loss.add(known)
        # Those that `jax.checkpoint` executes again are known.
        return place if known in self._of_loss else replace(place, part="backward pass")

    def _check_indices(self, equation: JaxprEqn, inputs: Sequence[Value], scope: _Scope) -> None:
        """Note an operation of which an index is outside of its array."""
        outside = find_outside(equation, [value.array for value in inputs])
        if outside is None:
            return
        indices = inputs[1]
        example = None
        if len(indices.example_axes) == 1:
            (axis,) = indices.example_axes
            if axis < len(outside.position):
                example = (outside.position[axis], indices.array.shape[axis])
        place = self._places.find(equation, scope.frames, scope.names, scope.loops)
        fault = IndexFault(
            equation.primitive.name,
            place,
            outside.index,
            outside.axis,
            inputs[0].array.shape,
            inputs[0].label,
            example,
        )
        if all(str(known) != str(fault) for known in self.index_faults):
            self.index_faults.append(fault)

    def _enter(
        self,
        equation: JaxprEqn,
        inputs: Sequence[Value],
        scope: _Scope,
        needed: Sequence[bool] | None = None,
    ) -> list[Value]:
        """Execute the programs within an operation, operation by operation."""
        params = equation.params
        frames = find_frames(equation, scope.frames)
        inner = replace(scope, names=join_scopes(scope.names, equation), frames=frames)
        match equation.primitive.name:
            case "scan":
                return self._run_scan(params, inputs, inner)
            case "while":
                return self._run_while(params, inputs, inner)
            case "cond":
                number = int(np.asarray(inputs[0].array))
                return self._run_closed(params["branches"][number], inputs[1:], inner)
        return self._run_closed(get_called_program(equation), inputs, inner, needed)

    def _run_closed(
        self,
        program: Any,
        inputs: Sequence[Value],
        scope: _Scope,
        needed: Sequence[bool] | None = None,
    ) -> list[Value]:
        """Run a program with its constants; some operations hold it without any."""
        if isinstance(program, ClosedJaxpr):
            constants = [self.receive(array, None) for array in program.consts]
            return self._run(program.jaxpr, constants, inputs, scope, needed)
        return self._run(program, [], inputs, scope, needed)

    def _run_scan(
        self, params: dict[str, Any], inputs: Sequence[Value], scope: _Scope
    ) -> list[Value]:
        num_constants, num_carry = split_scan(params)
        constants = list(inputs[:num_constants])
        carry = list(inputs[num_constants : num_constants + num_carry])
        xs = inputs[num_constants + num_carry :]
        length = params["length"]
        body = params["jaxpr"].jaxpr
        of_loss = find_needed_carry(body, scope.of_loss, num_constants, num_carry, is_backward)
        scope = replace(scope, of_loss=of_loss)
        ys_by_index: dict[int, list[Value]] = {}
        for index in reversed(range(length)) if params["reverse"] else range(length):
            loop = f"scan iteration {index} of {length}"
            slices = [self._slice(value, index) for value in xs]
            results = self._run_closed(
                params["jaxpr"],
                [*constants, *carry, *slices],
                replace(scope, loops=(*scope.loops, loop)),
            )
            carry = results[:num_carry]
            ys_by_index[index] = results[num_carry:]
        rows = [ys_by_index[index] for index in range(length)]
        return [*carry, *map(stack, zip(*rows, strict=True))]

    def _slice(self, value: Value, index: int) -> Value:
        """Return the part of an array for one iteration; its culprit stays, if it has one."""
        part = look_at(value.array[index], value.label)
        part = replace(part, example_axes=drop_first(value.example_axes))
        return part if part.is_finite else replace(part, culprit=value.culprit)

    def _run_while(
        self, params: dict[str, Any], inputs: Sequence[Value], scope: _Scope
    ) -> list[Value]:
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        cond_constants = inputs[:num_cond]
        body_constants = inputs[num_cond : num_cond + num_body]
        carry = list(inputs[num_cond + num_body :])
        body = params["body_jaxpr"]
        of_loss = find_needed_carry(body.jaxpr, scope.of_loss, num_body, len(carry), is_backward)
        index = 0
        while True:
            loops = (*scope.loops, f"while iteration {index}")
            inner = replace(scope, loops=loops, of_loss=(any(of_loss),))
            (is_running,) = self._run_closed(params["cond_jaxpr"], [*cond_constants, *carry], inner)
            if not bool(is_running.array):
                return carry
            inner = replace(inner, of_loss=of_loss)
            carry = self._run_closed(body, [*body_constants, *carry], inner)
            index += 1


def _set_axes(values: Sequence[Value], axes: Sequence[Axes]) -> list[Value]:
    """Return values with their axes of examples."""
    pairs = zip(values, axes, strict=True)
    return [replace(value, example_axes=each) for value, each in pairs]


def _keep_label(equation: JaxprEqn, inputs: Sequence[Value], outputs: list[Value]) -> list[Value]:
    """Return the results, with the label of the input if they are the same numbers in another
    form."""
    if equation.primitive.name not in _LABEL_KEEPING:
        return outputs
    return [replace(output, label=inputs[0].label) for output in outputs]
