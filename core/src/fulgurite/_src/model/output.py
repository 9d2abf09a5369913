"""What a step returns."""

from dataclasses import replace
from typing import Any

import equinox as eqx
from jaxtyping import Array, ArrayLike, Bool, PyTree, Real

from fulgurite._src.metrics.basic import Mean
from fulgurite._src.metrics.conversion import split_loss
from fulgurite._src.metrics.weights import find_weight


class Output(eqx.Module):
    """What a step returns.

    Example:
        accuracy = fg.metrics.Accuracy.from_logits(logits, labels)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        output = fg.Output(losses.mean(), metrics={"accuracy": accuracy})

    Attributes:
        loss: the scalar to minimise, or an `fg.metrics.Mean`, which says what it is a mean over;
            after the engine's forward pass, the sum of all terms. A step that has nothing else may
            return it alone.
        metrics: by name: a `Metric` (merged over the window), a `RunningMetric` one (carried from
            step to step), or a scalar, taken as a mean over `weight`. A dictionary of these gives
            `name/key` for each.
        losses: further terms by name, numbers or means, added to `loss`; the multi-optimizer plugin
            gives each its own optimizer. After the forward pass, all terms as numbers.
        weight: what the losses and metrics that are bare numbers are means over: the number of
            tokens, or the sum of the weights of the examples. By default it is the number of
            examples of the batch, without padding. Whatever divides a batch (accumulation, an
            evaluation, a metric window) averages by it, so that the result is that of the
            undivided batch. What weighs nothing counts for nothing, NaN included.
        preds: whatever the model predicted, for hooks and `predict`. Leaves the compiled step only
            where `Engine.step(returns=...)` asks for it.
        aux: any further arrays of the step, for whoever calls `Engine.step(returns=("aux",))`.
        model_state: the new `eqx.nn.State`, for models that carry one.
        media: what to show, by name: an `fg.Media`, such as those of
            `fulgurite_logging.media`, or a function without arguments that is
            evaluated only where the result is shown; dictionaries as of metrics. After the forward
            pass, zeros at all other steps.
        raw_grads: the gradients as they were computed, before they are clipped or otherwise
            transformed; set by the update rule.
        grads: the gradients as the optimizer receives them; set by the update rule.
        updates: what the optimizer returned; set by the update rule.
        bare_terms: the names of the terms of the loss that are bare numbers, of which nobody says
            what they are means over; set by the forward pass.
        loss_weights: what each term of the loss is a mean over, by name; set by the forward pass.
        is_update: bool, whether the step changed the parameters; None for always. Set by update
            rules that wait, such as those of gradient accumulation.
    """

    # A step may give a `Mean`; whoever reads the output of the forward pass gets a number.
    loss: Any = None
    metrics: dict[str, Any] = eqx.field(default_factory=dict)
    losses: dict[str, Any] = eqx.field(default_factory=dict)
    weight: Real[ArrayLike, ""] | None = eqx.field(default=None, kw_only=True)
    preds: PyTree = None
    aux: PyTree = None
    model_state: eqx.nn.State | None = None
    media: dict[str, Any] = eqx.field(default_factory=dict)
    raw_grads: PyTree = None
    grads: PyTree = None
    updates: PyTree = None
    bare_terms: tuple[str, ...] = eqx.field(static=True, default=(), kw_only=True)
    loss_weights: dict[str, Array] = eqx.field(default_factory=dict, kw_only=True)
    is_update: Bool[Array, ""] | None = eqx.field(default=None, kw_only=True)

    def resolve(self) -> "Output":
        """Return the output with numbers for losses, `loss_weights` of those whose weight is known,
        and a `Mean` for each metric that is a number of known weight."""
        weights = dict(self.loss_weights)
        loss, loss_weight = split_loss("loss", self.loss)
        if loss_weight is not None:
            weights["loss"] = loss_weight
        losses = {}
        for name, value in self.losses.items():
            losses[name], weight = split_loss(name, value)
            if weight is not None:
                weights[name] = weight
        metrics = {}
        for name, value in self.metrics.items():
            weight = find_weight(value)
            metrics[name] = value if weight is None else Mean.from_values(value, weight=weight)
        return self.replace(loss=loss, losses=losses, loss_weights=weights, metrics=metrics)

    @property
    def has_bare_numbers(self) -> bool:
        """Whether nobody says what the bare numbers of the output are means over."""
        # The forward pass sets the weight to the number of examples only for such a term.
        return self.weight is None or bool(self.bare_terms)

    def replace(self, **changes: Any) -> "Output":
        """Return a copy with some fields changed."""
        return replace(self, **changes)
