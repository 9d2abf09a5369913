"""The plugin that says in which dtypes a model computes."""

import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite import Selector
from fulgurite.errors import ConfigurationError, check_one_of
from fulgurite.plugins import hide_constructor_frames

from fulgurite_precision.casting import (
    cast_floats,
    cast_module,
    cast_output,
    cast_params,
    cast_task,
)
from fulgurite_precision.float8 import cast_products, check_device
from fulgurite_precision.scaling import Dynamic, ScaledGradients, ScaleState, Static

Preset = Literal["fp32", "bf16", "fp16", "bf16-true", "fp8"]

_COMPUTE = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "bf16-true": "bfloat16",
    "fp8": "bfloat16",
}


@hide_constructor_frames
@dataclass(frozen=True)
class Precision(fg.Plugin):
    """Runs the model in another dtype, in training, evaluation and prediction, without a change to
    the model.

    Parameters, gradients, optimizer and averages stay in the dtype of the module, which is float32
    as a rule, unless `params` says another. The module is cast where it is used; integers, labels
    and random keys are left alone.
    `eqx.nn.BatchNorm` computes in float32. The predictions of an `fg.Task` are cast before its loss
    and metrics; in a `training_step` of your own, cast what the loss is computed from.

    Example:
        from fulgurite_precision import Precision

        engine = fg.Engine(steps=100, plugins=[Precision("bf16")])
        result = engine.fit(model, data)

    Attributes:
        preset: `bf16`; `fp16`, with a dynamic loss scale; `fp32`, which changes nothing;
            `bf16-true`, with parameters, gradients and optimizer in bfloat16 too; `fp8`, which is
            `bf16` with the products of `eqx.nn.Linear` layers in float8, on GPUs that have it.
        params: the dtype of the parameters that are trained, and so of their gradients, of the
            optimizer's moments and of checkpoints; None for that of the module, or of the preset.
            The module is cast when its training state is made. In bfloat16 it takes half of the
            memory, and updates below a 256th of a weight are lost.
        compute: the dtype of the computation, instead of the preset's.
        output: the dtype of losses and predictions.
        exclude: parts of the module that compute in their own dtype: a pattern such as `**.norm`, a
            function of the module, or a selection. Layers cast what they get and return.
        keep: parts of the batch that are not cast, such as `target`; of an `fg.Task`, whose loss
            gets the batch as it is, those that its model gets so too.
        scale: of the loss in the backward pass, for float16: `Dynamic()` or `Static(1024)`. Needs
            `Engine(on_nonfinite="skip")`, which leaves out updates that are not finite.
    """

    plugin_name = "precision"
    kept_on_skip = True

    preset: Preset = "bf16"
    _: KW_ONLY
    params: str | None = None
    compute: str | None = None
    output: str = "float32"
    exclude: Selector | str | Callable[[Any], Any] | None = None
    keep: Selector | str | None = None
    scale: Static | Dynamic | None = None

    def __post_init__(self) -> None:
        check_one_of(self.preset, get_args(Preset), "Precision: preset")
        if self.params is None and self.preset == "bf16-true":
            object.__setattr__(self, "params", "bfloat16")
        if self.compute is None:
            object.__setattr__(self, "compute", _COMPUTE[self.preset])
            if self.preset == "fp16" and self.scale is None:
                object.__setattr__(self, "scale", Dynamic())
        for name in ("params", "compute", "output"):
            if name != "params" or self.params is not None:
                _check_dtype(name, getattr(self, name))
        for name in ("exclude", "keep"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Selector):
                object.__setattr__(self, name, fg.select(value))
        if self.scale is not None and not isinstance(self.scale, Static | Dynamic):
            raise ConfigurationError(
                f"Precision: scale is {self.scale!r}; give Dynamic() or Static(1024)"
            )
        if self.compute == "float16" and self.scale is None:
            warnings.warn(
                "Precision: gradients below 6e-8 are zero in float16: give scale=Dynamic(), or "
                "compute in bfloat16",
                stacklevel=3,
            )

    @fg.hookimpl
    def transform_module(self, module: Any) -> Any:
        """Return the module with parameters in their dtype."""
        assert not isinstance(self.exclude, str)
        exclude: Any = self.exclude
        return module if self.params is None else cast_params(module, self.params, exclude)

    @fg.hookimpl
    def around_forward(
        self,
        call: Callable[[Any, Any], Any],
        module: Any,
        batch: Any,
        ctx: fg.Context,
    ) -> Any:
        """Return what the step returns, computed in the dtype.

        Args:
            call: the step.
            module: the module.
            batch: the batch.
            ctx: the context of the step.
        """
        assert not isinstance(self.exclude, str)
        exclude: Any = self.exclude
        if self.preset == "fp8":
            check_device(self._find_device())
            module = cast_products(module, exclude)
        if isinstance(module, fg.Task):
            casted = cast_task(module, self.compute, self._cast_batch, self.output, exclude)
            result = call(casted, batch)
        else:
            result = call(cast_module(module, self.compute, exclude), self._cast_batch(batch))
        return cast_output(result, self.output, ctx.model_state)

    @fg.hookimpl
    def init_plugin_state(self) -> ScaleState | None:
        """Return the initial loss scale."""
        return None if self.scale is None else ScaleState.init(self.scale)

    @fg.hookimpl
    def wrap_update_rule(self, update_rule: fg.UpdateRule) -> fg.UpdateRule:
        """Return a rule with scaled gradients in its backward pass."""
        if self.scale is None:
            return update_rule
        return ScaledGradients(update_rule, self.registered_name, self.scale)

    @fg.hookimpl
    def step_metrics(self, state: fg.TrainState) -> dict[str, Any]:
        """Log the loss scale."""
        if self.scale is None:
            return {}
        scale = state.plugin_states[self.registered_name].scale
        return {"loss_scale": fg.metrics.LastValue.from_values(scale)}

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Refuse a loss scale in an engine that does not leave out what overflows."""
        if self.scale is not None and run.engine.on_nonfinite != "skip":
            raise ConfigurationError(
                "Precision: a scaled loss overflows now and then, and such an update must be left "
                "out: give Engine(on_nonfinite='skip')"
            )

    def _find_device(self) -> Any:
        """Return a device of those that the step is traced for."""
        return getattr(jax.config, "jax_default_device", None) or jax.local_devices()[0]

    def _cast_batch(self, batch: Any) -> Any:
        if self.keep is None:
            return cast_floats(batch, self.compute)
        assert isinstance(self.keep, Selector)
        # `choose`, because a batch of predictions may be without what is kept.
        leaves, structure = jax.tree.flatten(batch)
        casted = [
            leaf if is_kept else cast_floats(leaf, self.compute)
            for leaf, is_kept in zip(leaves, self.keep.choose(batch), strict=True)
        ]
        return jax.tree.unflatten(structure, casted)


def _check_dtype(name: str, dtype: Any) -> None:
    try:
        is_float = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        is_float = False
    if not is_float:
        raise ConfigurationError(
            f"Precision: {name} is {dtype!r}; give a floating-point dtype such as 'bfloat16'"
        )
