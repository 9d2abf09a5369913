"""The options of a program that trains. Nothing heavy is imported here, so that a mistake is
answered at once."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

TERMINATED = 143
IN_USE = 75
"""The exit code if another process has the run directory, as EX_TEMPFAIL of sysexits.h."""


class FitParser(argparse.ArgumentParser):
    """The parser of a program that trains; it tells how arguments are written here."""

    def error(self, message: str) -> NoReturn:
        """End with code 2; tell those who write `--lr=1e-3` that it is `lr=1e-3`."""
        option = re.match(r"unrecognized arguments: --?([\w.\[\]*-]+)(=\S+)?", message)
        if option is not None:
            message += f" (arguments of the program are written {option[1]}{option[2] or '=VALUE'})"
        super().error(message)


class _OnlyOnce(argparse.Action):
    """Stores a value, and refuses another one after it: which of them counts would be a guess."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) != self.default:
            parser.error(f"{option_string} is given twice")
        setattr(namespace, self.dest, values)


def print_to_pipe(text: str) -> None:
    """Print; a reader that has stopped, such as `| head`, is not an error. What the output
    has no characters for, as of a locale without UTF-8, is escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        # Python would write what is left when it ends, and what is printed later fails as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def add_fit_options(parser: argparse.ArgumentParser) -> None:
    """Add what a program that trains takes on its command line."""
    _add_run_options(parser)
    _add_configuration_options(parser)
    _add_sweep_options(parser)
    parser.add_argument(
        "--preempted-exit-code",
        action=_OnlyOnce,
        type=_parse_exit_code,
        default=TERMINATED,
        metavar="N",
        help="the exit code after SIGTERM, for schedulers that restart a job by its exit code "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--no-compilation-cache",
        action="store_false",
        dest="compilation_cache",
        help="keep nothing that is compiled for the next start; FULGURITE_COMPILATION_CACHE=off "
        "does the same for all programs",
    )


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add what a run is, and how it begins."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="name=value",
        help="arguments of the experiment, or paths in its configuration, listed below",
    )
    parser.add_argument(
        "--run", action=_OnlyOnce, metavar="DIR", help="the run directory, where plugins write"
    )
    parser.add_argument(
        "--resume",
        action=_OnlyOnce,
        choices=["auto", "never"],
        default="auto",
        help="whether a run that is in the run directory continues (default: auto)",
    )
    parser.add_argument(
        "--hyperparameters",
        action=_OnlyOnce,
        choices=["checkpoint", "program"],
        default="checkpoint",
        help="what a run that resumes takes of the hyperparameters in the optimizer's state: their "
        "values in the checkpoint, or those with which the program begins (default: checkpoint)",
    )
    parser.add_argument(
        "--init-from",
        action=_OnlyOnce,
        metavar="RUN",
        help="begin with the newest weights of another run, or, with the plugin Pretrained, with "
        "those of a safetensors file or a folder of Hugging Face, where none is resumed",
    )


def _add_configuration_options(parser: argparse.ArgumentParser) -> None:
    """Add what the arguments of the program start from."""
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--config",
        action=_OnlyOnce,
        metavar="FILE",
        help="start from this JSON file: a configuration, the manifest of a run, or values by "
        "name; overrides change it",
    )
    start.add_argument(
        "--from",
        action=_OnlyOnce,
        metavar="RUN",
        dest="from_run",
        help="start from the configuration of another run; overrides change it",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME",
        help="that configuration may also name this function or class, module:name, or all of a "
        "package; repeat it for several",
    )
    parser.add_argument(
        "--print",
        action="store_true",
        dest="should_print",
        help="print each value and where it comes from, and end",
    )


def _add_sweep_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE",
        help="a run for each value, in --run DIR; repeated, for each combination. "
        "a,b=(1,x),(2,y) changes several together",
    )
    parser.add_argument(
        "--jobs",
        action=_OnlyOnce,
        type=_parse_count,
        default=1,
        metavar="N",
        help="how many runs of a sweep at a time (default: 1)",
    )


def _parse_exit_code(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 256:
        raise argparse.ArgumentTypeError(f"{text} is not an exit code: they go from 1 to 255")
    return int(text)


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of jobs: give 1 or more")
    return int(text)
