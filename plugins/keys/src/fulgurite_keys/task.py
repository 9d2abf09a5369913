"""Any Equinox model, whose inputs are keys."""

import inspect
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import optax
from fulgurite.errors import ConfigurationError
from jaxtyping import PyTree

from fulgurite_keys.scope import KeyPath, Scope, list_key_fields


class KeyedTask(fg.Module):
    """Any Equinox model, which is applied to each example of what its keys find; what it returns is
    `preds`. `Losses` says what is minimised.

    With `map=False` the model is called once, with whole batches.

    It gets one random key for each example (or with `map=False` for the batch) if it takes `key`,
    and the `eqx.nn.State` if there is
    one, as `fg.Task` does. Its layers are found as `interms.model.…`.

    Example:
        from fulgurite_keys import KeyedTask

        task = KeyedTask(model, inputs={"x": "batch.image"}, optimizer=optax.adam(1e-3))

    Attributes:
        model: the model. Without `inputs` its own fields that are annotated with `Key` say which
            arguments it takes.
        inputs: keys by the name of the argument, looked up in the batch.
        optimizer: an `optax.GradientTransformation`, or an `fg.OptimizerSpec`.
        map: whether the model takes a single example, and is applied by `vmap`.
    """

    model: PyTree
    inputs: Mapping[str, Any] = eqx.field(static=True)
    optimizer: optax.GradientTransformation | fg.OptimizerSpec | None = eqx.field(static=True)
    map: bool = eqx.field(static=True)

    def __init__(
        self,
        model: PyTree,
        inputs: Mapping[str, Any] | None = None,
        *,
        optimizer: optax.GradientTransformation | fg.OptimizerSpec | None = None,
        map: bool = True,
    ) -> None:
        self.model = model
        self.inputs = _HashableDict(_read_inputs(model, inputs))
        self.optimizer = optimizer
        self.map = map

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        """Return the predictions for one batch."""
        scope = Scope({"batch": batch}, "the inputs of a model")
        inputs = {name: scope.resolve(key) for name, key in self.inputs.items()}
        call = self.model
        if "key" in inspect.signature(call).parameters and "key" not in inputs:
            num_examples = len(jax.tree.leaves(inputs)[0])
            inputs["key"] = ctx.keys("default", num_examples) if self.map else ctx.key()

        def apply(inputs: dict[str, Any], state: eqx.nn.State | None) -> Any:
            return call(**inputs) if state is None else call(**inputs, state=state)

        if ctx.model_state is None:
            mapped = jax.vmap(apply, in_axes=(0, None)) if self.map else apply
            return fg.Output(preds=mapped(inputs, None))
        mapped = apply
        if self.map:
            mapped = jax.vmap(apply, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        preds, model_state = mapped(inputs, ctx.model_state)
        return fg.Output(preds=preds, model_state=model_state)

    def configure_optimizers(self) -> optax.GradientTransformation | fg.OptimizerSpec:
        """Return the optimizer that was passed."""
        if self.optimizer is None:
            raise ConfigurationError(
                "KeyedTask has no optimizer: pass optimizer=optax.adam(1e-3) or another one"
            )
        return self.optimizer


class _HashableDict(dict[str, KeyPath]):
    """A dictionary that can be a static field."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(tuple(self.items()))


def _read_inputs(model: Any, inputs: Mapping[str, Any] | None) -> dict[str, KeyPath]:
    """Return the keys of the arguments of a model, from `inputs` or its own fields."""
    name = type(model).__name__
    if inputs is None:
        if isinstance(model, eqx.Module):
            inputs = {field: getattr(model, field) for field in list_key_fields(type(model))}
        if not inputs:
            raise ConfigurationError(
                f"KeyedTask does not know the inputs of {name}: give inputs={{'x': 'batch.image'}},"
                " or annotate fields of the model with Key"
            )
    keys = {field: KeyPath.parse(key, f"{name}: {field}") for field, key in inputs.items()}
    for field, key in keys.items():
        if key.prefix != "batch":
            raise ConfigurationError(
                f"{name}: {field} is {str(key)!r}; the inputs of a model are in the batch, such as "
                "'batch.image'"
            )
    return keys
