"""Sweeps whose points an agent chooses, such as that of Weights & Biases: it starts a command for
each, which trains one trial."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import optuna
from fulgurite.errors import ConfigurationError
from fulgurite_config import split_override
from optuna.trial import TrialState

from fulgurite_sweeps.attributes import AGENT, POINT
from fulgurite_sweeps.base_sweep import BaseSweep
from fulgurite_sweeps.executors import Executor
from fulgurite_sweeps.methods import check_search
from fulgurite_sweeps.objectives import Constraint, Objective
from fulgurite_sweeps.plan import Plan

AGENTS = {"wandb": "WANDB_RUN_ID"}
"""The environment variable in which an agent says what it calls a trial, by the agent's name."""


class AgentSweep(BaseSweep):
    """One trial of a sweep whose points an agent chooses; all of them share the directory.

    Example:
        from fulgurite_sweeps import AgentSweep


        def train() -> None:  # what the agent starts
            point = ["lr=0.01", "width=64"]
            sweep = AgentSweep("runs/sweep", "digits.py", point, ["test/accuracy"], agent="wandb")
            sweep.run_trial()

    Args:
        directory: of the sweep. One that was begun continues.
        program: a Python file that defines `experiment`, as for `fulgurite fit`.
        point: strings `path=value`, which the agent chooses.
        objectives: metrics `SOURCE/NAME` whose names tell which values are better, or objectives.
        agent: `wandb`.
        constraints: bounds of metrics, such as `test/loss<=0.5`.
        fit_options: further arguments of `fulgurite fit`.

    Raises:
        ConfigurationError: no such agent has started this process, or the program does not take
            the point.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        program: str | os.PathLike[str],
        point: Sequence[str],
        objectives: Sequence[str | Objective],
        *,
        agent: str = "wandb",
        constraints: Sequence[str | Constraint] = (),
        fit_options: Sequence[str] = (),
    ) -> None:
        if agent not in AGENTS:
            raise ConfigurationError(f"there is no agent {agent!r}: give {', '.join(AGENTS)}")
        self._agent = agent
        self._key = os.environ.get(AGENTS[agent], "")
        if not self._key:
            raise ConfigurationError(
                f"{AGENTS[agent]} is not set: this command is for the agent of {agent}, which "
                "starts it for each trial. Write it as the `command` of the sweep, and start the "
                "agent"
            )
        super().__init__(
            directory,
            program,
            {},
            objectives,
            constraints=constraints,
            overrides=point,
            fit_options=fit_options,
        )
        self._point = dict(split_override(override) for override in point)

    def _describe(self) -> dict[str, Any]:
        return super()._describe() | {"list of fixed arguments": [], "agent": self._agent}

    def run_trial(
        self,
        *,
        pruner: str | None = None,
        executor: Executor | None = None,
        num_retries: int = 3,
        tell: Callable[[str], None] = print,
    ) -> list[int]:
        """Train the trial, or resume it if the agent had it started before.

        Args:
            pruner: as of `Sweep.run`; the agent may end trials besides.
            executor: where it runs; None for this machine.
            num_retries: how often it is started again if its process was killed.
            tell: gets a line for each thing that happens.

        Returns:
            The signals that ended it; empty once the trial is over.
        """
        check_search("random", pruner, self._space, len(self._objectives))
        number = self._begin()
        plan = Plan(
            0,
            pruner=pruner,
            num_retries=num_retries,
            constraints=self._constraints,
            only=number,
        )
        return self._drive(plan, executor, tell)

    def _begin(self) -> int:
        """Return the number of the trial that has this key, which begins if there is none."""
        study = self._journal.study
        with self._directory.lock():
            number = self._find_number()
            if number is not None:
                return number
            self._directory.check_unbegun(len(study.get_trials(deepcopy=False)))
            attributes = {AGENT: self._key, POINT: self._point}
            study.add_trial(
                optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=attributes)
            )
            number = self._find_number()
        assert number is not None
        return number

    def _find_number(self) -> int | None:
        trials = self._journal.study.get_trials(deepcopy=False)
        numbers = (trial.number for trial in trials if trial.user_attrs.get(AGENT) == self._key)
        return next(numbers, None)

    @property
    def state(self) -> str:
        """How the trial stands, as `Trial.state`."""
        number = self._find_number()
        states = [trial.state for trial in self.trials if trial.number == number]
        return states[0] if states else "waiting"
