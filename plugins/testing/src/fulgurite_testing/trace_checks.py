"""Checks of what a plugin contributes to the compiled step."""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite import StepRange
from fulgurite.plugins import Program, TrainStep, as_model_init
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr

from fulgurite_testing.subject import CheckError, PluginUnderTest
from fulgurite_testing.tiny import tiny_engine

MAX_CONSTANT_SIZE = 1024
"""Bytes; a larger array belongs into the state."""
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_CALLBACK = re.compile(r"\b(\w*callback\w*|debug_print|infeed|outfeed)\[")


def check_same_trace(subject: PluginUnderTest) -> None:
    """Traced twice, the step is the same program, and no tracer is kept."""
    if not subject.is_traced:
        return
    plugin, (first, second) = _trace_with_plugin(subject)
    first_text = _print_program(first)
    second_text = _print_program(second)
    if first_text != second_text:
        pairs = zip(first_text.splitlines(), second_text.splitlines(), strict=False)
        lines = [(before, after) for before, after in pairs if before != after]
        where = f": {lines[0][0].strip()!r}, then {lines[0][1].strip()!r}" if lines else ""
        raise CheckError(
            f"traced twice, the step is not the same program{where}. A traced hook is a pure "
            "function of its arguments: keep what changes in plugin_state, take random keys from "
            "ctx"
        )
    for name, value in getattr(plugin, "__dict__", {}).items():
        if _holds_tracer(value):
            raise CheckError(
                f"a traced hook keeps a tracer in self.{name}: it stands for a value in one trace "
                "only. Return it by step_metrics, or keep it in plugin_state"
            )


def check_no_effects(subject: PluginUnderTest) -> None:
    """The compiled step does not call the host."""
    if not subject.is_traced:
        return
    callbacks = _find_callbacks(_trace_with_plugin(subject)[1][0])
    # A model may need the plugin; then it cannot be traced without.
    if callbacks:
        callbacks -= _find_callbacks(_trace_without_plugin(subject))
    if callbacks:
        raise CheckError(
            f"the compiled step calls the host at every step ({', '.join(sorted(callbacks))}): log "
            "from a scheduled action"
        )


def check_no_captured_arrays(subject: PluginUnderTest) -> None:
    """The compiled step holds no large array as a constant."""
    if not subject.is_traced:
        return
    constants = _find_large_constants(_trace_with_plugin(subject)[1][0])
    if not constants:
        return
    known = [
        (constant.shape, str(constant.dtype))
        for constant in _find_large_constants(_trace_without_plugin(subject))
    ]
    for constant in constants:
        spec = (constant.shape, str(constant.dtype))
        if spec not in known:
            raise CheckError(
                f"a traced hook captures an array {constant.dtype}{list(constant.shape)} as a "
                "constant of the compiled step: return it from init_plugin_state, so that it is "
                "saved, sharded and donated"
            )
        known.remove(spec)


@functools.lru_cache(1)
def _trace_with_plugin(subject: PluginUnderTest) -> tuple[Any, list[ClosedJaxpr]]:
    """Return a plugin, and the step with it, traced twice."""
    plugin = subject.make()
    return plugin, _trace_step(subject, [plugin], 2)


@functools.lru_cache(1)
def _trace_without_plugin(subject: PluginUnderTest) -> ClosedJaxpr:
    return _trace_step(subject, [], 1)[0]


def _trace_step(subject: PluginUnderTest, plugins: list[Any], times: int) -> list[ClosedJaxpr]:
    engine = tiny_engine(*plugins, *subject.other_plugins())
    batch = next(iter(engine.iter_batches(subject.data(), epochs=1)))
    program = Program(engine.services, as_model_init(subject.model), (batch,), None)
    update_rule = program.update_rule.for_step(0, StepRange(0, 8))
    nothing_due = jnp.zeros(len(engine.services.due_names), bool)

    def trace() -> ClosedJaxpr:
        # A new step for each trace: it keeps the trace of a batch that it knows.
        step = TrainStep(engine.services, update_rule, [])
        make_jaxpr = eqx.filter_make_jaxpr(functools.partial(step, step_number=1))
        return make_jaxpr(program.state_spec, batch, nothing_due)[0]

    with engine.sharding.mesh_context():
        return [trace() for _ in range(times)]


def _print_program(jaxpr: ClosedJaxpr) -> str:
    """Return the text of a program and its constants, without memory addresses."""
    constants = [
        _ADDRESS.sub("", repr(np.asarray(constant)))
        for constant in jaxpr.consts
        if not _is_key(constant)
    ]
    return _ADDRESS.sub("", str(jaxpr)) + "\n" + "\n".join(constants)


def _find_callbacks(jaxpr: ClosedJaxpr) -> set[str]:
    return set(_CALLBACK.findall(str(jaxpr)))


def _find_large_constants(jaxpr: ClosedJaxpr) -> list[Any]:
    return [
        *filter(_is_large_array, jaxpr.consts),
        *_find_large_constants_within(jaxpr.jaxpr),
    ]


def _find_large_constants_within(jaxpr: Jaxpr) -> list[Any]:
    """Return the large arrays that the equations of a program hold, and those of inner programs."""
    constants: list[Any] = []
    for equation in jaxpr.eqns:
        values = [getattr(variable, "val", None) for variable in equation.invars]
        constants += filter(_is_large_array, values)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if isinstance(inner, ClosedJaxpr):
                constants += _find_large_constants(inner)
            elif isinstance(inner, Jaxpr):
                constants += _find_large_constants_within(inner)
    return constants


def _is_large_array(value: Any) -> bool:
    return not _is_key(value) and getattr(value, "nbytes", 0) > MAX_CONSTANT_SIZE


def _is_program(value: Any) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def _holds_tracer(value: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))
