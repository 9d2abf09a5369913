"""One step executed operation by operation: what makes it not finite, which index is outside."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.plugins import (
    Program,
    TrainStep,
    UnboundedRange,
    as_model_init,
    leaves_with_paths,
)
from jaxtyping import Array, Bool

from fulgurite_replay.culprits import Culprit, IndexFault
from fulgurite_replay.interpreter import Interpreter
from fulgurite_replay.layers import NamedLayers
from fulgurite_replay.places import PlaceFinder

_LOSS = "the loss"
"""With which the names of losses begin."""


@dataclass(frozen=True)
class Examination:
    """What was found in a step.

    Example:
        from fulgurite_replay import Examination

        assert Examination().is_clean

    Attributes:
        term: what of the step is not finite: a loss, a gradient or an update; None if all is.
        culprit: the operation from which it is not; None if all is finite.
        is_expected_skip: whether the step is left out for infinite gradients in float16 and has
            finite losses, as loss scaling expects from time to time; then there is no culprit.
        index_faults: the operations that read or write outside of an array, if that was asked for.
    """

    term: str | None = None
    culprit: Culprit | None = None
    is_expected_skip: bool = False
    index_faults: tuple[IndexFault, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found."""
        return self.culprit is None and not self.index_faults

    @property
    def example(self) -> tuple[int, int] | None:
        """The index of the first example that is concerned, and the number of examples of which it
        is one; None where it is not known."""
        findings = [self.culprit, *self.index_faults]
        examples = [finding.example for finding in findings if finding is not None]
        return next((example for example in examples if example is not None), None)

    def describe(self) -> list[str]:
        """Return what was found, an entry for each."""
        if self.culprit is None:
            return list(map(str, self.index_faults))
        return [f"{self.term} is not finite\n  {self.culprit}", *map(str, self.index_faults)]


def examine_step(
    engine: fg.Engine, state: fg.TrainState, batch: Any, *, checks_indices: bool = False
) -> Examination:
    """Execute the step that `engine.step(state, batch)` would make, operation by operation.

    The state is not consumed, and nothing is compiled but single operations.

    Args:
        engine: the engine.
        state: the state before the step.
        batch: a tree of arrays with a leading example axis.
        checks_indices: whether to look for indices outside of arrays as well, which make no NaN.
    """
    model_init = as_model_init((state.module, state.model_state))
    program = Program(engine.services, model_init, (batch,), None)
    update_rule = program.update_rule.for_step(int(state.step), UnboundedRange(0))
    due = jnp.zeros(len(engine.services.due_names), bool)
    return examine(engine.services, update_rule, state, batch, due, checks_indices=checks_indices)


def examine(
    services: Any,
    update_rule: fg.UpdateRule,
    state: fg.TrainState,
    batch: Any,
    due: Bool[Array, " names"],
    *,
    checks_indices: bool,
    checks_numbers: bool = True,
) -> Examination:
    """Execute one step operation by operation.

    Args:
        services: of the engine.
        update_rule: the rule that applies at this step.
        state: the state before it.
        batch: its batch.
        due: what is due after it, in the order of `services.due_names`.
        checks_indices: whether to look for indices outside of arrays.
        checks_numbers: whether to say what is not finite.
    """
    step = TrainStep(services, NamedLayers(update_rule), [])
    leaves, structure = jax.tree.flatten((state, batch))
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    arrays = [leaf for leaf, flag in zip(leaves, is_array, strict=True) if flag]
    names: list[str] = []

    def compute_terms(arrays: list[Any]) -> list[Any]:
        remaining = iter(arrays)
        whole = [
            next(remaining) if flag else leaf for leaf, flag in zip(leaves, is_array, strict=True)
        ]
        traced_state, traced_batch = jax.tree.unflatten(structure, whole)
        step_number = int(state.step) + 1
        outcome = step.update(traced_state, traced_batch, due, step_number=step_number)
        terms = list(_iter_terms(outcome, checks_gradients=update_rule.checks_gradients))
        names[:] = [name for name, _ in terms]
        return [array for _, array in terms]

    paths = [path for tree in (state, {"batch": batch}) for path, _ in leaves_with_paths(tree)]
    labels = [path for path, flag in zip(paths, is_array, strict=True) if flag]
    places = PlaceFinder(services.plugins)
    interpreter = Interpreter(places, count_batch(batch), checks_indices=checks_indices)
    with services.sharding.mesh_context():
        program = jax.make_jaxpr(compute_terms)(arrays)
        # What made a loss not finite is before the backward pass, which takes most of the time.
        of_loss = [name.startswith(_LOSS) for name in names]
        needed = [flag or checks_indices for flag in of_loss]
        culprits = interpreter.find_culprits(program, arrays, labels, needed, of_loss)
        if not any(culprits) and not all(needed):
            needed = [True] * len(names)
            culprits = interpreter.find_culprits(program, arrays, labels, needed, of_loss)
    term, culprit = _find_first(dict(zip(names, culprits, strict=True)))
    faults = tuple(interpreter.index_faults)
    if not checks_numbers:
        return Examination(index_faults=faults)
    if services.settings.on_nonfinite == "skip" and _is_scaled_overflow(term, culprit):
        return Examination(is_expected_skip=True, index_faults=faults)
    return Examination(term, culprit, index_faults=faults)


def _is_scaled_overflow(term: str | None, culprit: Culprit | None) -> bool:
    """Return whether what is not finite is an overflow of float16 in the gradients alone."""
    if term is None or term.startswith(_LOSS) or culprit is None or culprit.output is None:
        return False
    return culprit.kind == "inf" and culprit.output.dtype == "float16"


def _find_first(culprits: dict[str, Culprit | None]) -> tuple[str | None, Culprit | None]:
    """Return the operation that was executed first, of those from which a term is not finite, and
    the first such term.

    Args:
        culprits: by term.
    """
    term, first = None, None
    for name, culprit in culprits.items():
        if culprit is None:
            continue
        if culprit.is_given and culprit.kind == "inf" and name.startswith("the update of"):
            continue  # it was infinite from the beginning, such as a mask
        if first is None or culprit.number < first.number:
            term, first = name, culprit
    return term, first


def _iter_terms(outcome: Any, *, checks_gradients: bool) -> Iterator[tuple[str, Any]]:
    """Yield what of a step must be finite, by name.

    Args:
        outcome: of `TrainStep.update`.
        checks_gradients: whether the update rule looks after the gradients itself, which may be
            infinite then.
    """
    output = outcome.output
    losses = output.losses or ({} if output.loss is None else {"loss": output.loss})
    for name, value in losses.items():
        yield ("the loss" if name == "loss" else f"the loss term {name!r}"), jnp.asarray(value)
    if not checks_gradients:
        for path, leaf in leaves_with_paths(output.grads):
            if _is_floating(leaf):
                yield f"the gradient of {path}", leaf
    for path, leaf in leaves_with_paths(outcome.state.module):
        if _is_floating(leaf):
            yield f"the update of {path}", leaf


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def count_batch(batch: Any) -> int:
    """Return the length of the axis of examples; 0 if the arrays have none."""
    lengths = [leaf.shape[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf) > 0]
    return lengths[0] if lengths else 0
