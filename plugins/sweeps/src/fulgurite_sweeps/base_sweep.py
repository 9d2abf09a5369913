"""What all sweeps have: a program, a directory, and trials to look at."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulgurite.errors import ConfigurationError

from fulgurite_sweeps.attributes import AXES
from fulgurite_sweeps.driver import Driver
from fulgurite_sweeps.executors import Executor, LocalExecutor
from fulgurite_sweeps.journal import SweepDirectory
from fulgurite_sweeps.objectives import Constraint, Objective
from fulgurite_sweeps.plan import Plan
from fulgurite_sweeps.program import Program
from fulgurite_sweeps.space import Space
from fulgurite_sweeps.summary import write_summary
from fulgurite_sweeps.trials import Trial, find_best, find_front, read_trials


class BaseSweep:
    """Trials of a program in one directory. A subclass says where their points come from: `Sweep`
    from a sampler, `AgentSweep` from an agent.

    Example:
        from fulgurite_sweeps import BaseSweep


        def show_best(sweep: BaseSweep) -> None:
            if sweep.best is not None:
                print(sweep.best.params, sweep.best.values)

    Args:
        directory: of the sweep. One that was begun continues.
        program: a Python file that defines `experiment`, as for `fulgurite fit`.
        space: what is searched, by path, or as strings.
        objectives: metrics `SOURCE/NAME` whose names tell which values are better, or objectives.
        constraints: bounds of metrics, such as `test/loss<=0.5`.
        overrides: strings `path=value` that all trials have.
        fit_options: further arguments of `fulgurite fit`.

    Raises:
        ConfigurationError: the space does not fit the program, or is not that of an earlier start.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        program: str | os.PathLike[str],
        space: Mapping[str, Any] | Sequence[str],
        objectives: Sequence[str | Objective],
        *,
        constraints: Sequence[str | Constraint] = (),
        overrides: Sequence[str] = (),
        fit_options: Sequence[str] = (),
    ) -> None:
        self._space = Space.make(space, overrides)
        self._objectives = [
            Objective.parse(objective) if isinstance(objective, str) else objective
            for objective in objectives
        ]
        if not self._objectives:
            raise ConfigurationError(
                "a sweep needs a metric to look at: give test/loss, or another"
            )
        self._constraints = tuple(
            Constraint.parse(constraint) if isinstance(constraint, str) else constraint
            for constraint in constraints
        )
        self._program = Program(os.fspath(program), tuple(fit_options))
        self._program.check(self._space)
        self._directory = SweepDirectory(directory)
        self._journal = self._directory.open(
            [direction for _, direction in self._objectives], self._describe()
        )

    def _describe(self) -> dict[str, Any]:
        """Return what must not change between two starts."""
        return {
            "program": Path(self._program.path).name,
            "search space": self._space.describe(),
            "list of fixed arguments": list(self._space.fixed),
            "list of objectives": [list(objective) for objective in self._objectives],
            "list of constraints": [str(constraint) for constraint in self._constraints],
            "agent": None,
            # Behind the search space, which says the same for people.
            AXES: self._space.describe_axes(),
        }

    @property
    def directory(self) -> Path:
        """The folder of the sweep."""
        return self._directory.path

    @property
    def trials(self) -> list[Trial]:
        """All trials so far."""
        return read_trials(self._directory, self._journal)

    @property
    def best(self) -> Trial | None:
        """The best complete trial that violates no constraint; None before the first. Of several
        objectives, by the first."""
        return find_best(self.trials, self._objectives)

    @property
    def best_trials(self) -> list[Trial]:
        """The complete trials that violate no constraint and than which none is better by one
        objective and as good by all others: the Pareto front."""
        return find_front(self.trials, self._objectives)

    def _drive(
        self, plan: Plan, executor: Executor | None, tell: Callable[[str], None]
    ) -> list[int]:
        """Run trials, and return the signals that ended it.

        Args:
            plan: which, and how.
            executor: where; None for one at a time on this machine.
            tell: gets a line for each thing that happens.
        """

        def tell_and_write(text: str) -> None:
            try:
                write_summary(self._directory, self._journal)
            except OSError as error:
                tell(f"what a report shows of the sweep is not up to date: {error}")
            tell(text)

        driver = Driver(
            self._directory,
            self._journal,
            self._program,
            self._space,
            self._objectives,
            plan,
            executor or LocalExecutor(),
            tell_and_write,
        )
        return driver.run()
