"""Folders of image files, decoded by Pillow."""

from pathlib import Path
from typing import Any

import numpy as np
from fulgurite.errors import ConfigurationError, DataError, check_one_of

from fulgurite_data.content import Mark, look_at_files
from fulgurite_data.examples import stack_rows
from fulgurite_data.extras import import_extra
from fulgurite_data.identity import hash_text
from fulgurite_data.nodes import Node
from fulgurite_data.passes import Pass

_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
_MODES = ("L", "RGB", "RGBA")


class ImageNode(Node):
    """The images in a folder; with a label where they are in a folder for each class.

    Args:
        folder: of the images, or of the folders for classes.
        size: (height, width) that they are scaled to, or None.
        mode: of Pillow.

    Raises:
        DataError: the folder is missing, or has no images.
    """

    def __init__(self, folder: Path, size: tuple[int, int] | None, mode: str) -> None:
        check_one_of(mode, _MODES, "Images: mode")
        is_pair = isinstance(size, tuple) and len(size) == 2
        if size is not None and not (is_pair and all(type(n) is int and n > 0 for n in size)):
            raise ConfigurationError(
                f"Images: size is {size!r}; it must be (height, width), two positive integers"
            )
        self._pillow = import_extra("PIL.Image", "images")
        if not folder.is_dir():
            raise DataError(f"the folder of images {folder} is missing")
        self.folder = folder
        self.size = size
        self.mode = mode
        paths = sorted(
            path.relative_to(folder)
            for path in folder.rglob("*")
            if path.suffix.lower() in _SUFFIXES and path.is_file()
        )
        if not paths:
            raise DataError(f"the folder {folder} has no images ({', '.join(sorted(_SUFFIXES))})")
        self.paths = [str(path) for path in paths]
        self.length = len(paths)
        self.classes = _find_classes(folder, paths)
        numbers = {name: number for number, name in enumerate(self.classes)}
        self.labels = [numbers[path.parts[0]] for path in paths] if numbers else None
        digest = hash_text("\n".join(self.paths))
        self.stages = (
            f"Images({folder.name}, {self.length} files {digest}, size={size}, {mode!r})",
        )

    def look(self) -> Mark:
        return look_at_files([self.folder / path for path in self.paths])

    def read(self, indices: np.ndarray, at: Pass) -> Any:
        examples = [self._decode(index) for index in indices.tolist()]
        return stack_rows(examples, lambda: f"{self.stages[-1]}; give Images(size=)")

    def trace(self, index: int, at: Pass) -> str:
        return str(self.folder / self.paths[index])

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the library, which each process imports itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_pillow"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pillow = import_extra("PIL.Image", "images")

    def _decode(self, index: int) -> Any:
        path = self.folder / self.paths[index]
        try:
            with self._pillow.open(path) as image:
                if self.size is not None:
                    height, width = self.size
                    # For JPEG, decodes at a fraction of the size where that is enough.
                    image.draft(self.mode, (width, height))
                    image = image.convert(self.mode).resize((width, height))
                pixels = np.asarray(image.convert(self.mode))
        except OSError as error:
            raise DataError(f"the image {path} cannot be read: {error}") from error
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        if self.labels is None:
            return {"image": pixels}
        return {"image": pixels, "label": np.int32(self.labels[index])}


def _find_classes(folder: Path, paths: list[Path]) -> list[str]:
    """Return the names of the folders for classes, sorted; none where images are in no folder."""
    is_nested = {len(path.parts) > 1 for path in paths}
    if len(is_nested) > 1:
        raise DataError(
            f"{folder} has images beside folders of images, so it is not clear whether folders are "
            "classes: move them"
        )
    return sorted({path.parts[0] for path in paths}) if is_nested == {True} else []
