"""The command `fulgurite fit`, and how a program is loaded from its file. What is heavy is imported
after the command line was checked as far as that is possible without."""

import argparse
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fulgurite_config import ConfigError, Node, NotLoadedError, apply_overrides

from fulgurite_cli.activity import show_activity
from fulgurite_cli.importing import add_program_folder
from fulgurite_cli.options import FitParser, add_fit_options
from fulgurite_cli.programs import find_mistyped_argument, find_mistyped_path, find_program

if TYPE_CHECKING:
    from fulgurite_cli.experiment import Experiment


_PROGRAMS: set[str] = set()
"""The names of the modules that are programs."""


def load_experiment(path: str) -> "Callable[..., Experiment]":
    """Return the function `experiment` of the file `path`, the only file that is imported.

    Raises:
        ConfigurationError: there is no such file, or it defines no such function.
    """
    file = Path(path)
    spec = importlib.util.spec_from_file_location(file.stem, file) if os.path.isfile(path) else None
    if spec is None or spec.loader is None:
        from fulgurite.errors import ConfigurationError

        raise ConfigurationError(f"there is no Python file {path}")
    _check_name(file)
    add_program_folder(file.resolve().parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    _PROGRAMS.add(file.stem)
    spec.loader.exec_module(module)
    experiment = getattr(module, "experiment", None)
    if not callable(experiment):
        from fulgurite.errors import ConfigurationError

        raise ConfigurationError(
            f"{path} defines no function `experiment` that returns an Experiment of fulgurite_cli"
        )
    return cast(Any, experiment)


def _check_name(file: Path) -> None:
    """Raise a `ConfigurationError` if a program has the name of a module that is imported already:
    it would be found in the place of that one.

    Args:
        file: of the program.
    """
    former = sys.modules.get(file.stem)
    origin = getattr(former, "__file__", None)
    is_same = origin is not None and Path(origin).resolve() == file.resolve()
    if former is None or file.stem in _PROGRAMS or is_same:
        return
    from fulgurite.errors import ConfigurationError

    raise ConfigurationError(
        f"{file} has the name of the module {file.stem!r}, which is in use: give the file another "
        "name"
    )


def run_fit(arguments: list[str]) -> int:
    """Train the experiment of a program."""
    parser = argparse.ArgumentParser(
        "fulgurite fit", usage="fulgurite fit [PROGRAM] [name=value ...] [--run DIR] [--from RUN]"
    )
    parser.add_argument(
        "program",
        metavar="PROGRAM",
        help="a Python file that defines `experiment`; with --from it may be left out if the "
        "file of that run's program is in the current directory. PROGRAM --help says more",
    )
    program = _find_program_argument(arguments)
    rest = list(arguments)
    if program is not None:
        rest.remove(program)
    elif not rest or {"-h", "--help"} & set(rest):
        parser.parse_args(rest)
    options = parse_fit_options(rest)
    try:
        path = program or _find_program_of_run(parser, options.from_run)
        mistake = find_mistyped_argument(path, options.overrides)
        if mistake is not None and not options.wants_help:
            parser.exit(2, f"error: {mistake}\n")
        if os.environ.get("FULGURITE_DISTRIBUTED"):
            from fulgurite_cli.processes import connect_processes

            connect_processes()
        with show_activity(f"importing {path}"):
            experiment = load_experiment(path)
        is_light = "jax" not in sys.modules and "fulgurite" not in sys.modules
        if is_light and options.config is None and options.from_run is None:
            _check_overrides(parser, experiment, options.overrides)
    except Exception as error:
        if not _is_mistake_of_user(error):
            raise
        from fulgurite_cli.mistakes import format_mistake

        parser.exit(2, format_mistake(error))
    with show_activity("importing jax and Fulgurite"):
        from fulgurite_cli.running import run

    run(experiment, rest, program=f"fulgurite fit {path}")
    return 0


def _find_program_argument(arguments: list[str]) -> str | None:
    """Return the program on a command line: its first word, or a file of Python among the overrides
    that come after options; None if it was left out."""
    for word in arguments[:1]:
        if not word.startswith("-") and not _is_override(word):
            return word
    words = parse_fit_options(arguments).overrides
    return next((word for word in words if word.endswith(".py") and not _is_override(word)), None)


def _is_override(word: str) -> bool:
    """Return whether a word is `name=value`, and not a file in a folder such as `runs/lr=1`."""
    return "=" in word and not (word.endswith(".py") and os.path.isfile(word))


def parse_fit_options(arguments: list[str]) -> argparse.Namespace:
    """Return what a command line of `fulgurite fit` says after the program; end with code 2 if it
    is not one.

    Args:
        arguments: without the program.
    """
    parser = FitParser("fulgurite fit", add_help=False)
    add_fit_options(parser)
    parser.add_argument("-h", "--help", action="store_true", dest="wants_help")
    return parser.parse_intermixed_args(arguments)


def _find_program_of_run(parser: argparse.ArgumentParser, run_dir: str | None) -> str:
    if run_dir is None:
        parser.error("the following arguments are required: PROGRAM")
    from fulgurite_runs import RunDirectory

    path = find_program(RunDirectory(run_dir).read_manifest())
    if path is None:
        parser.error(f"the program of {run_dir} is not in this directory: give PROGRAM")
    return path


def _check_overrides(
    parser: argparse.ArgumentParser, experiment: Callable[..., Any], overrides: list[str]
) -> None:
    """End with code 2 if an override does not fit a program that has not imported jax yet."""
    if inspect.signature(experiment).parameters:
        return
    config: Any = experiment()
    if not isinstance(config, Node):
        return
    for override in overrides:
        try:
            apply_overrides(config, [override])
        except NotLoadedError:
            # It is known for sure once what the configuration calls is imported.
            mistake = find_mistyped_path(config, override)
            if mistake is not None:
                parser.exit(2, f"error: {mistake}\n")
        except ConfigError as error:
            parser.exit(2, f"error: {error}\n")


def _is_mistake_of_user(error: Exception) -> bool:
    from fulgurite.errors import CheckpointError, ConfigurationError, ProcessError

    return isinstance(error, CheckpointError | ConfigurationError | ProcessError)
