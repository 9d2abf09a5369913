"""The command `fulgurite export`: a checkpoint of a run as a folder, or as an ONNX file."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fulgurite as fg
from fulgurite.errors import CheckpointError, ConfigurationError, FulguriteError
from fulgurite.plugins import hide_internal_frames
from fulgurite_cli import Experiment, format_mistake, rebuild_experiment
from fulgurite_runs import RunDirectory

from fulgurite_export.exporting import expand, export
from fulgurite_export.manifest import PLATFORMS, read_manifest
from fulgurite_export.onnx_format import export_onnx


@hide_internal_frames
def main(arguments: Sequence[str]) -> int:
    """Write a model of a run to a folder that JAX alone can run.

    Returns:
        The exit code: 0; 1 if the model cannot be exported; 2 for invalid arguments.
    """
    parser = _build_parser()
    options = parser.parse_intermixed_args(arguments)
    is_onnx = options.format == "onnx"
    if is_onnx and (options.constraint or options.platform or len(options.function) > 1):
        parser.error("an ONNX file has one function, and no --constraint and --platform")
    try:
        experiment = rebuild_experiment(
            options.run, options.program, options.overrides, options.allow
        )
        state = _load_state(experiment, options)
        write = _write_onnx if is_onnx else _write_folder
        description = write(state, _find_inputs(experiment), experiment.engine, options)
    except ConfigurationError as error:
        sys.stderr.write(format_mistake(error))
        return 2
    except (FulguriteError, OSError) as error:
        sys.stderr.write(format_mistake(error))
        return 1
    print(f"wrote step {int(state.step)} to {options.out}{description}")
    return 0


def _write_folder(
    state: fg.TrainState, inputs: Any, engine: fg.Engine, options: argparse.Namespace
) -> str:
    """Write a folder, show what it takes, and return what else is to be said of it."""
    digest = export(
        state,
        options.out,
        inputs,
        functions=options.function or ["predict"],
        engine=engine,
        batch=options.batch,
        shapes=dict(options.shape),
        constraints=options.constraint,
        platforms=options.platform or ["cpu", "cuda", "tpu"],
    )
    manifest, _ = read_manifest(options.out)
    for name, function in manifest.functions.items():
        print(function.describe(name))
    return f", digest {digest}"


def _write_onnx(
    state: fg.TrainState, inputs: Any, engine: fg.Engine, options: argparse.Namespace
) -> str:
    """Write an ONNX file, and return what else is to be said of it."""
    difference = export_onnx(
        state,
        options.out,
        inputs,
        function=(options.function or ["predict"])[0],
        engine=engine,
        batch=options.batch,
        shapes=dict(options.shape),
    )
    return f"; onnxruntime differs from JAX by {difference:.2g}"


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "fulgurite export",
        description="Writes functions of a run's model to a new folder, which "
        "`fulgurite_export.load` reads with JAX and NumPy alone. The first batch of the program's "
        "data says what the inputs are; what a function does not read of it is left out.",
    )
    parser.add_argument("run", metavar="RUN", help="the directory of the run")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="name=value",
        help="arguments of the program that the run does not record",
    )
    parser.add_argument(
        "--program",
        metavar="FILE",
        help="the Python file that defines `experiment`; by default the file of the run's program "
        "in the current directory",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME",
        help="the run's configuration may name this function or class, module:name, or all of a "
        "package (repeat it for several)",
    )
    parser.add_argument(
        "--step",
        default="latest",
        type=_parse_step,
        help="latest (the default), best, or a number; a damaged checkpoint is an error",
    )
    parser.add_argument(
        "--view",
        metavar="NAME",
        help="the weights of a plugin, such as averaged; by default those that were trained, and "
        "of the best checkpoint those that were measured",
    )
    _add_format(parser)
    parser.add_argument(
        "-o",
        "--out",
        metavar="PATH",
        type=_parse_path,
        required=True,
        help="the new folder or file",
    )
    return parser


def _add_format(parser: argparse.ArgumentParser) -> None:
    """Add what is written, and how."""
    parser.add_argument(
        "--function",
        action="append",
        default=[],
        metavar="NAME",
        help="a method of the module (repeat it for several); by default predict",
    )
    parser.add_argument(
        "--format",
        choices=("folder", "onnx"),
        default="folder",
        help="a folder (the default), or an ONNX file, which needs the extra `onnx`",
    )
    parser.add_argument(
        "--batch",
        default="symbolic",
        type=_parse_batch,
        metavar="N",
        help="the number of examples; by default `symbolic`, for any number",
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        type=_parse_shape,
        metavar="INPUT=SHAPE",
        help="the shape of an input, such as 'tokens=batch, length' (repeat it for several)",
    )
    parser.add_argument(
        "--constraint",
        action="append",
        default=[],
        metavar="TEXT",
        help="what holds for open sizes, such as 'length <= 128' (repeat it for several)",
    )
    parser.add_argument(
        "--platform",
        action="append",
        choices=PLATFORMS,
        help="what it is for (repeat it for several); by default cpu, cuda and tpu",
    )


def _load_state(experiment: Experiment, options: argparse.Namespace) -> fg.TrainState:
    """Return the state of the checkpoint that is meant, or raise `CheckpointError`.

    With `latest` an engine takes an older checkpoint where the newest is damaged. Nobody would
    notice that in an exported file, so the engine gets the number of the newest step.

    Args:
        experiment: of the program.
        options: of the command.
    """
    run = RunDirectory(options.run)
    step = run.find_newest_step() if options.step == "latest" else options.step
    if step is None:
        raise CheckpointError(f"there is no checkpoint in {run.path}: check the path")
    checkpoint = fg.CheckpointRef(run.path, step, view=options.view)
    try:
        return experiment.engine.load_weights(experiment.model, checkpoint)
    except CheckpointError as error:
        if options.step == "latest":
            error.add_note(f"step {step} is the newest; --step names an older checkpoint")
        raise


def _find_inputs(experiment: Experiment) -> Any:
    """Return the first batch of the data that the program predicts for, or else trains on."""
    data = experiment.data() if callable(experiment.data) else experiment.data
    if data is None:
        raise ConfigurationError(
            "the program has no data whose first batch says what the inputs are: "
            "Experiment(..., data=...)"
        )
    source = getattr(data, "predict", data)
    for batch in experiment.engine.iter_batches(source, steps=1):
        return batch
    raise ConfigurationError("the program's data has no batch, which would say what the inputs are")


def _parse_path(text: str) -> Path:
    try:
        return expand(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parse_step(text: str) -> int | str:
    if text in ("latest", "best"):
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor latest nor best")
    return int(text)


def _parse_batch(text: str) -> int | str:
    if text == "symbolic":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither symbolic nor a number of examples")
    return int(text)


def _parse_shape(text: str) -> tuple[str, str]:
    name, equals, shape = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: write INPUT=SHAPE")
    return name, shape
