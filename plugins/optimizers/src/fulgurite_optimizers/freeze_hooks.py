"""The hook that `Freeze` brings."""

import equinox as eqx
import fulgurite as fg
from fulgurite.plugins import Combine
from jaxtyping import PyTree

# pyright: reportReturnType=false


class FreezeHooks:
    """The specification of the hook by which a plugin says what training leaves alone.

    Who asks needs no import of it: `engine.plugins.hooks.get("list_kept_state")` is None without
    such a plugin. Another plugin may implement it by `@fg.hookimpl(optionalhook=True)`.
    """

    @fg.hookspec(
        "build",
        Combine.EACH,
        list[eqx.nn.StateIndex],
        "By what recomputes parts of the model state, such as `recompute_statistics` of "
        "`fulgurite-averaging`.",
    )
    def list_kept_state(self, module: PyTree) -> list[eqx.nn.StateIndex] | None:
        """Return the indices, in the module, of the model state that training never changes.

        Args:
            module: the module.
        """
