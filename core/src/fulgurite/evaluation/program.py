"""The jitted program of a validation step, without modules at its borders."""

from collections.abc import Callable
from typing import Any

import jax


class EvaluationProgram:
    """A jitted validation step whose results leave it as lists of arrays.

    To flatten metrics in Python, twice for each batch, took longer than a batch of a small
    perceptron.

    Attributes:
        carry_treedef: the structure of what one batch hands to the next, once it was traced; set by
            hand where a batch of another structure came before.
        collected_treedef: that of the collecting metrics.
        media_treedef: that of the media.

    Args:
        function: `function(leaves, batch, device_arrays, index, carry)` returns the new carry, the
            collecting metrics and the media, as trees; its carry is None at first.
        sharding: where the results lie; None for anywhere.
    """

    carry_treedef: Any = None
    collected_treedef: Any
    media_treedef: Any

    def __init__(self, function: Callable[..., Any], sharding: Any) -> None:
        self._function = function
        self._run = jax.jit(self._call_flat, out_shardings=sharding)
        self.trace = self._run.trace

    def __call__(self, *arguments: Any) -> tuple[list[Any], list[Any], list[Any]]:
        return self._run(*arguments)

    def _call_flat(self, *arguments: Any) -> tuple[list[Any], list[Any], list[Any]]:
        *others, carry = arguments
        if carry is not None:
            carry = self.carry_treedef.unflatten(carry)
        carry, collected, media = self._function(*others, carry)
        carry_leaves, self.carry_treedef = jax.tree.flatten(carry)
        collected_leaves, self.collected_treedef = jax.tree.flatten(collected)
        media_leaves, self.media_treedef = jax.tree.flatten(media)
        return carry_leaves, collected_leaves, media_leaves
