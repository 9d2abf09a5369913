"""The command `fulgurite sweep`. Optuna and jax are imported after the options were checked."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulgurite_sweeps.sweep import Sweep
    from fulgurite_sweeps.workers import Workers

_EPILOG = """\
search spaces, by the name of an argument or a path of the configuration:
  lr=log(1e-5,1e-1)              a number, between these on a logarithmic scale
  dropout=float(0,0.5)           a number; float(0,0.5,step=0.1) takes every tenth
  width=int(32,512,log)          an integer; int(32,512) and int(32,512,step=32) as well
  optimizer=adam,sgd             one of these values
  width,name=(16,small),(32,big) several together
  'momentum=float(0,0.99) if optimizer=sgd'   only in trials with this choice
  steps=1000                     what all trials have

fulgurite sweep digits.py 'lr=log(1e-5,1e-1)' --trials 40 --metric test/accuracy --run runs/sweep
fulgurite sweep --status runs/sweep
"""


def sweep(arguments: list[str]) -> int:
    """Search arguments of a program: trials that learn from each other, in processes.

    Args:
        arguments: the command line after the name of the command.
    """
    has_options = "--" in arguments
    index = arguments.index("--") if has_options else len(arguments)
    parser = _build_parser()
    options = parser.parse_intermixed_args(arguments[:index])
    _check_options(parser, options)
    from fulgurite.errors import CheckpointError, ConfigurationError
    from fulgurite_cli import format_mistake

    try:
        if options.status is not None:
            from fulgurite_sweeps.status import describe_sweep

            print(describe_sweep(options.status))
            return 0
        return _run(options, arguments[index + 1 :], arguments)
    except (ConfigurationError, CheckpointError) as error:
        sys.stderr.write(format_mistake(error))
        return 2


def _run(options: argparse.Namespace, fit_options: Sequence[str], arguments: Sequence[str]) -> int:
    """Run a sweep, and return the exit code.

    Args:
        options: of the command line.
        fit_options: what stands behind `--`.
        arguments: the command line.
    """
    import optuna

    from fulgurite_sweeps.display import show_sweep
    from fulgurite_sweeps.journal import SweepDirectory
    from fulgurite_sweeps.objectives import Objective
    from fulgurite_sweeps.status import describe_sweep
    from fulgurite_sweeps.sweep import Sweep
    from fulgurite_sweeps.workers import parse_executor, parse_workers

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if options.agent is not None:
        return _run_agent_trial(options, fit_options)
    workers = parse_workers(options.workers)
    executor = None if workers.name == "slurm" else parse_executor(options.workers)
    objectives = [Objective.parse(metric, mode) for metric, mode in options.metrics]
    search = Sweep(
        options.run,
        options.program,
        options.space,
        objectives,
        constraints=options.constraint,
        fit_options=fit_options,
    )
    for point in options.enqueue:
        search.enqueue(point)
    methods = {"sampler": options.sampler, "pruner": options.pruner, "seed": options.seed}
    if executor is None:
        plan = search.plan(options.trials, **methods)
        return _submit(search, workers, arguments, plan.num_trials)
    with show_sweep(SweepDirectory(options.run)) as tell:
        received = search.run(
            options.trials,
            **methods,
            executor=executor,
            num_retries=options.retries,
            should_wait=options.should_wait,
            tell=tell,
        )
    print(describe_sweep(options.run), flush=True)
    return 128 + received[0] if received else _choose_exit_code(search)


def _run_agent_trial(options: argparse.Namespace, fit_options: Sequence[str]) -> int:
    """Train the trial that an agent asks for, and return the exit code.

    Args:
        options: of the command line.
        fit_options: what stands behind `--`.
    """
    from fulgurite_sweeps.agents import AgentSweep
    from fulgurite_sweeps.objectives import Objective
    from fulgurite_sweeps.workers import parse_executor

    search = AgentSweep(
        options.run,
        options.program,
        options.space,
        [Objective.parse(metric, mode) for metric, mode in options.metrics],
        agent=options.agent,
        constraints=options.constraint,
        fit_options=fit_options,
    )
    received = search.run_trial(
        pruner=options.pruner,
        executor=parse_executor(options.workers),
        num_retries=options.retries,
    )
    return 128 + received[0] if received else int(search.state == "fail")


def _submit(search: "Sweep", workers: "Workers", arguments: Sequence[str], num_trials: int) -> int:
    """Submit a job array that drives a sweep, and return the exit code.

    Args:
        search: the sweep.
        workers: `slurm` with its arguments.
        arguments: the command line.
        num_trials: how many there are in all.
    """
    from fulgurite_sweeps.slurm import plan_job_array

    left = ("waiting", "running", "stopped")
    num_left = num_trials - sum(trial.state not in left for trial in search.trials)
    if num_left <= 0:
        _print(f"all trials have ended; fulgurite sweep --status {search.directory} shows them")
        return 0
    plan_job_array(workers, arguments, search.directory, num_left).submit(_print)
    _print(f"fulgurite sweep --status {search.directory} shows how the sweep stands")
    return 0


def _print(text: str) -> None:
    from fulgurite.plugins import as_printable

    print(as_printable(text), flush=True)


def _choose_exit_code(search: "Sweep") -> int:
    """Return 1 if no trial came to an end, else 0."""
    return int(all(trial.state == "fail" for trial in search.trials))


def _check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with code 2 if something is missing."""
    if options.status is not None:
        return
    if options.program is None:
        parser.error("the following arguments are required: PROGRAM")
    if options.run is None:
        parser.error("a sweep needs a directory in which each trial gets one of its own: --run DIR")
    if options.agent is not None and (options.trials is not None or options.enqueue):
        parser.error("the agent chooses trials: leave --trials and --enqueue out")
    if not options.metrics:
        parser.error("a sweep needs a metric to look at, SOURCE/NAME: --metric test/accuracy")


class _AddMetric(argparse.Action):
    """Adds a metric, whose name tells which values are better."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.metrics = [*namespace.metrics, (values, None)]


class _SetMode(argparse.Action):
    """Says which values of the metric before it are better."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if not namespace.metrics or namespace.metrics[-1][1] is not None:
            parser.error(f"{option_string} stands behind the --metric that it is about")
        metric, _ = namespace.metrics[-1]
        namespace.metrics = [*namespace.metrics[:-1], (metric, self.const)]


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "fulgurite sweep",
        usage="fulgurite sweep PROGRAM name=SPACE ... --metric NAME --trials N --run DIR "
        "[options] [-- options of fulgurite fit]",
        description="Trains trials of a program, each in a run directory of its own, and chooses "
        "their arguments by the results so far. The same command continues a sweep.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("program", nargs="?", metavar="PROGRAM", help="defines `experiment`")
    parser.add_argument("space", nargs="*", metavar="name=SPACE", help="what is searched, below")
    parser.add_argument("--run", metavar="DIR", help="the directory of the sweep")
    parser.add_argument("--status", metavar="DIR", help="print how a sweep stands, and end")
    parser.add_argument(
        "--metric",
        action=_AddMetric,
        dest="metrics",
        default=[],
        metavar="SOURCE/NAME",
        help="what is looked at, its newest value at the end of a trial; repeated, for several",
    )
    for mode in ("min", "max"):
        parser.add_argument(
            f"--{mode}imize",
            action=_SetMode,
            nargs=0,
            const=mode,
            help=f"the {mode}imum of the metric before it is the best; most names tell it",
        )
    parser.add_argument(
        "--constraint",
        action="append",
        default=[],
        metavar="SOURCE/NAME<=NUMBER",
        help="a bound (or >=) that the best trial must keep to; repeated, for several",
    )
    _add_search_options(parser)
    return parser


def _add_search_options(parser: argparse.ArgumentParser) -> None:
    """Add how a sweep searches, and where its trials run."""
    parser.add_argument(
        "--trials",
        type=_parse_count,
        metavar="N",
        help="how many there are in all, those of earlier starts included (a grid: all points)",
    )
    parser.add_argument(
        "--sampler",
        default="tpe",
        metavar="NAME",
        help="tpe, random, qmc, cmaes, nsgaii or grid, perhaps with arguments, "
        "tpe(n_startup_trials=5) "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--pruner",
        metavar="NAME",
        help="asha, median or hyperband, which end bad trials at an evaluation; perhaps with "
        "arguments in steps, asha(min_resource=200) (default: none)",
    )
    parser.add_argument(
        "--workers",
        default="local",
        metavar="WHERE",
        help="where trials run: local:N, N at a time; ray or ray:ADDRESS, a cluster, perhaps "
        "with what a trial needs, ray(cpus=4,gpus=1); slurm or slurm:PROFILE, a job array "
        "(default: local:1)",
    )
    parser.add_argument(
        "--agent",
        metavar="NAME",
        help="wandb: this command is what the agent of W&B starts for one trial of its sweep",
    )
    parser.add_argument(
        "--enqueue",
        action="append",
        default=[],
        metavar="'NAME=VALUE ...'",
        help="a point to try first; repeated, for several",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampler")
    parser.add_argument(
        "--retries",
        type=_parse_retries,
        default=3,
        metavar="N",
        help="how often a trial is resumed whose process was killed (default: %(default)s)",
    )
    parser.add_argument(
        "--no-wait",
        action="store_false",
        dest="should_wait",
        help="end when nothing is left to start, also while other drivers have trials (default: "
        "wait, and take over the trials of a driver that dies)",
    )


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of trials: give 1 or more")
    return int(text)


def _parse_retries(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a number of retries: give 0 or more")
    return int(text)
