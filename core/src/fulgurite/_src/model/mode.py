"""Training or evaluation, known anywhere in a step without passing a flag along."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import equinox as eqx
import jax

T = TypeVar("T")

# Part of the key of every jit cache. A plain global or a contextvar is not, and was seen to give
# the training branch to an evaluation (or the reverse) under an inner jit, checkpoint or scan that
# had been traced before.
_training = jax.make_user_context(True)


def is_training() -> bool:
    """Return whether the code being run or traced belongs to training. True outside of an engine.

    An ordinary Python bool, correct under nested `jax.jit`, `eqx.filter_jit`, `jax.checkpoint`,
    `jax.lax.scan` and `jax.lax.cond`."""
    return bool(_training.value)


@contextmanager
def training_mode(training: bool, module: T = None) -> Iterator[T]:
    """Switch `is_training()` and yield the module with its layers switched as well.

    Equinox layers such as `eqx.nn.Dropout` carry their own flag; both are set for the length of the
    block.

    Args:
        training: what `is_training()` returns in the block.
        module: any pytree of layers.

    Example:
        with fg.training_mode(False, model) as evaluated:
            outputs = jax.vmap(evaluated.linear)(jnp.ones((4, 2)))
    """
    with _training(training):
        yield eqx.nn.inference_mode(module, value=not training)
