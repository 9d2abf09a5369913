"""The program of a sweep: whether the search space fits it, and the command of a trial."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fulgurite.errors import ConfigurationError
from fulgurite_cli import (
    check_no_secret,
    load_experiment,
    parse_fit_options,
    plan_config,
    read_start_config,
)

from fulgurite_sweeps.axes import format_distribution
from fulgurite_sweeps.space import Space


@dataclass(frozen=True)
class Program:
    """A program, and how `fulgurite fit` starts it.

    Attributes:
        path: its file.
        fit_options: further arguments of `fulgurite fit`, such as `--init-from RUN`.
    """

    path: str
    fit_options: tuple[str, ...] = ()

    @cached_property
    def preempted_exit_code(self) -> int:
        """The exit code of a trial that was asked to save and end."""
        return parse_fit_options(list(self.fit_options)).preempted_exit_code

    def check(self, space: Space) -> None:
        """Raise a `ConfigurationError` if some values of a space are not what the program takes.

        Each choice is tried, and of numbers the smallest and the largest. Nothing is built.

        Args:
            space: what is searched.
        """
        options = parse_fit_options(list(self.fit_options))
        if options.overrides or options.sweep or options.run or options.should_print:
            raise ConfigurationError(
                f"{' '.join(self.fit_options)}: these options are not for the trials of a sweep; "
                "write arguments name=value before --"
            )
        if options.resume == "never":
            raise ConfigurationError("trials of a sweep are resumed: leave --resume never out")
        experiment = load_experiment(self.path)
        start_config, _ = read_start_config(options)
        axes = [f"{axis.name}={format_distribution(axis)}" for axis in space.axes.values()]
        check_no_secret(axes, {})  # what follows shows values in its errors
        for point in space.list_samples():
            overrides = space.build_overrides(point)
            try:
                config = plan_config(experiment, overrides, start_config, options.allow)
            except ConfigurationError as error:
                raise ConfigurationError(
                    f"the search space does not fit {self.path}: {error}"
                ) from error
            check_no_secret(axes, config)

    def build_command(self, overrides: Sequence[str], run_dir: Path) -> list[str]:
        """Return the command that trains a trial, or resumes it.

        Args:
            overrides: strings `path=value`.
            run_dir: of the trial.
        """
        # `-P`: nothing is imported from the current directory.
        command = [sys.executable, "-P", "-m", "fulgurite_cli", "fit", self.path, *overrides]
        return [*command, "--run", str(run_dir), *self.fit_options]
