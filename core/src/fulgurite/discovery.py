"""Installed plugins: what entry points offer, before anything is imported."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fulgurite.errors import PluginError, did_you_mean

GROUP = "fulgurite.plugins"
AUTOLOAD = "fulgurite.autoload"
SELECTION = "FULGURITE_PLUGINS"
ALLOWED = "FULGURITE_AUTOLOAD"


@dataclass(frozen=True)
class Installed:
    """A plugin that a distribution offers under a name."""

    entry: EntryPoint
    autoload: bool

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def distribution(self) -> str:
        """Name and version, such as `fulgurite-wandb 0.1`."""
        return f"{self.entry.dist.name} {self.entry.dist.version}" if self.entry.dist else "unknown distribution"

    def load(self) -> Any:
        """Imports the plugin's class; a failure names plugin and distribution."""
        try:
            return self.entry.load()
        except Exception as error:
            raise PluginError(
                f"plugin {self.name!r} ({self.distribution}) cannot be imported from {self.entry.value!r}: "
                f"{type(error).__name__}: {error}. Mend or uninstall that distribution, or leave the plugin out with "
                f"'-{self.name}'."
            ) from error


def installed() -> dict[str, list[Installed]]:
    """Everything installed, by name; more than one entry is a conflict of whoever asks for that name."""
    found: dict[str, list[Installed]] = {}
    auto = {(entry.name, entry.dist and entry.dist.name) for entry in entry_points(group=AUTOLOAD)}
    for entry in {(e.name, e.value, e.dist and e.dist.name): e for e in entry_points(group=GROUP)}.values():
        autoload = (entry.name, entry.dist and entry.dist.name) in auto
        found.setdefault(entry.name, []).append(Installed(entry, autoload))
    return found


def find(name: str, among: dict[str, list[Installed]]) -> Installed:
    """The one installed plugin called `name`."""
    if name not in among:
        raise PluginError(f"no plugin {name!r} is installed. {did_you_mean(name, among)} Try: pip install {_guess(name)}")
    if len(among[name]) > 1:
        raise PluginError(
            f"the plugin name {name!r} is claimed by {' and '.join(one.distribution for one in among[name])}: "
            "uninstall one, or pass an instance of the class that you mean"
        )
    return among[name][0]


def autoloaded(among: dict[str, list[Installed]]) -> list[Installed]:
    """What is active without being asked for, as far as FULGURITE_AUTOLOAD (`0`, or an allow-list `a,b`) lets it."""
    allowed = os.environ.get(ALLOWED)
    names = sorted(name for name, entries in among.items() if any(entry.autoload for entry in entries))
    if allowed is not None and allowed != "1":
        names = [name for name in names if name in {part.strip() for part in allowed.split(",")}]
    return [find(name, among) for name in names]


def selection_from_environment() -> list[str]:
    """What FULGURITE_PLUGINS adds (`name`) and takes away (`-name`)."""
    return [part.strip() for part in os.environ.get(SELECTION, "").split(",") if part.strip()]


def check_removals(removed: Iterable[str], known: Iterable[str]) -> None:
    """Taking away what is not installed is fine, a misspelt name is not."""
    known = set(known)
    for name in removed:
        if name not in known and "Did you mean" in (hint := did_you_mean(name, known)):
            raise PluginError(f"'-{name}' takes away a plugin that is neither installed nor asked for. {hint}")


def _guess(name: str) -> str:
    return f"fulgurite-{name}"
