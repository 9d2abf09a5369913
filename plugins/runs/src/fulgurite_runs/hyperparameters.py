"""The hyperparameters of a run: what the optimizer's state holds, and what its functions hold."""

import functools
import inspect
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite.plugins import TreePath, is_real_dtype, path_from_keys
from jax.core import Tracer
from jax.tree_util import GetAttrKey

_MAX_SIZE = 64
_MAX_NUMBERS = 1000
_MAX_DEPTH = 20


def describe_hyperparameters(run: fg.Run) -> dict[str, Any]:
    """Return the numbers that make an update, as a manifest holds them.

    `state` has those that `optax.inject_hyperparams` keeps in the optimizer's state, by path: the
    `value` with which this attempt begins, and that of the `program`, with which a new run would
    begin. A checkpoint holds them, so a resumed run continues with its values. `program` has the
    numbers in the functions of the optimizers, by name: no checkpoint holds them.

    Args:
        run: the run.
    """
    values = _as_json(_find_in_state(run.state.opt_state))
    initial = values
    if values and run.step > 0:
        initial = _as_json(_compute_initial(run))
    return {
        "state": {
            path: {"value": value, "program": initial.get(path)} for path, value in values.items()
        },
        "program": _list_program_numbers(run),
    }


def takes_program(resume: Any) -> bool:
    """Return whether a fit that resumes takes hyperparameters in the optimizer's state from the
    program.

    Args:
        resume: the argument of `Engine.fit`.
    """
    return isinstance(resume, fg.CheckpointRef) and resume.hyperparameters == "program"


def get_hyperparameters(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the values with which an attempt began, by name.

    Args:
        manifest: of the run.
    """
    state, program = _read_section(manifest)
    return program | {path: entry["value"] for path, entry in state.items()}


def get_program_hyperparameters(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the program alone, by name.

    Args:
        manifest: of the run.
    """
    state, program = _read_section(manifest)
    return program | {path: entry["program"] for path, entry in state.items()}


def describe_origins(manifest: dict[str, Any]) -> str:
    """Return what a resumed run takes from its checkpoint and what from the program; empty if
    everything is from the program.

    Args:
        manifest: of the attempt that resumes.
    """
    state, _ = _read_section(manifest)
    shorts = [path.rpartition("hyperparams.")[2] for path in state]
    items = []
    for (path, entry), short in zip(state.items(), shorts, strict=True):
        name = short if shorts.count(short) == 1 else path
        is_same = entry["value"] == entry["program"]
        of_program = "" if is_same else f" (the program has {entry['program']})"
        items.append(f"{name}={entry['value']}{of_program}")
    return ", ".join(items)


def _read_section(manifest: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return what a manifest says of the optimizer's state and of the program, by name. What an
    edit has left of it in another form counts as not said, as in manifests without such a section.

    Args:
        manifest: of the run.
    """
    section = manifest.get("hyperparameters")
    if not isinstance(section, dict):
        return {}, {}
    state = section.get("state")
    program = section.get("program")
    entries = state.items() if isinstance(state, dict) else ()
    return {
        path: entry
        for path, entry in entries
        if isinstance(entry, dict) and {"value", "program"} <= entry.keys()
    }, dict(program) if isinstance(program, dict) else {}


def _compute_initial(run: fg.Run) -> dict[str, Any]:
    """Return the hyperparameters in the optimizer state of a new run, by path. Nothing else of it
    is computed."""
    leaves, structure = jax.tree.flatten(run.state.module)
    arrays = [leaf if isinstance(leaf, jax.Array) else None for leaf in leaves]

    def init(arrays: list[Any]) -> dict[str, Any]:
        whole = [
            leaf if array is None else array for leaf, array in zip(leaves, arrays, strict=True)
        ]
        module = jax.tree.unflatten(structure, whole)
        return _find_in_state(run.update_rule.init(module))

    with run.engine.sharding.mesh_context():
        return jax.jit(init)(arrays)


def _find_in_state(opt_state: Any) -> dict[str, Any]:
    """Return what `optax.inject_hyperparams` keeps in an optimizer state, by path, except for what
    a schedule of the program computes at each update."""
    leaves: dict[TreePath, Any] = {}
    scheduled: set[TreePath] = set()
    for keys, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        for index, key in enumerate(keys):
            before = ("opt_state", *path_from_keys(keys[:index]))
            if key == GetAttrKey("hyperparams"):
                leaves[TreePath((*before, "hyperparams", *path_from_keys(keys[index + 1 :])))] = (
                    leaf
                )
            if key == GetAttrKey("hyperparams_states"):
                scheduled.add(
                    TreePath((*before, "hyperparams", *path_from_keys(keys[index + 1 :])[:1]))
                )
    return {str(path): leaf for path, leaf in leaves.items() if path not in scheduled}


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _as_plain(value) for name, value in values.items()}


def _as_plain(array: Any) -> Any:
    """Return an array as a number or lists; a float32 of 0.1 is 0.1. Of an array that is large, in
    several processes, or of something else than numbers, such as random keys, only the shape is
    told."""
    is_here = not isinstance(array, jax.Array) or (
        array.is_fully_addressable or array.is_fully_replicated
    )
    if array.size > _MAX_SIZE or not is_here or not _has_numbers(array):
        return f"{array.dtype}{list(array.shape)}"
    array = np.asarray(array)
    if array.ndim:
        return [_as_plain(part) for part in array]
    if array.dtype.kind in "biu":
        return array.item()
    if array.dtype.kind == "c":  # JSON has none
        return str(array)
    return float(str(array)) if array.dtype == np.float32 else float(array)


def _has_numbers(array: Any) -> bool:
    return is_real_dtype(array.dtype) or jax.numpy.issubdtype(array.dtype, np.complexfloating)


def _list_program_numbers(run: fg.Run) -> dict[str, Any]:
    """Return the numbers in the functions of the optimizers by name, such as `scale_by_adam.b1`.

    `optax.adam(1e-3)` is a chain of functions that hold their numbers in closures. What makes an
    update is looked at, and no object is called.
    """
    numbers: dict[str, Any] = {}
    optimizers = run.update_rule.list_optimizers()
    for optimizer_name, spec in optimizers.items():
        prefix = "" if len(optimizers) == 1 else f"{optimizer_name}: "
        for name, number in _iter_numbers(spec.optimizer, "optimizer", []):
            if len(numbers) == _MAX_NUMBERS:
                return numbers
            _add(numbers, prefix + name, number)
    return numbers


def _add(numbers: dict[str, Any], name: str, number: Any) -> None:
    """Add a number under a name of its own: two of a chain may be called `scale.step_size`."""
    count = 1
    unique_name = name
    while unique_name in numbers:
        count += 1
        unique_name = f"{name} ({count})"
    numbers[unique_name] = number


def _iter_numbers(value: Any, name: str, path: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers that a value holds, each with its name.

    Args:
        value: a function, an optimizer, a container, a schedule that is an object, or a number.
        name: of the value.
        path: what was gone through to the value, so that no circle is followed.
    """
    if isinstance(value, bool | int | float | complex):
        yield name, str(value) if isinstance(value, complex) else value
    elif isinstance(value, np.ndarray | np.generic | jax.Array):
        if not isinstance(value, Tracer) and value.size <= _MAX_SIZE and _has_numbers(value):
            yield name, _as_plain(value)
    elif len(path) < _MAX_DEPTH and not any(value is outer for outer in path):
        for part_name, part in _list_parts(value, name):
            yield from _iter_numbers(part, part_name, [*path, value])


def _list_parts(value: Any, name: str) -> list[tuple[str, Any]]:
    """Return what a value is made of, each part with its name."""
    if isinstance(value, MethodType):
        return [(name, value.__self__), (name, value.__func__)]
    if isinstance(value, FunctionType):
        # The state of `optax.inject_hyperparams` has a value for each default of its factory.
        has_defaults = name != "inject_hyperparams.inner_factory"
        return _list_captured(value, has_defaults=has_defaults)
    if isinstance(value, functools.partial):
        positional = [(f"{name}[{index}]", item) for index, item in enumerate(value.args)]
        keywords = [(f"{name}.{key}", item) for key, item in value.keywords.items()]
        return [(name, value.func), *positional, *keywords]
    # `optax.GradientTransformation`: a checkpoint holds what its `init` made.
    if isinstance(value, tuple) and "update" in getattr(value, "_fields", ()):
        return [(name, value.update)]  # type: ignore[attr-defined]
    if isinstance(value, list | tuple):
        return [(f"{name}[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return [(f"{name}.{key}", item) for key, item in value.items()]
    # A model is described elsewhere; it is a tree for jax, which a schedule is not.
    is_leaf = jax.tree_util.all_leaves([value])
    if isinstance(value, type | ModuleType) or not is_leaf or not hasattr(value, "__dict__"):
        return []
    return [(f"{type(value).__name__}.{key}", item) for key, item in vars(value).items()]


def _list_captured(function: FunctionType, *, has_defaults: bool) -> list[tuple[str, Any]]:
    """Return the variables that a function takes from outside, by name.

    Args:
        function: the function.
        has_defaults: whether the defaults of its arguments are among them.
    """
    owner = function.__qualname__.partition(".<locals>")[0]
    captured = inspect.getclosurevars(function)
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if has_defaults and parameter.default is not parameter.empty
    }
    constants = {
        name: item
        for name, item in captured.globals.items()
        if isinstance(item, bool | int | float)
    }
    variables = {**constants, **defaults, **captured.nonlocals}
    return [(f"{owner}.{name}", item) for name, item in variables.items()]
