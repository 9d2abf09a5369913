"""The commands of fulgurite-replay. What a run has written they leave as it is."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fulgurite.errors import ConfigurationError, FulguriteError
from fulgurite_cli import (
    Experiment,
    build_experiment,
    format_mistake,
    load_experiment,
    rebuild_experiment,
)
from fulgurite_runs import RunDirectory

from fulgurite_replay.capture_files import list_captures
from fulgurite_replay.forking import count_steps, fork as fork_run
from fulgurite_replay.proof import bisect as find_divergence, verify as prove
from fulgurite_replay.replaying import Replay, replay as replay_step, replay_capture, save_batch
from fulgurite_replay.rerun import Recorded


def replay(arguments: Sequence[str]) -> int:
    """Execute a step of a run operation by operation, and show which one made NaN or infinity.

    Returns:
        The exit code: 0 if nothing is wrong in the step; 1 if something is; 2 if it cannot be
        executed.
    """
    parser = argparse.ArgumentParser(
        "fulgurite replay",
        description="Trains from the newest checkpoint before step N up to it, bit for bit, and "
        "executes that step operation by operation: which one made NaN or infinity, in which line, "
        "of which numbers. The batch is saved. The exit code is 1 if something is found.",
    )
    _add_run(parser)
    parser.add_argument(
        "--step",
        metavar="N",
        type=int,
        help="the step; by default the first one after the newest checkpoint that is not finite",
    )
    parser.add_argument(
        "--check",
        choices=("float", "index", "all"),
        default="float",
        help="what to look for: numbers that are not finite (default), indices outside of arrays, "
        "or both",
    )
    parser.add_argument(
        "--from",
        dest="origin",
        choices=("capture", "checkpoint"),
        help="where the step is taken from: what Capture has written of it (default, if it has), "
        "which needs no data, or the steps since a checkpoint",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="where the batch is written (default RUN/replay/step-N.npz)",
    )
    options = parser.parse_args(arguments)

    def execute() -> int:
        result = _replay(options)
        print(result)
        path = options.out or Path(options.run) / "replay" / f"step-{result.step}.npz"
        save_batch(result.batch, path)
        print(f"batch: {path}")
        return 0 if result.examination.is_clean else 1

    return _run_command(execute)


def verify(arguments: Sequence[str]) -> int:
    """Execute steps of a run again, and compare them with what it recorded, bit for bit.

    Returns:
        The exit code: 0 if everything is equal; 1 if anything differs; 2 if it cannot be compared.
    """
    parser = argparse.ArgumentParser(
        "fulgurite verify",
        description="Executes the steps after A up to B again, from the newest checkpoint that is "
        "not after A, and compares the exact records, the digests of StateDigest and the "
        "checkpoints on the way, bit for bit. The exit code is 1 if anything differs.",
    )
    _add_run(parser)
    parser.add_argument(
        "steps",
        metavar="A:B",
        nargs="?",
        default=":",
        help="by default from the begin to the newest checkpoint",
    )
    options = parser.parse_args(arguments)

    def compare() -> int:
        first, last = _parse_steps(options.steps)
        proof = prove(_rebuild(options), first, last)
        print(proof)
        return 0 if proof.is_equal else 1

    return _run_command(compare)


def bisect(arguments: Sequence[str]) -> int:
    """Show the first step at which the states of two runs differ, and what of them.

    Returns:
        The exit code: 0 if they are equal; 1 if they differ; 2 if they cannot be compared.
    """
    parser = argparse.ArgumentParser(
        "fulgurite bisect",
        description="Shows the first step at which the states of two runs with StateDigest differ, "
        "and which array. The exit code is 1 if one does.",
    )
    parser.add_argument("good", metavar="GOOD", type=Path, help="the directory of a run")
    parser.add_argument("bad", metavar="BAD", type=Path, help="that of another one")
    options = parser.parse_args(arguments)

    def compare() -> int:
        divergence = find_divergence(options.good, options.bad)
        print(divergence)
        return 0 if divergence.step is None else 1

    return _run_command(compare)


def fork(arguments: Sequence[str]) -> int:
    """Start a new run from a step of another one, with other settings.

    Returns:
        The exit code: 0; 2 if it cannot begin.
    """
    parser = argparse.ArgumentParser(
        "fulgurite fork",
        description="Starts a new run with the state that RUN had at step N, and with other "
        "arguments. Where that step was not saved, it is trained again from the checkpoint before "
        "it. `fulgurite compare` shows the fork point. A fork that was killed is continued by the "
        "same command.",
    )
    _add_run(parser)
    parser.add_argument("overrides", metavar="NAME=VALUE", nargs="*", help="arguments that change")
    parser.add_argument("--step", metavar="N", type=int, required=True, help="where to begin")
    parser.add_argument("--out", metavar="DIR", required=True, help="the directory of the new run")
    parser.add_argument(
        "--hyperparameters",
        choices=("checkpoint", "program"),
        default="checkpoint",
        help="whose hyperparameters in the state of the optimizer the new run has (default: those "
        "of RUN)",
    )
    parser.add_argument(
        "--skip-batch",
        metavar="K",
        type=int,
        action="append",
        default=[],
        help="leave out the batch on which RUN trained at step K; may be given more than once",
    )
    options = parser.parse_intermixed_args(arguments)

    def begin() -> int:
        recorded = _rebuild(options)
        changed = _build_changed(options)
        takes_program = options.hyperparameters == "program"
        num_steps = count_steps(recorded, changed, options.skip_batch)
        if num_steps is not None:
            print(
                f"note: without the batches that are left out, {changed.engine.epochs} epochs are "
                f"{num_steps} steps. What is shown as the number of steps assumes epochs of equal "
                "length, and is right at the end"
            )
        result = fork_run(
            recorded,
            options.step,
            changed,
            takes_hyperparameters=takes_program,
            skipped_steps=options.skip_batch,
        )
        print(f"{options.out}: step {int(result.state.step)}")
        return 0

    return _run_command(begin)


def _replay(options: argparse.Namespace) -> Replay:
    """Replay a step from what was captured of it, or from the run."""
    checks = {
        "checks_indices": options.check != "float",
        "checks_numbers": options.check != "index",
    }
    captures = list_captures(Path(options.run)) if options.origin != "checkpoint" else {}
    step = max(captures, default=None) if options.step is None else options.step
    if step in captures:
        experiment = _rebuild_experiment(options)
        return replay_capture(experiment.engine, experiment.model, captures[step], **checks)
    if options.origin == "capture":
        known = ", ".join(map(str, sorted(captures))) or "none"
        raise ConfigurationError(
            f"{options.run} has no capture of step {options.step}; captured is {known}. Replay it "
            "with --from checkpoint"
        )
    return replay_step(_rebuild(options), options.step, **checks)


def _build_changed(options: argparse.Namespace) -> Recorded:
    """Return the program of a run with other arguments."""
    manifest = RunDirectory(options.run).read_manifest()
    config = manifest.get("configuration")
    if options.overrides and not config:
        raise ConfigurationError(f"the program of {options.run} has no arguments that could change")
    experiment = build_experiment(
        load_experiment(options.program or _get_program_file(options.run)),
        options.overrides,
        run_dir=options.out,
        start_config=config,
    )
    return Recorded(experiment.engine, experiment.model, _get_data(experiment), options.out)


def _get_program_file(run: str) -> str:
    """Return the name of the program's file of a run, which was found in this directory."""
    return str(RunDirectory(run).read_manifest()["program"]["file"])


def _add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which run it is, and of which program."""
    parser.add_argument("run", metavar="RUN", help="the directory of the run")
    parser.add_argument(
        "--program",
        metavar="FILE",
        help="the Python file that defines `experiment`; by default the file of the run's "
        "program in the current directory",
    )


def _rebuild(options: argparse.Namespace) -> Recorded:
    experiment = _rebuild_experiment(options)
    return Recorded(experiment.engine, experiment.model, _get_data(experiment), options.run)


def _rebuild_experiment(options: argparse.Namespace) -> Experiment:
    try:
        return rebuild_experiment(options.run, options.program)
    except ConfigurationError as error:
        error.add_note(
            "in a program without `experiment`: from fulgurite_replay import Recorded, fork, "
            "replay, verify, and then, for example, "
            f"print(replay(Recorded(engine, model, data, {options.run!r}), step=N))"
        )
        raise


def _get_data(experiment: Experiment) -> Any:
    data = experiment.data() if callable(experiment.data) else experiment.data
    if data is None:
        raise ConfigurationError("the program has no data to train on: Experiment(..., data=...)")
    return data


def _parse_steps(text: str) -> tuple[int, int | None]:
    first, colon, last = text.partition(":")
    numbers = (first or "0", last or "0")
    if not colon or not all(number.isdecimal() for number in numbers):
        raise ConfigurationError(f"{text!r} are not steps: give A:B, such as 100:200")
    return int(first or 0), int(last) if last else None


def _run_command(command: Callable[[], int]) -> int:
    """Return the exit code of a command; print its error."""
    try:
        return command()
    except (FulguriteError, OSError) as error:
        sys.stderr.write(format_mistake(error))
        return 2
