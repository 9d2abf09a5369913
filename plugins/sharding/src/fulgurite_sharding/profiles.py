"""Profiles of `fulgurite launch`: where and how a program is started, by name in a TOML file."""

import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fulgurite.errors import ConfigurationError, did_you_mean

DEFAULT_FILES = (Path("fulgurite.toml"), Path("pyproject.toml"))
"""Where profiles are looked for: below `profiles`, and below `tool.fulgurite.profiles`."""
# In bytes; reading TOML takes up to 100 times as much memory.
_MAX_FILE_SIZE = 2**20


@dataclass(frozen=True)
class Profile:
    """Where and how a program is started.

    Example:
        from fulgurite_sharding import Profile

        profile = Profile.from_table({"command": ["srun", "-N{nodes}"], "nodes": 4}, "a table")
        profile.fill_command("a table")  # ["srun", "-N4"]

    Attributes:
        processes: how many processes on this machine.
        devices: how many devices each process has, or each node; filled into `command`.
        nodes: how many machines; filled into `command`.
        command: what starts the processes instead, such as `srun --nodes={nodes}`; the command that
            runs the program is appended.
        environment: variables for the processes.
        groups: the groups of standalone evaluators that it is for.
    """

    processes: int | None = None
    devices: int | None = None
    nodes: int | None = None
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[str, ...] = ()

    @staticmethod
    def from_table(table: Mapping[str, Any], where: str) -> "Profile":
        """Return the profile that a table of TOML describes.

        Args:
            table: the table.
            where: its place, for errors.

        Raises:
            ConfigurationError: it has an unknown key, or a value of another type.
        """
        names = {item.name for item in fields(Profile)}
        for name in table:
            if name not in names:
                raise ConfigurationError(
                    f"{where} has an unknown key {name!r}. {did_you_mean(name, names)}"
                )
        for name in ("processes", "devices", "nodes"):
            value = table.get(name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigurationError(
                    f"{where}: {name} is {reprlib.repr(value)}; give an integer above 0"
                )
        command = table.get("command", [])
        if not _is_list_of_texts(command):
            raise ConfigurationError(
                f"{where}: command is {reprlib.repr(command)}; give a list of words, such as "
                "['srun', '-N4']"
            )
        groups = table.get("groups", [])
        if not _is_list_of_texts(groups):
            raise ConfigurationError(
                f"{where}: groups is {groups!r}; give a list of names, such as ['side']"
            )
        environment = table.get("environment", {})
        if not isinstance(environment, dict) or not all(
            isinstance(value, str) for value in environment.values()
        ):
            raise ConfigurationError(
                f"{where}: environment is {reprlib.repr(environment)}; give a table of strings"
            )
        if not command and table.get("nodes", 1) > 1:
            raise ConfigurationError(
                f"{where}: nodes is {table['nodes']}, but nothing starts processes on other "
                "machines: give command, such as ['srun', '--nodes={nodes}']"
            )
        lists = {"command": tuple(command), "groups": tuple(groups)}
        return Profile(**{**table, **lists, "environment": environment})

    def fill_command(self, where: str) -> list[str]:
        """Return the words of `command`, with the numbers of devices, nodes and processes.

        Args:
            where: the place of the profile, for errors.

        Raises:
            ConfigurationError: a word names anything else, or a number that is not set.
        """
        numbers = {
            name: number
            for name in ("processes", "devices", "nodes")
            if (number := getattr(self, name)) is not None
        }
        words = []
        for word in self.command:
            try:
                words.append(word.format_map(numbers))
            except (KeyError, IndexError, ValueError, AttributeError) as error:
                raise ConfigurationError(
                    f"{where}: {word!r} in command cannot be filled in: {error}. Set it in the "
                    "profile; {processes}, {devices} and {nodes} are known, and {{ is a brace"
                ) from error
        return words


def read_profile(name: str, file: Path | None = None) -> tuple[Profile, str]:
    """Return a profile, and where it is, in words.

    Args:
        name: of the profile.
        file: a TOML file; None for the first of `DEFAULT_FILES` that has profiles.

    Raises:
        ConfigurationError: there is no such file or profile, or it is wrong.
    """
    path, profiles = _find_profiles(file)
    if path is None:
        raise ConfigurationError(
            f"there is no profile {name!r}: write [profiles.{name}] into fulgurite.toml, or "
            f"[tool.fulgurite.profiles.{name}] into pyproject.toml, or name a file by --profiles"
        )
    if not isinstance(profiles.get(name), dict):
        raise ConfigurationError(f"{path} has no profile {name!r}. {did_you_mean(name, profiles)}")
    where = f"profile {name!r} in {path}"
    return Profile.from_table(profiles[name], where), where


def find_group_profile(group: str, file: Path | None) -> str:
    """Return the name of the profile that is for a group of standalone evaluators.

    Args:
        group: the name of the group.
        file: as for `read_profile`.

    Raises:
        ConfigurationError: there is none, or several are.
    """
    _, profiles = _find_profiles(file)
    groups = {
        name: table.get("groups", []) for name, table in profiles.items() if isinstance(table, dict)
    }
    names = [name for name, value in groups.items() if _is_list_of_texts(value) and group in value]
    if len(names) != 1:
        amount = f"{' and '.join(names)} are profiles" if names else "there is no profile"
        raise ConfigurationError(
            f"{amount} for the group {group!r}: write groups = [{group!r}] into one profile, or "
            "give --profile NAME"
        )
    return names[0]


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _find_profiles(file: Path | None) -> tuple[Path | None, dict[str, Any]]:
    """Return the file with profiles, or None if there is none, and the tables in it by name."""
    if file is not None:
        return file, _read_profiles(file)
    for path in DEFAULT_FILES:
        profiles = _read_profiles(path) if path.is_file() else {}
        if profiles:
            return path, profiles
    return None, {}


def _read_profiles(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_FILE_SIZE:
            raise ConfigurationError(
                f"{path} has more than {_MAX_FILE_SIZE:,} bytes: these are not profiles"
            )
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path} is not UTF-8 from byte {error.start} on: save it as UTF-8"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    is_project = path.name == "pyproject.toml"
    table = content
    for key in ("tool", "fulgurite", "profiles") if is_project else ("profiles",):
        table = table.get(key, {})
        if not isinstance(table, dict):
            raise ConfigurationError(
                f"{path}: {key} is {reprlib.repr(table)}; give a table for each profile"
            )
    return table
