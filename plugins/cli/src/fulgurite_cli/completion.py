"""The command `fulgurite completion`: what the Tab key completes in a shell."""

import argparse
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress

from fulgurite_cli.command import find_commands
from fulgurite_cli.options import print_to_pipe
from fulgurite_cli.programs import read_argument_names, read_config_paths
from fulgurite_cli.sources import read_options

# The words are read line by line: `compgen -W` would expand what is in them. Bash splits words at
# `=`, which `list_words` undoes.
BASH = """_fulgurite() {
    local word
    COMPREPLY=()
    while IFS= read -r word; do
        COMPREPLY+=("$word")
    done < <(fulgurite completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _fulgurite fulgurite"""
SCRIPTS = {"bash": BASH, "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{BASH}"}
WORDS = "words"
LAUNCHED = ("evaluate", "predict")
"""The commands that `fulgurite launch` takes in place of a program."""


def run_completion(arguments: list[str]) -> int:
    """Print a script that completes command lines in a shell."""
    # Not argparse, for which `--` and all that begins with it would be its own.
    if arguments[:1] == [WORDS]:
        print_to_pipe("\n".join(list_words(arguments[1:])))
        return 0
    parser = argparse.ArgumentParser(
        "fulgurite completion",
        description="Prints a script that completes commands, their options and the arguments of "
        'programs: eval "$(fulgurite completion bash)"',
    )
    parser.add_argument("shell", choices=[*SCRIPTS])
    print_to_pipe(SCRIPTS[parser.parse_args(arguments).shell])
    return 0


def list_words(line: Sequence[str]) -> list[str]:
    """Return what may be written in place of the last word of a command line.

    Args:
        line: the words after `fulgurite`; the last one may be empty or incomplete.
    """
    words = _join_words(line) or [""]
    if "=" in words[-1]:  # a value
        return []
    return [word for word in _list_candidates(words) if word.startswith(words[-1])]


def _join_words(line: Sequence[str]) -> list[str]:
    """Return words without the splits that bash makes at `=`."""
    words: list[str] = []
    for word in line:
        if words and (word == "=" or words[-1].endswith("=")):
            words[-1] += word
        else:
            words.append(word)
    return words


def _read_path(word: str) -> str:
    """Return a word as the shell hands it to a command: without quotes, `~` as the home."""
    with suppress(ValueError):  # a quote is not closed yet
        word = "".join(shlex.split(word))
    return os.path.expanduser(word)


def _list_candidates(words: Sequence[str]) -> list[str]:
    """Return the words that may stand in the place of the last one, however that begins."""
    *former, last = words
    commands = find_commands()
    if not former:
        return sorted(commands)
    if former == ["config"] and not last.startswith("-"):
        return ["diff"]
    programs = [_read_path(word) for word in former if _read_path(word).endswith(".py")]
    command = former[0]
    if command == "launch":  # what follows a program or another command is for that
        command = next((word for word in former[1:] if word in LAUNCHED), command)
        command = "fit" if command == "launch" and programs else command
    options = read_options(commands[command][0]) if command in commands else {}
    if last.startswith("-"):
        return list(options)
    if not programs or options.get(former[-1]):  # the shell completes files
        return []
    names = read_argument_names(programs[0]) or read_config_paths(programs[0])
    return [f"{name}=" for name in names]
