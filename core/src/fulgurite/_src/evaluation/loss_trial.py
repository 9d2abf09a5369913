"""Whether the bare numbers of a step are means over examples: tried on a few of them.

A number that a step returns says nothing of what it is a mean over, and the engine averages it over
examples. That is wrong for a mean over tokens, a sum, a loss that compares the examples of a batch,
or the root of a mean; so where it matters it is tried once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fulgurite._src.data.batch import as_batch
from fulgurite._src.execution.executables import Compilation
from fulgurite._src.execution.flops import uses_low_precision
from fulgurite._src.execution.step_parts import list_argument_specs
from fulgurite._src.training.forward import get_common_length
from fulgurite._src.tree.specs import is_key
from fulgurite.errors import DataError

NOISE = 2e-5
"""How far two computations of a number may be apart, relative to it. Examples of unequal weight
whose losses are alike, as those of an untrained model, differ by little more."""
FIX = (
    "If it is a mean over something else, say over what: return fg.Output(..., weight=...), or an "
    "fg.metrics.Mean. A sum, the root of a mean, and a loss that compares examples are not "
    "averages of those of parts"
)
"""What an error about a number that is not a mean over examples ends with."""
LOW_PRECISION_NOISE = 1e-2
"""The same where anything is computed in half precision: a number of bfloat16 is rounded by up to
0.4 %, and the three that are compared differently."""

SMALLEST_DIFFERENCE = 1e-6
"""A difference that may be what is left of terms that cancel each other."""

ComputeNumbers = Callable[[Any, Any], dict[str, Any]]
"""`compute_numbers(batch, index)` returns the bare numbers of a step by name; another index is
another random key."""


class Sample(NamedTuple):
    """A few examples of a batch, in two halves that differ in how much of them is zero, such as
    padding.

    Attributes:
        batch: the examples, those of the first half first.
        size: the number of examples in each half.
    """

    batch: Any
    size: int


class Undecided(Exception):
    """The numbers of a sample say nothing: they are not finite, or all the same, as those of rows
    that are nothing but padding."""


def is_small(batch: Any) -> bool:
    """Return whether a batch has too few examples to be tried alone.

    Args:
        batch: as the data source yields it.
    """
    return len(_list_rows(batch)) < 2


def choose_sample(*batches: Any) -> Sample | None:
    """Return two or four examples of a batch, or of batches of one structure that are small; None
    if there are not as many, or if a batch cannot be divided.

    Args:
        batches: as the data source yields them; the last one is tried alone if it is large enough.
    """
    *others, batch = batches
    if is_small(batch):
        others = [other for other in others if other is not None and len(_list_rows(other)) > 0]
        if not others or len({jax.tree.structure(other) for other in (*others, batch)}) > 1:
            return None
        batch = jax.tree.map(
            lambda *leaves: _concatenate(leaves) if jnp.ndim(leaves[0]) else leaves[0],
            *others,
            batch,
        )
    rows = _list_rows(batch)
    if len(rows) < 2:
        return None
    num_nonzero = np.zeros(len(rows), int)
    for leaf in jax.tree.leaves(as_batch(batch).value):
        if jnp.ndim(leaf) and not is_key(leaf):
            numbers = np.asarray(leaf)[rows].reshape(len(rows), -1)
            num_nonzero += np.count_nonzero(numbers, axis=1)
    rows = rows[np.argsort(num_nonzero, kind="stable")]
    size = 2 if len(rows) >= 4 else 1
    chosen = np.concatenate([rows[:size], rows[-size:]])
    return Sample(
        jax.tree.map(lambda leaf: _take(leaf, chosen) if jnp.ndim(leaf) else leaf, batch), size
    )


def _list_rows(batch: Any) -> np.ndarray:
    """Return the indices of the examples of a batch that are not padding; none if its arrays do not
    say which they are."""
    parts = as_batch(batch)
    has_arrays = any(jnp.ndim(leaf) for leaf in jax.tree.leaves(parts.value))
    if parts.num_examples is not None or not has_arrays:
        return np.arange(0)
    try:
        length = get_common_length(parts.value)
    except DataError:
        return np.arange(0)
    return np.arange(length) if parts.mask is None else np.flatnonzero(parts.mask)


def _concatenate(leaves: tuple[Any, ...]) -> Any:
    return jnp.concatenate(leaves) if is_key(leaves[0]) else np.concatenate(leaves)


def _take(leaf: Any, rows: np.ndarray) -> Any:
    return leaf[rows] if is_key(leaf) else np.asarray(leaf)[rows]


def compute_trial(compute_numbers: ComputeNumbers, batch: Any, size: int) -> Any:
    """Return the numbers of a sample with each of two random keys, and those of its halves; traced.

    Args:
        compute_numbers: the step.
        batch: the sample, without its mask where the step gets that otherwise.
        size: the number of examples in each half.
    """

    def split(leaf: Any) -> Any:
        return leaf.reshape(2, size, *leaf.shape[1:]) if leaf.ndim else jnp.stack([leaf, leaf])

    # Loops, so that each size is compiled once.
    whole = jax.lax.map(lambda index: compute_numbers(batch, index), jnp.arange(2))
    halves = jax.lax.map(lambda half: compute_numbers(half, 0), jax.tree.map(split, batch))
    return whole, halves


class TrialCompilation(NamedTuple):
    """The compilation of a trial.

    Attributes:
        compilation: of a function that returns what `compute_trial` gives.
        argument_specs: of the arguments that it is for, and their structure.
        noise: how far two computations of a number may be apart, relative to it.
    """

    compilation: Compilation
    argument_specs: list[Any]
    noise: float

    def fits(self, arguments: Any) -> bool:
        """Return whether the executable will be one for these arguments."""
        return _list_specs(arguments) == self.argument_specs

    def run(self, arguments: tuple[Any, ...]) -> tuple[Any, Any, float]:
        """Return what `compute_trial` gives, on the host, and how exact it is."""
        whole, halves = jax.device_get(self.compilation.wait()(*arguments))
        return whole, halves, self.noise


def lower_trial(program: Any, arguments: tuple[Any, ...]) -> TrialCompilation:
    """Return the compilation of a trial, which has yet to start.

    Args:
        program: a jitted function that returns what `compute_trial` gives.
        arguments: of the program.
    """
    traced = program.trace(*arguments)
    options = None
    if jax.default_backend() == "cpu":
        # It runs once: not to optimize it halves the time to compile it.
        options = {"xla_backend_optimization_level": "0"}
    compilation = Compilation(traced.lower(), arguments, options)
    noise = LOW_PRECISION_NOISE if uses_low_precision(traced.jaxpr) else NOISE
    return TrialCompilation(compilation, _list_specs(arguments), noise)


def _list_specs(arguments: tuple[Any, ...]) -> list[Any]:
    return [jax.tree.structure(arguments), *list_argument_specs(arguments)]


def describe_mismatches(whole: Any, halves: Any, noise: float, size: int) -> dict[str, str]:
    """Return a sentence for each number that is not the mean of those of the halves, by its name.

    Args:
        whole: the numbers of the sample by name, each with two random keys.
        halves: the numbers of the halves, by name.
        noise: how far two computations of a number may be apart, relative to it.
        size: the number of examples in each half.

    Raises:
        Undecided: none differs, and of one of them nothing can be said.
    """
    undecided = []
    sentences = {}
    for name in whole:
        value, other = np.asarray(whole[name], np.float64)
        parts = np.asarray(halves[name], np.float64)
        scale = noise * max(abs(value), *np.abs(parts))
        is_random = abs(value - other) > scale
        if is_random:
            continue
        if not np.isfinite(value) or value == parts[0] == parts[1]:
            undecided.append(name)
            continue
        mean = parts.mean()
        tolerance = max(scale, 1e-3 * abs(parts[0] - parts[1]), SMALLEST_DIFFERENCE)
        if abs(value - mean) <= tolerance:
            continue
        sentences[name] = (
            f"{name} of {2 * size} examples is {value:.6g}, and the mean of {name} of each half of "
            f"them is {mean:.6g}"
        )
    if undecided and not sentences:
        raise Undecided(", ".join(undecided))
    return sentences
