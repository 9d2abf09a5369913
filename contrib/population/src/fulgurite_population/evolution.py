"""Population-based training: members that do badly are replaced by perturbed copies of good ones.

Source: Jaderberg et al., Population Based Training of Neural Networks (2017).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError

from fulgurite_population.rule import get_hyperparameter


@dataclass(frozen=True)
class Evolution:
    """How members that do badly are replaced: each becomes a copy of one that does well, with its
    weights and its optimizer state, whose hyperparameters are multiplied by one of `factors`.

    Which factor is drawn from the engine's seed and the step, so that a resumed run draws the same.
    A member that is frozen is the worst, and is trained again as a copy.

    Example:
        from fulgurite_population import Evolution, Population

        evolution = Evolution(every=50, monitor="test/loss")  # with an evaluator every 50 steps
        population = Population(
            seeds=range(4), vary={"learning_rate": [0.1, 0.01, 0.1, 0.01]}, evolution=evolution
        )

    Attributes:
        every: the steps between two replacements.
        monitor: the metric by which members are compared, `SOURCE/NAME` without an index, such as
            `test/loss` of an evaluator that runs at the same steps. Metrics of training are those
            logged last before.
        share: the share of members that is replaced, at most a half.
        factors: what hyperparameters are multiplied by.
        mode: whether the smallest or the largest value is the best.
    """

    every: int
    monitor: str
    share: float = 0.25
    factors: tuple[float, ...] = (0.8, 1.25)
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ConfigurationError(f"Evolution: every is {self.every!r}; give a number of steps")
        if not 0 < self.share <= 0.5:
            raise ConfigurationError(
                f"Evolution: share is {self.share!r}; it must be above 0, and at most 0.5"
            )
        if not self.factors or not all(factor > 0 for factor in self.factors):
            raise ConfigurationError(
                f"Evolution: factors is {self.factors!r}; give positive numbers"
            )
        if self.mode not in ("min", "max"):
            raise ConfigurationError(f"Evolution: mode is {self.mode!r}; choose 'max' or 'min'")

    def evolve(self, run: fg.Run) -> fg.ReplaceState | None:
        """Return the state in which the worst members are copies of the best; None at the end of
        training, where nobody would train the copies."""
        if run.step >= (run.step_range.stop or math.inf):
            return None
        state = run.state
        size = len(state.module.seeds)
        values = [run.get_metric(f"{self.monitor}[{index}]") for index in range(size)]
        parents = self.choose_parents(values, np.asarray(state.module.is_alive))
        if parents == list(range(size)):
            return None
        random = np.random.default_rng([run.engine.seed, run.step])
        factors = random.choice(self.factors, size)
        factors[np.asarray(parents) == np.arange(size)] = 1
        run.log_scalars(
            "population", {f"parent[{index}]": parent for index, parent in enumerate(parents)}
        )
        return fg.ReplaceState(copy_members(state, parents, factors))

    def choose_parents(self, values: list[float], is_alive: Any) -> list[int]:
        """Return the index of the member that each member continues from.

        Args:
            values: the metric of each member.
            is_alive: bool `(members,)`; others are replaced, as members without a finite value are.
        """
        sign = 1 if self.mode == "min" else -1
        scores = [
            sign * value if alive and math.isfinite(value) else math.inf
            for value, alive in zip(values, is_alive, strict=True)
        ]
        order = sorted(range(len(scores)), key=lambda index: (scores[index], index))
        num_replaced = max(1, int(self.share * len(scores)))
        parents = list(range(len(scores)))
        worst = order[-num_replaced:]
        for rank, index in enumerate(reversed(worst)):
            parent = order[rank]
            if scores[parent] < scores[index]:
                parents[index] = parent
        return parents


def copy_members(state: fg.TrainState, parents: list[int], factors: Any) -> fg.TrainState:
    """Return the state in which each member is a copy of its parent.

    Random keys and what differs by path in the module stay with the index.

    Args:
        state: of the population.
        parents: for each member, the member to copy.
        factors: `(members,)`, for the hyperparameters of each.
    """
    indices = jnp.asarray(parents)
    multipliers = jnp.asarray(factors)

    def copy(path: Any, leaf: Any) -> Any:
        if not eqx.is_array(leaf):
            return leaf
        copied = leaf[indices]
        if get_hyperparameter(path) is None or not eqx.is_inexact_array(leaf):
            return copied
        return (copied * multipliers).astype(leaf.dtype)

    parts = (state.module.members, state.model_state, state.opt_state)
    members, model_state, opt_state = jax.tree_util.tree_map_with_path(copy, parts)
    is_copy = indices != jnp.arange(len(parents))
    frozen_at = jnp.where(is_copy, -1, state.module.frozen_at)
    module = replace(state.module, members=members, frozen_at=frozen_at)
    return state.replace(module=module, model_state=model_state, opt_state=opt_state)
