"""The plugin that trains a part of the module later than the rest, and at a lower rate."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import optax
from fulgurite import Selector
from fulgurite.errors import (
    ConfigurationError,
    set_ints,
)
from fulgurite.metrics import LastValue
from fulgurite.plugins import (
    as_optimizer_specs,
    get_method,
    hide_constructor_frames,
    leaves_with_paths,
    path_from_keys,
)
from jaxtyping import Array, Float, Int, PyTree
from optax.schedules import InjectHyperparamsState, InjectStatefulHyperparamsState

from fulgurite_optimizers.freezing import Freeze

ScheduleState = (
    optax.ScaleByScheduleState,
    InjectHyperparamsState,
    InjectStatefulHyperparamsState,
)


@hide_constructor_frames
@dataclass(frozen=True)
class BackboneFinetuning(fg.Plugin):
    """Trains a part of the module, such as a pretrained backbone, later than the rest and at a
    fraction of its learning rate.

    Until then the part is frozen, as by `Freeze`: BatchNorm layers in it normalize with the
    statistics of the batch and dropout is active, before and after, unless the part is in inference
    mode. It has an optimizer state of its own, which
    begins when its training does: Adam corrects the bias of its first moments, which it would not
    if they shared the count of the rest, and then the first updates would be six times too large.
    Schedules of the learning rate are those of the rest. What an optimizer computes from all of
    its gradients, as `optax.clip_by_global_norm` does, it computes from those of each part;
    `GradientClip` takes all.

    The fraction of the last update is logged as `backbone_finetuning/rate`, 0 while frozen.

    Attributes:
        where: the part: a pattern, a function of the module, or a selection by `fg.select` and
            `fg.exclude`.
        until: when its training begins: a step, or the first time of a trigger; 0 for at once.
        rate: the fraction: a number, or an optax schedule of the number of updates that the part
            has had.
        warmup: the number of updates over which the fraction grows linearly to `rate`.
        train_statistics: whether the model state of the part changes while it is frozen.

    Example:

        from fulgurite_optimizers import BackboneFinetuning

        tuning = BackboneFinetuning("layers[0]", until=fg.EveryEpoch(3), rate=0.1, warmup=100)
        fg.Engine(steps=1000, plugins=[tuning])
    """

    plugin_name = "backbone_finetuning"

    where: Selector | str | Callable[[Any], Any]
    until: fg.Trigger | int
    _: KW_ONLY
    rate: float | optax.Schedule = 0.1
    warmup: int = 0
    train_statistics: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.where, Selector):
            object.__setattr__(self, "where", fg.select(self.where))
        is_number = isinstance(self.rate, Real) and not isinstance(self.rate, bool)
        if not callable(self.rate) and not (is_number and 0 < float(self.rate) < float("inf")):
            raise ConfigurationError(
                f"BackboneFinetuning: rate is {self.rate!r}; give a positive fraction of the "
                "learning rate, or a schedule"
            )
        set_ints(self, "warmup", "until")
        if type(self.warmup) is not int or self.warmup < 0:
            raise ConfigurationError(
                f"BackboneFinetuning: warmup is {self.warmup!r}; give a number of updates"
            )
        if self.until != 0:
            self._build_freeze()

    @fg.hookimpl
    def configure_optimizers(self, module: Any) -> dict[str, fg.OptimizerSpec]:
        """Return the optimizers of the module, with a rate of its own for the part."""
        source = f"{type(module).__name__}.configure_optimizers"
        configured = get_method(module, "configure_optimizers")(module)
        specs = dict(as_optimizer_specs(configured, source))
        assert isinstance(self.where, Selector)
        is_part = self.where(module)
        num_arrays = 0
        for name, spec in specs.items():
            mask = jax.tree.map(lambda a, b: a and b, is_part, spec.param_mask(module))
            paths = frozenset(path for path, flag in leaves_with_paths(mask) if flag)
            num_arrays += len(paths)
            if paths:
                optimizer = scale_rate_of_part(spec.optimizer, paths, self.compute_rate)
                specs[name] = replace(spec, optimizer=optimizer)
        if not num_arrays:
            raise ConfigurationError(
                f"BackboneFinetuning: no optimizer updates what {self.where.text} selects: "
                "select arrays that the optimizers of the module update"
            )
        return specs

    @fg.hookimpl
    def wrap_update_rule(self, module: Any, update_rule: fg.UpdateRule) -> fg.UpdateRule:
        """Freeze the part until its training begins."""
        return (
            update_rule
            if self.until == 0
            else self._build_freeze().wrap_update_rule(module, update_rule)
        )

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Tell if the fit ends before the part is trained."""
        if self.until != 0:
            self._build_freeze().on_fit_start(run)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Announce the step at which the part begins to be trained."""
        return [] if self.until == 0 else self._build_freeze().register_actions()

    @fg.hookimpl
    def step_metrics(self, state: fg.TrainState) -> dict[str, Any]:
        """Log the fraction of the last update."""
        nodes = jax.tree.leaves(state.opt_state, is_leaf=_is_part_state)
        first = next(node for node in nodes if _is_part_state(node))
        rate = self.compute_rate(jnp.maximum(first.num_updates - 1, 0))
        rate = jnp.where(first.num_updates > 0, rate, 0)
        return {"rate": LastValue.from_values(rate)}

    def compute_rate(self, num_updates: Int[Array, ""]) -> Float[Array, ""]:
        """Return the fraction for the update after that many updates of the part."""
        rate = self.rate(num_updates) if callable(self.rate) else self.rate
        rate = jnp.asarray(rate, jnp.float32)
        if self.warmup:
            rate = rate * jnp.minimum((num_updates + 1) / self.warmup, 1)
        return rate

    def _build_freeze(self) -> Freeze:
        return Freeze(self.where, self.until, self.train_statistics)


class PartState(NamedTuple):
    """The state of `scale_rate_of_part`.

    Attributes:
        num_updates: int32, the updates of the part.
        rest: the optimizer state of everything else.
        part: the optimizer state of the part, always as far in its schedules as the rest.
    """

    num_updates: Int[Array, ""]
    rest: PyTree
    part: PyTree


def scale_rate_of_part(
    optimizer: optax.GradientTransformation,
    paths: frozenset[str],
    compute_rate: Callable[[Int[Array, ""]], Float[Array, ""]],
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that has another state for a part of the parameters, and multiplies their
    updates.

    Where none of these parameters is there, because they are frozen, their state stays as it is.

    Args:
        optimizer: for both.
        paths: of the parameters of the part.
        compute_rate: returns the factor, from the number of updates that the part has had.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def split(tree: PyTree) -> tuple[PyTree, PyTree]:
        is_part = jax.tree_util.tree_map_with_path(
            lambda keys, _: str(path_from_keys(keys)) in paths, tree
        )
        return eqx.partition(tree, is_part)

    def init(params: Any) -> PartState:
        part, rest = split(params)
        return PartState(jnp.int32(0), optimizer.init(rest), optimizer.init(part))

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, PartState]:
        part_updates, rest_updates = split(updates)
        part_params, rest_params = (None, None) if params is None else split(params)
        part_args, rest_args = dict(extra_args), dict(extra_args)
        if extra_args.get("grad") is not None:
            part_args["grad"], rest_args["grad"] = split(extra_args["grad"])
        rest_updates, rest = optimizer.update(rest_updates, state.rest, rest_params, **rest_args)
        num_updates = state.num_updates
        if not jax.tree.leaves(part_updates):
            part = copy_schedules(state.part, rest)
        else:
            part = copy_schedules(state.part, state.rest)
            part_updates, part = optimizer.update(part_updates, part, part_params, **part_args)
            rate = compute_rate(num_updates)
            # Wider than either, also where jax is told to promote nothing by itself.
            with jax.numpy_dtype_promotion("standard"):
                part_updates = jax.tree.map(
                    lambda leaf: (rate * leaf).astype(leaf.dtype), part_updates
                )
            num_updates = num_updates + 1
        return eqx.combine(part_updates, rest_updates), PartState(num_updates, rest, part)

    return optax.GradientTransformationExtraArgs(init, update)


def copy_schedules(opt_state: PyTree, source: PyTree) -> PyTree:
    """Return an optimizer state that is as far in its schedules as another one of the same
    optimizer; values that were set by hand, where `optax.inject_hyperparams` holds them, are copied
    too.

    Args:
        opt_state: the state.
        source: the other state.
    """
    nodes = jax.tree.leaves(source, is_leaf=_is_schedule_state)
    sources = iter([node for node in nodes if _is_schedule_state(node)])

    def copy_node(node: Any) -> Any:
        if not _is_schedule_state(node):
            return node
        new_node = next(sources)
        if hasattr(node, "inner_state"):
            inner_state = copy_schedules(node.inner_state, new_node.inner_state)
            return new_node._replace(inner_state=inner_state)
        return new_node

    return jax.tree.map(copy_node, opt_state, is_leaf=_is_schedule_state)


def _is_schedule_state(node: Any) -> bool:
    return isinstance(node, ScheduleState)


def _is_part_state(node: Any) -> bool:
    return isinstance(node, PartState)
