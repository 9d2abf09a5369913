"""The command `fulgurite evaluate`: a run's checkpoint, or all of them as they come."""

import argparse
import sys
import time
import traceback
from collections.abc import Sequence

import fulgurite as fg
from fulgurite.errors import CheckpointError, ConfigurationError, FulguriteError
from fulgurite_cli import Experiment, build_experiment, load_experiment
from fulgurite_runs import RunDirectory
from fulgurite_runs.json_codec import dumps

from fulgurite_evaluators.follow import Follower, find_evaluators, line

POLL = 0.2


def main(arguments: Sequence[str]) -> int:
    """Runs `fulgurite evaluate`; gives 0, 1 if anything failed or was waited for in vain, and 2 on
    arguments that cannot be meant."""
    parser = argparse.ArgumentParser(
        "fulgurite evaluate",
        description=(
            "Evaluates a checkpoint of a run (--step), or its checkpoints while it is training"
            " (--group). The program's arguments are those of the run."
        ),
    )
    parser.add_argument(
        "program", metavar="PROGRAM", help="the Python file that defines `experiment`"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="name=value", help="arguments that the run does not record"
    )
    parser.add_argument("--run", metavar="DIR", required=True, help="the run's directory")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--step", default="latest", type=_step, help="latest (the default), best, or a number"
    )
    what.add_argument("--group", help="follow the run with the standalone evaluators of this group")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds to wait for the run to begin (600)"
    )
    parser.add_argument(
        "--idle-timeout",
        type=float,
        default=120.0,
        help="seconds without a sign of life of the trainer (120)",
    )
    parser.add_argument("--json", action="store_true", help="results as JSON, one line each")
    options = parser.parse_intermixed_args(arguments)
    run = RunDirectory(options.run)
    try:
        if options.group is not None:
            _wait_for(run, options.timeout)
        program, kept = load_experiment(options.program), run.read_manifest()["configuration"]
        experiment = build_experiment(program, options.overrides, kept, run_dir=options.run)
        if options.group is None:
            return _once(experiment, run, options.step, options.json)
        follower = Follower(
            experiment, run, options.group, idle_timeout=options.idle_timeout, tell=_tell
        )
        try:
            return 0 if follower.follow() else 1
        except OSError as error:
            gap = f"the results of group {options.group!r} cannot be kept in {run.path}: {error}"
            raise CheckpointError(
                f"{gap}. Those already in it are complete; start this again for the rest"
            ) from error
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FulguriteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _wait_for(run: RunDirectory, timeout: float) -> None:
    """Waits until the run has begun; a `CheckpointError` if it does not."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            run.read_manifest()
            return
        except CheckpointError as error:
            if time.monotonic() >= deadline:
                raise CheckpointError(
                    f"no run began in {run.path} within {timeout:g} s. Check the path, start the"
                    " training with --run, or wait longer with --timeout"
                ) from error
        time.sleep(POLL)


def _once(experiment: Experiment, run: RunDirectory, step: int | str, as_json: bool) -> int:
    engine = experiment.engine
    plugins = find_evaluators(engine)
    names = list(dict.fromkeys([*plugins, *engine.evaluators]))
    if not names:
        raise ConfigurationError(
            "the program has no evaluator: add Evaluator('test', data) to its plugins"
        )
    state = engine.load_weights(experiment.model, fg.CheckpointRef(run.path, step))  # type: ignore[arg-type]
    at, failed = int(state.step), False
    for name in names:
        try:
            if name in plugins:
                metrics = plugins[name].compute(state, engine, engine.run_evaluator).metrics
            else:
                metrics = engine.run_evaluator(name, state).metrics
        except Exception:
            print(f"{name}  step {at}  failed:\n{traceback.format_exc()}", file=sys.stderr)
            failed = True
            continue
        _tell(
            dumps({"evaluator": name, "step": at, "metrics": metrics})
            if as_json
            else line(name, at, metrics)
        )
    return int(failed)


def _step(text: str) -> int | str:
    if text in ("latest", "best"):
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor latest nor best")
    return int(text)


def _tell(text: str) -> None:
    print(text, flush=True)
