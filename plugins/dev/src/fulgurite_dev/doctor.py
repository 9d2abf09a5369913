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

from fulgurite.errors import FulguriteError, PluginError
from fulgurite.plugins import PluginManager, find_installed_plugins, hookspecs
from fulgurite_cli import choose_compilation_cache, print_to_pipe
from packaging.requirements import InvalidRequirement, Requirement

GROUPS = ("fulgurite.commands",)
PACKAGES = ("jax", "jaxlib", "equinox", "optax", "jaxtyping", "pluggy", "numpy")


def run_doctor(arguments: list[str]) -> int:
    """Show what is installed, and what is wrong.

    The command `fulgurite doctor`; its exit code is 1 if anything is wrong.
    """
    parser = argparse.ArgumentParser(
        "fulgurite doctor", description="Show what is installed, and what is wrong."
    )
    parser.add_argument(
        "directory", nargs="*", type=Path, help="directories that runs will be written to"
    )
    options = parser.parse_args(arguments)
    for line in (*iter_versions(), *iter_missing_extras()):
        print_to_pipe(line)
    problems = list(find_problems(options.directory))
    print_to_pipe("")
    for problem in problems:
        print_to_pipe(f"wrong: {problem}")
    if not problems:
        print_to_pipe("Nothing is wrong.")
    return 1 if problems else 0


def iter_versions() -> Iterator[str]:
    """Yield versions, of plugins' distributions as well, devices, and the compilation cache."""
    yield f"python {platform.python_version()} on {platform.platform()}"
    for dist in find_distributions():
        yield f"{dist.name} {dist.version}"
    for name in PACKAGES:
        yield f"{name} {get_version(name) or 'is not installed'}"
    import jax

    try:
        devices = jax.devices()
        yield f"devices: {len(devices)} × {devices[0].platform} ({devices[0].device_kind})"
    except RuntimeError as error:
        yield f"devices: none ({error})"
    yield f"compilation cache: {choose_compilation_cache().description}"


def find_problems(directories: list[Path]) -> Iterator[str]:
    """Yield what is wrong with devices, versions, entry points and directories, a sentence each.

    Args:
        directories: where runs will be written to, besides the current directory.
    """
    import jax

    try:
        jax.devices()
    except RuntimeError as error:
        yield f"jax finds no device: {error}"
    for dist in find_distributions():
        yield from find_unmet_requirements(dist)
    yield from _find_plugin_problems()
    yield from find_autoload_problems()
    yield from _find_command_problems()
    cache = choose_compilation_cache()
    if cache.problem is not None:
        yield f"programs are compiled without a cache: {cache.problem}"
    cache_directories = [] if cache.directory is None else [cache.directory]
    for directory in [Path.cwd(), *directories, *cache_directories]:
        problem = find_write_problem(directory)
        if problem is not None:
            yield f"nothing can be written into {directory}: {problem}"


def _find_plugin_problems() -> Iterator[str]:
    """Yield what is wrong with the entry points of plugins."""
    for name, entries in find_installed_plugins().items():
        if len(entries) > 1:
            owners = " and ".join(entry.distribution for entry in entries)
            yield f"the plugin name {name!r} is claimed by {owners}"
        for entry in entries:
            try:
                entry.load()
            except PluginError as error:
                yield str(error)
    autoload_names = {entry.name for entry in entry_points(group="fulgurite.autoload")}
    for name in sorted(autoload_names - find_installed_plugins().keys()):
        yield (
            f"{name!r} of fulgurite.autoload is not a plugin, because it is not in "
            "fulgurite.plugins: it is never loaded"
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


def find_autoload_problems() -> Iterator[str]:
    """Yield why every `Engine` of this environment fails, or what each would warn of."""
    with warnings.catch_warnings():
        # They say the same as the messages.
        warnings.simplefilter("ignore")
        try:
            messages = PluginManager(hookspecs=hookspecs).messages
        except FulguriteError as error:
            messages = [
                f"every Engine fails: {error}. FULGURITE_AUTOLOAD=0 leaves out what is autoloaded"
            ]
    yield from messages


def iter_missing_extras() -> Iterator[str]:
    """Yield the extras of distributions that are not installed, and what they would bring."""
    for dist in find_distributions():
        for extra in _get_extras(dist):
            requirements = get_requirements(dist, extra)
            missing = [need.name for need in requirements if get_version(need.name) is None]
            if missing:
                names = ", ".join(missing)
                yield f"extra not installed: {names}; pip install '{dist.name}[{extra}]'"


def find_distributions() -> list[Distribution]:
    """Return Fulgurite's distributions, and those that bring plugins or commands, by name.

    Of two with one name it is the first on the path.
    """
    by_name: dict[str, Distribution] = {}
    for dist in distributions():
        if dist.name and (dist.name.startswith("fulgurite") or _is_plugin(dist)):
            by_name.setdefault(dist.name, dist)
    return [by_name[name] for name in sorted(by_name)]


def find_unmet_requirements(dist: Distribution) -> Iterator[str]:
    """Yield the requirements of a distribution that do not hold here.

    What an extra requires counts only where it is installed in another version.
    """
    label = f"{dist.name} {dist.version}"
    for text in dist.requires or ():
        try:
            Requirement(text)
        except InvalidRequirement:
            yield f"{label} has a requirement that cannot be read: {text}"
    requirements = get_requirements(dist)
    for need in requirements:
        if get_version(need.name) is None:
            yield f"{label} needs {need.name}, which is not installed"
    for extra in _get_extras(dist):
        requirements += get_requirements(dist, extra)
    for need in requirements:
        version = get_version(need.name)
        if version is not None and not need.specifier.contains(version, prereleases=True):
            yield f"{label} needs {need.name}{need.specifier}, and {version} is installed"


def get_requirements(dist: Distribution, extra: str = "") -> list[Requirement]:
    """Return what a distribution requires on this machine, or what one of its extras adds.

    Args:
        dist: the distribution.
        extra: the name of the extra; empty for none.
    """
    requirements = []
    for text in dist.requires or ():
        try:
            need = Requirement(text)
        except InvalidRequirement:
            # `find_unmet_requirements` reports it.
            continue
        is_needed_anyway = extra != "" and _applies(need, "")
        if _applies(need, extra) and not is_needed_anyway:
            requirements.append(need)
    return requirements


def find_write_problem(directory: Path) -> str | None:
    """Return why no file can be made in a directory, or None if one can.

    Of a directory that does not exist, the nearest parent that exists is tried.
    """
    path = directory.absolute()
    try:
        while not path.exists():
            path = path.parent
        if not path.is_dir():
            return f"{path} is not a directory"
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


def get_version(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def _is_plugin(dist: Distribution) -> bool:
    return any(entry.group.startswith("fulgurite.") for entry in dist.entry_points)


def _get_extras(dist: Distribution) -> list[str]:
    return dist.metadata.get_all("Provides-Extra") or []


def _applies(requirement: Requirement, extra: str) -> bool:
    """Return whether a requirement counts on this machine, with this extra."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})
