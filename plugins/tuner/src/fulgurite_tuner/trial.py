"""An engine to try things with, which leaves nothing behind."""

from collections.abc import Collection
from typing import Any

import fulgurite as fg
from fulgurite.plugins import RegisteredPlugin

# What changes the update, or is a part of the train state and so takes memory. Everything else,
# such as loggers, checkpoints and evaluators, stays away.
_HOOKS = (
    "after_update",
    "around_forward",
    "gradient_transform",
    "init_plugin_state",
    "loss_terms",
    "make_update_rule",
    "plugin_state_sharding",
    "register_rng_streams",
    "sharding_strategy",
    "transform_batch",
    "transform_module",
    "wrap_update_rule",
)


def make_trial_engine(engine: fg.Engine, *plugins: Any) -> fg.Engine:
    """Return an engine that makes the same updates as another one, of the same state, and writes
    nothing.

    Args:
        engine: the engine; of its plugins only what changes the update or the state is used, and
            none of them is told of a fit.
        plugins: further ones. If they give optimizers, they do it in the place of those of the
            engine.
    """
    hooks = _HOOKS
    if not any(hasattr(plugin, "configure_optimizers") for plugin in plugins):
        hooks = (*_HOOKS, "configure_optimizers")
    parts = [_take_part(engine, plugin, hooks) for plugin in engine.plugins.plugins.values()]
    return fg.Engine(
        steps=1,
        seed=engine.seed,
        plugins=[*(part for part in parts if part is not None), *plugins],
        autoload=False,
        # No metric is read, and no spike or overflow ends a trial.
        log_every=10**9,
        on_nonfinite="skip" if engine.on_nonfinite == "skip" else "ignore",
        device=engine.device,
    )


def _take_part(engine: fg.Engine, plugin: RegisteredPlugin, hooks: Collection[str]) -> Any:
    """Return a plugin of the same name that implements some of the hooks only, in the same way;
    None if the plugin has none of them.

    Args:
        engine: that has the plugin.
        plugin: the plugin.
        hooks: the names of the hooks.
    """
    members: dict[str, Any] = {
        hook: staticmethod(implementation.function)
        for hook in hooks
        for implementation in engine.plugins.hooks[hook].implementations
        if implementation.plugin is plugin
    }
    if not members:
        return None
    # A step may ask what is due by their names. They have their triggers already: those that run
    # with an action of a plugin that stays away would find none.
    actions = [action.scheduled for action in engine.actions if action.plugin is plugin]

    @fg.hookimpl
    def register_actions() -> list[fg.ScheduledAction]:
        return actions

    plugin_name, _, instance = plugin.name.partition(":")
    members |= {
        "register_actions": staticmethod(register_actions),
        "plugin_name": plugin_name,
        "instance": instance or None,
        "kept_on_skip": plugin.options.kept_on_skip,
        "__module__": type(plugin.plugin).__module__,
    }
    return type(type(plugin.plugin).__name__, (), members)()
