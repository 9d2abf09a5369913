"""Installed plugins: what entry points offer, before anything is imported."""

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points, packages_distributions, version
from pathlib import Path
from typing import Any

from fulgurite.errors import PluginError, did_you_mean

GROUP = "fulgurite.plugins"
AUTOLOAD = "fulgurite.autoload"
# For an error alone: what of ours brings which plugins.
_KNOWN_DISTRIBUTIONS = {
    "checkpoint": "checkpoints",
    "evaluators": "evaluator",
    "logging": "compilations console csv environment jsonl learning_rate media norms",
    "optimizers": "accumulate clip phases reduce_on_plateau",
    "progress": "progress",
    "rng": "rng",
    "sharding": "data_parallel fsdp sharding tensor_parallel",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
_packages = functools.cache(
    packages_distributions
)  # reads the metadata of everything installed: 0.2 s and more


@dataclass(frozen=True)
class InstalledPlugin:
    """A plugin that a distribution offers under a name."""

    entry: EntryPoint
    autoload: bool

    @property
    def distribution(self) -> str:
        """Name and version, such as `fulgurite-wandb 0.1`."""
        return (
            f"{self.entry.dist.name} {self.entry.dist.version}"
            if self.entry.dist
            else "unknown distribution"
        )

    @property
    def names(self) -> tuple[str, str]:
        """The module and the attribute that the entry point says, even if they cannot be such."""
        module, _, attribute = self.entry.value.partition("[")[0].partition(":")
        return module.strip(), attribute.strip()

    def load(self) -> Any:
        """Imports the plugin's class; a failure names plugin and distribution."""
        name = self.entry.name
        try:
            found = self.entry.load()
            if not callable(found):
                raise TypeError("an entry point names a class, or a function that makes a plugin")
            return found
        except (Exception, SystemExit) as error:
            gap = f"plugin {name!r} ({self.distribution}) cannot be imported from {self.entry.value!r}"
            fix = f"Fix or uninstall that distribution, or leave it out with '-{name}'."
            raise PluginError(f"{gap}: {type(error).__name__}: {error}. {fix}") from error


def find_installed() -> dict[str, list[InstalledPlugin]]:
    """Everything installed, by name; more than one entry is a conflict for whoever asks for that
    name."""
    places = map(os.path.abspath, sys.path)
    return _installed(
        tuple((place, os.path.exists(place) and os.path.getmtime(place)) for place in places)
    )


def find(name: str, among: Mapping[str, Sequence[InstalledPlugin]]) -> InstalledPlugin:
    """The one installed plugin called `name`."""
    if name not in among:
        place = next(
            (place for place, names in _KNOWN_DISTRIBUTIONS.items() if name in names.split()), None
        )
        brought = f"fulgurite-{place} brings it, in a clone: pip install ./plugins/{place}"
        raise PluginError(
            f"no plugin {name!r} is installed. {brought if place else did_you_mean(name, among)}"
        )
    if len(among[name]) > 1:
        claims = " and ".join(one.distribution for one in among[name])
        raise PluginError(
            f"the plugin name {name!r} is claimed by {claims}: uninstall one, or pass an instance"
        )
    return among[name][0]


def autoload_names(among: Mapping[str, Sequence[InstalledPlugin]]) -> list[str]:
    """What is active without being asked for, as far as FULGURITE_AUTOLOAD (`0`, or an allow-list
    `a,b`) lets it."""
    allowed = os.environ.get("FULGURITE_AUTOLOAD", "1")
    names = sorted(
        name for name, entries in among.items() if any(entry.autoload for entry in entries)
    )
    return (
        names
        if allowed == "1"
        else [name for name in names if name in map(str.strip, allowed.split(","))]
    )


def selection_from_environment() -> list[str]:
    """What FULGURITE_PLUGINS adds (`name`) and takes away (`-name`)."""
    return [
        part.strip() for part in os.environ.get("FULGURITE_PLUGINS", "").split(",") if part.strip()
    ]


@functools.cache
def distribution_of(cls: type) -> str:
    """Name and version of the distribution that a class comes from, else its module."""
    package = cls.__module__.partition(".")[0]
    for one in (one for entries in find_installed().values() for one in entries):
        if one.names[0].partition(".")[0] == package:
            return one.distribution
    names = _packages().get(package) if _is_installed(package) else None
    return f"{names[0]} {version(names[0])}" if names else f"module {cls.__module__}"


def _is_installed(package: str) -> bool:
    """Whether there is metadata beside a package. A program that defines plugins itself mostly lies
    elsewhere."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:
        return True
    folder = Path(file).parent.parent if Path(file).stem == "__init__" else Path(file).parent
    return any(folder.glob("*.dist-info")) or any(folder.glob("*.egg-info"))


@functools.lru_cache(maxsize=1)  # reading it anew takes most of the time of an `Engine`
def _installed(places: tuple[tuple[str, float], ...]) -> dict[str, list[InstalledPlugin]]:
    entries, found = entry_points(), dict[str, list[InstalledPlugin]]()
    auto = {(entry.name, entry.dist) for entry in entries.select(group=AUTOLOAD)}
    for entry in entries.select(group=GROUP):
        found.setdefault(entry.name, []).append(
            InstalledPlugin(entry, (entry.name, entry.dist) in auto)
        )
    return found
