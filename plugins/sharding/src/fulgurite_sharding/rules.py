"""Rules: which dimensions of which arrays lie on which axes of the mesh."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from fulgurite.errors import ConfigurationError, PathError, did_you_mean
from fulgurite.tree.paths import Path
from fulgurite.tree.select import Pattern
from jax.sharding import Mesh, PartitionSpec

Rule = tuple[str, PartitionSpec | Sequence[Any]]
"""A path pattern, and the mesh axes of each dimension: `("**.attention.*.weight", P("model",
None))`, or as plain data `("**.attention.*.weight", ["model", None])`."""


@dataclass(frozen=True)
class ShardBySize:
    """Divides every array with at least `min_size` elements by `axis`, along its largest dimension
    that divides evenly. Smaller arrays, and those with no such dimension, stay as they are.
    Dimensions that a rule divides are left alone."""

    axis: str = "data"
    min_size: int = 2**14

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str) or type(self.min_size) is not int:
            raise ConfigurationError(
                f"{self!r}: axis is the name of one, and min_size a number of elements"
            )

    def extend(self, spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
        """`spec` with the axis added, where it can be."""
        names: list[Any] = [*spec, *[None] * (len(shape) - len(spec))]
        fitting = [
            i
            for i, size in enumerate(shape)
            if names[i] is None and size % mesh.shape[self.axis] == 0
        ]
        if prod(shape) < self.min_size or not fitting or self.axis in axes_of(spec):
            return spec
        names[max(fitting, key=lambda i: shape[i])] = self.axis
        return PartitionSpec(*names)


class Rules:
    """Rules for the arrays of one tree; the first whose pattern is the whole path decides. Unless
    `strict`, an array whose dimensions do not divide as that says is left alone."""

    def __init__(self, rules: Iterable[Rule], what: str, *, strict: bool = True) -> None:
        self._what, self._strict, self._rules = (
            what,
            strict,
            [_parse_rule(rule, what) for rule in rules],
        )

    def __bool__(self) -> bool:
        return bool(self._rules)

    @property
    def axes(self) -> set[str]:
        """Every axis that is named."""
        return {axis for _, spec in self._rules for axis in axes_of(spec)}

    def spec(self, path: Path, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec | None:
        """What the first matching rule says of an array, or None. A `ConfigurationError` if it does
        not fit."""
        for pattern, spec in self._rules:
            if pattern.matches(path):
                return spec if self._fits(pattern, spec, path, shape, mesh) else None
        return None

    def check_used(self, paths: Sequence[Path]) -> None:
        """A `PathError` for a rule whose pattern matches none of `paths`."""
        for pattern, spec in self._rules:
            if not any(map(pattern.matches, paths)):
                near = did_you_mean(pattern.text, map(str, paths))
                raise PathError(
                    f"{self._what}: the rule {(pattern.text, spec)} matches no array. {near}"
                )

    def _fits(
        self, pattern: Pattern, spec: PartitionSpec, path: Path, shape: tuple[int, ...], mesh: Mesh
    ) -> bool:
        where = f"{self._what}: the rule {(pattern.text, spec)} does not fit {path} {list(shape)}"
        if len(spec) > len(shape):
            raise ConfigurationError(f"{where}, which has {len(shape)} dimensions")
        for dimension, names in enumerate(spec):
            count = prod(mesh.shape[name] for name in axes_of((names,)))
            if shape[dimension] % count and self._strict:
                raise ConfigurationError(
                    f"{where}: dimension {dimension} of {shape[dimension]} does not divide by axis "
                    f"{names!r}, which "
                    f"has {count} devices"
                )
            if shape[dimension] % count:
                return False
        return True


def axes_of(spec: Iterable[Any]) -> list[str]:
    """The axes that a spec names, in order."""
    return [
        axis for names in spec if names for axis in ((names,) if isinstance(names, str) else names)
    ]


def _parse_rule(rule: Any, what: str) -> tuple[Pattern, PartitionSpec]:
    well_formed = isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str)
    if (
        not well_formed
        or isinstance(rule[1], str)
        or not isinstance(rule[1], PartitionSpec | Sequence)
    ):
        raise ConfigurationError(
            f"{what}: a rule is a pair such as ('**.weight', P('model', None)), not {rule!r}"
        )
    names = [tuple(name) if isinstance(name, list) else name for name in rule[1]]
    for name in names:
        parts = name if isinstance(name, tuple) else (name,)
        if not all(part is None or isinstance(part, str) for part in parts):
            raise ConfigurationError(f"{what}: {name!r} in the rule {rule!r} is no name of an axis")
    if len(set(axes_of(names))) != len(axes_of(names)):
        raise ConfigurationError(f"{what}: the rule {rule!r} names an axis twice")
    return Pattern.parse(rule[0]), PartitionSpec(*names)
