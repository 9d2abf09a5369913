"""Folders of image files, decoded by Pillow."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fulgurite.errors import ConfigurationError, DataError, as_int, check_one_of

from fulgurite_data.content import Mark, look_at_files
from fulgurite_data.examples import stack_rows
from fulgurite_data.extras import import_extra
from fulgurite_data.identity import hash_text
from fulgurite_data.nodes import Node
from fulgurite_data.passes import Pass

_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
_MODES = ("L", "RGB", "RGBA")
_BYTE_MODES = {
    "1",
    "L",
    "LA",
    "La",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBa",
    "CMYK",
    "YCbCr",
    "HSV",
    "LAB",
}
"""Modes of Pillow whose pixels are bytes, which another mode has as bytes too."""
_ORIENTATION = 0x0112
"""The number of the tag of EXIF that says how a camera was held; from 5 on, it was on its side."""


class ImageNode(Node):
    """The images in a folder; with a label where they are in a folder for each class.

    Args:
        folder: of the images, or of the folders for classes.
        size: (height, width) that they are scaled to, or None.
        mode: of Pillow.
        classes: the names of the folders for classes, in the order of their labels; None to find
            them.
        draft: as of `Images`.

    Raises:
        ConfigurationError: an argument makes no sense.
        DataError: the folder is missing, or has no images; a class has none, or is not in
            `classes`.
    """

    def __init__(
        self,
        folder: Path,
        size: tuple[int, int] | None,
        mode: str,
        classes: Sequence[str] | None = None,
        draft: bool = False,
    ) -> None:
        check_one_of(mode, _MODES, "Images: mode")
        if isinstance(size, tuple):
            size = tuple(map(as_int, size))  # type: ignore[assignment]
        is_pair = isinstance(size, tuple) and len(size) == 2
        if size is not None and not (is_pair and all(type(n) is int and n > 0 for n in size)):
            raise ConfigurationError(
                f"Images: size is {size!r}; it must be (height, width), two positive integers"
            )
        if draft and size is None:
            raise ConfigurationError(
                "Images: draft=True decodes at a size that is close to size, which is not given"
            )
        self._import_pillow()
        if not folder.is_dir():
            raise DataError(f"the folder of images {folder} is missing")
        self.folder = folder
        self.size = size
        self.mode = mode
        self.draft = draft
        paths = _find_images(folder)
        if not paths:
            raise DataError(f"the folder {folder} has no images ({', '.join(sorted(_SUFFIXES))})")
        self.paths = [str(path) for path in paths]
        self.length = len(paths)
        self.classes = _find_classes(folder, paths, classes)
        numbers = {name: number for number, name in enumerate(self.classes)}
        self.labels = [numbers[path.parts[0]] for path in paths] if numbers else None
        named = [] if classes is None else [f"classes={self.classes}"]
        digest = hash_text("\n".join([*self.paths, *named]))
        options = f"size={size}, {mode!r}{', draft=True' if draft else ''}"
        self.stages = (f"Images({folder.name}, {self.length} files {digest}, {options})",)

    def look(self) -> Mark:
        return look_at_files([self.folder / path for path in self.paths])

    def read(self, indices: np.ndarray, at: Pass) -> Any:
        examples = [self._decode(index) for index in indices.tolist()]
        return stack_rows(examples, lambda: f"{self.stages[-1]}; give Images(size=)")

    def trace(self, index: int, at: Pass) -> str:
        return str(self.folder / self.paths[index])

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the library, which each process imports itself."""
        libraries = ("_pillow", "_pillow_ops")
        return {name: value for name, value in self.__dict__.items() if name not in libraries}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._import_pillow()

    def _import_pillow(self) -> None:
        self._pillow = import_extra("PIL.Image", "images")
        self._pillow_ops = import_extra("PIL.ImageOps", "images")

    def _draft(self, image: Any, height: int, width: int) -> None:
        """Have a JPEG file decoded at a fraction of its size that is enough."""
        is_on_side = image.getexif().get(_ORIENTATION, 1) >= 5
        image.draft(self.mode, (height, width) if is_on_side else (width, height))

    def _decode(self, index: int) -> Any:
        path = self.folder / self.paths[index]
        try:
            with self._pillow.open(path) as image:
                if image.mode not in _BYTE_MODES:
                    raise DataError(
                        f"the image {path} is of Pillow's mode {image.mode}, whose numbers are "
                        "larger than a byte: Images would cut them off. Read it with "
                        "Items(paths).map(function), where the function scales them"
                    )
                if self.size is not None and self.draft:
                    self._draft(image, *self.size)
                # As a camera was held, which its file only says.
                self._pillow_ops.exif_transpose(image, in_place=True)
                image = image.convert(self.mode)
                if self.size is not None:
                    height, width = self.size
                    image = image.resize((width, height))
                pixels = np.asarray(image)
        except (OSError, SyntaxError, self._pillow.DecompressionBombError) as error:
            raise DataError(f"the image {path} cannot be read: {error}") from error
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        if self.labels is None:
            return {"image": pixels}
        return {"image": pixels, "label": np.int32(self.labels[index])}


def _find_images(folder: Path) -> list[Path]:
    """Return the images in a folder and the folders in it, sorted, without those in hidden ones."""
    paths = []
    for parent, names, files in os.walk(folder, followlinks=True):
        place = Path(parent)
        # Without links that lead back to where they stand.
        names[:] = [
            name
            for name in names
            if name[0] != "." and not place.resolve().is_relative_to((place / name).resolve())
        ]
        candidates = [place / file for file in files]
        paths += [p for p in candidates if p.suffix.lower() in _SUFFIXES and p.is_file()]
    return sorted(path.relative_to(folder) for path in paths)


def _find_classes(folder: Path, paths: list[Path], classes: Sequence[str] | None) -> list[str]:
    """Return the names of the folders for classes, sorted; none where images are in no folder."""
    is_nested = {len(path.parts) > 1 for path in paths}
    if len(is_nested) > 1:
        raise DataError(
            f"{folder} has images beside folders of images, so it is not clear whether folders are "
            "classes: move them"
        )
    filled = {path.parts[0] for path in paths} if is_nested == {True} else set()
    if classes is not None:
        return _check_classes(folder, filled, classes)
    names = {path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != "."}
    empty = sorted(names - filled)
    if filled and empty:
        raise DataError(
            f"the folder {folder / empty[0]} has no images, so it is not clear whether it is a "
            "class, and which label those after it have: remove it, or give Images(classes=)"
        )
    return sorted(filled)


def _check_classes(folder: Path, filled: set[str], classes: Sequence[str]) -> list[str]:
    """Return the names that a user gave; those without images are classes too."""
    names = [*classes]
    if isinstance(classes, str) or not names or len(set(names)) < len(names):
        raise ConfigurationError(
            f"Images: classes is {classes!r}; it must be the different names of folders"
        )
    others = sorted(filled - {*names})
    if others or not filled:
        problem = f"the folder {others[0]} with images" if others else "images in no folder"
        raise DataError(f"{folder} has {problem}, and classes are {', '.join(names)}")
    return names
