"""What an engine will do, in words: which plugins in which order and why, who implements which
hook, and what is due when."""

import argparse
from collections.abc import Iterator
from itertools import islice

from fulgurite import Engine, EvenlySpaced, EveryEpoch, EverySeconds, StepRange, Trigger
from fulgurite.errors import ConfigurationError, PluginError, ProcessError
from fulgurite.plugins import (
    BoundAction,
    Combine,
    Or,
    RegisteredPlugin,
    as_printable,
    find_hookspecs,
    hookspecs,
)
from fulgurite_runs import describe_program, format_program

EXCLUSIVE_HOOKS = [
    hook
    for hook, metadata in find_hookspecs(hookspecs).items()
    if metadata.combine is Combine.EXCLUSIVE
]
"""The hooks that only one plugin may answer."""
_MAX_STEPS = 6
"""The largest number of steps that are listed for a trigger."""


def run_explain(arguments: list[str]) -> int:
    """Show what the engine of a program will do, and why."""
    parser = argparse.ArgumentParser(
        "fulgurite explain", description="Show what the engine of a program will do, and why."
    )
    parser.add_argument(
        "program", metavar="PROGRAM", help="a Python file that defines `experiment`"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # without, they count as required
        metavar="name=value",
        help="arguments of the experiment",
    )
    parser.add_argument("--run", metavar="DIR", help="the run directory, where plugins write")
    options = parser.parse_intermixed_args(arguments)
    from fulgurite_cli.compilation_cache import choose_compilation_cache
    from fulgurite_cli.experiment import build_experiment
    from fulgurite_cli.fit import load_experiment
    from fulgurite_cli.mistakes import format_mistake
    from fulgurite_cli.options import print_to_pipe

    try:
        experiment = load_experiment(options.program)
        built = build_experiment(experiment, options.overrides, run_dir=options.run)
    except (ConfigurationError, PluginError, ProcessError) as error:
        parser.exit(2, format_mistake(error))
    if options.run is not None:
        built.engine.run_dir = options.run
    cache = f"compilation cache: {choose_compilation_cache().description}"
    print_to_pipe(as_printable(f"{explain(built.engine)}\n\n{cache}"))
    return 0


def explain(engine: Engine) -> str:
    """Return what an engine will do, and why: the order of plugins and hooks, who implements the
    hooks of one plugin alone, and what is due when.

    Example:
        from fulgurite_cli import explain

        print(explain(fg.Engine(steps=100)))
    """
    sections = {
        "plugins, in the order in which they are called": _list_plugins(engine),
        "hooks, and who implements them in which order": _list_hooks(engine),
        "exclusive hooks, each of one plugin": _list_exclusive_hooks(engine),
        "what is due, in the order in which it runs at one step": _list_actions(engine),
    }
    program = f"program: {format_program(describe_program(engine.program_file))}"
    lines = [_format_settings(engine), program]
    for title, rows in sections.items():
        lines += ["", title, *(rows or ["  none"])]
    return "\n".join(lines)


def _format_settings(engine: Engine) -> str:
    length = (
        f"{engine.epochs} epochs" if engine.epochs else f"{engine.steps or 'no number of'} steps"
    )
    run_dir = "" if engine.run_dir is None else f", run directory {engine.run_dir}"
    dispatch = "as many steps in a dispatch as fit chooses"
    if engine.steps_per_execution != "auto":
        dispatch = f"up to {engine.steps_per_execution} steps in a dispatch"
    return f"{length}, seed {engine.seed}, {dispatch}{run_dir}"


def _list_plugins(engine: Engine) -> list[str]:
    plugins = list(engine.plugins.plugins.values())
    return [_format_row(plugin.name, _format_plugin(plugin, plugins)) for plugin in plugins]


def _list_hooks(engine: Engine) -> list[str]:
    rows = []
    for name, hook in engine.plugins.hooks.items():
        names = [plugin.name for plugin in hook.plugins]
        if names and name not in EXCLUSIVE_HOOKS:
            rows.append(_format_row(name, f"{hook.metadata.kind:12} {', '.join(names)}"))
    return rows


def _list_exclusive_hooks(engine: Engine) -> list[str]:
    rows = []
    for hook in EXCLUSIVE_HOOKS:
        names = [plugin.name for plugin in engine.plugins.hooks[hook].plugins]
        rows.append(_format_row(hook, ", ".join(names) or "no plugin"))
    return rows


def _list_actions(engine: Engine) -> list[str]:
    return [
        _format_row(action.scheduled.stage, f"{action.name:24} {_format_trigger(action, engine)}")
        for action in engine.actions
        # The engine's own actions that call a hook are listed as that hook.
        if not action.is_engine_action or action.closes_window
    ]


def _format_row(name: str, text: str) -> str:
    return f"  {name:20} {text}"


def _format_plugin(plugin: RegisteredPlugin, plugins: list[RegisteredPlugin]) -> str:
    """Return where a plugin comes from, why it is active, and which of the other plugins it
    requires, follows or precedes."""
    others = set().union(*(other.aliases for other in plugins if other is not plugin))
    relations = []
    for key in ("requires", "after", "before"):
        names = [name for name in plugin.order.get(key, ()) if name in others]
        if names:
            relations.append(f"{key} {', '.join(names)}")
    order = "; ".join(relations) or "in the order given"
    return f"{plugin.distribution:32} {plugin.activation:10} {order}"


def _format_trigger(action: BoundAction, engine: Engine) -> str:
    """Return a trigger with the steps at which it fires, as far as they are known before the data
    is seen."""
    trigger = action.trigger
    step_range = StepRange(0, engine.steps)
    parts = trigger.parts if isinstance(trigger, Or) else (trigger,)
    known = [
        part for part in parts if step_range.stop is not None or not isinstance(part, EvenlySpaced)
    ]
    steps = list(islice(_iter_steps(Or(known), step_range), _MAX_STEPS + 1)) if known else []
    times = [str(step) for step in steps[:_MAX_STEPS]]
    if len(steps) > _MAX_STEPS:
        times.append("…")
    if any(isinstance(part, EverySeconds) for part in parts):
        times.append("by the clock")
    if any(isinstance(part, EveryEpoch) for part in parts):
        times.append("where epochs end")
    return f"{trigger!r}: {', '.join(times) or 'not known before the end is'}"


def _iter_steps(trigger: Trigger, step_range: StepRange) -> Iterator[int]:
    step = trigger.next(-1, step_range)
    while step is not None:
        yield step
        step = trigger.next(step, step_range)
