"""The command `fulgurite data`: what a program trains on, and how fast it is read."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from fulgurite.errors import ConfigurationError, FulguriteError, check_positive_int
from fulgurite.plugins import as_printable, get_split
from fulgurite_cli import Experiment, build_experiment, format_mistake, load_experiment

from fulgurite_data.batches import Batches
from fulgurite_data.inspection import (
    describe_data,
    measure_reading,
    measure_stages,
    read_first_batch,
)
from fulgurite_data.pictures import save_picture


def main(arguments: Sequence[str]) -> int:
    """Show what a program trains on, its first batch, and how fast each stage reads.

    Returns:
        The exit code: 0; 1 if the data cannot be read; 2 for invalid arguments; 130 after Ctrl-C.
    """
    options = _build_parser().parse_intermixed_args(arguments)
    try:
        check_positive_int(options.batches, "--batches")
        program = load_experiment(options.program)
        experiment = build_experiment(program, options.overrides)
        data = _choose_data(experiment, options.evaluation)
        print_report(data, options.batches)
        if options.picture is not None:
            save_picture(read_first_batch(data), options.picture)
            print(f"\nthe images of the first batch are in {options.picture}")
        return 0
    except ConfigurationError as error:
        sys.stderr.write(format_mistake(error))
        return 2
    except (FulguriteError, OSError) as error:
        sys.stderr.write(format_mistake(error))
        return 1
    except KeyboardInterrupt:
        return 130


def print_report(data: Any, num_batches: int) -> None:
    """Print what data is, and how fast it is read.

    Args:
        data: as of `fg.Engine.fit`, without its parts.
        num_batches: how many are read to measure the speed.
    """
    print(as_printable(describe_data(data)))
    source = getattr(data, "source", data)
    if isinstance(source, Batches):
        print("\nexamples a second, of each stage alone, in one thread")
        for speed in measure_stages(source, num_batches):
            print(as_printable(f"  {speed.examples_per_second:>14,.0f}  {speed.stage}"))
    print("\nexamples a second, as a fit reads them")
    speed = measure_reading(data, num_batches)
    print("  the data has one batch" if speed is None else f"  {speed:>14,.0f}")


def _choose_data(experiment: Experiment, evaluation: str | None) -> Any:
    data = experiment.data
    # A function without arguments, which the program calls only where it needs the data.
    data = data() if callable(data) else data
    if data is None:
        raise ConfigurationError("this program has no data to train on: Experiment(..., data=...)")
    if evaluation is not None:
        split = get_split(data, "evaluations", evaluation)
        if split is data:
            raise ConfigurationError(
                f"--evaluation {evaluation}: the data of this program is of training "
                "alone, without evaluations by name"
            )
        return split
    return get_split(data, "train")


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "fulgurite data",
        description="Shows what a program trains on: the stages, the length, the first batch, and "
        "how many examples a second each stage reads, so that one sees which is slow. Nothing is "
        "trained.",
    )
    parser.add_argument(
        "program", metavar="PROGRAM", help="the Python file that defines `experiment`"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="name=value", help="arguments of the program"
    )
    parser.add_argument("--evaluation", metavar="NAME", help="the data of this evaluation instead")
    parser.add_argument(
        "--picture", metavar="FILE", help="write the images of the first batch to this PNG file"
    )
    parser.add_argument(
        "--batches", type=int, default=50, metavar="N", help="how many are read (default 50)"
    )
    return parser
