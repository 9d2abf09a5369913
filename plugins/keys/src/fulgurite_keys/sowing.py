"""Values that a model names deep inside, collected outside of it through any transformation of jax.

`sow` marks a value by a primitive of its own, which is the identity and leaves nothing in the
compiled program. `collect_sown` runs code under a trace that hands every operation on to the trace
around it, and notes those marks. Where the code of a loop, a condition, a checkpoint or an inner
jit is an operation by itself, that operation is replaced by one with the marked values as further
outputs.

`jax.make_jaxpr` and an interpreter of its result would need no trace, but the step would run inside
of it, and what a step hands out besides its result, such as `ctx.add_loss` and functions that draw
media, could not leave. What differs between versions of jax is in `_as_closed` and `_split_scan`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import equinox as eqx
import jax
import jax.numpy as jnp
from fulgurite.errors import ModelError
from jax._src import core as jax_core
from jax._src.named_sharding import UNSPECIFIED
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

T = TypeVar("T")
ShouldCollect = Callable[[str], bool]
"""Says whether values of a name are collected."""

_sow = Primitive("fulgurite_sow")
_sow.multiple_results = True


def sow(name: str, value: T) -> T:
    """Name a value anywhere in a model, so that keys such as `interms.NAME` find it.

    It works inside `jax.vmap`, `scan`, `cond`, `while_loop`, `jax.checkpoint`, `jax.jit` and
    `jax.grad`. A value in a mapped function gets the mapped axis in front, one in a scan the axis
    of its iterations; of a `while_loop` the last one counts, and of a `cond` zeros where its branch
    was not taken. Where nobody asks for the name, the compiled program is the one without it.

    Args:
        name: of the value.
        value: an array or a tree of them; other leaves become None in what is collected.

    Returns:
        The value. Use it instead of the one before.

    Raises:
        ModelError: someone asks for it, and it is inside a function with a derivative of its own.

    Example:
        import fulgurite_keys as fk


        def apply(model, x):
            first, second = model.layers
            hidden = fk.sow("hidden", first(x))
            return second(hidden)
    """
    for should_collect, primitive_name in _blocked.get():
        _check_not_blocked(name, primitive_name, should_collect)
    arrays, others = eqx.partition(value, eqx.is_array_like)
    leaves, structure = jax.tree.flatten(arrays)
    leaves = _sow.bind(*map(jnp.asarray, leaves), name=name, structure=structure)
    return eqx.combine(jax.tree.unflatten(structure, leaves), others)


@dataclass
class Sown:
    """What was collected.

    Example:
        from fulgurite_keys import sow
        from fulgurite_keys.sowing import collect_sown

        with collect_sown(lambda name: name == "hidden") as sown:
            sow("hidden", jnp.ones(3))
        sown.values["hidden"]  # [Array([1., 1., 1.])]

    Attributes:
        values: by name; one value for each time that `sow` was called with it.
        names: all that occurred, whether they were collected or not.
    """

    values: dict[str, list[Any]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


@contextmanager
def collect_sown(should_collect: ShouldCollect) -> Iterator[Sown]:
    """Collect values that code in the block sows; they are there as it continues, and may be used
    after the block.

    Inside of `jax.grad`, collect inside of it, and return the values with `has_aux`.

    Args:
        should_collect: says of a name whether its values are collected.

    Raises:
        ModelError: a value is inside a function with a derivative of its own, such as a
            `jax.custom_vjp`, in the condition of a `while_loop`, or in two branches of a `cond`
            with different shapes.
    """
    sown = Sown()
    with (
        jax_core.take_current_trace() as parent,
        jax_core.set_current_trace(_CollectingTrace(parent, should_collect, sown)),
    ):
        yield sown


# --- the primitive --------------------------------------------------------------------------------

_sow.def_impl(lambda *args, **_: list(args))
_sow.def_abstract_eval(lambda *avals, **_: list(avals))
mlir.register_lowering(_sow, lambda _, *args, **__: list(args))


def _batch(args: Sequence[Any], axes: Sequence[int | None], **params: Any) -> Any:
    """Sow the batched value with its axis in front, so that its shape does not depend on where the
    caller of `vmap` has it."""
    moved = [
        arg if axis is None else jnp.moveaxis(arg, axis, 0)
        for arg, axis in zip(args, axes, strict=True)
    ]
    return _sow.bind(*moved, **params), [None if axis is None else 0 for axis in axes]


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """Sow the value and not its tangent."""
    return _sow.bind(*primals, **params), list(tangents)


batching.primitive_batchers[_sow] = _batch
ad.primitive_jvps[_sow] = _differentiate

# --- the trace ------------------------------------------------------------------------------------

_blocked: ContextVar[tuple[tuple[ShouldCollect, str], ...]] = ContextVar("blocked", default=())
"""Who collects around a function with a derivative of its own, and what that function is, while it
is traced: nothing can leave it."""


class _CollectingTrace(jax_core.Trace):
    """Hands operations on to the trace around it, and notes what is sown."""

    __slots__ = ("_parent", "_should_collect", "_sown")

    def __init__(self, parent: Any, should_collect: ShouldCollect, sown: Sown) -> None:
        super().__init__()
        self._parent = parent
        self._should_collect = should_collect
        self._sown = sown
        self.requires_low = parent.requires_low
        if parent is not jax_core.eval_trace:
            # Values belong to the trace around this one, and by this jax tells which that is.
            self._weakref = parent._weakref

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        """Note a value that is sown, rewrite an operation with such values inside, and hand any
        other one on."""
        if primitive is _sow:
            name = params["name"]
            self._sown.names.add(name)
            if self._should_collect(name):
                value = jax.tree.unflatten(params["structure"], tracers)
                self._sown.values.setdefault(name, []).append(value)
            return self._parent.process_primitive(primitive, tracers, params)
        names = _find_names(primitive.name, params)
        self._sown.names |= names.keys()
        collected = [name for name in names if self._should_collect(name)]
        if not collected:
            return self._parent.process_primitive(primitive, tracers, params)
        for name in collected:
            blocking = names[name]
            if blocking is not None:
                _check_not_blocked(name, blocking, self._should_collect)
        with jax_core.set_current_trace(self._parent):
            outs, values = _REWRITERS[primitive.name](tracers, params, self._should_collect)
        for name, calls in values.items():
            self._sown.values.setdefault(name, []).extend(calls)
        return outs

    def process_custom_jvp_call(self, primitive: Any, *args: Any, **params: Any) -> Any:
        return self._hand_on("process_custom_jvp_call", primitive, *args, **params)

    def process_custom_vjp_call(self, primitive: Any, *args: Any, **params: Any) -> Any:
        return self._hand_on("process_custom_vjp_call", primitive, *args, **params)

    def process_call(self, primitive: Any, *args: Any) -> Any:
        return self._hand_on("process_call", primitive, *args)

    def stage_value(self, val: Any) -> Any:
        return self._parent.stage_value(val)

    def cur_qdd(self, x: Any) -> Any:
        return self._parent.cur_qdd(x)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("process_"):
            return partial(self._hand_on, name)
        return getattr(self._parent, name)

    def _hand_on(self, method: str, primitive: Any, *args: Any, **params: Any) -> Any:
        """Let the trace around this one process a function that nothing can leave."""
        token = _blocked.set((*_blocked.get(), (self._should_collect, primitive.name)))
        try:
            return getattr(self._parent, method)(primitive, *args, **params)
        finally:
            _blocked.reset(token)


def _check_not_blocked(name: str, primitive_name: str, should_collect: ShouldCollect) -> None:
    """Raise an error for a value that is asked for where it cannot be collected."""
    if should_collect(name):
        raise ModelError(
            f"the value {name!r} is computed inside {primitive_name}, which nothing can leave but "
            "what it returns: return the value from there, and call sow outside"
        )


# --- operations that hold code --------------------------------------------------------------------

_names_by_jaxpr: WeakKeyDictionary[Any, dict[str, str | None]] = WeakKeyDictionary()


def _find_names(primitive_name: str, params: dict[str, Any]) -> dict[str, str | None]:
    """Return the names that are sown inside an operation, each with None or what it cannot leave.

    Args:
        primitive_name: of the operation.
        params: of the operation.
    """
    names: dict[str, str | None] = {}
    for key, value in params.items():
        blocking = None if primitive_name in _REWRITERS else primitive_name
        if key == "cond_jaxpr":
            blocking = "the condition of a while_loop"
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, Jaxpr | ClosedJaxpr):
                for name, inner in _find_names_in(_as_closed(part).jaxpr).items():
                    names[name] = inner or blocking or names.get(name)
    return names


def _find_names_in(jaxpr: Any) -> dict[str, str | None]:
    if jaxpr not in _names_by_jaxpr:
        names: dict[str, str | None] = {}
        for eqn in jaxpr.eqns:
            if eqn.primitive is _sow:
                names.setdefault(eqn.params["name"], None)
            else:
                for name, blocking in _find_names(eqn.primitive.name, eqn.params).items():
                    names[name] = blocking or names.get(name)
        _names_by_jaxpr[jaxpr] = names
    return _names_by_jaxpr[jaxpr]


def _as_closed(jaxpr: Any) -> Any:
    """Return a jaxpr with its constants. Since jax 0.12 there is no other kind."""
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr
    return ClosedJaxpr(jaxpr, ())


def _run(jaxpr: Any, should_collect: ShouldCollect, args: Any) -> tuple[list[Any], Any]:
    """Return the outputs of a jaxpr and the values that it sows, by name."""
    with collect_sown(should_collect) as sown:
        outs = jaxpr_as_fun(_as_closed(jaxpr))(*args)
    return list(outs), sown.values


def _rewrite_jit(args: Any, params: Any, should_collect: ShouldCollect) -> Any:
    def run(*args: Any) -> Any:
        return _run(params["jaxpr"], should_collect, args)

    run.__name__ = params["name"]
    jitted = jax.jit(
        run,
        in_shardings=tuple(params["in_shardings"]),
        out_shardings=(list(params["out_shardings"]), UNSPECIFIED),
        inline=params["inline"],
    )
    return jitted(*args)


def _rewrite_checkpoint(args: Any, params: Any, should_collect: ShouldCollect) -> Any:
    def run(*args: Any) -> Any:
        return _run(params["jaxpr"], should_collect, args)

    checkpointed = jax.checkpoint(run, policy=params["policy"], prevent_cse=params["prevent_cse"])
    return checkpointed(*args)


def _rewrite_scan(args: Any, params: Any, should_collect: ShouldCollect) -> Any:
    num_consts, num_carry = _split_scan(params)
    consts = args[:num_consts]
    init = args[num_consts : num_consts + num_carry]

    def body(carry: Any, xs: Any) -> Any:
        outs, values = _run(params["jaxpr"], should_collect, [*consts, *carry, *xs])
        return outs[:num_carry], (outs[num_carry:], values)

    carry, (ys, values) = jax.lax.scan(
        body,
        list(init),
        list(args[num_consts + num_carry :]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys], values


def _split_scan(params: Any) -> tuple[int, int]:
    """Return how many of the inputs of a scan are constants, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # jax 0.12
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def _rewrite_while(args: Any, params: Any, should_collect: ShouldCollect) -> Any:
    num_cond = params["cond_nconsts"]
    num_body = params["body_nconsts"]
    cond_consts = args[:num_cond]
    body_consts = args[num_cond : num_cond + num_body]
    init = list(args[num_cond + num_body :])

    def run(carry: Any) -> Any:
        return _run(params["body_jaxpr"], should_collect, [*body_consts, *carry])

    def should_continue(carry: Any) -> Any:
        return jaxpr_as_fun(_as_closed(params["cond_jaxpr"]))(*cond_consts, *carry[0])[0]

    zeros = _make_zeros(jax.eval_shape(run, init)[1])
    return jax.lax.while_loop(should_continue, lambda carry: run(carry[0]), (init, zeros))


def _rewrite_cond(args: Any, params: Any, should_collect: ShouldCollect) -> Any:
    index, *operands = args
    specs: dict[str, list[Any]] = {}
    for jaxpr in params["branches"]:
        values = jax.eval_shape(partial(_run, jaxpr, should_collect), operands)[1]
        for name, calls in values.items():
            known = specs.setdefault(name, [])
            for spec, other in zip(known, calls, strict=False):
                if eqx.tree_equal(spec, other) is not True:
                    raise ModelError(
                        f"the value {name!r} is {_describe(spec)} in one branch of a cond and "
                        f"{_describe(other)} in another: give the two different names"
                    )
            known += calls[len(known) :]

    def run_branch(jaxpr: Any, *operands: Any) -> Any:
        outs, values = _run(jaxpr, should_collect, operands)
        for name, calls in specs.items():
            present = values.get(name, [])
            values[name] = [*present, *_make_zeros(calls[len(present) :])]
        return outs, {name: values[name] for name in specs}

    branches = [partial(run_branch, jaxpr) for jaxpr in params["branches"]]
    return jax.lax.switch(index, branches, *operands)


def _make_zeros(specs: Any) -> Any:
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)


def _describe(tree: Any) -> str:
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree))


_REWRITERS: dict[str, Callable[..., tuple[list[Any], dict[str, list[Any]]]]] = {
    "jit": _rewrite_jit,
    "pjit": _rewrite_jit,
    "checkpoint": _rewrite_checkpoint,
    "remat2": _rewrite_checkpoint,
    "scan": _rewrite_scan,
    "while": _rewrite_while,
    "cond": _rewrite_cond,
}
