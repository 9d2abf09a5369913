"""The command `fulgurite completion`: what the Tab key completes in a shell."""

import argparse
import re

from fulgurite_cli.command import find_commands
from fulgurite_cli.options import FitParser, add_fit_options
from fulgurite_cli.programs import read_argument_names

BASH = """_fulgurite() {
    local words
    words=$(fulgurite completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _fulgurite fulgurite"""
SCRIPTS = {"bash": BASH, "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{BASH}"}


def run_completion(arguments: list[str]) -> int:
    """Print a script that completes command lines in a shell."""
    parser = argparse.ArgumentParser(
        "fulgurite completion",
        description="Prints a script that completes commands and the arguments of programs: "
        'eval "$(fulgurite completion bash)"',
    )
    parser.add_argument("shell", choices=[*SCRIPTS, "words"])
    parser.add_argument("line", nargs="*", help="for `words`: what stands after `fulgurite`")
    options = parser.parse_args(arguments)
    if options.shell == "words":
        print("\n".join(list_words(options.line)))
    else:
        print(SCRIPTS[options.shell])
    return 0


def list_words(line: list[str]) -> list[str]:
    """Return what may be written in place of the last word of a command line.

    Args:
        line: the words after `fulgurite`; the last one may be empty or incomplete.
    """
    if len(line) <= 1:
        return sorted(find_commands())
    if line[0] == "fit" and line[-1].startswith("-"):
        parser = FitParser()
        add_fit_options(parser)
        return sorted(set(re.findall(r"(?<!\S)--[a-z-]+", parser.format_help())))
    if len(line) == 2:  # a program: the shell completes files
        return ["diff"] if line[0] == "config" else []
    return [f"{name}=" for name in read_argument_names(line[1]) or []]
