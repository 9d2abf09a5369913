"""The command `fulgurite doctor`: what is installed, what it runs on, and what is wrong with it."""

import argparse
import os
import platform
import tempfile
import warnings
from collections.abc import Iterator
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    distribution,
    distributions,
    entry_points,
)
from pathlib import Path

import fulgurite.hookspecs as hookspecs
from fulgurite.errors import FulguriteError, PluginError
from fulgurite.plugins.manager import PluginManager
from fulgurite.plugins.selection import find_installed
from packaging.requirements import InvalidRequirement, Requirement

GROUPS = ("fulgurite.commands",)
PACKAGES = ("jax", "jaxlib", "equinox", "optax", "jaxtyping", "pluggy", "numpy")


def command(arguments: list[str]) -> int:
    """Runs the command; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(
        "fulgurite doctor", description="Shows what is installed, and what is wrong."
    )
    parser.add_argument(
        "directory", nargs="*", type=Path, help="directories that runs will be written to"
    )
    options = parser.parse_args(arguments)
    for line in (*told(), *missing_extras()):
        print(line)
    wrong = list(problems(options.directory))
    print(
        "\n".join(["", *(f"wrong: {one}" for one in wrong)] if wrong else ["", "Nothing is wrong."])
    )
    return 1 if wrong else 0


def told() -> Iterator[str]:
    """Versions, of plugins' distributions as well, devices, and the compilation cache."""
    yield f"python {platform.python_version()} on {platform.platform()}"
    for one in ours():
        yield f"{one.name} {one.version}"
    for name in PACKAGES:
        yield f"{name} {version(name) or 'is not installed'}"
    import jax

    try:
        devices = jax.devices()
        yield f"devices: {len(devices)} × {devices[0].platform} ({devices[0].device_kind})"
    except RuntimeError as error:
        yield f"devices: none ({error})"
    cache = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    yield (
        "compilation cache:"
        f" {cache or 'none; Engine(compilation_cache_dir=DIR) keeps compiled steps'}"
    )


def problems(directories: list[Path]) -> Iterator[str]:
    """What is wrong with devices, versions, entry points and directories, a sentence each."""
    import jax

    try:
        jax.devices()
    except RuntimeError as error:
        yield f"jax finds no device: {error}"
    for one in ours():
        yield from unmet(one)
    yield from _find_plugin_problems()
    yield from autoloading()
    yield from _find_command_problems()
    cache = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    for directory in [Path.cwd(), *directories, *([Path(cache)] if cache else [])]:
        if why := unwritable(directory):
            yield f"nothing can be written into {directory}: {why}"


def _find_plugin_problems() -> Iterator[str]:
    """Yield what is wrong with the entry points of plugins."""
    for name, entries in find_installed().items():
        if len(entries) > 1:
            yield (
                f"the plugin name {name!r} is claimed by"
                f" {' and '.join(entry.distribution for entry in entries)}"
            )
        for entry in entries:
            try:
                entry.load()
            except PluginError as error:
                yield str(error)
    for name in sorted(
        {entry.name for entry in entry_points(group="fulgurite.autoload")} - find_installed().keys()
    ):
        yield (
            f"{name!r} of fulgurite.autoload is no plugin, because it is not in fulgurite.plugins:"
            " it is never loaded"
        )


def _find_command_problems() -> Iterator[str]:
    """Yield what is wrong with the entry points of commands."""
    for group in GROUPS:
        for entry in entry_points(group=group):
            try:
                entry.load()
            except (Exception, SystemExit) as error:
                owner = entry.dist.name if entry.dist else "unknown"
                yield (
                    f"{entry.name!r} of {group} ({owner}) cannot be imported:"
                    f" {type(error).__name__}: {error}"
                )


def autoloading() -> Iterator[str]:
    """What every `Engine` of this environment would fail by, or say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the notices are the same
        try:
            notices = PluginManager(hookspecs=hookspecs).messages
        except FulguriteError as error:
            notices = [
                f"every Engine fails: {error}. FULGURITE_AUTOLOAD=0 leaves out what is autoloaded"
            ]
    yield from notices


def missing_extras() -> Iterator[str]:
    """What only a part of a distribution needs, and is not installed, by the extra that brings
    it."""
    for one in ours():
        for extra in one.metadata.get_all("Provides-Extra") or ():
            if absent := [
                asked.name for asked in requirements(one, extra) if version(asked.name) is None
            ]:
                yield f"extra not installed: {', '.join(absent)}; pip install '{one.name}[{extra}]'"


def ours() -> list[Distribution]:
    """Fulgurite's distributions, and those that bring plugins or commands; of two of one name the
    first on the path."""
    found: dict[str, Distribution] = {}
    for one in distributions():
        if one.name and (one.name.startswith("fulgurite") or _is_plugin(one)):
            found.setdefault(one.name, one)
    return [found[name] for name in sorted(found)]


def unmet(one: Distribution) -> Iterator[str]:
    """The requirements of a distribution that do not hold here; those of extras only where what
    they ask for is here in another version."""
    for text in one.requires or ():
        try:
            Requirement(text)
        except InvalidRequirement:
            yield f"{one.name} {one.version} has a requirement that cannot be read: {text}"
    for asked in requirements(one):
        if version(asked.name) is None:
            yield f"{one.name} {one.version} needs {asked.name}, which is not installed"
    extras = [
        asked
        for extra in one.metadata.get_all("Provides-Extra") or ()
        for asked in requirements(one, extra)
    ]
    for asked in [*requirements(one), *extras]:
        have = version(asked.name)
        if have is not None and not asked.specifier.contains(have, prereleases=True):
            yield (
                f"{one.name} {one.version} needs {asked.name}{asked.specifier}, and {have} is"
                " installed"
            )


def requirements(one: Distribution, extra: str = "") -> list[Requirement]:
    """What a distribution needs here, or what an extra of it adds."""
    found = []
    for text in one.requires or ():
        try:
            found.append(Requirement(text))
        except InvalidRequirement:
            continue  # `unmet` tells it
    return [asked for asked in found if _holds(asked, extra) and not (extra and _holds(asked, ""))]


def unwritable(directory: Path) -> str | None:
    """Why no file can be made in a directory, or in the one in which it would be made; None if one
    can."""
    place = next(
        one for one in (directory.absolute(), *directory.absolute().parents) if one.exists()
    )
    if not place.is_dir():
        return f"{place} is no directory"
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


def version(name: str) -> str | None:
    """Of an installed distribution."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def _is_plugin(one: Distribution) -> bool:
    return any(entry.group.startswith("fulgurite.") for entry in one.entry_points)


def _holds(asked: Requirement, extra: str) -> bool:
    return asked.marker is None or asked.marker.evaluate({"extra": extra})
