"""Population-based training: members that do badly are replaced by perturbed copies of good ones.

Source: Jaderberg et al., Population Based Training of Neural Networks (2017).
"""

import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import (
    ConfigurationError,
    check_positive_int,
    did_you_mean,
    set_ints,
)
from fulgurite.metrics import Mode, is_better, rank, resolve_mode
from fulgurite.plugins import (
    check_metric_exists,
    check_metric_measured,
    hide_constructor_frames,
    map_to_paths,
    read_measured_metric,
)
from jaxtyping import Array, PyTree

from fulgurite_population.hyperparameters import find_varied
from fulgurite_population.members import PLUGINS_WITHIN, Members, list_paths
from fulgurite_population.metrics import AcrossMembers

_COPIED = ("average", "lookahead")
"""Plugins that keep weights of each member, which belong to it: a copy has those of its parent."""
_SHARED = ("early_stopping", "reduce_on_plateau", "spike_detection")
"""Plugins that keep what is of all members: numbers, or the whole population of an earlier step."""


@dataclass(frozen=True)
class EveryBeforeEnd(fg.Every):
    """Every multiple of `n` but the end of a fit, after which nobody would train the copies. A run
    that is made longer is due there when it resumes."""

    def _next_after(self, after: int, step_range: fg.StepRange) -> int | None:
        step = super()._next_after(after, step_range)
        is_past = step is not None and step >= (step_range.stop or math.inf)
        return None if is_past else step


@hide_constructor_frames
@dataclass(frozen=True)
class Evolution:
    """How members that do badly are replaced: each becomes a copy of one that does well, with its
    weights and its optimizer state. What the population varies is multiplied, each hyperparameter
    of each copy by one of `factors` of its own: those of the optimizer, and the arrays of the
    module that training does not change, such as integers and what `Freeze` hides. An array that
    is trained is a weight, and is copied.

    Which factor is drawn from the engine's seed, the step and the name, so that a resumed run draws
    the same.
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
            `test/loss` of an evaluator that runs at the same steps. A function, `Evaluator(fn=)`,
            returns a number for each member: `loss[0]`, `loss[1]`, and so on. Of metrics of
            training a window must end there: `every` is a multiple of `log_every`.
        share: the share of members that is replaced, at most a half.
        factors: what hyperparameters are multiplied by.
        mode: whether the smallest (`min`) or the largest (`max`) value is the best. None to tell it
            from the metric's name.
    """

    every: int
    monitor: str
    share: float = 0.25
    factors: tuple[float, ...] = (0.8, 1.25)
    mode: Mode | None = None

    def __post_init__(self) -> None:
        set_ints(self, "every")
        check_positive_int(self.every, "Evolution: every")
        is_name = isinstance(self.monitor, str) and "/" in self.monitor
        if not is_name or self.monitor.endswith("]"):
            raise ConfigurationError(
                f"Evolution: monitor is {self.monitor!r}; write SOURCE/NAME without an index, as "
                "in test/loss"
            )
        if not _is_number(self.share) or not 0 < self.share <= 0.5:
            raise ConfigurationError(
                f"Evolution: share is {self.share!r}; it must be above 0, and at most 0.5"
            )
        are_numbers = isinstance(self.factors, tuple) and all(map(_is_number, self.factors))
        if not are_numbers or not self.factors or not all(factor > 0 for factor in self.factors):
            raise ConfigurationError(
                f"Evolution: factors is {self.factors!r}; give a tuple of positive numbers"
            )
        object.__setattr__(self, "mode", resolve_mode(self.monitor, self.mode, "Evolution"))

    def check(self, run: fg.Run) -> None:
        """Raise a ConfigurationError if the metric of each member will not be measured when members
        are compared, or if a plugin keeps of each member what cannot be copied.

        Args:
            run: before its first step.
        """
        check_plugin_states(run.state)
        source, _, name = self.monitor.partition("/")
        if f"{name}[0]" not in run.metrics.get(source, {}):
            self._check_exists(run, source, name)
        # At the end of training nobody would train the copies.
        stop = run.step_range.stop
        check_metric_measured(run, self.monitor, fg.Every(self.every), "Evolution", stop)

    def _check_exists(self, run: fg.Run, source: str, name: str) -> None:
        if source != "train":
            evaluator = run.engine.evaluations.get(source)
            if evaluator is None or not evaluator.check_at_start:
                check_metric_exists(run, self.monitor, "Evolution")
                return  # what a function measures is known when it has run
        types = run.engine.get_metric_types(run.state, source)
        names = {key.removesuffix("[0]") for key in types if not key.endswith("]") or "[0]" in key}
        # A metric of several numbers has one class for all of them.
        is_part = types.get(name.rpartition("/")[0]) is AcrossMembers
        if name not in names and not is_part:
            known = sorted(f"{source}/{known_name}" for known_name in names)
            raise ConfigurationError(
                f"Evolution: no member has a metric {self.monitor!r}. "
                f"{did_you_mean(self.monitor, known)}"
            )

    def evolve(self, run: fg.Run, hyperparameters: Collection[str]) -> fg.ReplaceState | None:
        """Return the state in which the worst members are copies of the best; None if none of them
        is worse.

        Args:
            run: the run.
            hyperparameters: the names of what varies, each of which is multiplied.
        """
        state = run.state
        size = len(state.module.seeds)
        self._check_has_members(run, size)
        values = [
            read_measured_metric(run, f"{self.monitor}[{index}]", "Evolution")
            for index in range(size)
        ]
        parents = self.choose_parents(values, np.asarray(state.module.is_alive))
        if parents == list(range(size)):
            return None
        factors = {
            name: self._draw_factors(name, run.engine.seed, run.step, parents)
            for name in hyperparameters
        }
        trained = run.update_rule.trainable_mask(state.module).members
        run.log_scalars(
            "population", {f"parent[{index}]": parent for index, parent in enumerate(parents)}
        )
        return fg.ReplaceState(copy_members(state, parents, factors, trained))

    def _check_has_members(self, run: fg.Run, size: int) -> None:
        """Raise a ConfigurationError if a source has measured something, and not this metric of
        each member.

        Args:
            run: the run.
            size: the number of members.
        """
        source, _, name = self.monitor.partition("/")
        metrics = run.metrics.get(source, {})
        missing = [index for index in range(size) if f"{name}[{index}]" not in metrics]
        if source != "train" and metrics and missing:
            raise ConfigurationError(
                f"Evolution: {source!r} measured no {name}[{missing[0]}], by which member "
                f"{missing[0]} is compared, but {', '.join(sorted(metrics))}: a function returns a "
                f"number for each member, {name}[0] to {name}[{size - 1}]"
            )

    def _draw_factors(self, name: str, seed: int, step: int, parents: list[int]) -> Any:
        """Return by what a hyperparameter of each member is multiplied: 1 for those that stay.

        Args:
            name: of the hyperparameter, so that each has its own.
            seed: of the engine.
            step: of the run.
            parents: for each member, the member that it continues from.
        """
        random = np.random.default_rng([seed, step, zlib.crc32(name.encode())])
        factors = random.choice(self.factors, len(parents))
        return np.where(np.asarray(parents) == np.arange(len(parents)), 1, factors)

    def choose_parents(self, values: Sequence[float | None], is_alive: Any) -> list[int]:
        """Return the index of the member that each member continues from.

        Args:
            values: the metric of each member; None where it was not measured.
            is_alive: bool `(members,)`; others are replaced, as members without a finite value are.
        """
        assert self.mode is not None
        scores = [
            value if alive and value is not None else math.nan
            for value, alive in zip(values, is_alive, strict=True)
        ]
        order = rank(scores, self.mode)
        # A share of 0.29 of 100 is 28.999999999999996.
        num_replaced = max(1, int(self.share * len(scores) + 1e-9))
        parents = list(range(len(scores)))
        worst = order[-num_replaced:]
        for place, index in enumerate(reversed(worst)):
            parent = order[place]
            if is_better(scores[parent], scores[index], self.mode):
                parents[index] = parent
        return parents


def copy_members(
    state: fg.TrainState, parents: list[int], factors: Mapping[str, Any], trained: PyTree[bool]
) -> fg.TrainState:
    """Return the state in which each member is a copy of its parent. Random keys stay with the
    index.

    Args:
        state: of the population.
        parents: for each member, the member to copy.
        factors: `(members,)` each, by the names of what is multiplied. Others, such as the decay of
            a moment, may be valid in a narrow range alone.
        trained: for each leaf of a member, whether training changes it: then it is a weight, and no
            hyperparameter.
    """
    indices = jnp.asarray(parents)

    def copy(leaf: Any) -> Any:
        return leaf[indices] if eqx.is_array(leaf) else leaf

    def copy_parameter(path: str, leaf: Any, is_trained: bool) -> Any:
        is_varied = path in factors and not is_trained and eqx.is_array(leaf)
        return _multiply(copy(leaf), factors[path]) if is_varied else copy(leaf)

    paths = map_to_paths(state.module.members)
    is_copy = indices != jnp.arange(len(parents))

    def copy_module(module: Members) -> Members:
        """Return the population, or a tree of its form that a plugin keeps, such as an average; it
        has None in the place of what is not averaged."""
        members = jax.tree.map(copy_parameter, paths, module.members, trained)
        frozen_at = module.frozen_at
        if frozen_at is not None:
            frozen_at = jnp.where(is_copy, -1, frozen_at)
        return replace(module, members=members, frozen_at=frozen_at)

    # What is the path of an array is not a hyperparameter of the same name.
    names = factors.keys() - set(list_paths(state.module.members))

    def copy_hyperparameter(path: Any, leaf: Any) -> Any:
        name = find_varied(path, names)
        return copy(leaf) if name is None else _multiply(copy(leaf), factors[name])

    opt_state = jax.tree_util.tree_map_with_path(copy_hyperparameter, state.opt_state)
    plugin_states = {
        name: _copy_kept(name, plugin_state, copy, copy_module)
        for name, plugin_state in state.plugin_states.items()
    }
    return state.replace(
        module=copy_module(state.module),
        model_state=jax.tree.map(copy, state.model_state),
        opt_state=opt_state,
        plugin_states=plugin_states,
    )


def _copy_kept(
    name: str, plugin_state: PyTree, copy: Callable[[Any], Any], copy_module: Callable[[Any], Any]
) -> PyTree:
    """Return the state of a plugin, with what it keeps of each member copied.

    Args:
        name: of the plugin.
        plugin_state: its state.
        copy: what to do with an array of all members.
        copy_module: what to do with a module of all members.
    """

    def copy_part(part: Any) -> Any:
        if isinstance(part, Members):
            return copy_module(part)
        return copy(part) if np.ndim(part) > 0 else part  # a count is of all members

    if name in PLUGINS_WITHIN:
        return jax.tree.map(copy, plugin_state)
    if _get_kind(name) in _COPIED:
        return jax.tree.map(copy_part, plugin_state, is_leaf=lambda part: isinstance(part, Members))
    return plugin_state


def check_plugin_states(state: fg.TrainState) -> None:
    """Raise a ConfigurationError if a plugin keeps something of each member, and nobody knows
    whether it belongs to the member or to its place.

    Args:
        state: of the population.
    """
    size = len(state.module.seeds)
    for name, plugin_state in state.plugin_states.items():
        if name in PLUGINS_WITHIN or _get_kind(name) in _COPIED + _SHARED:
            continue
        leaves = filter(eqx.is_array, jax.tree.leaves(plugin_state))
        if any(leaf.shape[:1] == (size,) for leaf in leaves):
            raise ConfigurationError(
                f"Evolution: the plugin {name!r} keeps arrays with an axis of {size}, as of {size} "
                "members, which a copy of another member would not have: leave that plugin out, or "
                "evolution"
            )


def _get_kind(name: str) -> str:
    """Return what a plugin is called without the name of its instance, as `average` of
    `average:ema`."""
    return name.partition(":")[0]


def _multiply(values: Array, factors: Any) -> Array:
    """Return the values of each member times its factor, in their dtype.

    Args:
        values: with a leading axis of members; integers are rounded, and bools stay.
        factors: `(members,)`.
    """
    if values.dtype == bool:
        return values
    factors = jnp.asarray(factors).reshape(-1, *(1,) * (values.ndim - 1))
    # Wider than either, also where jax is told to promote nothing by itself.
    with jax.numpy_dtype_promotion("standard"):
        products = values * factors
    if jnp.issubdtype(values.dtype, jnp.integer):
        products = jnp.round(products)
    return products.astype(values.dtype)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
