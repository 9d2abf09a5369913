"""Checks of what a plugin contributes to the compiled step."""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import numpy as np
from fulgurite.execution.program import Program
from fulgurite.training.state import as_model_init
from fulgurite.triggers import StepRange
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr

from fulgurite_testing.subject import Broken, Subject
from fulgurite_testing.tiny import tiny_engine

CAPTURED = 1024
"""Bytes; a larger array belongs into the state."""
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_CALLBACK = re.compile(r"\b(\w*callback\w*|debug_print|infeed|outfeed)\[")


def same_trace(subject: Subject) -> None:
    """Traced twice, the step is the same program, and nothing of the trace is kept."""
    if not subject.traced:
        return
    plugin, (first, again) = _with(subject)
    if (one := _text(first)) != (two := _text(again)):
        lines = [
            pair
            for pair in zip(one.splitlines(), two.splitlines(), strict=False)
            if pair[0] != pair[1]
        ]
        where = f": {lines[0][0].strip()!r}, then {lines[0][1].strip()!r}" if lines else ""
        raise Broken(
            f"traced twice, the step is not the same program{where}. A traced hook is a pure "
            f"function of its "
            "arguments: keep what changes in plugin_state, take random keys from ctx"
        )
    kept = (
        [name for name, value in vars(plugin).items() if _holds_tracer(value)]
        if hasattr(plugin, "__dict__")
        else []
    )
    if kept:
        raise Broken(
            f"a traced hook keeps a tracer in self.{kept[0]}: it stands for a value in one trace "
            f"only. Return it by "
            "step_metrics, or keep it in plugin_state"
        )


def no_effects(subject: Subject) -> None:
    """What is traced calls nothing on the host."""
    found = _callbacks(_with(subject)[1][0]) if subject.traced else set()
    if found and (found := found - _callbacks(_without(subject))):
        raise Broken(
            f"the compiled step calls the host at every step ({', '.join(sorted(found))}): emit "
            f"from a scheduled action"
        )


def no_captured_arrays(subject: Subject) -> None:
    """What is traced holds no large array as a constant."""
    found = _captured(_with(subject)[1][0]) if subject.traced else []
    # A model may need the plugin; then it cannot be traced without.
    known = [(one.shape, str(one.dtype)) for one in _captured(_without(subject))] if found else []
    for array in found:
        if (kind := (array.shape, str(array.dtype))) in known:
            known.remove(kind)
        else:
            raise Broken(
                f"a traced hook captures an array {kind[1]}{list(kind[0])} as a constant of the "
                f"compiled step: return "
                "it from plugin_state, so that it is saved, sharded and donated"
            )


@functools.lru_cache(1)
def _with(subject: Subject) -> tuple[Any, list[ClosedJaxpr]]:
    """A plugin, and the step with it, traced twice."""
    plugin = subject.make()
    return plugin, _traced(subject, [plugin], 2)


@functools.lru_cache(1)
def _without(subject: Subject) -> ClosedJaxpr:
    """The step without the plugin."""
    return _traced(subject, [], 1)[0]


def _traced(subject: Subject, plugins: list[Any], times: int) -> list[ClosedJaxpr]:
    engine = tiny_engine(*plugins, *subject.beside())
    batch = next(iter(engine.iter_batches(subject.data(), epochs=1)))
    program = Program(engine.services, as_model_init(subject.model), batch, None)
    program.select_update_rule(0, StepRange(0, 8))
    nothing_due = np.zeros(len(engine.due_names), bool)

    def trace() -> ClosedJaxpr:
        # A function of its own for each: JAX keeps the trace of one that it has seen.
        step = eqx.filter_make_jaxpr(lambda state, batch, due: program.step(state, batch, due))
        return step(program.state_spec, batch, nothing_due)[0]

    with engine.sharding.mesh_context():
        return [trace() for _ in range(times)]


def _text(jaxpr: ClosedJaxpr) -> str:
    constants = [
        _ADDRESS.sub("", repr(np.asarray(one))) for one in jaxpr.consts if not _is_key(one)
    ]
    return _ADDRESS.sub("", str(jaxpr)) + "\n" + "\n".join(constants)


def _callbacks(jaxpr: ClosedJaxpr) -> set[str]:
    return set(_CALLBACK.findall(str(jaxpr)))


def _captured(jaxpr: ClosedJaxpr) -> list[Any]:
    found = [
        one for one in jaxpr.consts if not _is_key(one) and getattr(one, "nbytes", 0) > CAPTURED
    ]
    return found + [one for inner in _within(jaxpr.jaxpr) for one in inner]


def _within(jaxpr: Jaxpr) -> list[list[Any]]:
    """What the equations of a program hold, inner programs too."""
    found: list[list[Any]] = []
    for equation in jaxpr.eqns:
        values = [getattr(one, "val", None) for one in equation.invars]
        found.append(
            [one for one in values if not _is_key(one) and getattr(one, "nbytes", 0) > CAPTURED]
        )
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if isinstance(inner, ClosedJaxpr):
                found.append(_captured(inner))
            elif isinstance(inner, Jaxpr):
                found += _within(inner)
    return found


def _is_program(value: Any) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def _holds_tracer(value: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))
