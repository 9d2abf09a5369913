"""The marker class of media, and their place in a step: rendered only where they are shown.

The types that users return, such as pictures and histograms, are in `fulgurite_logging.media`.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fulgurite.errors import ModelError

MEDIA_ACTION = "media.show"
"""The scheduled action whose steps show what steps return as media."""


class Media(eqx.Module):
    """Base class of what can be shown besides numbers.

    Its arrays are on the device in a step and NumPy arrays in a record.

    Example:
        class Picture(fg.Media):
            pixels: jax.Array
    """


def split_media(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Media]]:
    """Split values by name into those that are not media and those that are.

    Functions without arguments are called first.
    """
    values = {name: value() if callable(value) else value for name, value in values.items()}
    media = {name: value for name, value in values.items() if isinstance(value, Media)}
    others = {name: value for name, value in values.items() if name not in media}
    return others, media


def render_if_due(
    media: dict[str, Media | Callable[[], Media]], is_due: Bool[Array, ""]
) -> dict[str, Media]:
    """Return the media of a step where `is_due`, else the same structure of zeros.

    Traced: what renders them stands behind `jax.lax.cond` and costs nothing at other steps.

    Args:
        media: media by name, or functions without arguments that return them.
        is_due: whether the step shows its media.

    Raises:
        ModelError: a value is not a `Media`.
    """
    structures = []

    def render() -> list[Array]:
        others, rendered = split_media(media)
        for name, value in others.items():
            raise ModelError(
                f"media {name!r} is {type(value).__name__}; give a type of "
                "fulgurite_logging.media, or a function that returns one"
            )
        leaves, structure = jax.tree.flatten(rendered)
        # `cond` returns arrays only, so the structure leaves the trace through this list.
        structures.append(structure)
        return [jax.lax.stop_gradient(leaf) for leaf in leaves]

    shapes = jax.eval_shape(render)
    leaves = jax.lax.cond(
        is_due, render, lambda: [jnp.zeros(leaf.shape, leaf.dtype) for leaf in shapes]
    )
    # Each rendering of a figure may have another `draw`, so that its structure is another one to
    # jax: the first one is taken for all.
    return structures[0].unflatten(leaves)
