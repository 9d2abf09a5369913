"""A picture of the images in a batch."""

import math
from os import PathLike
from typing import Any

import fulgurite as fg
import numpy as np
from fulgurite.errors import ConfigurationError
from jax.tree_util import keystr, tree_leaves_with_path

from fulgurite_data.dtypes import is_real
from fulgurite_data.extras import import_extra

_MAX_IMAGES = 64
_LONGER_SIDE = 64
"""Pixels: smaller images are enlarged to this by a whole number."""
_GAP = 6
_LINE = 14
"""Pixels of a line of text."""
_WHITE = 255
_CHANNELS = (1, 3, 4)


def save_picture(batch: Any, path: str | PathLike[str]) -> None:
    """Write the images of a batch to a PNG file, below each the numbers that come with it.

    Images are arrays of three axes, grey, or of four, with 1, 3 or 4 channels. Bytes are shown as
    they are, other numbers from the lowest of the array, black, to the highest, white.

    Args:
        batch: a pytree of arrays, or an `fg.Batch`; its padding is left out.
        path: of the file.

    Raises:
        ConfigurationError: it has no images, or Pillow is missing.
    """
    value = batch.value if isinstance(batch, fg.Batch) else batch
    leaves = {keystr(where): np.asarray(leaf) for where, leaf in tree_leaves_with_path(value)}
    if isinstance(batch, fg.Batch) and batch.mask is not None:
        leaves = {name: leaf[np.asarray(batch.mask)] for name, leaf in leaves.items()}
    images = {name: as_pixels(leaf) for name, leaf in leaves.items()}
    sheets = [
        _draw_sheet(f"{name} {leaves[name].dtype}{list(leaves[name].shape)}", pixels, leaves)
        for name, pixels in images.items()
        if pixels is not None
    ]
    if not sheets:
        shapes = ", ".join(f"data{name} {list(leaf.shape)}" for name, leaf in leaves.items())
        raise ConfigurationError(
            "this batch has no images, which are arrays (batch, height, width), or (batch, height, "
            f"width, channels) with 1, 3 or 4 channels; it has {shapes}"
        )
    pillow = import_extra("PIL.Image", "images")
    size = max(sheet.width for sheet in sheets), sum(sheet.height for sheet in sheets)
    picture = pillow.new("L", size, _WHITE).convert("RGB")
    top = 0
    for sheet in sheets:
        picture.paste(sheet, (0, top))
        top += sheet.height
    picture.save(path, format="PNG")


def as_pixels(array: np.ndarray) -> np.ndarray | None:
    """Return images as bytes `(images, height, width, 3)`; None if the array holds none.

    Args:
        array: of a batch.
    """
    if array.ndim not in (3, 4) or not is_real(array.dtype) or not array.size:
        return None
    if array.ndim == 3:
        array = array[..., None]
    if array.shape[-1] not in _CHANNELS and array.shape[1] in _CHANNELS:
        array = np.moveaxis(array, 1, -1)  # as PyTorch has them
    if array.shape[-1] not in _CHANNELS:
        return None
    pixels = array if array.dtype == np.uint8 else _scale(array.astype(np.float64))
    if pixels.shape[-1] == 4:
        opacity = pixels[..., 3:] / 255
        pixels = (pixels[..., :3] * opacity + _WHITE * (1 - opacity)).astype(np.uint8)
    return np.broadcast_to(pixels, (*pixels.shape[:-1], 3))


def _scale(numbers: np.ndarray) -> np.ndarray:
    """Return 0 for the lowest finite number, 255 for the highest, and 0 for what is not finite."""
    finite = numbers[np.isfinite(numbers)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    scaled = (np.where(np.isfinite(numbers), numbers, low) - low) * (255 / max(high - low, 1e-12))
    return np.rint(scaled).astype(np.uint8)


def _draw_sheet(title: str, pixels: np.ndarray, leaves: dict[str, np.ndarray]) -> Any:
    """Return a picture of images in rows, with a title and the numbers of each."""
    pillow = import_extra("PIL.Image", "images")
    draw_on = import_extra("PIL.ImageDraw", "images").Draw
    count, height, width = pixels.shape[:3]
    numbers = [
        leaf.astype(np.float64)
        for leaf in leaves.values()
        if leaf.shape == (count,) and is_real(leaf.dtype)
    ]
    factor = max(_LONGER_SIDE // max(height, width), 1)
    cell = (width * factor + _GAP, height * factor + _GAP + (_LINE if numbers else 0))
    num_shown = min(count, _MAX_IMAGES)
    num_columns = math.ceil(math.sqrt(num_shown))
    num_rows = math.ceil(num_shown / num_columns)
    left = _GAP
    sheet_width = max(left + num_columns * cell[0], left + 7 * len(title))
    top = _GAP + _LINE
    sheet = pillow.new("RGB", (sheet_width, top + num_rows * cell[1]), "white")
    pen = draw_on(sheet)
    pen.text((left, 2), title, "black")
    for number in range(num_shown):
        row, column = divmod(number, num_columns)
        x, y = left + column * cell[0], top + row * cell[1]
        image = np.repeat(np.repeat(pixels[number], factor, 0), factor, 1)
        sheet.paste(pillow.fromarray(image), (x, y))
        caption = " ".join(f"{leaf[number]:.4g}" for leaf in numbers)
        pen.text((x, y + height * factor), caption, "black")
    return sheet
