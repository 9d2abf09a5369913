"""A plugin that was written against the hooks of version 0.1 goes on working; what is deprecated says so."""

import inspect
from typing import Any

import fulgurite as fg
import fulgurite.hooks as hooks
import pytest
from models import Linear, regression

# The hooks of 0.1, their kinds and arguments. It is never changed: a hook may get further arguments, and is deprecated
# before it goes, in the next major version.
FIRST = {
    "rng_streams": ("build", ""),
    "mesh": ("build", ""),
    "state_sharding": ("build", "state mesh"),
    "slice_sharding": ("build", "own mesh"),
    "batch_sharding": ("build", "batch mesh"),
    "update_rule": ("build", "module phases"),
    "wrap_update_rule": ("build", "module rule"),
    "consensus": ("build", ""),
    "optimizers": ("build", "module"),
    "evaluators": ("build", ""),
    "gradient_transform": ("build", "module optimizer"),
    "plugin_state": ("build", "module key"),
    "schedule": ("build", ""),
    "module_views": ("build", "state"),
    "transform_batch": ("traced", "batch ctx"),
    "forward_sharding": ("traced", "module"),
    "output_sharding": ("traced", "output"),
    "loss_terms": ("traced", "module output batch ctx"),
    "after_update": ("traced", "module own output ctx"),
    "step_metrics": ("traced", "state output grads updates ctx"),
    "on_fit_start": ("event", "run"),
    "on_epoch_end": ("event", "run epoch"),
    "on_evaluate_end": ("event", "run name metrics"),
    "on_compile": ("event", "run name batch_spec compiled"),
    "on_save": ("event", "run step"),
    "on_restore": ("event", "run step"),
    "on_exception": ("event", "run exception"),
    "on_fit_end": ("event", "run result"),
    "open_log": ("sink", "run"),
    "log_scalars": ("sink", "record"),
    "log_media": ("sink", "record"),
    "log_text": ("sink", "record"),
    "log_config": ("sink", "record"),
    "durable": ("sink", "step"),
    "rewind": ("sink", "position"),
    "close_log": ("sink", ""),
    "host_state": ("persistence", ""),
    "restore_host_state": ("persistence", "state version"),
    "save": ("persistence", "run"),
    "restore": ("persistence", "reference like engine"),
}
CALLED = {
    "rng_streams": [],
    "evaluators": [],
    "schedule": [],
    "loss_terms": {},
    "step_metrics": {},
    "plugin_state": None,
    "host_state": 0,
}
"""Those that a run on one device calls for sure, and what they answer."""


def plugin_of_the_first_hooks(called: set[str]) -> Any:
    """A plugin that implements every hook of 0.1 that needs no answer, with all of its arguments."""

    def implementation(name: str, arguments: list[str]) -> Any:
        def implement(self: Any, *given: Any) -> Any:
            called.add(name)
            if name in ("transform_batch", "after_update"):
                return given[0] if name == "transform_batch" else given[:2]
            return CALLED.get(name)

        names = ["self", *arguments]
        space: dict[str, Any] = {"implement": implement}
        exec(f"def {name}({', '.join(names)}): return implement({', '.join(names)})", space)
        return fg.hookimpl(space[name])

    exclusive = {"save", "restore", "durable"}
    members = {name: implementation(name, text.split()) for name, (_, text) in FIRST.items() if name not in exclusive}
    return type("OfTheFirstHooks", (), members)()


def test_every_hook_of_the_first_version_is_there_with_its_kind_and_arguments() -> None:
    for name, (kind, arguments) in FIRST.items():
        hook = getattr(hooks, name)
        assert hook.fulgurite_kind == kind, name
        assert set(arguments.split()) <= set(inspect.signature(hook).parameters), name


def test_a_plugin_of_the_first_hooks_takes_part_in_a_run() -> None:
    called: set[str] = set()
    engine = fg.Engine(steps=4, log_every=2, plugins=[plugin_of_the_first_hooks(called)], autoload=False)
    result = engine.fit(Linear, regression())
    assert (int(result.state.step), result.failed) == (4, {})
    events = {"on_fit_start", "on_epoch_end", "on_compile", "on_fit_end", "open_log", "log_scalars", "close_log"}
    assert called >= events | (CALLED.keys() - {"host_state"}) | {"transform_batch", "after_update"}


def test_who_implements_a_deprecated_hook_is_told_since_when_and_what_to_do() -> None:
    class Specifications:
        @fg.hookspec("event", deprecated="since 0.3: implement on_fit_end")
        def on_the_end(self, run: fg.Run) -> None:
            """As it was called once."""

    class Old:
        hookspecs = Specifications

        @fg.hookimpl
        def on_the_end(self, run: fg.Run) -> None: ...

    with pytest.warns(DeprecationWarning, match="hook on_the_end is deprecated since 0.3: implement on_fit_end"):
        fg.Engine(plugins=[Old()], autoload=False)
