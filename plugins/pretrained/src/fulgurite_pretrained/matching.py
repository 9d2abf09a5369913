"""Which arrays of a file fill which arrays of a module, and what does not fit."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import CheckpointError, did_you_mean, find_similar_names
from fulgurite.plugins import as_printable

from fulgurite_pretrained.files import StoredArray, format_shape
from fulgurite_pretrained.naming import Rule, Slot, Target

Casting = Literal["match", "file"] | None
"""Of which dtype the arrays become: that of the module, cast; that of the file; or, for None, both,
which must be the same."""
_MAX_ROWS = 20
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Source:
    """The array of a file that fills a slot, or a part of it.

    Attributes:
        name: in the file.
        is_transposed: whether the file has the transpose.
        start: where the part begins, along the first axis in the module.
    """

    name: str
    is_transposed: bool = False
    start: int = 0


@dataclass(frozen=True)
class Copies:
    """Two sources for one place in a module.

    Attributes:
        path: of the array in the module.
        shape: of the place.
        sources: both.
    """

    path: str
    shape: tuple[int, ...]
    sources: tuple[Source, Source]


@dataclass
class Matches:
    """How the arrays of a file fit a module.

    Attributes:
        sources: of each array of the module that is filled, by path and index in its stack.
        dtypes: those that the arrays become, by path.
        copies: two sources for one place, which must be equal.
        faults: a row for each array that does not fit, or is there on one side alone.
    """

    sources: dict[str, dict[tuple[int, ...], Source]] = field(default_factory=dict)
    dtypes: dict[str, Any] = field(default_factory=dict)
    copies: list[Copies] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def is_next_shown(self) -> bool:
        """Whether a message shows the next fault: a file of a million names is not compared with
        each of the map."""
        return len(self.faults) < _MAX_ROWS


def match(
    stored: Mapping[str, StoredArray],
    needed: Mapping[str, Any],
    rules: Sequence[Rule],
    dtype: Casting,
    is_complete: bool,
    wholes: Mapping[str, str],
) -> Matches:
    """Return which arrays of a file fill which of a module.

    Args:
        stored: what the file has, by name.
        needed: arrays or shapes of the module, by path.
        rules: of the map.
        dtype: of which dtype the arrays become.
        is_complete: whether an array of the module that no rule names is a fault.
        wholes: of the module, as `find_wholes` returns them.
    """
    matches = Matches()
    sources: dict[str, dict[tuple[int, ...], Source]] = defaultdict(dict)
    rules_by_name = {rule.name: rule for rule in rules}
    patterns = [rule for rule in rules if "*" in rule.name]
    unknown = []
    for array in stored.values():
        rule, numbers = _find_rule(array.name, rules_by_name, patterns)
        if rule is None:
            unknown.append(array.name)
            hint = did_you_mean(array.name, rules_by_name) if matches.is_next_shown else ""
            matches.faults.append(
                f"{as_printable(array.name)} of the file, {array}, is not in the map. {hint}"
            )
            continue
        for slot, source in _iter_slots(array, rule, numbers, needed, matches.faults):
            other = sources[slot.path].setdefault(slot.index, source)
            if other is not source:
                shape = needed[slot.path].shape[len(slot.index) :]
                matches.copies.append(Copies(slot.path, shape, (other, source)))
    named = {path for rule in rules for target in rule.targets for path in target.paths.values()}
    for path, leaf in needed.items():
        _match_leaf(path, leaf, sources.get(path, {}), stored, rules, dtype, matches)
        if path not in sources and (is_complete or path in named):
            hint = _describe_name(path, rules, unknown) if matches.is_next_shown else ""
            matches.faults.append(
                f"{path} of the module, {_format(leaf)}, is not in the file{hint}"
            )
    _leave_parts(matches, needed, wholes)
    return matches


def join_rows(rows: Sequence[str]) -> str:
    """Return the first rows, one a line, and how many more there are."""
    listed = "\n".join(f"  {row}" for row in rows[:_MAX_ROWS])
    return listed if len(rows) <= _MAX_ROWS else f"{listed}\n  and {len(rows) - _MAX_ROWS} more"


def _find_rule(
    name: str, rules_by_name: Mapping[str, Rule], patterns: Sequence[Rule]
) -> tuple[Rule | None, tuple[int, ...]]:
    """Return the rule for a name of a file, or None, and the numbers in the name.

    Args:
        name: the name.
        rules_by_name: all rules; one without `*` is for its own name alone.
        patterns: those with `*`.
    """
    if name in rules_by_name and "*" not in name:
        return rules_by_name[name], ()
    for rule in patterns:
        groups = rule.find_groups(name)
        if groups is not None and not rule.targets:
            return rule, ()
        if groups is not None and all(map(_NUMBER.fullmatch, groups)):
            return rule, tuple(map(int, groups))
    return None, ()


def _iter_slots(
    array: StoredArray,
    rule: Rule,
    numbers: tuple[int, ...],
    needed: Mapping[str, Any],
    faults: list[str],
) -> Iterator[tuple[Slot, Source]]:
    """Yield the slots that an array of a file fills, each with what fills it.

    Args:
        array: the array.
        rule: for its name.
        numbers: of the layers in the name.
        needed: arrays or shapes of the module, by path.
        faults: gets a row if the array does not fit.
    """
    slots = []
    shapes = []
    for target in rule.targets:
        slot = target.find_slot(numbers)
        shape = None if slot is None else _get_slot_shape(slot, needed)
        if slot is None or shape is None:
            faults.append(
                f"{as_printable(array.name)} of the file, {array}, has no place in the module: "
                f"{target.text} ends before"
            )
            return
        slots.append(slot)
        shapes.append(shape)
    is_transposed = any(target.is_transposed for target in rule.targets)
    if is_transposed and len(array.shape) != 2:
        faults.append(
            f"{as_printable(array.name)} of the file, {array}, is not a matrix, and .T is for these"
        )
        return
    if slots and not _check_shape(array, is_transposed, rule.targets, shapes, faults):
        return
    start = 0
    for slot, shape in zip(slots, shapes, strict=True):
        yield slot, Source(array.name, is_transposed, start)
        start += shape[0] if len(slots) > 1 else 0


def _check_shape(
    array: StoredArray,
    is_transposed: bool,
    targets: Sequence[Target],
    shapes: Sequence[tuple[int, ...]],
    faults: list[str],
) -> bool:
    """Return whether an array has the shape of its slots, which are its parts; add a row if not."""
    shape = array.shape[::-1] if is_transposed else array.shape
    wanted = shapes[0]
    if len(shapes) > 1:
        is_joinable = all(len(part) and part[1:] == wanted[1:] for part in shapes)
        wanted = (sum(part[0] for part in shapes), *wanted[1:]) if is_joinable else ()
    if shape == wanted:
        return True
    hint = ""
    if shape[::-1] == wanted and len(wanted) == 2:
        hint = ", its transpose: " + (
            "leave out .T" if is_transposed else "end the path in the map with .T"
        )
    places = ", ".join(target.text for target in targets)
    faults.append(
        f"{as_printable(array.name)} is {array}, and {places} of the module is "
        f"{format_shape(wanted)}{hint}"
    )
    return False


def _get_slot_shape(slot: Slot, needed: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of a place in a module; None if its stack has no such layer."""
    shape = needed[slot.path].shape
    size = len(slot.index)
    is_inside = len(shape) >= size and all(
        index < length for index, length in zip(slot.index, shape, strict=False)
    )
    return shape[size:] if is_inside else None


def _match_leaf(
    path: str,
    leaf: Any,
    sources: Mapping[tuple[int, ...], Source],
    stored: Mapping[str, StoredArray],
    rules: Sequence[Rule],
    dtype: Casting,
    matches: Matches,
) -> None:
    """Add an array of the module to the matches if the file has all of it.

    Args:
        path: of the array.
        leaf: the array or its shape.
        sources: what fills it, by index in its stack.
        stored: what the file has, by name.
        rules: of the map.
        dtype: of which dtype the array becomes.
        matches: what is added to.
    """
    if not sources:
        return
    stack = leaf.shape[: len(next(iter(sources)))]
    num_layers = math.prod(stack)
    if len(sources) != num_layers:
        # One by one: a config.json may ask for billions of layers.
        indices = (np.unravel_index(number, stack) for number in range(num_layers))
        layers = (tuple(map(int, index)) for index in indices)
        missing = next(layer for layer in layers if layer not in sources)
        matches.faults.append(
            f"{path} of the module, {_format(leaf)}, has {num_layers} layers, and the file "
            f"{len(sources)} that fit; there is no {_find_name(path, rules, missing)} that does"
        )
        return
    arrays = {stored[source.name].dtype_name: stored[source.name] for source in sources.values()}
    array = next(iter(arrays.values()))
    if len(arrays) > 1:
        names = " and ".join(sorted(arrays))
        matches.faults.append(f"{path} of the module would be of layers in {names}")
        return
    fault = _find_dtype_fault(array, leaf.dtype, dtype)
    if fault is not None:
        matches.faults.append(f"{path} of the module, from {as_printable(array.name)}: {fault}")
        return
    matches.sources[path] = dict(sources)
    matches.dtypes[path] = array.dtype if dtype == "file" else leaf.dtype


def _find_dtype_fault(array: StoredArray, wanted: Any, dtype: Casting) -> str | None:
    """Return what is wrong with the dtype of an array of a file, or None.

    Args:
        array: the array.
        wanted: the dtype of the module.
        dtype: of which dtype the array becomes.
    """
    if array.dtype is None:
        return f"the dtype {array.dtype_name} is not one that NumPy reads"
    difference = f"the file has {array.dtype} and the module {wanted}"
    kind = _find_kind(array.dtype)
    if kind != _find_kind(wanted):
        return f"{difference}, and one is never cast to the other"
    owner, result = ("file", array.dtype) if dtype == "file" else ("module", wanted)
    if jax.dtypes.canonicalize_dtype(result) != result:
        return (
            f"the {owner} has {result}, which needs jax.config.update('jax_enable_x64', True); "
            "or ask for another dtype, such as dtype=jnp.float32 of from_pretrained, or "
            "dtype='match'"
        )
    if dtype == "file" or array.dtype == wanted:
        return None
    can_cast = kind in (jnp.floating, jnp.complexfloating)
    if dtype == "match" and can_cast:
        return None
    return f"{difference}; dtype='match' casts it" if can_cast else difference


def _find_kind(dtype: Any) -> Any:
    """Return of which kind the numbers of a dtype are: only within one are they cast."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next((kind for kind in kinds if jnp.issubdtype(dtype, kind)), None)


def _leave_parts(matches: Matches, needed: Mapping[str, Any], wholes: Mapping[str, str]) -> None:
    """Take out of the matches the parts of what is loaded whole, of which the file lacks some.

    Args:
        matches: what is taken out of.
        needed: arrays or shapes of the module, by path.
        wholes: of the module, as `find_wholes` returns them.
    """
    left = {
        whole for path, whole in wholes.items() if path in needed and path not in matches.sources
    }
    for path in [path for path in matches.sources if wholes.get(path) in left]:
        del matches.sources[path]
        del matches.dtypes[path]
        matches.faults.append(
            f"{path} of the module fits, and is left with the rest of {wholes[path]}: that is "
            "filled as a whole or not at all"
        )


def _describe_name(path: str, rules: Sequence[Rule], unknown: Sequence[str]) -> str:
    """Return the end of a sentence: what an array that is missing is called in a file, and what of
    the file may be meant instead.

    Args:
        path: of the array in the module.
        rules: of the map.
        unknown: names in the file that no rule is for.
    """
    name = _find_name(path, rules)
    if name is None or name == path:
        return ""
    similar = find_similar_names(name.replace("*", "0"), unknown)
    hint = f"; it has {' and '.join(map(as_printable, similar))}" if similar else ""
    return f", where its name is {name}{hint}"


def _find_name(path: str, rules: Sequence[Rule], layer: Sequence[int] = ()) -> str | None:
    """Return the name in a file of an array of a module, by the first rule that has one.

    Args:
        path: of the array.
        rules: of the map.
        layer: the index in its stack; without one, `*` stands for all.
    """
    for rule in rules:
        for target in rule.targets:
            for indices, target_path in target.paths.items():
                if target_path == path:
                    rest = iter(layer)
                    return rule.make_name([next(rest, "*") if n is None else n for n in indices])
    return None


def check_faults(matches: Matches, source: Any, strict: bool) -> None:
    """Raise a CheckpointError for weights that do not fit; without `strict`, if nothing does.

    Args:
        matches: how they fit.
        source: the file.
        strict: whether all must fit.
    """
    if matches.faults and (strict or not matches.sources):
        how = "does not fit" if strict else "has nothing that fits"
        hint = (
            "strict=False takes what fits"
            if strict and matches.sources
            else "Give the module and the map that belong to it"
        )
        raise CheckpointError(f"{source} {how} the module:\n{join_rows(matches.faults)}\n{hint}")


def _format(leaf: Any) -> str:
    return f"{leaf.dtype}{format_shape(leaf.shape)}"
