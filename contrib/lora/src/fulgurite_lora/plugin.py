"""The plugin that trains adapters alone."""

import math
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any

import equinox as eqx
import fulgurite as fg
from fulgurite.errors import (
    ConfigurationError,
    check_name,
    set_ints,
)
from fulgurite.plugins import hide_constructor_frames
from fulgurite_optimizers import Freeze
from jaxtyping import Array, Key

from fulgurite_lora.adapters import (
    Where,
    add_adapters,
    as_selector,
    select_adapters,
)
from fulgurite_lora.layers import STREAM
from fulgurite_lora.rule import AdapterUpdate, find_adapter_update


@hide_constructor_frames
@dataclass(frozen=True)
class Lora(fg.Plugin):
    """Adds adapters of low rank to linear layers, and trains them alone.

    Everything else is frozen: it has no gradient, no optimizer state and no weight decay. Where the
    model has adapters of this name already, they are trained on with the scale given here;
    those of other names take part as they are. Adapters from a checkpoint come with the scale that
    they were trained with. Several such plugins train the adapters of each, so that layers may have
    different ranks.

    Example:
        from fulgurite_lora import Lora, merge

        engine = fg.Engine(steps=100, plugins=[Lora("**", rank=2, scale=2.0)])
        result = engine.fit(model, data)
        merged = merge(result.module)

    Attributes:
        where: the layers, `eqx.nn.Linear`, by their paths, as `fg.select` takes them; those of an
            attention layer are found by its path.
        rank: of each adapter; one above the smaller side of a layer gains nothing there.
        scale: a factor for what the adapters compute; alpha / rank in the paper.
        dropout: the probability with which an element of what goes into an adapter becomes 0.
        axis_name: of the `vmap` over examples, each of which then has dropout of its own.
        name: of the adapters.
        train_too: what else is trained, as `fg.select` takes it, such as a new head.
    """

    hookspecs = Freeze.hookspecs

    where: Where = "**"
    rank: int = 8
    _: KW_ONLY
    scale: float = 1.0
    dropout: float = 0.0
    axis_name: str | None = None
    name: str = "default"
    train_too: Where | None = None
    # That of the newest program, which all such plugins of an engine share.
    _update: list[AdapterUpdate] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        as_selector(self.where)
        if self.train_too is not None:
            as_selector(self.train_too)
        set_ints(self, "rank")
        if type(self.rank) is not int or self.rank < 0:
            raise ConfigurationError(
                f"Lora: rank is {self.rank!r}; it must be an integer that is not negative"
            )
        if not _is_number(self.scale) or not math.isfinite(self.scale):
            raise ConfigurationError(f"Lora: scale is {self.scale!r}; it must be a finite number")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ConfigurationError(
                f"Lora: dropout is {self.dropout!r}; it must be at least 0 and below 1"
            )
        check_name(self.name, "Lora: name")

    @property
    def instance(self) -> str | None:
        """Several such plugins have adapters of different names, or are numbered."""
        return None if self.name == "default" else self.name

    @fg.hookimpl
    def register_rng_streams(self) -> list[fg.RngStream]:
        """Declare the stream of dropout, so that no other random numbers change."""
        return [STREAM]

    @fg.hookimpl
    def transform_module(self, module: Any, key: Key[Array, ""]) -> Any:
        """Return the module with adapters.

        Args:
            module: the module.
            key: for their first values.
        """
        return add_adapters(
            module,
            self.where,
            rank=self.rank,
            scale=self.scale,
            dropout=self.dropout,
            axis_name=self.axis_name,
            name=self.name,
            key=key,
        )

    @fg.hookimpl
    def wrap_update_rule(self, module: Any, update_rule: fg.UpdateRule) -> fg.UpdateRule:
        """Hide everything but the adapters from the rule.

        Args:
            module: the module with adapters.
            update_rule: the rule.
        """
        trained = fg.select(select_adapters(self.name))
        if self.train_too is not None:
            trained = trained | as_selector(self.train_too)
        other = find_adapter_update(update_rule)
        if other is not None:
            other.train_too(trained)
            self._update[:] = [other]
            return update_rule
        self._update[:] = [AdapterUpdate(module, update_rule, trained)]
        return self._update[0]

    @fg.hookimpl
    def list_kept_state(self, module: Any) -> list[eqx.nn.StateIndex]:
        """Return the model state that training does not change, such as the statistics of frozen
        BatchNorm layers.

        Args:
            module: the module with adapters.
        """
        return [
            index for update in self._update for index in update.freeze.list_frozen_indices(module)
        ]


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
