"""Show what a step gets: the pictures in its batch, and the shapes of everything."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import (
    check_positive_int,
    set_ints,
)
from fulgurite.plugins import format_tree, hide_constructor_frames, leaves_with_paths

from fulgurite_logging.media import Images, Text


@hide_constructor_frames
@dataclass(frozen=True)
class BatchPictures(fg.Plugin):
    """Pass the pictures in batches to the loggers that show media, as `batch/PATH`, and a text with
    the shapes of all arrays.

    They are those that the module gets, after every transformation. They are shown at the steps of
    `MediaLogger`, and of the first batch of each evaluation; at other steps they cost nothing.
    Pictures are arrays of uint8, floating-point numbers or booleans with the axes (examples,
    height, width) or (examples, height, width, channels), of at least 4 by 4 pixels and with 1, 3
    or 4 channels.

    Example:
        from fulgurite_logging import BatchPictures, MediaLogger

        first_step = MediaLogger(every=fg.FirstSteps(1))
        plugins = ["tensorboard", first_step, BatchPictures(num_examples=9)]
        engine = fg.Engine(steps=1000, run_dir="runs/digits", plugins=plugins)

    Attributes:
        num_examples: how many of the batch are shown.
    """

    num_examples: int = 16
    plugin_name = "batch_pictures"
    requires = ("media",)

    def __post_init__(self) -> None:
        set_ints(self, "num_examples")
        check_positive_int(self.num_examples, "BatchPictures: num_examples")

    @fg.hookimpl
    def around_forward(self, call: Callable[[Any, Any], Any], module: Any, batch: Any) -> Any:
        """Return the output of the step with these media."""
        output = call(module, batch)
        if not isinstance(output, fg.Output):
            return output  # predictions, or a bare loss
        shown: dict[str, Any] = {"shapes": Text(format_tree(batch))}
        for path, leaf in leaves_with_paths(batch):
            if _is_pictures(leaf):
                shown[path or "pictures"] = partial(_draw, leaf[: self.num_examples])
        return output.replace(media={**output.media, "batch": shown})


def _draw(pixels: jax.Array) -> Images:
    return Images.from_pixels(pixels[..., None] if pixels.ndim == 3 else pixels)


def _is_pictures(leaf: Any) -> bool:
    shape = getattr(leaf, "shape", ())
    if len(shape) not in (3, 4) or min(shape[1:3]) < 4:
        return False
    if len(shape) == 4 and shape[3] not in (1, 3, 4):
        return False
    # bfloat16 and its like are of no kind of floating-point numbers to NumPy.
    return jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype in (bool, jnp.uint8)
