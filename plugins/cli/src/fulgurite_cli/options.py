"""The options of a program that trains. Nothing heavy is imported here, so that a mistake is
answered at once."""

import argparse

TERMINATED = 143


def add_fit_options(parser: argparse.ArgumentParser) -> None:
    """Add what a program that trains takes on its command line."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="name=value",
        help="arguments of the experiment, or paths in its configuration, listed below",
    )
    parser.add_argument("--run", metavar="DIR", help="the run directory, where plugins write")
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--config",
        metavar="FILE",
        help="start from the configuration in this JSON file; overrides change it",
    )
    start.add_argument(
        "--from",
        metavar="RUN",
        dest="from_run",
        help="start from the configuration of another run; overrides change it",
    )
    parser.add_argument(
        "--print",
        action="store_true",
        dest="should_print",
        help="print each value and where it comes from, and end",
    )
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
        type=_parse_count,
        default=1,
        metavar="N",
        help="how many runs of a sweep at a time (default: 1)",
    )
    parser.add_argument(
        "--preempted-exit-code",
        type=_parse_exit_code,
        default=TERMINATED,
        metavar="N",
        help="the exit code after SIGTERM, for schedulers that restart a job by its exit code "
        "(default: %(default)s)",
    )


def _parse_exit_code(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 256:
        raise argparse.ArgumentTypeError(f"{text} is not an exit code: they go from 1 to 255")
    return int(text)


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of jobs: give 1 or more")
    return int(text)
