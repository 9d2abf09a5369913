"""The plugin by which `init_from=` and `weights=` read weights of others."""

import os
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
from fulgurite.errors import CheckpointError, ConfigurationError, did_you_mean
from fulgurite.plugins import EngineView, find_wholes, hide_constructor_frames, path_from_keys

from fulgurite_pretrained.families import is_of_family
from fulgurite_pretrained.files import (
    INDEX_NAME,
    INDEX_SUFFIX,
    WEIGHTS_NAME,
    expand_path,
    open_weights,
)
from fulgurite_pretrained.folders import CONFIG_NAME, read_config
from fulgurite_pretrained.naming import PathMap, Split
from fulgurite_pretrained.reading import list_arrays, read_arrays, replace_arrays


@hide_constructor_frames
@dataclass(frozen=True)
class Pretrained(fg.Plugin):
    """Lets `fit(init_from=)`, `evaluate(weights=)` and `predict(weights=)` take safetensors files,
    and folders as transformers writes them. Every other path is left to the checkpointer.

    `fg.CheckpointRef(path, dtype="match")` casts, and `strict=False` takes what fits, cast too.

    Example:
        from fulgurite_pretrained import Pretrained, save_safetensors

        mlp = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
        save_safetensors(mlp, "encoder.safetensors")
        engine = fg.Engine(steps=10, plugins=[Pretrained(into="encoder")])

    Attributes:
        map: names in the file with paths in the module, or in the part `into` of it. By default, of
            a folder with a known family, that of the family; of a file, its names are the paths.
        into: the path of the part of the module that is filled, such as `model` of an `fg.Task`. By
            default, of a folder with a known family, its model in the module; else the module.
    """

    plugin_name = "pretrained"

    map: PathMap | None = None
    _: KW_ONLY
    into: str | None = None

    @fg.hookimpl
    def read_weights(self, source: fg.CheckpointRef, module: Any, engine: EngineView) -> Any:
        """Return the module with the weights of a file or folder, each piece where it is to be.

        Args:
            source: refers to the file or folder.
            module: of shapes.
            engine: the engine that trains or evaluates.
        """
        if source.path is None:
            return None
        path = expand_path(source.path)
        if not is_weights(path):
            _check_exists(path, engine)
            return None
        if source.map is not None or source.step != "latest":
            raise ConfigurationError(
                f"{source.path} is not the checkpoint of a run: its names are mapped by "
                "Pretrained(map=...), and it has no steps. Leave map and step of the reference out"
            )
        needed = list_arrays(module)
        with open_weights(path) as files:
            path_map, is_complete = self._find_map(path, module, files.arrays)
            arrays = read_arrays(
                files,
                needed,
                path_map,
                dtype=source.dtype if source.strict else "match",
                strict=source.strict,
                is_complete=is_complete,
                wholes=find_wholes(module),
            )
        return replace_arrays(module, arrays)

    def _find_map(self, path: Path, module: Any, names: Any) -> tuple[PathMap | None, bool]:
        """Return names in the files with paths in the module, and whether all arrays of the module
        must be among these: not where adapters or other layers are around the model of a family.

        Args:
            path: of the file or folder.
            module: of shapes.
            names: in the files.
        """
        if self.map is not None:
            return _put_below(self.map, self.into or ""), self.into is None
        if not (path / CONFIG_NAME).is_file():
            if self.into is None:
                return None, True
            return _list_below(module, self.into), False
        family, _ = read_config(path)
        place, model = _find_model(module, lambda node: is_of_family(node, family), self.into)
        return _put_below(family.make_map_for(model.config, names), place), False


def is_weights(path: Path) -> bool:
    """Return whether a path is that of a safetensors file, of an index of such, or of a folder with
    either, or with what transformers wrote as a pickle, which is refused with the way out."""
    if path.is_dir():
        names = (WEIGHTS_NAME, INDEX_NAME, "pytorch_model.bin", "pytorch_model.bin.index.json")
        return any((path / name).is_file() for name in names)
    return path.name.endswith((".safetensors", INDEX_SUFFIX))


def _check_exists(path: Path, engine: EngineView) -> None:
    """Raise a CheckpointError for a path that leads nowhere, unless a checkpointer may know it."""
    if engine.plugins.hooks.restore_checkpoint.get_owner() is None and not path.exists():
        text = os.fspath(path)
        raise CheckpointError(
            f"there is no file or folder {text}: check the path. A model on the hub is downloaded "
            f"by fulgurite_pretrained.find_folder({text!r}), which returns its folder"
        )


def _find_model(module: Any, is_model: Callable[[Any], bool], place: str | None) -> tuple[str, Any]:
    """Return the model in a module, after its path.

    Args:
        module: the module.
        is_model: whether a node is one.
        place: where it is; None for the one that there is.

    Raises:
        ConfigurationError: there is none there, or there are several.
    """
    nodes = jax.tree_util.tree_leaves_with_path(module, is_leaf=is_model)
    models = {str(path_from_keys(keys)): node for keys, node in nodes if is_model(node)}
    if place is not None:
        models = {path: node for path, node in models.items() if path == place}
    if len(models) != 1:
        raise ConfigurationError(
            f"Pretrained: {type(module).__name__} has {len(models)} models of the family of the "
            f"folder{'' if place is None else f' at {place!r}'}, and one is filled: name it by "
            "Pretrained(into=...), or give the names by Pretrained(map=...)"
        )
    return next(iter(models.items()))


def _list_below(module: Any, place: str) -> dict[str, str]:
    """Return the paths of the arrays in a part of a module, each with that in the module.

    Args:
        module: the module.
        place: the path of the part.

    Raises:
        ConfigurationError: there is no array in it.
    """
    paths = list_arrays(module)
    starts = (f"{place}.", f"{place}[")  # of a module, and of a list or dictionary
    below = {
        path.removeprefix(place).removeprefix("."): path
        for path in paths
        if path.startswith(starts)
    }
    if not below:
        raise ConfigurationError(
            f"Pretrained: {type(module).__name__} has no arrays below into={place!r}. "
            f"{did_you_mean(place, paths.keys() - {place})}"
        )
    return below


def _put_below(path_map: PathMap, place: str) -> PathMap:
    """Return a map whose paths are below another one."""
    if not place:
        return path_map

    def put(value: Any) -> Any:
        if isinstance(value, Split):
            return Split(*map(put, value))
        if not isinstance(value, str):
            return value
        return place + value if value.startswith("[") else f"{place}.{value}"

    return {name: put(value) for name, value in path_map.items()}
