"""Writes `hooks.md`, the reference of all hooks, from their specifications.

python docs/generate_hooks.py
"""

import ast
import inspect
from pathlib import Path

from fulgurite import hooks
from fulgurite.plugins import PluginManager

PAGE = Path(__file__).with_name("hooks.md")

INTRODUCTION = """\
# Hooks

<!-- Written by docs/generate_hooks.py from the specifications in fulgurite.hooks: change them there. -->

A plugin is an object whose methods carry `@fg.hookimpl` and are called like a hook. A method takes the arguments that
it needs, by name, and may leave out the others. Hooks are called in the order of the plugins: as registered, unless
`after`, `before` or `requires` says otherwise. A hook that nobody implements costs nothing.
"""

KINDS = {
    "build": "Asked before anything is compiled.",
    "traced": "Pure functions that become part of the compiled step. They run while it is traced, perhaps several "
    "times, and cost nothing else afterwards. `ctx` gives each plugin random keys of its own.",
    "event": "Called on the host, between steps. An exception ends the run after `on_exception` was called for all.",
    "sink": "Given the records of a run, in step order. A sink that raises is told once, gets no more records, and is "
    "named in `result.failed`; it ends the run only if it has `required = True`.",
    "persistence": "Save and restore a run.",
}

EXCLUSIVE = "One answer: two are an error that names both plugins."
SEVERAL = {
    "rng_streams": "Merged by name over the core's; two plugins with one name are an error.",
    "mesh": EXCLUSIVE,
    "state_sharding": EXCLUSIVE,
    "slice_sharding": "Each plugin for its own slice.",
    "batch_sharding": EXCLUSIVE,
    "update_rule": EXCLUSIVE,
    "wrap_update_rule": "Folded: each gets the rule that the one before it returned.",
    "consensus": EXCLUSIVE,
    "optimizers": EXCLUSIVE,
    "evaluators": "Concatenated; a name twice is an error.",
    "gradient_transform": "Chained in order, before the optimizer.",
    "plugin_state": "One slice for each plugin.",
    "schedule": "All of them, by phase (`evaluate`, `decide`, `log`, `act`, `save`), then by `after` and `before`, "
    "then by plugin.",
    "module_views": "Merged; a name twice is an error.",
    "transform_batch": "Folded: each gets what the one before it returned.",
    "forward_sharding": EXCLUSIVE,
    "output_sharding": EXCLUSIVE,
    "loss_terms": "Merged; a name twice is an error.",
    "after_update": "The module is folded; each plugin gets and returns its own slice.",
    "step_metrics": "All of them, each under its plugin's name.",
    "open_log": "Each sink for itself.",
    "log_scalars": "All.",
    "log_media": "All.",
    "log_text": "All.",
    "log_config": "All.",
    "durable": "Each sink for itself.",
    "rewind": "Each sink for itself.",
    "close_log": "Each sink for itself.",
    "host_state": "Each plugin for itself.",
    "restore_host_state": "Each plugin for itself.",
    "save": "One plugin, the checkpointer: two are an error that names both.",
    "restore": "One plugin, the checkpointer: two are an error that names both.",
}


def page() -> str:
    """The text of the page."""
    kinds = PluginManager(autoload=False).kinds
    functions = [node for node in ast.parse(inspect.getsource(hooks)).body if isinstance(node, ast.FunctionDef)]
    parts = [INTRODUCTION]
    for kind, about in KINDS.items():
        parts.append(f"## {kind.capitalize()} hooks\n\n{about}\n")
        parts += [_entry(function, kind) for function in functions if kinds.get(function.name) == kind]
    return "\n".join(parts)


def _entry(function: ast.FunctionDef, kind: str) -> str:
    arguments = [f"{one.arg}: {_written(one.annotation)}" for one in function.args.args]
    signature = f"def {function.name}({', '.join(['self', *arguments])}) -> {_written(function.returns)}"
    several = "All of them, in order." if kind == "event" else SEVERAL[function.name]
    return (
        f"### {function.name}\n\n```python\n{signature}\n```\n\n{ast.get_docstring(function)}\n\n"
        f"*Several plugins:* {several}\n"
    )


def _written(annotation: ast.expr | None) -> str:
    """An annotation as it is read, without the quotes of a forward reference."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return "None" if annotation is None else ast.unparse(annotation)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
