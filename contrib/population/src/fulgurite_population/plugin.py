"""The plugin: what is trained, what differs between members, and which one is best."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import (
    ConfigurationError,
    ModelError,
    as_int,
    check_one_of,
    check_positive_int,
    did_you_mean,
    set_ints,
)
from fulgurite.metrics import Mode, rank, resolve_mode
from fulgurite.plugins import get_decision_stage, hide_constructor_frames, map_to_paths

from fulgurite_population.evolution import EveryBeforeEnd, Evolution
from fulgurite_population.hyperparameters import check_values, convert_values
from fulgurite_population.members import (
    PLUGINS_WITHIN,
    Members,
    check_index,
    list_paths,
    make_init_key,
    stack_models,
    take_member,
)
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


@hide_constructor_frames
@dataclass(frozen=True, eq=False)
class Population(fg.Plugin):
    """Trains many members in one program: the same model with several seeds or hyperparameters.

    All members see the same batches. Each has its own weights, optimizer state and random keys:
    those of a run with `fg.Engine(seed=its seed)`. A member whose step is not finite is frozen: it
    stays as it was before that step, is reported, and counts no more; the others continue. With
    `on_nonfinite="skip"` it leaves the step out instead.

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
            `temperature` or `net.layers[0].bias`. Of several optimizers, `g/learning_rate` is that
            of the one called `g`, and `learning_rate` that of each.
        exact: whether members run one after the other, each with the bits of a run of its own; on
            a CPU, convolutions differ in the last bit all the same. Otherwise they run together,
            which is faster and differs from single runs by rounding.
        evolution: how members that do badly are replaced during training; None for not at all.
        num_devices: the number of devices to divide the members among, a divisor of their number;
            it needs `fulgurite-sharding`. None for all members on one device.
    """

    after = PLUGINS_WITHIN
    # Its state is one for the run, of the mean loss.
    before = ("spike_detection",)

    seeds: Sequence[int] = (0, 1, 2, 3)
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    exact: bool = False
    evolution: Evolution | None = None
    num_devices: int | None = None
    # By index, the step of the freezing that was reported last.
    _reported = fg.PerFit[dict[int, int]](dict)

    def __post_init__(self) -> None:
        seeds = tuple(map(as_int, self.seeds)) if isinstance(self.seeds, Iterable) else ()
        if not seeds or not all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds):
            raise ConfigurationError(
                f"Population: seeds is {self.seeds!r}; give one integer of 32 bits, not negative, "
                "for each member, such as range(8)"
            )
        object.__setattr__(self, "seeds", seeds)
        if not isinstance(self.vary, Mapping):
            raise ConfigurationError(
                f"Population: vary is {self.vary!r}; give the values of all members by name, such "
                'as {"learning_rate": [0.1, 0.01]}'
            )
        if len(set(seeds)) < len(seeds) and not self.vary:
            raise ConfigurationError(
                f"Population: seeds is {self.seeds!r}; members of the same seed are the same "
                "unless vary says in what they differ"
            )
        for name, values in self.vary.items():
            check_values(name, values, len(seeds))
        check_one_of(self.exact, (True, False), "Population: exact")
        if not isinstance(self.evolution, Evolution | None):
            raise ConfigurationError(
                f"Population: evolution is {self.evolution!r}; give an Evolution(...) or None"
            )
        if self.evolution is not None and len(seeds) < 2:
            raise ConfigurationError("Population: evolution needs two members at least")
        if self.num_devices is None:
            return
        set_ints(self, "num_devices")
        check_positive_int(self.num_devices, "Population: num_devices")
        if len(seeds) % self.num_devices:
            raise ConfigurationError(
                f"Population: num_devices is {self.num_devices!r}; it must divide the number of "
                f"members, {len(seeds)}"
            )
        if self.exact and self.num_devices > 1:
            raise ConfigurationError(
                "Population: exact=True trains one member after the other, which several devices "
                f"cannot share: num_devices is {self.num_devices}; leave one of them out"
            )

    def stack(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return what makes the population, for `fit`.

        Args:
            model: called as `model(key=key)` with the key of each member; returns a module, or a
                pair of a module and its `eqx.nn.State`.
        """
        # A module may be callable too, but it makes no other one.
        if isinstance(model, eqx.Module) or not callable(model):
            raise ConfigurationError(
                f"Population.stack: model is a {type(model).__name__}; give what makes the model "
                "of a member, called as model(key=key), such as its class"
            )

        def make_members(*, key: Any) -> Any:
            del key  # each member has its own
            models = [model(key=make_init_key(seed)) for seed in self.seeds]
            stacked = stack_models(models)
            is_pair = isinstance(stacked, tuple)
            members, model_state = stacked if is_pair else (stacked, None)
            members = self._set_arrays(members)
            frozen_at = jnp.full(len(self.seeds), -1, jnp.int32)
            skipped = jnp.zeros(len(self.seeds), jnp.int32)
            module = Members(members, frozen_at, skipped, tuple(self.seeds), self.exact)
            return (module, model_state) if is_pair else module

        return make_members

    @fg.hookimpl
    def wrap_update_rule(
        self, module: Any, update_rule: fg.UpdateRule, on_nonfinite: fg.NonFinitePolicy
    ) -> fg.UpdateRule:
        """Return the rule that updates every member by the given one.

        Args:
            module: what `stack` makes.
            update_rule: of one member.
            on_nonfinite: what becomes of a step that is not finite.
        """
        if not isinstance(module, Members) or module.seeds != self.seeds:
            raise ModelError(
                f"Population trains what its stack(model) makes, not {type(module).__name__}: "
                "engine.fit(population.stack(model), data)"
            )
        paths = list_paths(module.members)
        hyperparameters = {
            name: np.asarray(values) for name, values in self.vary.items() if name not in paths
        }
        return PopulationUpdate(update_rule, hyperparameters, on_nonfinite)

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Refuse what would move frozen members; check that members can be compared to evolve."""
        _check_lookahead(run)
        if not run.is_resumed:
            self._set_reported(self.list_frozen(run.state))
        if self.evolution is not None:
            self.evolution.check(run)

    @fg.hookimpl
    def get_host_state(self) -> dict[str, int]:
        """Return the step of the freezing that was reported last, by the member's index."""
        return {str(index): step for index, step in self._reported.items()}

    @fg.hookimpl
    def set_host_state(self, state: Any, version: int) -> None:
        """Report no freezing that was reported before.

        Args:
            state: what `get_host_state` returned.
            version: of its form.
        """
        self._set_reported({int(index): int(step) for index, step in state.items()})

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
    def register_actions(self, log_trigger: fg.Trigger | None) -> list[fg.ScheduledAction]:
        """Schedule the reports, and the evolution of the population, if it has one.

        Args:
            log_trigger: when the engine logs.
        """
        actions = [fg.ScheduledAction("report_last", fg.AtEnd(), self.report_frozen)]
        if log_trigger is not None:
            actions.append(
                fg.ScheduledAction("report", log_trigger, self.report_logged, stage="decide")
            )
        if self.evolution is not None:
            stage = get_decision_stage(self.evolution.monitor)
            trigger = EveryBeforeEnd(self.evolution.every)
            actions.append(fg.ScheduledAction("evolve", trigger, self.evolve, stage=stage))
        return actions

    def report_logged(self, run: fg.Run) -> None:
        """Tell which members were frozen, if the metrics logged last count others than were
        reported. To look at the state would wait for the device."""
        if run.metrics.get("train", {}).get("frozen", 0) != len(self._reported):
            self.report_frozen(run)

    def report_frozen(self, run: fg.Run) -> None:
        """Tell which members were frozen since the last report."""
        frozen = self.list_frozen(run.state)
        for index, step in frozen.items():
            if self._reported.get(index) != step:
                run.notify(
                    "population",
                    f"member {index} was not finite at step {step}; it is frozen as it was before",
                )
        self._set_reported(frozen)

    def evolve(self, run: fg.Run) -> fg.ReplaceState | None:
        """Return the state in which the worst members are copies of the best, if any is replaced.
        A frozen member is reported before it is."""
        assert self.evolution is not None
        self.report_frozen(run)
        answer = self.evolution.evolve(run, tuple(self.vary))
        if answer is not None:
            self._set_reported(self.list_frozen(answer.state))
        return answer

    def list_frozen(self, result: Any) -> dict[int, int]:
        """Return the step at which each frozen member was not finite, by the member's index.

        Args:
            result: of a fit, or a train state.
        """
        frozen_at = np.asarray(result.module.frozen_at)
        return {int(index): int(frozen_at[index]) for index in np.flatnonzero(frozen_at >= 0)}

    def best(self, result: fg.FitResult, monitor: str, mode: Mode | None = None) -> Best:
        """Return the best member by a metric, of those that are finite.

        The metrics are the newest of the fit. If training ends with other weights than it measured,
        as with `EarlyStopping(restore_best=True)`, choose by `engine.evaluate(result.state, data)`,
        which has the metrics of each member too.

        Args:
            result: of the fit.
            monitor: the metric, `SOURCE/NAME`, such as `test/loss`.
            mode: whether the smallest (`min`) or the largest (`max`) value is the best. None to
                tell it from the metric's name.

        Raises:
            ConfigurationError: there is no such metric, its name does not tell the mode, or no
                member has a finite value.
        """
        if not isinstance(result, fg.FitResult) or not isinstance(result.module, Members):
            raise ConfigurationError(
                f"best: result is a {type(result).__name__}; give what fit returned for this "
                "population, which has the metrics"
            )
        _check_monitor(result, monitor)
        mode = resolve_mode(monitor, mode, "best")
        source, _, name = monitor.partition("/")
        frozen = self.list_frozen(result)
        values = [
            math.nan if index in frozen else float(result.metrics[source][f"{name}[{index}]"])
            for index in range(len(self.seeds))
        ]
        index = rank(values, mode)[0]
        if not math.isfinite(values[index]):
            raise ConfigurationError(f"best: no member has a finite {monitor!r}")
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
        plugin_states = {
            name: plugin_state
            for name, plugin_state in state.plugin_states.items()
            if name in PLUGINS_WITHIN and name in template.plugin_states
        }
        parts = (state.module.members, state.model_state, state.opt_state, plugin_states)
        module, model_state, opt_state, plugin_states = take_member(parts, index)
        num_skipped = state.nonfinite.skipped + state.module.skipped[index]
        return template.replace(
            step=jnp.array(state.step),
            module=module,
            model_state=model_state,
            opt_state=opt_state,
            key=jax.random.key(self.seeds[index]),
            nonfinite=replace(template.nonfinite, skipped=num_skipped),
            plugin_states={**template.plugin_states, **plugin_states},
        )

    def _set_reported(self, steps: dict[int, int]) -> None:
        object.__setattr__(self, "_reported", steps)

    def _set_arrays(self, members: Any) -> Any:
        """Return the stacked module with the arrays that `vary` names by their paths."""

        def replace_array(path: str, leaf: Any) -> Any:
            if path not in self.vary or not eqx.is_array(leaf):
                return leaf
            return convert_values(path, self.vary[path], leaf)

        return jax.tree.map(replace_array, map_to_paths(members), members)


def _check_lookahead(run: fg.Run) -> None:
    """Raise a ConfigurationError if `Lookahead`, which moves all members, may move a frozen one."""
    kinds = {name.partition(":")[0] for name in run.state.plugin_states}
    if "lookahead" in kinds and run.engine.on_nonfinite != "ignore":
        raise ConfigurationError(
            "Population: Lookahead moves all members, also one that is frozen or leaves a step "
            "out because it was not finite: leave Lookahead out, or give "
            "fg.Engine(on_nonfinite='ignore'), which does neither"
        )


def _check_monitor(result: fg.FitResult, monitor: Any) -> None:
    """Raise a ConfigurationError if members have no such metric.

    Args:
        result: of the fit.
        monitor: `SOURCE/NAME`.
    """
    known = [
        f"{source}/{name.removesuffix('[0]')}"
        for source, metrics in result.metrics.items()
        for name in metrics
        if name.endswith("[0]")
    ]
    if monitor in known:
        return
    if not isinstance(monitor, str) or "/" not in monitor:
        raise ConfigurationError(
            f"best: monitor is {monitor!r}; write SOURCE/NAME, as in test/loss. "
            f"{did_you_mean(str(monitor), known)}"
        )
    raise ConfigurationError(
        f"best: no member has a metric {monitor!r}. {did_you_mean(monitor, known)}"
    )
