"""What is known of a kind of model: its config.json, its class, and the names of its arrays."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fulgurite.errors import CheckpointError, ConfigurationError, did_you_mean

from fulgurite_pretrained.naming import PathMap

GROUP = "fulgurite.families"
"""The group of entry points: the `model_type` of a config.json with a `Family`."""


@dataclass(frozen=True)
class Family:
    """A kind of model whose folders `from_pretrained` reads and `save_pretrained` writes.

    A distribution makes one known by an entry point of the group `fulgurite.families`, whose name
    is the `model_type`.

    Example:
        from fulgurite_pretrained import Family


        class Perceptron(eqx.Module):
            layer: eqx.nn.Linear
            config: dict = eqx.field(static=True)

            def __init__(self, config, *, key):
                self.layer = eqx.nn.Linear(config["inputs"], config["outputs"], key=key)
                self.config = config


        family = Family(
            model_type="perceptron",
            model=Perceptron,
            architecture="PerceptronModel",
            read_config=lambda values: {name: values[name] for name in ("inputs", "outputs")},
            write_config=lambda config: config,
            make_map=lambda config: {"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
        )

    Attributes:
        model_type: as config.json has it.
        model: the class, called as `model(config, key=key)`; its instances have a `config`.
        architecture: the class of transformers that config.json names.
        read_config: makes the `config` of the model of what config.json holds. It raises an error
            for what the model does not have.
        write_config: makes of a `config` what config.json holds.
        make_map: makes of a `config` the map of names in files to paths in the module; it names
            every array of the module.
        prefix: with which names in the map begin, and which those in a file may lack.
    """

    model_type: str
    model: Callable[..., Any]
    architecture: str
    read_config: Callable[[Mapping[str, Any]], Any]
    write_config: Callable[[Any], Mapping[str, Any]]
    make_map: Callable[[Any], PathMap]
    prefix: str = ""

    def make_map_for(self, config: Any, names: Mapping[str, Any]) -> PathMap:
        """Return the map for a file: without the prefix if its names lack it.

        Args:
            config: of the model.
            names: those in the file.
        """
        path_map = self.make_map(config)
        if any(name.startswith(self.prefix) for name in names):
            return path_map
        return {name.removeprefix(self.prefix): value for name, value in path_map.items()}


def find_family(model_type: Any, families: tuple[Family, ...] = ()) -> Family:
    """Return the family of a `model_type`.

    Args:
        model_type: as config.json has it.
        families: those to look at before the installed ones.

    Raises:
        CheckpointError: there is none.
    """
    for family in families:
        if family.model_type == model_type:
            return family
    points = _list_entry_points()
    for point in points:
        if point.name == model_type:
            return _load(point)
    known = [family.model_type for family in families] + [point.name for point in points]
    hint = "" if points else " fulgurite-models brings GPT-2, Llama, Qwen and ViT."
    raise CheckpointError(
        f"config.json has the model_type {model_type!r:.100}, and no family of models is known by "
        f"it. {did_you_mean(str(model_type)[:100], known)}{hint}"
    )


def find_family_of_model(module: Any, families: tuple[Family, ...] = ()) -> Family:
    """Return the family of a model.

    Args:
        module: the model.
        families: those to look at before the installed ones.

    Raises:
        ConfigurationError: there is none.
    """
    for family in iter_families(families):
        if is_of_family(module, family):
            return family
    names = [family.model_type for family in iter_families(families)]
    raise ConfigurationError(
        f"{type(module).__name__} is the class of no family of models; there are "
        f"{', '.join(names) or 'none'}. Give the model itself, without what is around it, such as "
        "task.model, or write it by save_safetensors"
    )


def is_of_family(module: Any, family: Family) -> bool:
    """Return whether a node of a module is a model of a family."""
    is_class = isinstance(family.model, type) and type(module) is family.model
    if not is_class:
        return False
    return getattr(module.config, "model_type", family.model_type) == family.model_type


def check_is_of_family(module: Any, family: Family) -> None:
    """Raise a ConfigurationError for a model that is not of a family."""
    if not is_of_family(module, family):
        raise ConfigurationError(
            f"{type(module).__name__} is given where the model of a folder of {family.model_type} "
            f"is filled, which is a {getattr(family.model, '__name__', family.model)}"
        )


def iter_families(families: tuple[Family, ...]) -> Iterator[Family]:
    """Yield these families and those that are installed."""
    yield from families
    for point in _list_entry_points():
        yield _load(point)


def _list_entry_points() -> list[EntryPoint]:
    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


def _load(point: EntryPoint) -> Family:
    family = point.load()
    if not isinstance(family, Family):
        raise ConfigurationError(
            f"the entry point {point.name} of {GROUP} is {type(family).__name__}, not a Family"
        )
    return family
