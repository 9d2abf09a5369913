"""The command `fulgurite population`: writes one member of a population as a run of its own."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
from fulgurite.errors import ConfigurationError, FulguriteError
from fulgurite.plugins import as_printable
from fulgurite_checkpoint import save_weights
from fulgurite_cli import rebuild_experiment

from fulgurite_population.members import Members, check_index, take_member


def main(arguments: Sequence[str]) -> int:
    """Write the weights of a member of a population as a run with one checkpoint.

    Args:
        arguments: the command line after the name of the command.

    Returns:
        The exit code: 0; 1 if it failed; 2 for invalid arguments.
    """
    options = _build_parser().parse_intermixed_args(arguments)
    program, overrides = _split_program(options.arguments)
    try:
        experiment = rebuild_experiment(options.run, program, overrides, options.allow)
        checkpoint = fg.CheckpointRef(options.run, options.step)
        state = experiment.engine.load_weights(experiment.model, checkpoint)
        member = take_weights(state, options.member)
        save_weights(member, options.out)
    except ConfigurationError as error:
        print(as_printable(f"error: {error}"), file=sys.stderr)
        return 2
    except (FulguriteError, OSError) as error:
        print(as_printable(f"error: {error}"), file=sys.stderr)
        return 1
    print(f"{options.out}: member {options.member} of {options.run} at step {int(member.step)}")
    return 0


def take_weights(state: fg.TrainState, index: int) -> fg.TrainState:
    """Return the weights, the model state and the random key of a member, as a state to evaluate.

    Args:
        state: of a population.
        index: of the member, from 0.

    Raises:
        ConfigurationError: it is not of a population, or has no such member.
    """
    if not isinstance(state.module, Members):
        raise ConfigurationError(
            f"the run trained a {type(state.module).__name__} and no population: evaluate it as "
            "it is"
        )
    seeds = state.module.seeds
    check_index(index, len(seeds))
    module, model_state = take_member((state.module.members, state.model_state), index)
    # What plugins keep of a population, such as averages, is of all members at once.
    return state.replace(
        module=module, model_state=model_state, key=jax.random.key(seeds[index]), plugin_states={}
    )


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "fulgurite population",
        description="Writes the weights of one member of a population as a run with one "
        "checkpoint, for `fulgurite evaluate`, fit(init_from=...) and Engine.load_weights. The "
        "program's arguments are those of the run.",
    )
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="[PROGRAM] name=value",
        help="the Python file that defines `experiment` (default: the file of that name in the "
        "current directory), and arguments that the run does not record",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="the run's configuration may import this package (repeat it for several); without "
        "PROGRAM, the run is built from its manifest alone",
    )
    parser.add_argument(
        "--run", metavar="DIR", required=True, help="the directory of the population's run"
    )
    parser.add_argument("--member", metavar="N", type=int, required=True, help="from 0")
    parser.add_argument(
        "--step", default="latest", type=_parse_step, help="latest (the default), best, or a number"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, required=True, help="a directory that does not exist yet"
    )
    return parser


def _split_program(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the program, or None if it was left out, and the overrides."""
    if arguments and "=" not in arguments[0]:
        return arguments[0], list(arguments[1:])
    return None, list(arguments)


def _parse_step(text: str) -> Any:
    if text in ("latest", "best"):
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor latest nor best")
    return int(text)
