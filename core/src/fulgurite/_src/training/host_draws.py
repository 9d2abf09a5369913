"""Programs of random keys in two parts: random bits, made on the host, and what XLA makes of them.

Of the CPU time before the first step of a small model most went into programs that draw random
numbers, 0.3 s for each shape, all for 20 rounds of integer arithmetic. So the random bits are made
on the host, and XLA makes numbers of them: the same bits either way, because integers have no last
bit to round, and because what makes floating-point numbers of them is the same operation as before.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.extend.core.primitives import (
    broadcast_in_dim_p,
    jit_p,
    random_bits_p,
    random_fold_in_p,
    random_split_p,
    slice_p,
    squeeze_p,
)

from fulgurite._src import threefry
from fulgurite._src.identity import ByIdentity
from fulgurite._src.recent import RecentCache
from fulgurite._src.threefry import Words

MAX_HOST_NUMBERS = 2**20
"""How many numbers of one kind are made on the host: about as fast as XLA compiles."""


class DividedProgram(NamedTuple):
    """A program of keys in two parts.

    Attributes:
        draw: returns, on the host, random bits and keys, from the words of the keys among the
            arguments of the program.
        rest: what XLA does; its arguments are what `draw` returns, and then those of the program
            that are no keys.
    """

    draw: Callable[[Sequence[Words]], list[Any]]
    rest: ClosedJaxpr


def divide(
    program: ClosedJaxpr, are_keys: tuple[bool, ...], *, make_constants: bool = False
) -> DividedProgram:
    """Return a program in two parts: what is made of keys alone, and what is made of that.

    Args:
        program: the program.
        are_keys: which of its arguments are keys whose words are known.
        make_constants: whether to make arrays of one number on the host, too: within a jitted
            function it is not an operation of its own.
    """
    jaxpr = program.jaxpr
    keys = [var for var, is_key in zip(jaxpr.invars, are_keys, strict=True) if is_key]
    others = [var for var, is_key in zip(jaxpr.invars, are_keys, strict=True) if not is_key]
    divider = _Divider(keys, _find_large_calls(jaxpr), make_constants=make_constants)
    for equation in jaxpr.eqns:
        divider.add(equation)
    divider.hand_over(jaxpr.outvars)
    rest = jaxpr.replace(
        invars=[*divider.drawn, *others],
        eqns=divider.equations,
        debug_info=jaxpr.debug_info._replace(arg_names=None),
    )
    return DividedProgram(partial(_draw, keys, divider), ClosedJaxpr(rest, program.consts))


class _HostStep(NamedTuple):
    """What is done on the host in the place of an equation.

    Attributes:
        compute: returns the results.
        arguments: of the equation, which are on the host.
        results: of the equation, or what an equation that stays is handed.
        is_handed: whether XLA gets the results; they are words of keys otherwise.
    """

    compute: Callable[..., list[Any]]
    arguments: list[Var]
    results: list[Var]
    is_handed: bool


class _Divider:
    """Takes the equations of a program in order, and divides them.

    Attributes:
        steps: done on the host, in order.
        drawn: what they hand to the equations.
        equations: those that stay.

    Args:
        keys: whose words are known.
        large_calls: programs within the program that draw too much for the host.
        make_constants: as of `divide`.
    """

    def __init__(
        self, keys: Sequence[Var], large_calls: set[ByIdentity], *, make_constants: bool
    ) -> None:
        self.steps: list[_HostStep] = []
        self.drawn: dict[Var, None] = {}
        self.equations: list[JaxprEqn] = []
        self._keys = set(keys)
        self._large_calls = large_calls
        self._make_constants = make_constants

    def add(self, equation: JaxprEqn) -> None:
        """Do an equation on the host if it is about keys alone, and as much of it as is."""
        arguments = self._list_keys(equation.invars)
        if not arguments and self._make_constants and _is_constant(equation):
            results = list(equation.outvars)
            self._add_handed(partial(_make_constant, equation), [], results)
        elif not arguments:
            self.equations.append(equation)
        elif (compute := _find_host_rule(equation)) is not None:
            results = list(equation.outvars)
            if equation.primitive is random_bits_p:
                self._add_handed(compute, arguments, results)
            else:
                self.steps.append(_HostStep(compute, arguments, results, is_handed=False))
                self._keys.update(results)
        elif not self._divide_call(equation):
            self.hand_over(arguments)
            self.equations.append(equation)

    def hand_over(self, values: Sequence[Any]) -> None:
        """Hand the keys among some values to XLA."""
        for var in self._list_keys(values):
            if var not in self.drawn:
                self._add_handed(_wrap, [var], [var])

    def _add_handed(
        self, compute: Callable[..., list[Any]], arguments: list[Var], results: list[Var]
    ) -> None:
        self.steps.append(_HostStep(compute, arguments, results, is_handed=True))
        self.drawn |= dict.fromkeys(results)

    def _list_keys(self, values: Sequence[Any]) -> list[Var]:
        return [value for value in values if isinstance(value, Var) and value in self._keys]

    def _divide_call(self, equation: JaxprEqn) -> bool:
        """Divide the call of a jitted function, if it may be, and return whether it was."""
        if equation.primitive is not jit_p:
            return False
        program = equation.params["jaxpr"]
        if ByIdentity(program) in self._large_calls:
            return False
        is_known = [isinstance(var, Var) and var in self._keys for var in equation.invars]
        call = _calls.get_or_build(
            (ByIdentity(program), tuple(is_known)),
            lambda: _DividedCall.make(equation, tuple(is_known)),
        )
        if not call.can_replace(equation):
            return False
        results = [Var(aval) for aval in call.avals]
        others = [var for var, known in zip(equation.invars, is_known, strict=True) if not known]
        self._add_handed(call.draw, self._list_keys(equation.invars), results)
        invars = [*results, *others]
        self.equations.append(call.equation.replace(invars=invars, outvars=equation.outvars))
        return True


class _DividedCall(NamedTuple):
    """The call of a jitted function of keys, such as `jax.random.uniform`, in two parts.

    Attributes:
        draw: as `_HostStep.compute`.
        avals: of what it returns.
        equation: the call of the rest.
    """

    draw: Callable[..., list[Any]]
    avals: list[Any]
    equation: JaxprEqn

    @staticmethod
    def make(equation: JaxprEqn, are_keys: tuple[bool, ...]) -> "_DividedCall":
        """Divide the program of a call whose arguments are keys, or not."""
        divided = divide(equation.params["jaxpr"], are_keys)

        def rest(*arguments: Any) -> list[Any]:
            return jaxpr_as_fun(divided.rest)(*arguments)

        rest.__name__ = equation.params["name"]
        avals = [var.aval for var in divided.rest.jaxpr.invars]
        num_drawn = len(avals) - are_keys.count(False)
        (call,) = jax.make_jaxpr(jax.jit(rest))(*avals).eqns
        return _DividedCall(lambda *words: divided.draw(words), avals[:num_drawn], call)

    def can_replace(self, equation: JaxprEqn) -> bool:
        """Return whether this call may stand for the call of the whole, which then says nothing of
        devices, layouts and donation that this one does not say."""
        params, new = equation.params, self.equation.params
        return not any(params["donated_invars"]) and all(
            set(params[name]) <= set(new[name])
            for name in ("in_shardings", "out_shardings", "in_layouts", "out_layouts")
        )


# Of all initializers, so that a second engine finds what was compiled for the first.
_calls = RecentCache[_DividedCall](128)


def _draw(keys: Sequence[Var], divider: _Divider, words: Sequence[Words]) -> list[Any]:
    """Do the steps on the host, and return what is handed to XLA."""
    values: dict[Var, Any] = dict(zip(keys, words, strict=True))
    handed: dict[Var, Any] = {}
    for step in divider.steps:
        results = step.compute(*(values[var] for var in step.arguments))
        if step.is_handed:
            # At once, so that the host keeps none of them.
            handed.update(zip(step.results, jax.device_put(results), strict=True))
        else:
            values.update(zip(step.results, results, strict=True))
    return [handed[var] for var in divider.drawn]


def _wrap(words: Words) -> list[Any]:
    return [threefry.as_key(words)]


def _find_host_rule(equation: JaxprEqn) -> Callable[[Words], list[Any]] | None:
    """Return what an equation about a key makes of its words; None if that is left to XLA."""
    params, primitive = equation.params, equation.primitive
    # As it was where the program was traced; what is not known counts as not.
    is_partitionable = getattr(equation.ctx, "threefry_partitionable", False)
    compute: Callable[[Words], Any] | None = None
    if primitive is random_bits_p and params["bit_width"] == 32 and is_partitionable:
        compute = partial(threefry.draw_bits, shape=params["shape"])
    elif primitive is random_split_p and is_partitionable:
        compute = partial(threefry.split, shape=params["shape"])
    elif primitive is random_fold_in_p and isinstance(equation.invars[1], Literal):
        compute = partial(threefry.fold_in_words, data=int(equation.invars[1].val))
    elif primitive is slice_p:
        starts, limits = params["start_indices"], params["limit_indices"]
        steps = params["strides"] or (1,) * len(starts)
        indices = tuple(map(slice, starts, limits, steps))
        compute = partial(_index, indices=indices)
    elif primitive is squeeze_p:
        compute = partial(np.squeeze, axis=tuple(params["dimensions"]))
    return None if compute is None else lambda words: [compute(words)]


def _is_constant(equation: JaxprEqn) -> bool:
    """Return whether an equation makes an array of one number, small enough for the host."""
    if equation.primitive is not broadcast_in_dim_p:
        return False
    aval: Any = equation.outvars[0].aval
    is_small = prod(aval.shape) <= MAX_HOST_NUMBERS
    return isinstance(equation.invars[0], Literal) and not aval.weak_type and is_small


def _make_constant(equation: JaxprEqn) -> list[Any]:
    aval: Any = equation.outvars[0].aval
    number: Any = equation.invars[0]
    return [np.full(aval.shape, number.val, aval.dtype)]


def _index(words: Words, indices: tuple[slice, ...]) -> Words:
    return words[indices]


def _find_large_calls(jaxpr: Jaxpr) -> set[ByIdentity]:
    """Return the programs of jitted functions that draw too many numbers for the host, in all of
    their calls together."""
    sizes: Counter[ByIdentity] = Counter()
    for equation in jaxpr.eqns:
        if equation.primitive is jit_p:
            program = equation.params["jaxpr"]
            sizes[ByIdentity(program)] += _count_numbers(program.jaxpr)
    return {program for program, size in sizes.items() if size > MAX_HOST_NUMBERS}


def _count_numbers(jaxpr: Jaxpr) -> int:
    """Return how many random numbers a program draws, but for those in loops and branches."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive is random_bits_p:
            aval: Any = equation.outvars[0].aval
            total += prod(aval.shape)
        elif equation.primitive is jit_p:
            total += _count_numbers(equation.params["jaxpr"].jaxpr)
    return total
