"""The command `fulgurite`. It imports neither jax nor the core before a command needs them."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any

from fulgurite_cli.sources import read_description

GROUP = "fulgurite.commands"
INTERRUPTED = 130
"""The exit code after Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fulgurite COMMAND ...`, and return its exit code.

    Commands are the functions `command(arguments: list[str]) -> int` that packages offer in the
    entry-point group `fulgurite.commands`; they are imported when they are called. The help shows
    the first paragraph of their docstrings.
    """
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    commands = find_commands()
    parser = argparse.ArgumentParser(
        "fulgurite",
        usage="fulgurite COMMAND ...",
        description="Train Equinox models on JAX, with plugins.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fulgurite {version('fulgurite')}")
    parser.add_argument(
        "command", choices=sorted(commands), metavar="COMMAND", help=argparse.SUPPRESS
    )
    if arguments[0] in ("-h", "--help"):
        parser.epilog = _list_commands(commands)
    name = parser.parse_args(arguments[:1]).command
    entry, *others = commands[name]
    if others:
        parser.exit(
            2,
            f"error: {describe_source(others[0])} adds a command {name!r}, which already exists: "
            "uninstall one of them\n",
        )
    with _note_interrupts() as interrupts:
        try:
            return entry.load()(arguments[1:]) or 0
        except BaseException as error:
            # An import that is cut off may fail with any error.
            if interrupts and not isinstance(error, SystemExit):
                print("stopped by SIGINT", file=sys.stderr)
                return INTERRUPTED
            error.add_note(f"command {name!r} ({describe_source(entry)})")
            raise


@contextmanager
def _note_interrupts() -> Iterator[list[int]]:
    """Yield a list that gets an entry with Ctrl-C within the block, which raises
    `KeyboardInterrupt`. A second one ends the process. Commands that train or wait have handlers of
    their own meanwhile; where someone else handles or ignores the signal, that stays."""
    interrupts: list[int] = []

    def note(number: int, _: Any) -> None:
        interrupts.append(number)
        if len(interrupts) > 1:
            os._exit(INTERRUPTED)
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupts
        return
    former = signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, former)


def find_commands() -> dict[str, list[EntryPoint]]:
    """Return the installed commands by name, those of this package first."""
    installed = entry_points(group=GROUP)
    commands: dict[str, list[EntryPoint]] = {}
    for entry in sorted(installed, key=lambda entry: not entry.value.startswith("fulgurite_cli.")):
        commands.setdefault(entry.name, []).append(entry)
    return commands


def _list_commands(commands: dict[str, list[EntryPoint]]) -> str:
    """Return a line a command, with what it does."""
    width = max(map(len, commands))
    lines = [
        f"  {name:{width}}  {read_description(entries[0])}".rstrip()
        for name, entries in sorted(commands.items())
    ]
    return "\n".join(["commands; fulgurite COMMAND --help says more:", *lines])


def describe_source(entry: EntryPoint) -> str:
    """Return name and version of the distribution that offers an entry point."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
