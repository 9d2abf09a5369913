"""The plugin: what is trained, what differs between members, and which one is best."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError, ModelError

from fulgurite_population.evolution import Evolution
from fulgurite_population.members import Members, check_index, stack_models, take_member
from fulgurite_population.rule import PopulationUpdate


@dataclass(frozen=True)
class Best:
    """The best member of a population.

    Attributes:
        index: of the member.
        value: of the metric.
        module: the member, a module as the model's own.
    """

    index: int
    value: float
    module: Any


@dataclass(frozen=True, eq=False)
class Population:
    """Trains many members in one program: the same model with several seeds or hyperparameters.

    All members see the same batches. Each has its own weights, optimizer state and random keys:
    those of a run with `fg.Engine(seed=its seed)`. A member whose step is not finite stays as it
    was before that step, is reported, and counts no more; the others go on.

    Example:
        from fulgurite_population import Population

        population = Population(seeds=range(4))
        engine = fg.Engine(steps=100, plugins=[population])
        result = engine.fit(population.stack(Classifier), data)
        print(population.best(result, "train/loss").index)

    Attributes:
        seeds: one for each member.
        vary: what else differs, one value for each member: by the name of a hyperparameter of
            `optax.inject_hyperparams`, or by the path of an array of the module, such as
            `net.temperature`.
        exact: whether members run one after the other, each with the bits of a run of its own.
            Otherwise they run together, which is faster and differs from them by rounding.
        evolution: how members that do badly are replaced during training; None for not at all.
        num_devices: the number of devices to divide the members among, a divisor of their number;
            it needs `fulgurite-sharding`. None for all members on one device.
    """

    seeds: Sequence[int] = (0, 1, 2, 3)
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    exact: bool = False
    evolution: Evolution | None = None
    num_devices: int | None = None

    def __post_init__(self) -> None:
        seeds = tuple(self.seeds)
        if not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
            raise ConfigurationError(
                f"Population: seeds is {self.seeds!r}; give one integer, not negative, for each "
                "member, such as range(8)"
            )
        object.__setattr__(self, "seeds", seeds)
        for name, values in self.vary.items():
            if len(values) != len(seeds):
                raise ConfigurationError(
                    f"Population: vary[{name!r}] has {len(values)} values for {len(seeds)} "
                    "members: give one for each"
                )
        if self.evolution is not None and len(seeds) < 2:
            raise ConfigurationError("Population: evolution needs two members at least")
        num_devices = self.num_devices
        if num_devices is not None and (num_devices < 1 or len(seeds) % num_devices):
            raise ConfigurationError(
                f"Population: num_devices is {num_devices!r}; it must divide the number of "
                f"members, {len(seeds)}"
            )

    def stack(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return what makes the population, for `fit`.

        Args:
            model: called as `model(key=key)` with the key of each member; returns a module, or a
                pair of a module and its `eqx.nn.State`.
        """

        def make_members(*, key: Any) -> Any:
            del key  # each member has its own
            models = [model(key=self._make_init_key(seed)) for seed in self.seeds]
            stacked = stack_models(models)
            is_pair = isinstance(stacked, tuple)
            members, model_state = stacked if is_pair else (stacked, None)
            members = self._set_arrays(members)
            frozen_at = jnp.full(len(self.seeds), -1, jnp.int32)
            module = Members(members, frozen_at, tuple(self.seeds), self.exact)
            return (module, model_state) if is_pair else module

        return make_members

    @fg.hookimpl
    def wrap_update_rule(self, module: Any, rule: fg.UpdateRule) -> fg.UpdateRule:
        """Return the rule that updates every member by the given one."""
        if not isinstance(module, Members) or module.seeds != self.seeds:
            raise ModelError(
                f"Population trains what its stack(model) makes, not {type(module).__name__}: "
                "engine.fit(population.stack(model), data)"
            )
        paths = _list_paths(module.members)
        hyperparameters = {
            name: jnp.asarray(values) for name, values in self.vary.items() if name not in paths
        }
        return PopulationUpdate(rule, hyperparameters)

    @fg.hookimpl
    def sharding_strategy(self) -> fg.ShardingStrategy | None:
        """Return the strategy that divides the members among devices, if there are several."""
        if self.num_devices is None:
            return None
        try:
            from fulgurite_population.sharding import MemberStrategy
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                "Population: num_devices needs fulgurite-sharding: pip install "
                "fulgurite-population[devices]"
            ) from error
        devices = jax.devices()
        if len(devices) < self.num_devices:
            raise ConfigurationError(
                f"Population: num_devices is {self.num_devices}, and there are {len(devices)}"
            )
        return MemberStrategy(len(self.seeds), devices[: self.num_devices])

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Schedule the report at the end, and the evolution of the population, if it has one."""
        actions = [fg.ScheduledAction("report", fg.AtEnd(), self.report_frozen)]
        if self.evolution is not None:
            evolve = self.evolution.evolve
            actions.append(
                fg.ScheduledAction("evolve", self.evolution.every, evolve, stage="decide")
            )
        return actions

    def report_frozen(self, run: fg.Run) -> None:
        """Tell which members are frozen."""
        for index, step in self.list_frozen(run.state).items():
            run.notify(
                "population",
                f"member {index} was not finite at step {step}; it is frozen as it was before",
            )

    def list_frozen(self, result: Any) -> dict[int, int]:
        """Return the step at which each frozen member was not finite, by the member's index.

        Args:
            result: of a fit, or a train state.
        """
        frozen_at = np.asarray(result.module.frozen_at)
        return {int(index): int(frozen_at[index]) for index in np.flatnonzero(frozen_at >= 0)}

    def best(self, result: fg.FitResult, monitor: str, mode: Literal["min", "max"] = "min") -> Best:
        """Return the best member by a metric, of those that are finite.

        Args:
            result: of the fit.
            monitor: the metric, `SOURCE/NAME`, such as `test/loss`.
            mode: whether the smallest or the largest value is the best.

        Raises:
            ConfigurationError: there is no such metric, or no member has a finite value.
        """
        if mode not in ("min", "max"):
            raise ConfigurationError(f"best: mode is {mode!r}; choose 'max' or 'min'")
        source, _, name = monitor.partition("/")
        metrics = result.metrics.get(source, {})
        frozen = self.list_frozen(result)
        values = {}
        for index in range(len(self.seeds)):
            if f"{name}[{index}]" not in metrics:
                known = sorted(key[:-3] for key in metrics if key.endswith("[0]"))
                raise ConfigurationError(
                    f"best: no member has a metric {monitor!r}; the source {source!r} has "
                    f"{', '.join(known) or 'none'}"
                )
            value = float(metrics[f"{name}[{index}]"])
            if index not in frozen and math.isfinite(value):
                values[index] = value
        if not values:
            raise ConfigurationError(f"best: no member has a finite {monitor!r}")
        index = (min if mode == "min" else max)(values, key=values.__getitem__)
        return Best(index, values[index], result.module.take(index))

    def take_state(
        self, state: fg.TrainState, index: int, template: fg.TrainState
    ) -> fg.TrainState:
        """Return one member as the train state of a run of its own, to be trained on, evaluated or
        saved without the population.

        Args:
            state: of the population, such as `result.state`.
            index: of the member, from 0.
            template: a new state of the other engine, `engine.init_state(model, data)`; it says
                which structure the state has.
        """
        check_index(index, len(self.seeds))
        parts = (state.module.members, state.model_state, state.opt_state)
        module, model_state, opt_state = take_member(parts, index)
        return template.replace(
            step=jnp.array(state.step),
            module=module,
            model_state=model_state,
            opt_state=opt_state,
            key=jax.random.key(self.seeds[index]),
        )

    def _make_init_key(self, seed: int) -> Any:
        return fg.RngStreams(jax.random.key(seed)).key("params", "init")

    def _set_arrays(self, members: Any) -> Any:
        """Return the stacked module with the arrays that `vary` names by their paths."""
        leaves, tree = jax.tree_util.tree_flatten_with_path(members)
        replaced = []
        for path, leaf in leaves:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            if name in self.vary and eqx.is_array(leaf):
                values = jnp.asarray(self.vary[name], leaf.dtype)
                if values.shape != leaf.shape:
                    raise ConfigurationError(
                        f"Population: vary[{name!r}] has the shape {values.shape}, the array of "
                        f"all members has {leaf.shape}"
                    )
                leaf = values
            replaced.append(leaf)
        return tree.unflatten(replaced)


def _list_paths(members: Any) -> set[str]:
    """Return the paths of all arrays of a module."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(members, eqx.is_array))
    return {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves}
