"""An engine to try things with, which leaves nothing behind."""

from typing import Any

import fulgurite as fg

# What changes the update. Everything else, such as loggers, checkpoints and evaluators, stays away.
_HOOKS = (
    "around_forward",
    "gradient_transform",
    "loss_terms",
    "make_update_rule",
    "register_rng_streams",
    "sharding_strategy",
    "transform_batch",
    "transform_module",
    "wrap_update_rule",
)


def make_trial_engine(engine: fg.Engine, *plugins: Any) -> fg.Engine:
    """Return an engine that makes the same updates as another one, and writes nothing.

    Args:
        engine: the engine; its plugins are used as they are, and none of them is told of a fit.
        plugins: further ones. If they give optimizers, they do it in the place of those of the
            engine.
    """
    hooks = _HOOKS
    if not any(hasattr(plugin, "configure_optimizers") for plugin in plugins):
        hooks = (*_HOOKS, "configure_optimizers")
    chosen = {
        impl.plugin.name: impl.plugin.plugin
        for hook in hooks
        for impl in engine.plugins.implementations(hook)
    }
    return fg.Engine(
        steps=1,
        seed=engine.seed,
        plugins=[*chosen.values(), *plugins],
        autoload=False,
        # No metric is read, and no spike or overflow ends a trial.
        log_every=10**9,
        on_nonfinite="skip" if engine.on_nonfinite == "skip" else "ignore",
        device=engine.device,
    )
