"""Layers that draw their own random keys."""

import equinox as eqx
import fulgurite as fg
from jaxtyping import Array, Float


class Dropout(eqx.Module):
    """`eqx.nn.Dropout` that needs no key: it draws one of the stream `dropout` in each training
    step. In evaluation it passes on what it gets.

    Under `vmap` all examples lose the same elements, unless the axis has a name and `axis_name`
    says it.

    Example:
        from fulgurite_rng import Dropout, Rng


        class Net(fg.Module):
            linear: eqx.nn.Linear
            dropout: Dropout

            def __init__(self, *, key):
                self.linear = eqx.nn.Linear(4, 2, key=key)
                self.dropout = Dropout(0.1, axis_name="batch")

            def __call__(self, x):
                return self.dropout(self.linear(x))

            def training_step(self, batch, ctx):
                preds = jax.vmap(self, axis_name="batch")(batch["x"])
                return fg.Output(jnp.mean(preds**2))


        engine = fg.Engine(steps=1000, plugins=[Rng()])

    Attributes:
        dropout: the layer that does it.
        axis_name: of the `vmap` over examples.

    Args:
        p: the probability with which an element becomes 0.
        axis_name: of the `vmap` over examples, each of which gets a key of its own.
    """

    dropout: eqx.nn.Dropout
    axis_name: str | None = eqx.field(static=True)

    def __init__(self, p: float = 0.5, *, axis_name: str | None = None) -> None:
        self.dropout = eqx.nn.Dropout(p)
        self.axis_name = axis_name

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Return `x` with some elements 0 and the others larger by `1 / (1 - p)`.

        Args:
            x: of any shape.
        """
        if self.dropout.inference or self.dropout.p == 0:
            return x
        return self.dropout(x, key=fg.make_rng("dropout", axis_name=self.axis_name))
