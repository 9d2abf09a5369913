"""Layers that tell operations their paths in the model, by the name stack of JAX, or by the names
of functions where only those are kept. Names change no number."""

import re
from collections.abc import Callable
from types import FunctionType
from typing import Any

import fulgurite as fg
import jax
from fulgurite.plugins import Forward, replace_layers, wrap_layer

_START = "layer:"
_SCOPE = re.compile(r"layer:([^/()]+)")


class NamedLayers(fg.UpdateRuleWrapper):
    """Makes an update with a model whose layers name their operations.

    Example:
        from fulgurite_replay.layers import NamedLayers

        rule = NamedLayers(fg.GradientUpdate(optax.sgd(0.1)))
    """

    def __call__(
        self, forward: Forward, state: fg.TrainState, batch: Any, ctx: fg.Context
    ) -> tuple[fg.TrainState, fg.Output]:
        def forward_named(module: Any, *args: Any, **kwargs: Any) -> fg.Output:
            return forward(name_layers(module), *args, **kwargs)

        return self.update_rule(forward_named, state, batch, ctx)


def name_layers(module: Any) -> Any:
    """Return a model each of whose layers names its operations in their name stacks."""
    return replace_layers(module, lambda layer, path: wrap_layer(layer, _call_named, str(path)))


def name_functions(module: Any) -> Any:
    """Return a model each of whose layers names its operations in their tracebacks."""
    return replace_layers(module, lambda layer, path: wrap_layer(layer, _call_in_frame, str(path)))


def find_layer(scope: str) -> str | None:
    """Return the path of the innermost layer in a name stack, or in the name of a function of a
    traceback; None outside of all."""
    names = _SCOPE.findall(scope)
    return names[-1] if names else None


def _call_named(name: str, call: Callable[[], Any]) -> Any:
    with jax.named_scope(_START + name):
        return call()


def _call_in_frame(name: str, call: Callable[[], Any]) -> Any:
    """Call a function from one that has the layer's name."""
    title = _START + name
    code = _call.__code__.replace(co_name=title, co_qualname=title)
    return FunctionType(code, {})(call)


def _call(call: Callable[[], Any]) -> Any:
    return call()
