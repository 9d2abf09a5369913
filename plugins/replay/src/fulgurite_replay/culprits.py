"""What made a number that is not finite: the operation, where it is, and what it computed with."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from fulgurite_replay.places import Place


@dataclass(frozen=True)
class Operand:
    """An array that an operation received or gave.

    Example:
        from fulgurite_replay import Operand

        print(Operand.describe(np.float32([0, 2]), "batch['x']"))

    Attributes:
        label: what it is, if that is known: a path in the state or in the batch.
        dtype: of its elements.
        shape: its shape.
        low: the smallest finite element, of complex ones the smallest part; None if there is none,
            or the elements are no numbers.
        high: the largest finite element, likewise.
        num_nan: how many elements are NaN.
        num_inf: how many are infinite.
    """

    label: str | None
    dtype: str
    shape: tuple[int, ...]
    low: float | None
    high: float | None
    num_nan: int = 0
    num_inf: int = 0

    @staticmethod
    def describe(array: Any, label: str | None = None) -> "Operand":
        """Return what an array is.

        Args:
            array: of anything, also of random keys.
            label: what it is called.
        """
        dtype, shape = str(array.dtype), tuple(array.shape)
        numbers = as_numbers(array)
        if numbers is None:
            return Operand(label, dtype, shape, None, None)
        num_nan, num_inf = int(np.isnan(numbers).sum()), int(np.isinf(numbers).sum())
        parts = (
            np.stack([np.real(numbers), np.imag(numbers)]) if np.iscomplexobj(numbers) else numbers
        )
        finite = parts[np.isfinite(parts)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
        return Operand(label, dtype, shape, low, high, num_nan, num_inf)

    def __str__(self) -> str:
        parts = [f"{self.dtype}{list(self.shape)}"]
        if self.low is not None and self.high is not None:
            single = self.low == self.high
            text = f"= {self.low:.6g}" if single else f"in [{self.low:.6g}, {self.high:.6g}]"
            parts.append(text)
        if self.num_nan:
            parts.append(f"{self.num_nan} NaN")
        if self.num_inf:
            parts.append(f"{self.num_inf} infinite")
        name = "" if self.label is None else f"{self.label}: "
        return name + ", ".join(parts).replace(", =", " =").replace(", in", " in", 1)


@dataclass(frozen=True, eq=False)
class Culprit:
    """The first operation of a step that made a number from which the step is not finite.

    Example:
        from fulgurite_replay import Culprit, Place

        place = Place(frames=(), part="forward pass")
        print(Culprit(0, "inf", "exp", place, (), None, None))

    Attributes:
        number: its place in the order of operations.
        kind: `nan` or `inf`.
        operation: the name of the operation of JAX; `given` for what the step received.
        place: where it is.
        inputs: what it received.
        output: what it gave.
        example: the index of the first example that is concerned, and the number of examples, of
            the batch or of the part that is one iteration; None where it is not of an example.
    """

    number: int
    kind: str
    operation: str
    place: Place
    inputs: tuple[Operand, ...]
    output: Operand | None
    example: tuple[int, int] | None

    @property
    def is_given(self) -> bool:
        """Whether the step received it and no operation made it."""
        return self.operation == "given"

    def describe(self) -> list[str]:
        """Return what is known of it, as lines."""
        name = {"nan": "NaN", "inf": "infinity"}[self.kind]
        if self.is_given:
            lines = [f"{name} was there before the step: {self.output}"]
        else:
            lines = [f"{name} made by {self.operation} in the {self.place.part}"]
            if self.place.part.startswith("plugin"):
                lines = [f"{name} made by {self.operation} in {self.place.part}"]
        if self.place.user_frame is not None:
            lines.append(f"at {self.place.user_frame}")
        if self.place.library_frame is not None:
            lines.append(f"at {self.place.library_frame}")
        if self.place.layer is not None:
            lines.append(f"in the layer {self.place.layer}")
        lines += self.place.loops
        lines += [f"input {index}: {operand}" for index, operand in enumerate(self.inputs)]
        if self.output is not None and not self.is_given:
            lines.append(f"output: {self.output}")
        if self.example is not None:
            index, length = self.example
            lines.append(f"the first example concerned has the index {index} of {length}")
        return lines

    def __str__(self) -> str:
        return "\n  ".join(self.describe())


@dataclass(frozen=True)
class IndexFault:
    """An operation that reads or writes outside of an array. JAX moves the index to the end, leaves
    the number out or makes it NaN, without an error.

    Example:
        from fulgurite_replay import IndexFault, Place

        print(IndexFault("gather", Place((), "forward pass"), 9, 0, (4, 2), "module.table", None))

    Attributes:
        operation: the name of the operation of JAX.
        place: where it is.
        index: the first index that is outside.
        axis: of the array.
        shape: of the array.
        label: what the array is called, if that is known.
        example: the index of the example that has it, and the number of examples; None where the
            indices are not of examples.
    """

    operation: str
    place: Place
    index: int
    axis: int
    shape: tuple[int, ...]
    label: str | None
    example: tuple[int, int] | None

    def __str__(self) -> str:
        name = "" if self.label is None else f" {self.label}"
        lines = [
            f"index {self.index} is outside of axis {self.axis} of an array"
            f"{name} of shape {self.shape}",
            f"in {self.operation} in the {self.place.part}",
        ]
        if self.place.user_frame is not None:
            lines.append(f"at {self.place.user_frame}")
        if self.place.layer is not None:
            lines.append(f"in the layer {self.place.layer}")
        lines += self.place.loops
        if self.example is not None:
            index, length = self.example
            lines.append(f"the first example concerned has the index {index} of {length}")
        return "\n  ".join(lines)


def as_numbers(array: Any) -> np.ndarray | None:
    """Return an array as NumPy's numbers; None for random keys."""
    try:
        numbers = np.asarray(array)
    except TypeError:  # random keys are no numbers
        return None
    if numbers.dtype.kind not in "biufc":
        # Those that NumPy itself does not know, such as bfloat16.
        return numbers.astype(np.float32)
    return numbers


def find_example(array: Any, axes: Set[int]) -> tuple[int, int] | None:
    """Return the first index along the axis of examples at which an array has NaN, or an infinity
    where it has no NaN, and how many examples there are; None where it has no such axis.

    Masks of -inf are in every example, and the NaN beside them is in that which is looked for.

    Args:
        array: that an operation gave.
        axes: along which examples are; only a single one tells which.
    """
    numbers = as_numbers(array)
    if numbers is None or len(axes) != 1:
        return None
    is_nan = np.isnan(numbers)
    is_sought = is_nan if is_nan.any() else ~np.isfinite(numbers)
    (axis,) = axes
    rows = np.moveaxis(is_sought, axis, 0).reshape(numbers.shape[axis], -1)
    is_bad = rows.any(axis=1)
    return (int(np.argmax(is_bad)), len(rows)) if is_bad.any() else None
