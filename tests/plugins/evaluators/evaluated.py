"""Small models and plugins that the tests of evaluators share."""

from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax


class Counting(fg.Module):
    """One weight that every update makes smaller by exactly 1, whatever the batch: it counts updates."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight * 1.0, metrics={"updates": -self.weight}, preds=batch)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


class Logits(fg.Module):
    """Takes the batch's logits as they are: metrics of it are those of the data."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        logits = batch["logits"] + 0.0 * self.weight
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        metrics = {"accuracy": fg.metrics.Accuracy.of(logits, batch["label"], ctx.mask)}
        return fg.Output(jnp.mean(loss, where=ctx.mask), metrics=metrics, preds=logits)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


@dataclass(eq=False)
class Keeper:
    """A checkpointer in memory: keeps the newest snapshot, with copies of its arrays."""

    every: int
    kept: dict[int, fg.Snapshot] = field(default_factory=dict)

    @fg.hookimpl
    def schedule(self) -> list[fg.Scheduled]:
        return [fg.Scheduled("save", self.every, fg.Run.save, "save")]

    @fg.hookimpl
    def save(self, run: fg.Run) -> None:
        self.kept[run.step] = _copied(run.snapshot())

    @fg.hookimpl
    def restore(self, reference: fg.Checkpoint, like: fg.TrainState) -> fg.Snapshot | None:
        return _copied(self.kept[max(self.kept)]) if self.kept else None


@dataclass(eq=False)
class Sink:
    """Keeps the exact and the other scalars that it is given, apart."""

    exact: list[fg.Record] = field(default_factory=list)
    telemetry: list[fg.Record] = field(default_factory=list)
    text: list[fg.Record] = field(default_factory=list)

    @fg.hookimpl
    def log_scalars(self, record: fg.Record) -> None:
        (self.exact if record.stream == "exact" else self.telemetry).append(record)

    @fg.hookimpl
    def log_text(self, record: fg.Record) -> None:
        self.text.append(record)

    def values(self, source: str, name: str) -> list[tuple[int, Any]]:
        return [(one.step, one.values[name]) for one in self.exact if one.source == source]


@dataclass(eq=False)
class Act:
    """An action at one step, before the save of that step."""

    step: int
    action: Any

    @fg.hookimpl
    def schedule(self) -> list[fg.Scheduled]:
        return [fg.Scheduled("act", fg.At(self.step), lambda run: self.action(), "act")]


def numbers(*batches: Any) -> list[np.ndarray]:
    """A list of batches of float32 numbers."""
    return [np.asarray(batch, np.float32) for batch in batches]


def _copied(snapshot: fg.Snapshot) -> fg.Snapshot:
    arrays, static = eqx.partition(snapshot.state, eqx.is_array)
    return replace(snapshot, state=eqx.combine(jax.tree.map(jnp.copy, arrays), static))
