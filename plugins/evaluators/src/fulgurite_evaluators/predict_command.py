"""The command `fulgurite predict`: what a checkpoint of a run predicts, in a file."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
from fulgurite.errors import ConfigurationError, FulguriteError, did_you_mean
from fulgurite_cli import Experiment, format_mistake, rebuild_experiment
from fulgurite_runs import RunDirectory

from fulgurite_evaluators.command import add_program_arguments, parse_step, split_program
from fulgurite_evaluators.evaluator import find_evaluators
from fulgurite_evaluators.predictions import open_predictions


def main(arguments: Sequence[str]) -> int:
    """Write a model's predictions for the examples of a program.

    Returns:
        The exit code: 0; 1 if it failed; 2 for invalid arguments; 130 after Ctrl-C.
    """
    options = _build_parser().parse_intermixed_args(arguments)
    try:
        if options.out.exists() and not options.force:
            raise ConfigurationError(f"{options.out} exists: give another file, or --force")
        run = RunDirectory(options.run)
        experiment = rebuild_experiment(
            options.run, *split_program(options.arguments), options.allow
        )
        data, view = _find_data(experiment, options.evaluator)
        num_examples = 0
        with open_predictions(options.out) as append:

            def count_and_append(preds: Any) -> None:
                nonlocal num_examples
                num_examples += _count_examples(preds)
                append(preds)

            experiment.engine.predict(
                experiment.model,
                data,
                num_batches=options.batches,
                weights=fg.CheckpointRef(run.path, options.step, view=view),
                callback=count_and_append,
            )
    except ConfigurationError as error:
        sys.stderr.write(format_mistake(error))
        return 2
    except (FulguriteError, OSError) as error:
        sys.stderr.write(format_mistake(error))
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"wrote predictions for {num_examples:,} examples to {options.out}")
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "fulgurite predict",
        description=(
            "Writes what the module's `predict_step` gives for each example. The program's"
            " arguments are those of the run."
        ),
    )
    add_program_arguments(parser)
    parser.add_argument("--run", metavar="DIR", required=True, help="the run's directory")
    parser.add_argument(
        "--step",
        default="latest",
        type=parse_step,
        help="latest (the default), best, or a number",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        required=True,
        help="a file .npz (arrays) or .jsonl (a line for each example)",
    )
    parser.add_argument(
        "--evaluator",
        metavar="NAME",
        help="predict for the data of this evaluator (default: `data.predict` of the experiment)",
    )
    parser.add_argument("--batches", metavar="N", type=int, help="at most this many batches")
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")
    return parser


def _find_data(experiment: Experiment, evaluator_name: str | None) -> tuple[Any, str | None]:
    """Return the data to predict for, of an evaluator or what the experiment has for it, and the
    module view to predict with: that of the evaluator."""
    evaluators = find_evaluators(experiment.engine)
    if evaluator_name is not None:
        if evaluator_name not in evaluators:
            raise ConfigurationError(
                f"no evaluator is called {evaluator_name!r}. "
                f"{did_you_mean(evaluator_name, evaluators)}"
            )
        evaluator = evaluators[evaluator_name]
        if evaluator.data is None:
            raise ConfigurationError(
                f"the evaluator {evaluator_name!r} has no data, but computes its metrics itself: "
                "name another one, or give the experiment's data an attribute `predict`"
            )
        return experiment.engine.evaluations[evaluator_name].data, evaluator.module_view
    data = experiment.data() if callable(experiment.data) else experiment.data
    if not hasattr(data, "predict"):
        names = ", ".join(evaluators) or "none"
        raise ConfigurationError(
            "the experiment's data has no attribute `predict` with the data to predict for: add "
            f"it, or give --evaluator NAME, to take the data of an evaluator (there is: {names})"
        )
    return data, None


def _count_examples(preds: Any) -> int:

    return len(jax.tree.leaves(preds)[0])
