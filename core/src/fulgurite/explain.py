"""What an engine will do, in words: which plugins in which order and why, who answers what, and
what is due when."""

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from fulgurite.fit.scheduler import BoundAction
from fulgurite.plugins.manager import RegisteredPlugin
from fulgurite.triggers import EvenlySpaced, EveryEpoch, EverySeconds, Or, StepRange, Trigger

if TYPE_CHECKING:
    from fulgurite.engine import Engine

SLOTS = (
    *("mesh", "state_sharding", "batch_sharding", "forward_sharding", "output_sharding"),
    *(
        "make_update_rule",
        "configure_optimizers",
        "consensus",
        "save_checkpoint",
        "restore_checkpoint",
    ),
)
"""The hooks that one plugin alone answers."""
_SHOWN = 6


def explain_engine(engine: "Engine") -> str:
    """The text of `Engine.explain`."""
    length = (
        f"{engine.epochs} epochs" if engine.epochs else f"{engine.steps or 'no number of'} steps"
    )
    run = "" if engine.run_dir is None else f", run directory {engine.run_dir}"
    plugins = list(engine.plugins.plugins.values())
    parts = {
        "plugins, in the order in which they are called": [
            _row(one.name, _why(one, plugins)) for one in plugins
        ],
        "hooks, and who implements them in which order": [
            _row(hook, f"{metadata.kind:12} {', '.join(one.plugin.name for one in found)}")
            for hook, metadata in engine.plugins.hooks.items()
            if hook not in SLOTS and (found := engine.plugins.implementations(hook))
        ],
        "slots, each with one owner": [
            _row(
                hook,
                ", ".join(one.plugin.name for one in engine.plugins.implementations(hook))
                or "no plugin",
            )
            for hook in SLOTS
        ],
        "what is due, in the order in which it runs at one step": [
            _row(task.scheduled.stage, f"{task.name:24} {_times(task, engine)}")
            for task in engine.actions
        ],
    }
    lines = [
        f"{length}, seed {engine.seed}, up to {engine.steps_per_execution} steps in a dispatch{run}"
    ]
    for title, rows in parts.items():
        lines += ["", title, *(rows or ["  none"])]
    return "\n".join(lines)


def _row(name: str, rest: str) -> str:
    return f"  {name:20} {rest}"


def _why(plugin: RegisteredPlugin, plugins: list[RegisteredPlugin]) -> str:
    """Where a plugin comes from, why it is active, and what it says of the others that are
    there."""
    there = set().union(*(one.aliases for one in plugins if one is not plugin))
    said = [
        f"{key} {', '.join(names)}"
        for key in ("requires", "after", "before")
        if (names := [name for name in plugin.order.get(key, ()) if name in there])
    ]
    return (
        f"{plugin.distribution:32} {plugin.activation:10} {'; '.join(said) or 'in the order given'}"
    )


def _times(task: BoundAction, engine: "Engine") -> str:
    """A trigger with the steps at which it fires, as far as they are known before the data is
    seen."""
    trigger, span = task.trigger, StepRange(0, engine.steps)
    parts = trigger.parts if isinstance(trigger, Or) else (trigger,)
    known = [part for part in parts if span.stop is not None or not isinstance(part, EvenlySpaced)]
    steps = list(islice(_steps(Or(known), span), _SHOWN + 1)) if known else []
    shown = [*map(str, steps[:_SHOWN]), *["…"] * (len(steps) > _SHOWN)]
    shown += ["by the clock"] * any(isinstance(part, EverySeconds) for part in parts)
    shown += ["where epochs end"] * any(isinstance(part, EveryEpoch) for part in parts)
    return f"{trigger!r}: {', '.join(shown) or 'not known before the end is'}"


def _steps(trigger: Trigger, span: StepRange) -> Iterator[int]:
    step = trigger.next(-1, span)
    while step is not None:
        yield step
        step = trigger.next(step, span)
