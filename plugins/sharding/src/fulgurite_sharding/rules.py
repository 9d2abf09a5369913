"""Rules: which dimensions of which arrays lie on which axes of the mesh."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from fulgurite.errors import (
    ConfigurationError,
    PathError,
    did_you_mean,
    set_ints,
)
from fulgurite.plugins import PathPattern, TreePath, hide_constructor_frames
from jax.sharding import Mesh, PartitionSpec

Rule = tuple[str, PartitionSpec | Sequence[Any]]
"""A path pattern, and the mesh axes of each dimension.

Such as `("**.attention.*.weight", P("model", None))`, or as plain data
`("**.attention.*.weight", ["model", None])`.
"""


@hide_constructor_frames
@dataclass(frozen=True)
class ShardBySize:
    """Divides arrays by an axis of the mesh, along their largest dimension that divides evenly.

    Small arrays, and those without such a dimension, stay as they are. Dimensions that a rule
    divides are left alone.

    Example:
        from fulgurite_sharding import ShardBySize, Sharding

        plugin = Sharding(parameters=ShardBySize("data", min_size=2**16))

    Attributes:
        axis: the axis of the mesh.
        min_size: the smallest number of elements of an array to divide.
    """

    axis: str = "data"
    min_size: int = 2**14

    def __post_init__(self) -> None:
        set_ints(self, "min_size")
        if not isinstance(self.axis, str) or type(self.min_size) is not int:
            raise ConfigurationError(
                f"{self!r}: axis is the name of one, and min_size a number of elements"
            )

    def is_large(self, shape: tuple[int, ...]) -> bool:
        """Return whether an array of this shape is to be divided if that is possible."""
        return prod(shape) >= self.min_size

    def extend(self, spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
        """Return a spec with the axis added, or unchanged where that is not possible.

        Args:
            spec: how the array is divided already.
            shape: the shape of the array.
            mesh: the devices.
        """
        names: list[Any] = [*spec, *[None] * (len(shape) - len(spec))]
        candidates = [
            dimension
            for dimension, size in enumerate(shape)
            if names[dimension] is None and size % mesh.shape[self.axis] == 0
        ]
        if not self.is_large(shape) or not candidates or self.axis in get_axes(spec):
            return spec
        largest = max(candidates, key=lambda dimension: shape[dimension])
        names[largest] = self.axis
        return PartitionSpec(*names)


class Rules:
    """Rules for the arrays of one tree. The first whose pattern matches the whole path decides.

    Args:
        rules: pairs of a path pattern and a spec.
        label: how errors call the rules, such as `Sharding(rules=)`.
        strict: whether it is an error that an array does not divide as its rule says; otherwise
            such an array is left alone.
    """

    def __init__(self, rules: Iterable[Rule], label: str, *, strict: bool = True) -> None:
        self._label = label
        self._strict = strict
        self._rules = [_parse_rule(rule, label) for rule in rules]

    def __bool__(self) -> bool:
        return bool(self._rules)

    @property
    def axes(self) -> set[str]:
        """Every axis that a rule names."""
        return {axis for _, spec in self._rules for axis in get_axes(spec)}

    def get_spec(self, path: TreePath, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec | None:
        """Return what the first matching rule says of an array, or None.

        Args:
            path: of the array.
            shape: of the array.
            mesh: the devices.

        Raises:
            ConfigurationError: the array does not divide as the rule says.
        """
        for pattern, spec in self._rules:
            if pattern.matches(path):
                return spec if self._fits(pattern, spec, path, shape, mesh) else None
        return None

    def check_used(self, paths: Sequence[TreePath]) -> None:
        """Raise a PathError for a rule whose pattern matches none of `paths`."""
        for pattern, spec in self._rules:
            if not any(map(pattern.matches, paths)):
                near = did_you_mean(pattern.text, map(str, paths))
                raise PathError(
                    f"{self._label}: the rule {(pattern.text, spec)} matches no array. {near}"
                )

    def _fits(
        self,
        pattern: PathPattern,
        spec: PartitionSpec,
        path: TreePath,
        shape: tuple[int, ...],
        mesh: Mesh,
    ) -> bool:
        where = f"{self._label}: the rule {(pattern.text, spec)} does not fit {path} {list(shape)}"
        if len(spec) > len(shape):
            raise ConfigurationError(f"{where}, which has {len(shape)} dimensions")
        for dimension, names in enumerate(spec):
            count = prod(mesh.shape[name] for name in get_axes((names,)))
            if shape[dimension] % count and self._strict:
                raise ConfigurationError(
                    f"{where}: dimension {dimension} of {shape[dimension]} does not divide by axis "
                    f"{names!r}, which has {count} devices"
                )
            if shape[dimension] % count:
                return False
        return True


def get_axes(spec: Iterable[Any]) -> list[str]:
    """Return the axes that a spec names, in order."""
    axes: list[str] = []
    for names in spec:
        if isinstance(names, str):
            axes.append(names)
        elif names:
            axes.extend(names)
    return axes


def _parse_rule(rule: Any, label: str) -> tuple[PathPattern, PartitionSpec]:
    if not _is_rule(rule):
        raise ConfigurationError(
            f"{label}: a rule is a pair such as ('**.weight', P('model', None)), not {rule!r}"
        )
    pattern, spec = rule
    names = [tuple(name) if isinstance(name, list) else name for name in spec]
    for name in names:
        parts = name if isinstance(name, tuple) else (name,)
        if not all(part is None or isinstance(part, str) for part in parts):
            raise ConfigurationError(
                f"{label}: {name!r} in the rule {rule!r} is not the name of an axis"
            )
    axes = get_axes(names)
    if len(set(axes)) != len(axes):
        raise ConfigurationError(f"{label}: the rule {rule!r} names an axis twice")
    path_pattern = PathPattern.parse(pattern)
    if path_pattern.has_negative_index:
        raise ConfigurationError(
            f"{label}: the rule {rule!r} counts from the end of a list, which rules for sharding "
            f"cannot do: write the index"
        )
    return path_pattern, PartitionSpec(*names)


def _is_rule(rule: Any) -> bool:
    if not isinstance(rule, tuple | list) or len(rule) != 2:
        return False
    pattern, spec = rule
    if not isinstance(pattern, str) or isinstance(spec, str):
        return False
    return isinstance(spec, PartitionSpec | Sequence)
