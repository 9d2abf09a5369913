"""The rows of the table: kinds of losses and batches, as users write them, each with what the
oracle says about it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import equinox as eqx
import fulgurite as fg
import fulgurite_losses
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
from fulgurite.metrics import Mean
from fulgurite_keys import L2, Losses

Term = Any
"""A number or a `Mean`."""


@dataclass(frozen=True)
class Kind:
    """A kind of loss and batch.

    Attributes:
        terms: what the oracle computes.
        compute: `compute(errors, batch, mask)` returns the terms of the loss by name, of the
            squared errors `(batch, LENGTH)`; None where a plugin gives the loss.
        weigh: `weigh(batch, mask)` returns `fg.Output(weight=)`.
        dtype: of the weights.
        pack: makes what the source yields of a batch of the oracle.
        unpack: the inverse, within a step, of what is not masked.
        plugins: `plugins(phases)` returns further plugins that the loss needs.
        uses_preds: whether the loss is of the predictions, not of their errors.
        is_mean: whether the mean of the losses of parts of a batch is that of the batch, or the
            loss says what it is a mean over.
        has_count: whether the number of examples of a batch is known.
        can_split: whether a batch can be divided into microbatches.
    """

    terms: Callable[..., oracle.Terms]
    compute: Callable[[Any, Any, Any], dict[str, Term]] | None = None
    _: Any = field(default=None, kw_only=True, repr=False)
    weigh: Callable[[Any, Any], Any] | None = None
    dtype: str = "float32"
    pack: Callable[[oracle.Batch], Any] = lambda batch: batch
    unpack: Callable[[Any], Any] = lambda batch: batch
    plugins: Callable[[Sequence[str] | None], Sequence[Any]] = lambda phases: ()
    uses_preds: bool = False
    is_mean: bool = True
    has_count: bool = True
    can_split: bool = True


class Model(fg.Module):
    """A linear map and a vector that is multiplied with what it gives.

    Attributes:
        body: `2 -> WIDTH`.
        head: `(WIDTH,)`.
        kind: of its loss.
        optimizer: of all.
        phases: the names of losses, each with the terms of the only loss; None for one loss.
    """

    body: eqx.nn.Linear
    head: jax.Array
    kind: Kind = eqx.field(static=True)
    optimizer: optax.GradientTransformation = eqx.field(static=True)
    phases: tuple[str, ...] | None = eqx.field(static=True, default=None)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        batch = self.kind.unpack(batch)
        preds = jax.vmap(jax.vmap(self.body))(batch["x"]) @ self.head
        if not jnp.iscomplexobj(preds):
            # As Precision says: what the loss is computed from is cast.
            preds = preds.astype(jnp.float32)
        metric = self._measure(preds, batch, ctx)
        if self.kind.compute is None:
            return fg.Output(preds=preds, metrics=metric)
        terms = compute_terms(self.kind, preds, batch, ctx.mask)
        weight = None if self.kind.weigh is None else self.kind.weigh(batch, ctx.mask)
        if self.phases is not None:
            named = {
                phase if name == "loss" else f"{phase}/{name}": value
                for phase in self.phases
                for name, value in terms.items()
            }
            return fg.Output(losses=named, weight=weight, preds=preds)
        loss = terms.pop("loss")
        for name, value in terms.items():
            ctx.add_loss(name, value)
        return fg.Output(loss, weight=weight, preds=preds, metrics=metric)

    def compute_losses(self, batch: Any, ctx: fg.Context) -> fg.Output:
        """Return the losses of all phases."""
        return Model.training_step(self, batch, ctx)

    def _measure(self, preds: Any, batch: Any, ctx: fg.Context) -> dict[str, Any]:
        """Return the mean of the predictions over what the loss is a mean over, a bare number
        where the output says what that is."""
        if self.kind.weigh is None or jnp.iscomplexobj(preds):
            return {}
        weights = get_weights(batch, ctx.mask, is_by_token=self.kind.terms is oracle.average_tokens)
        preds = preds if weights.ndim == 2 else preds.mean(1)
        return {"prediction": jnp.sum(preds * weights) / jnp.sum(weights)}

    def configure_optimizers(self) -> optax.GradientTransformation:
        return self.optimizer


class FunctionModel(Model):
    """Gives its losses as functions. It has no step, so they are evaluated too."""

    training_step = fg.Module.training_step

    def losses(self, batch: Any, ctx: fg.Context) -> dict[str, Callable[[], fg.Output]]:
        assert self.phases is not None
        return {phase: partial(self._compute_loss, phase, batch, ctx) for phase in self.phases}

    def _compute_loss(self, phase: str, batch: Any, ctx: fg.Context) -> fg.Output:
        output = self.compute_losses(batch, ctx)
        terms = {
            name: value
            for name, value in output.losses.items()
            if name == phase or name.startswith(f"{phase}/")
        }
        return output.replace(loss=terms.pop(phase), losses=terms)


def get_weights(batch: Any, mask: Any, *, is_by_token: bool) -> Any:
    """Return what the tokens or the examples of a batch weigh."""
    if is_by_token:
        return jnp.where(batch["tokens"], 1.0, 0.0)
    return batch["weight"].astype(jnp.float32)


def compute_terms(kind: Kind, preds: Any, batch: Any, mask: Any) -> dict[str, Term]:
    """Return the terms of the loss by name.

    Args:
        kind: of the loss; its loss comes from no plugin.
        preds: `(batch, LENGTH)`.
        batch: of the oracle's structure.
        mask: which examples are not padding, or None.
    """
    assert kind.compute is not None
    difference = preds - batch["y"]
    if kind.uses_preds:
        return kind.compute(preds, batch, mask)
    return kind.compute(jnp.real(difference * jnp.conj(difference)), batch, mask)


def make_model(
    kind: Kind,
    optimizer: Any,
    phases: tuple[str, ...] | None = None,
    model_class: type[Model] = Model,
) -> Model:
    """Return the model with the first weights of the oracle.

    Args:
        kind: of its loss.
        optimizer: of all.
        phases: the names of its losses.
        model_class: its class.
    """
    params = {
        name: jnp.array(value["real"] + 1j * value["imaginary"], jnp.complex64)
        if isinstance(value, dict)
        else jnp.array(value)
        for name, value in oracle.make_params(kind.dtype).items()
    }
    body = eqx.nn.Linear(2, oracle.WIDTH, use_bias=False, key=jax.random.key(0))
    body = eqx.tree_at(lambda body: body.weight, body, params["body"])
    return model_class(body, params["head"], kind, optimizer, phases)


def get_params(module: Any) -> oracle.Params:
    """Return the weights of a module in the oracle's structure."""
    return {"body": split_complex(module.body.weight), "head": split_complex(module.head)}


def split_complex(array: Any) -> Any:
    """Return the real and imaginary part of a complex array; another as it is."""
    if not jnp.iscomplexobj(array):
        return array
    return {"real": jnp.real(array), "imaginary": jnp.imag(array)}


# --- How users write the losses -------------------------------------------------------------------


def take_mean(errors: Any, batch: Any, mask: Any) -> dict[str, Term]:
    return {"loss": errors.mean()}


def take_mean_of_present(errors: Any, batch: Any, mask: Any) -> dict[str, Term]:
    return {"loss": Mean.from_values(errors.mean(1), mask)}


def divide_by_tokens(errors: Any, batch: Any, mask: Any) -> dict[str, Term]:
    """NaN in a batch without tokens, as most write it."""
    return {"loss": jnp.sum(errors * batch["tokens"]) / jnp.sum(batch["tokens"])}


def divide_by_tokens_safely(errors: Any, batch: Any, mask: Any) -> dict[str, Term]:
    count = jnp.maximum(jnp.sum(batch["tokens"]), 1).astype(errors.dtype)
    return {"loss": jnp.sum(errors * batch["tokens"]) / count}


def return_mean(errors: Any, batch: Any, mask: Any) -> dict[str, Term]:
    return {"loss": Mean.from_values(errors, batch["tokens"])}


def compute_mean(errors: Any, batch: Any, mask: Any) -> dict[str, Term]:
    return {"loss": return_mean(errors, batch, mask)["loss"].compute()}


def call_masked_loss(preds: Any, batch: Any, mask: Any) -> dict[str, Term]:
    loss = fulgurite_losses.squared_error(preds, batch["y"], mask=batch["tokens"])
    return {"loss": loss}


def call_weighted_loss(preds: Any, batch: Any, mask: Any) -> dict[str, Term]:
    loss = fulgurite_losses.squared_error(
        preds, batch["y"], weight=batch["weight"], reduction="weighted_mean"
    )
    return {"loss": loss}


def call_scaled_loss(preds: Any, batch: Any, mask: Any) -> dict[str, Term]:
    loss = fulgurite_losses.squared_error(preds, batch["y"], weight=batch["weight"])
    return {"loss": loss}


def divide_by_weights(errors: Any, batch: Any, mask: Any) -> dict[str, Term]:
    weight = batch["weight"].astype(errors.dtype)
    return {"loss": jnp.sum(errors.mean(1) * weight) / jnp.sum(weight)}


def return_weighted_mean(errors: Any, batch: Any, mask: Any) -> dict[str, Term]:
    return {"loss": Mean.from_values(errors.mean(1), weight=batch["weight"])}


def return_three(preds: Any, batch: Any, mask: Any) -> dict[str, Term]:
    errors = (preds - batch["y"]) ** 2
    return {**return_mean(errors, batch, mask), "example": 0.5 * errors.mean()}


def add_up(errors: Any, batch: Any, mask: Any) -> dict[str, Term]:
    return {"loss": errors.mean(1).sum()}


def contrast(preds: Any, batch: Any, mask: Any) -> dict[str, Term]:
    scores = -jnp.mean((preds[:, None] - batch["y"][None]) ** 2, -1)
    labels = jnp.arange(len(scores))
    return {"loss": optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()}


def take_root(errors: Any, batch: Any, mask: Any) -> dict[str, Term]:
    return {"loss": jnp.sqrt(errors.mean())}


def deviate(preds: Any, batch: Any, mask: Any) -> dict[str, Term]:
    return {"loss": jnp.std(preds - batch["y"])}


def count_tokens(batch: Any, mask: Any) -> Any:
    return jnp.sum(batch["tokens"])


def add_up_weights(batch: Any, mask: Any) -> Any:
    return jnp.sum(batch["weight"])


@dataclass(frozen=True)
class Penalty:
    """Terms of a plugin: a penalty on a part of the weights."""

    names: Sequence[str]

    @fg.hookimpl
    def loss_terms(self, module: Any) -> dict[str, Any]:
        return {name: 0.1 * jnp.sum(module.head**2) for name in self.names}


def make_penalty(phases: Sequence[str] | None) -> list[Any]:
    return [Penalty(name_terms("l2", phases))]


def make_keyed_losses(phases: Sequence[str] | None) -> list[Any]:
    loss = L2("preds", "batch.y", mask="batch.tokens")
    return [Losses(**dict.fromkeys(name_terms("error", phases), loss))]


def name_terms(name: str, phases: Sequence[str] | None) -> list[str]:
    """Return the names of a term in every phase."""
    return [name] if phases is None else [f"{phase}/{name}" for phase in phases]


# --- Structures of batches ------------------------------------------------------------------------


NAMES = ("weight", "y", "x", "tokens")


def pack_tuple(batch: oracle.Batch) -> Any:
    return tuple(batch[name] for name in NAMES)


def unpack_tuple(batch: Any) -> Any:
    return dict(zip(NAMES, batch, strict=True))


def pack_nested(batch: oracle.Batch) -> Any:
    inputs = {"x": batch["x"], "tokens": batch["tokens"]}
    return {"inputs": [inputs], "targets": (batch["y"], {"weight": batch["weight"]})}


def unpack_nested(batch: Any) -> Any:
    targets, weight = batch["targets"]
    return {**batch["inputs"][0], "y": targets, **weight}


def pack_padded(batch: oracle.Batch) -> Any:
    """Eight examples of padding at the end, which would change every mean."""
    padded = {
        name: np.concatenate([array, np.ones_like(array, shape=(8, *array.shape[1:]))])
        for name, array in batch.items()
    }
    return fg.Batch(padded, np.arange(len(batch["y"]) + 8) < len(batch["y"]))


def pack_foreign(batch: oracle.Batch) -> Any:
    """An array that comes first and is not one entry an example."""
    return {"class_weights": np.ones(3, np.float32), **batch}


def pack_counted(batch: oracle.Batch) -> Any:
    return fg.Batch(pack_foreign(batch), num_examples=len(batch["y"]))


KINDS: Mapping[str, Kind] = {
    "mean": Kind(oracle.average_examples, take_mean),
    "padded": Kind(oracle.average_examples, take_mean_of_present, pack=pack_padded),
    "tokens_weight": Kind(oracle.average_tokens, divide_by_tokens, weigh=count_tokens),
    "tokens_mean": Kind(oracle.average_tokens, return_mean),
    "tokens_computed": Kind(oracle.average_tokens, compute_mean),
    "tokens_losses": Kind(oracle.average_tokens, call_masked_loss, uses_preds=True),
    "tokens_keys": Kind(oracle.average_tokens, plugins=make_keyed_losses),
    "weights_weight": Kind(oracle.average_weighted, divide_by_weights, weigh=add_up_weights),
    "weights_mean": Kind(oracle.average_weighted, return_weighted_mean),
    "weights_losses": Kind(oracle.average_weighted, call_weighted_loss, uses_preds=True),
    "scaled_losses": Kind(oracle.average_scaled, call_scaled_loss, uses_preds=True),
    "three_terms": Kind(oracle.average_three, return_three, uses_preds=True, plugins=make_penalty),
    "tuple": Kind(oracle.average_examples, take_mean, pack=pack_tuple, unpack=unpack_tuple),
    "nested": Kind(oracle.average_tokens, return_mean, pack=pack_nested, unpack=unpack_nested),
    "foreign": Kind(
        oracle.average_examples, take_mean, pack=pack_foreign, has_count=False, can_split=False
    ),
    "foreign_counted": Kind(oracle.average_examples, take_mean, pack=pack_counted, can_split=False),
    "foreign_weight": Kind(
        oracle.average_tokens,
        divide_by_tokens,
        weigh=count_tokens,
        pack=pack_foreign,
        can_split=False,
    ),
    "half": Kind(oracle.average_tokens, return_mean, dtype="bfloat16"),
    "complex": Kind(oracle.average_tokens, divide_by_tokens, weigh=count_tokens, dtype="complex64"),
    "tokens_bare": Kind(oracle.average_tokens_silently, divide_by_tokens_safely, is_mean=False),
    "sum": Kind(oracle.add_up, add_up, is_mean=False),
    "contrast": Kind(oracle.contrast, contrast, uses_preds=True, is_mean=False),
    "root": Kind(oracle.take_root, take_root, is_mean=False),
    "deviation": Kind(oracle.deviate, deviate, uses_preds=True, is_mean=False),
}
