"""The command `fulgurite tune`."""

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import optax
from fulgurite.errors import ConfigurationError, FulguriteError
from fulgurite_cli import Experiment, build_experiment, format_mistake, load_experiment

from fulgurite_tuner.batch_size import Search, find_batch_size
from fulgurite_tuner.learning_rate import find_learning_rate


def main(arguments: Sequence[str]) -> int:
    """Suggest a learning rate or a batch size for a program.

    Returns:
        The exit code: 0; 1 if there is nothing to suggest or it failed; 2 for invalid arguments;
        130 after Ctrl-C.
    """
    options = _build_parser().parse_intermixed_args(arguments)
    try:
        program = load_experiment(options.program)
        experiment = build_experiment(program, options.overrides)
        if options.what == "lr":
            return _tune_learning_rate(experiment, options)
        return _tune_batch_size(experiment, options)
    except ConfigurationError as error:
        sys.stderr.write(format_mistake(error))
        return 2
    except (FulguriteError, OSError) as error:
        sys.stderr.write(format_mistake(error))
        return 1
    except KeyboardInterrupt:
        return 130


def find_optimizer(name: str) -> Callable[[Any], optax.GradientTransformation]:
    """Return an optimizer of optax by its name.

    Raises:
        ConfigurationError: optax has none of that name that takes a learning rate.
    """
    optimizer = getattr(optax, name, None)
    parameters = inspect.signature(optimizer).parameters if inspect.isfunction(optimizer) else {}
    if optimizer is None or next(iter(parameters), None) != "learning_rate":
        raise ConfigurationError(
            f"--optimizer is {name!r}, which is not an optimizer of optax with a learning rate: "
            "give adam, adamw, sgd or another one"
        )
    return optimizer


def _tune_learning_rate(experiment: Experiment, options: argparse.Namespace) -> int:
    rates = find_learning_rate(
        experiment.engine,
        experiment.model,
        _load_data(experiment),
        find_optimizer(options.optimizer),
        low=options.low,
        high=options.high,
        steps=options.steps,
    )
    if options.svg is not None:
        options.svg.write_text(rates.to_svg())
    if rates.suggestion is None:
        print("the loss falls nowhere: no suggestion", file=sys.stderr)
        return 1
    print(f"{rates.suggestion:.3g}")
    return 0


def _tune_batch_size(experiment: Experiment, options: argparse.Namespace) -> int:
    sizes = find_batch_size(
        experiment.engine,
        experiment.model,
        _load_data(experiment),
        limit=options.limit,
        max_size=options.max_size,
        search=options.search,
    )
    print(sizes.suggestion)
    return 0


def _load_data(experiment: Experiment) -> Any:
    data = experiment.data() if callable(experiment.data) else experiment.data
    if data is None:
        raise ConfigurationError("this program has no data to train on: Experiment(..., data=...)")
    return data


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "fulgurite tune",
        description="Prints a learning rate, or the largest batch size, for a program. Nothing is "
        "trained for good, and nothing is written but --svg.",
    )
    parser.add_argument("what", choices=("lr", "batch"), help="what to find")
    parser.add_argument(
        "program", metavar="PROGRAM", help="the Python file that defines `experiment`"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="name=value", help="arguments of the program"
    )
    rate = parser.add_argument_group("lr")
    rate.add_argument("--optimizer", default="adam", metavar="NAME", help="of optax (default adam)")
    rate.add_argument("--low", type=float, default=1e-7, help="the first rate (default 1e-7)")
    rate.add_argument("--high", type=float, default=1.0, help="the last rate (default 1)")
    rate.add_argument("--steps", type=int, default=100, help="how many rates (default 100)")
    rate.add_argument("--svg", type=Path, metavar="FILE", help="draw the losses")
    batch = parser.add_argument_group("batch")
    batch.add_argument(
        "--limit", type=int, metavar="BYTES", help="memory of a step (default: the device's)"
    )
    batch.add_argument("--max-size", type=int, metavar="N", help="the largest size")
    batch.add_argument(
        "--search", choices=get_args(Search), default="power", help="powers of two, or any size"
    )
    return parser
