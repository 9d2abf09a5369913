"""Whether a step was finite: losses, gradients as the optimizer receives them, and the parameters
it updated."""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PyTree

from fulgurite._src.model.output import Output
from fulgurite._src.tree.paths import leaves_with_paths
from fulgurite._src.tree.specs import put_constant
from fulgurite._src.tree.vectors import join_scalars
from fulgurite.errors import NonFiniteError

NonFinitePolicy = Literal["raise", "skip", "ignore"]
"""What happens to a step whose loss, gradient or update is not finite."""

FINITE_CHECK = "finite_check"
"""The scope of its operations, which are none of the model."""

# Arrays of this many elements are looked at one by one, in one vector for all of them. A look at
# each array for itself made XLA compile a step of 60 small residual layers in 12.5 s; so it takes
# 4.3, and 3.1 without any look.
_MAX_MARKS = 1024


class CheckedTerm(NamedTuple):
    """Something of a step that must be finite.

    Attributes:
        name: for the message.
        array: floating-point, and not empty.
        parameter_index: the index of the parameter among the floating-point ones, -1 for a loss or
            gradient.
    """

    name: str
    array: Array
    parameter_index: int = -1


class NonFiniteTracker(eqx.Module):
    """The first step whose update was not finite and was not skipped, and which value of it.

    It is sticky: later steps do not change it. NaN gradients under a finite loss are the common
    case, so looking at the loss is not enough.

    Looking is what a step of large matrices pays for: a step of MLP 784-256-10 takes 1.07 of one by
    hand, and 1.01 with `on_nonfinite="ignore"`. On eight simulated devices a data-parallel step of
    that network takes 6.0 ms against 5.6, a fully sharded one 7.3 against 6.2, where what the
    devices found is one more all-reduce. To divide replicated arrays among the devices was tried
    (9.9 ms), and so was to leave a number for each row, which saves a product. On an H200 a step
    over 54 million parameters takes 1.20 of one by hand, and 1.10 with `ignore`; a reduction of
    each array without a branch after it was no faster there.

    Looking also costs the last bit: it makes XLA fuse the rest of the step differently. A step with
    `on_nonfinite="ignore"` has the bits of a function written by hand and compiled with the same
    options; any other differs from it by rounding.

    Attributes:
        step: int32, the first such step, or -1.
        term_index: int32, the index of the first term of that step that is not finite, or -1.
        skipped: int32, the number of updates left out by the policy `skip`.
        ignored: bool `(parameters,)`, the arrays that were not finite from the beginning, such as a
            mask of -inf.
    """

    step: Int[Array, ""]
    term_index: Int[Array, ""]
    skipped: Int[Array, ""]
    ignored: Bool[Array, " parameters"]

    @staticmethod
    def init(module: PyTree) -> "NonFiniteTracker":
        """Return the tracker of a state in which no step was taken yet."""
        ignored = _find_nonfinite([leaf for _, leaf in _get_floating_arrays(module)])
        return NonFiniteTracker(
            step=put_constant(np.int32(-1)),
            term_index=put_constant(np.int32(-1)),
            skipped=put_constant(np.int32(0)),
            ignored=ignored,
        )

    def check(
        self, output: Output, updated_module: PyTree, module: PyTree, *, is_sharded: bool
    ) -> tuple[Bool[Array, ""], Int[Array, ""], list[str]]:
        """Look whether anything of a step is not finite.

        Args:
            output: of the step, with `grads`.
            updated_module: the module after the update. That an update was not finite shows in the
                parameter, which is written anyway; to look at the updates would force them into
                memory.
            module: what `after_update` made of it. It is looked at in addition, where it is another
                array, and not instead: a constraint may hide an infinite parameter, or turn a
                finite one into NaN.
            is_sharded: whether arrays may be divided among devices: a look at single elements would
                gather them.

        Returns:
            Whether anything is not finite, the index of the first such term, and the names of all
            terms.
        """
        terms = [*_get_terms(output), *_get_parameter_terms(updated_module, module)]
        make_marks = _reduce_to_marks if is_sharded else _reduce_large_to_marks
        marks_by_term = [make_marks(term.array) for term in terms]
        marks = jnp.concatenate(marks_by_term)
        sizes = [term_marks.size for term_marks in marks_by_term]
        term_indices = np.repeat(np.arange(len(terms), dtype=np.int32), sizes)
        parameter_indices = np.asarray([term.parameter_index for term in terms])[term_indices]

        def find_first(marks: Array, ignored: Array) -> Array:
            # The flag after the last is that of everything that is not a parameter.
            is_ignored = jnp.append(ignored, False)[parameter_indices]
            is_bad = ~jnp.isfinite(marks) & ~is_ignored
            return jnp.min(jnp.where(is_bad, term_indices, len(terms)))

        # Which term it is costs a look at each mark, and is only looked up where one is bad.
        term_index = jax.lax.cond(
            _reduce_to_marks(marks)[0] != 0,
            find_first,
            lambda *_: jnp.int32(len(terms)),
            marks,
            self.ignored,
        )
        return term_index < len(terms), term_index, [term.name for term in terms]

    def update(
        self, step: Int[Array, ""], bad: Bool[Array, ""], term_index: Int[Array, ""], skip: bool
    ) -> "NonFiniteTracker":
        """Return the tracker after an update.

        Args:
            step: the number of the update.
            bad: whether anything of it was not finite.
            term_index: the first such term.
            skip: whether a bad update is left out.
        """
        if skip:
            return replace(self, skipped=self.skipped + bad.astype(jnp.int32))
        is_first = bad & (self.step < 0)
        return replace(
            self,
            step=jnp.where(is_first, step, self.step),
            term_index=jnp.where(is_first, term_index, self.term_index),
        )


MAX_SKIPPED_STEPS = 100
"""After how many steps in a row that were all skipped a fit fails."""


class SkippedSteps:
    """Counts the steps of a fit that the policy `skip` left out, as they become known.

    Attributes:
        num_steps: how many steps of the fit are known of.
        num_skipped: how many of them were skipped.

    Args:
        step: the number of updates before the fit.
        skipped: how many of them were skipped.
    """

    def __init__(self, step: int, skipped: int) -> None:
        self.num_steps = 0
        self.num_skipped = 0
        self._first = (step, skipped)
        self._run_length = 0

    def note(self, step: int, skipped: int) -> None:
        """Note how many of the updates up to a step were skipped.

        Raises:
            NonFiniteError: none of the last `MAX_SKIPPED_STEPS` or more steps was finite.
        """
        num_steps, num_skipped = step - self._first[0], skipped - self._first[1]
        new_steps, new_skipped = num_steps - self.num_steps, num_skipped - self.num_skipped
        self.num_steps, self.num_skipped = num_steps, num_skipped
        # Where in these steps the finite ones were is not known.
        self._run_length = self._run_length + new_steps if new_skipped == new_steps else 0
        if self._run_length >= MAX_SKIPPED_STEPS:
            raise NonFiniteError(step, "something of it", skipped=self._run_length)

    @property
    def are_all(self) -> bool:
        """Whether every step of the fit was skipped."""
        return 0 < self.num_steps == self.num_skipped


def _find_nonfinite(leaves: list[Array]) -> Bool[Array, " leaves"]:
    """Return which of these floating-point arrays have an element that is not finite."""
    if all(_is_on_host(leaf) for leaf in leaves):
        # In the place where they are, without a program of their shapes.
        flags = [not np.isfinite(np.asarray(leaf)).all() for leaf in leaves]
        return put_constant(np.array(flags, bool))
    flags = [_has_nonfinite(leaf) for leaf in leaves]
    return join_scalars(flags) if flags else jnp.zeros(0, bool)


# Jitted, so that it is traced once for each shape.
@jax.jit
def _has_nonfinite(leaf: Array) -> Bool[Array, ""]:
    return jnp.any(_reduce_to_marks(leaf) != 0)


def _is_on_host(leaf: Array) -> bool:
    """Return whether an array is not a traced one, and in the memory of the CPU."""
    if isinstance(leaf, Tracer):
        return False
    return all(device.platform == "cpu" for device in leaf.devices())


def _get_terms(output: Output) -> list[CheckedTerm]:
    """Return the losses and gradients of a step."""
    if output.losses:
        losses = output.losses
    else:
        losses = {} if output.loss is None else {"loss": output.loss}
    terms = []
    for name, value in losses.items():
        text = "the loss" if name == "loss" else f"the loss term {name!r}"
        terms.append(CheckedTerm(text, jnp.asarray(value)))
    for path, leaf in _get_floating_arrays(output.grads):
        terms.append(CheckedTerm(f"the gradient of {path}", leaf))
    return terms


def _get_parameter_terms(updated_module: PyTree, module: PyTree) -> list[CheckedTerm]:
    """Return the parameters after the update, and those that `after_update` has replaced.

    Args:
        updated_module: the module after the update.
        module: the module after `after_update`.
    """
    terms = []
    parameters = zip(
        _get_floating_arrays(updated_module), _get_floating_arrays(module), strict=True
    )
    for index, ((path, leaf), (_, final_leaf)) in enumerate(parameters):
        terms.append(CheckedTerm(f"the update of {path}", leaf, index))
        if final_leaf is not leaf:
            terms.append(CheckedTerm(f"what after_update made of {path}", final_leaf, index))
    return terms


def _get_floating_arrays(tree: Any) -> list[tuple[str, Array]]:
    """Return the floating-point arrays of a tree that are not empty, by path."""
    arrays = eqx.filter(tree, eqx.is_inexact_array)
    return [(path, leaf) for path, leaf in leaves_with_paths(arrays) if leaf.size]


@jax.named_scope(FINITE_CHECK)
def _reduce_large_to_marks(leaf: Array) -> Float[Array, " marks"]:
    """Return numbers that are finite if all elements of an array are: its elements if it is small,
    and otherwise products with zeros, which CPU backends vectorize.

    A look at 0.8 MB takes 30 µs. Maxima of bits, sums and `isfinite` took two to five times as
    long.

    Args:
        leaf: a floating-point array that is not empty.
    """
    if leaf.size <= _MAX_MARKS:
        # As they are: each small operation on them would be one more kernel to compile.
        is_exact = jnp.finfo(leaf.dtype).bits <= 32 and not jnp.iscomplexobj(leaf)
        return _as_marks(leaf if is_exact else leaf * 0)
    if leaf.ndim > 1 and leaf.size // leaf.shape[-1] <= _MAX_MARKS:
        return _as_marks(_multiply_rows_by_zeros(leaf))
    return _reduce_to_marks(leaf)


@jax.named_scope(FINITE_CHECK)
def _reduce_to_marks(leaf: Array) -> Float[Array, "2"]:
    """Return two zeros, or NaN in the place of both if an element of an array is not finite.

    Args:
        leaf: a floating-point array that is not empty.
    """
    rows = _multiply_rows_by_zeros(leaf) if leaf.ndim > 1 else leaf.reshape(-1)
    # Two columns, because the product of two vectors becomes a sum again.
    return _as_marks(rows @ jnp.zeros((rows.size, 2), leaf.dtype))


def _as_marks(numbers: Array) -> Float[Array, " marks"]:
    # By `jax.lax`, because there are three for each array of the model, and `jax.numpy` takes
    # several times as long to trace them.
    numbers = jax.lax.reshape(numbers, (numbers.size,))
    if jnp.iscomplexobj(numbers):
        numbers = jax.lax.real(numbers)
    return jax.lax.convert_element_type(numbers, jnp.float32)


def _multiply_rows_by_zeros(leaf: Array) -> Array:
    """Return the product of each row with zeros."""
    length = leaf.shape[-1]
    return leaf.reshape(-1, length) @ jnp.zeros(length, leaf.dtype)
