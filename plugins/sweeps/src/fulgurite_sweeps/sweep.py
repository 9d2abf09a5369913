"""A sweep from Python: `Sweep("runs/sweep", "digits.py", {"lr": "log(1e-5,1e-1)"}, ...)`."""

from collections.abc import Callable
from typing import Any

import optuna
from fulgurite.errors import ConfigurationError

from fulgurite_sweeps.base_sweep import BaseSweep
from fulgurite_sweeps.executors import Executor
from fulgurite_sweeps.methods import GRID, check_search
from fulgurite_sweeps.plan import Plan
from fulgurite_sweeps.space import split_point


class Sweep(BaseSweep):
    """Trials of a program, of which each has a run directory of its own.

    Example:
        from fulgurite_sweeps import LocalExecutor, Sweep


        def search() -> None:
            space = {"lr": "log(1e-5,1e-1)", "width": [32, 64], "optimizer": ["adam", "sgd"]}
            sweep = Sweep("runs/sweep", "digits.py", space, ["test/accuracy"])
            sweep.enqueue(lr=1e-3, width=64)
            sweep.run(40, pruner="asha", executor=LocalExecutor(2))
            print(sweep.best.params, sweep.best.values)

    Args:
        directory: of the sweep. One that was begun continues.
        program: a Python file that defines `experiment`, as for `fulgurite fit`.
        space: what is searched, by path: a string as on the command line, a list of values, or a
            distribution of Optuna. Or strings as on the command line.
        objectives: metrics `SOURCE/NAME` whose names tell which values are better, or objectives.
        constraints: bounds of metrics, such as `test/loss<=0.5`; a trial that violates one is never
            the best.
        overrides: strings `path=value` that all trials have.
        fit_options: further arguments of `fulgurite fit`, such as `["--init-from", "runs/a"]`.

    Raises:
        ConfigurationError: the space does not fit the program, or is not that of an earlier start.
    """

    def enqueue(self, point: str | None = None, /, **values: Any) -> None:
        """Put a point in line, to be tried before what the sampler chooses; one that is there
        already, or was tried, is passed over.

        Args:
            point: strings `name=value` with spaces between them.
            **values: by the names of what is searched. What is left out, the sampler chooses.

        Raises:
            ConfigurationError: the search space has no such point.
        """
        whole = self._space.make_point({**split_point(point or ""), **values})
        with self._directory.lock():
            self._journal.study.enqueue_trial(whole, skip_if_exists=True)

    def run(
        self,
        num_trials: int | None = None,
        *,
        sampler: str | optuna.samplers.BaseSampler = "tpe",
        pruner: str | None = None,
        executor: Executor | None = None,
        seed: int = 0,
        num_retries: int = 3,
        should_wait: bool = True,
        tell: Callable[[str], None] = print,
    ) -> list[int]:
        """Run trials until there are `num_trials` in all, those of earlier starts included.

        Several processes may do so at a time, and any of them may be killed: each trial runs once,
        and one that was cut off is resumed.

        Args:
            num_trials: how many; None for all points of a grid.
            sampler: `tpe`, `random`, `qmc`, `cmaes`, `nsgaii` or `grid`, perhaps with arguments,
                `tpe(n_startup_trials=5)`; or a sampler of Optuna.
            pruner: `asha`, `median` or `hyperband`, perhaps with arguments in steps,
                `asha(min_resource=200)`.
            executor: where trials run; None for one at a time on this machine.
            seed: of the sampler.
            num_retries: how often a trial is started again whose process was killed.
            should_wait: whether it waits for trials that other processes run when it has nothing
                left to start, to take over those whose process dies.
            tell: gets a line for each thing that happens.

        Returns:
            The signals that ended it, such as SIGINT; empty once the sweep is over.

        Raises:
            ConfigurationError: there is no such sampler or pruner, or it does not fit the space.
        """
        plan = self.plan(
            num_trials,
            sampler=sampler,
            pruner=pruner,
            seed=seed,
            num_retries=num_retries,
            should_wait=should_wait,
        )
        return self._drive(plan, executor, tell)

    def plan(
        self,
        num_trials: int | None = None,
        *,
        sampler: str | optuna.samplers.BaseSampler = "tpe",
        pruner: str | None = None,
        seed: int = 0,
        num_retries: int = 3,
        should_wait: bool = True,
    ) -> Plan:
        """Return how `run` drives the sweep with these arguments; of a grid, all points are in line
        then.

        Args:
            num_trials: how many; None for all points of a grid.
            sampler: its name, or a sampler of Optuna.
            pruner: its name, or None.
            seed: of the sampler.
            num_retries: how often a trial is started again whose process was killed.
            should_wait: whether it waits for trials that other processes run.

        Raises:
            ConfigurationError: there is no such sampler or pruner, or it does not fit the space.
        """
        if sampler == GRID:
            self._enqueue_grid()
            # With those in line that are not points of the grid, or that were tried before.
            num_trials = len(self.trials) if num_trials is None else num_trials
        elif num_trials is None:
            raise ConfigurationError("how many trials? Only a grid has an end: give --trials N")
        check_search(sampler, pruner, self._space, len(self._objectives))
        return Plan(
            num_trials,
            sampler,
            pruner,
            seed,
            num_retries,
            self._constraints,
            should_wait=should_wait,
        )

    def _enqueue_grid(self) -> None:
        """Put all points in line that are not there yet, in their order."""
        points = self._space.list_points()
        with self._directory.lock():
            for point in points:
                self._journal.study.enqueue_trial(point, skip_if_exists=True)
