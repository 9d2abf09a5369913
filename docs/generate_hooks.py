"""Writes `hooks.md`, the reference of all hooks, from their specifications.

python docs/generate_hooks.py
"""

import ast
import inspect
from pathlib import Path

from fulgurite import hookspecs
from fulgurite.plugins.manager import PluginManager

PAGE = Path(__file__).with_name("hooks.md")
EXAMPLES = Path(__file__).with_name("hook_examples.py")

INTRODUCTION = """\
# Hooks

<!-- Written by docs/generate_hooks.py from the specifications in fulgurite.hookspecs: change them there. -->

A plugin is an object whose methods carry `@fg.hookimpl` and have the names of hooks. A method takes the arguments that
it needs, by name, and may leave out the others. Hooks are called in the order of the plugins: as listed, unless
`after`, `before` or `requires` says otherwise. A hook that no plugin implements costs nothing.
[Writing a plugin](writing-a-plugin.md) shows hooks at work.
"""

KINDS = {
    "build": "Asked before anything is compiled.",
    "traced": "Pure functions that become part of the compiled step. They run while it is traced, perhaps several "
    "times, and cost nothing else afterwards. `ctx` gives each plugin random keys of its own.",
    "event": "Called on the host, between steps. An exception ends the run, after `on_exception` of every plugin.",
    "sink": "Receive the records of a run, in step order. If a sink raises, there is one notice, it gets no more "
    "records, and it is listed in `result.failures`; it ends the run only if it has `required = True`.",
    "persistence": "Save and restore a run.",
}

MADE = "When the engine is made."
BUILT = "When a state for a kind of module and batch is made for the first time; its arrays have no values yet."
TRACED = "Wherever a training step is traced: once for each shape of batch, or more."
EMITTED = "As soon as the record's values are computed, in step order, before the next thing that is due at the latest."
CALLED = {
    "register_rng_streams": MADE,
    "mesh": MADE,
    "state_sharding": BUILT,
    "plugin_state_sharding": BUILT,
    "batch_sharding": "Once for each structure and set of shapes of batches, in training and in evaluation.",
    "make_update_rule": BUILT,
    "wrap_update_rule": BUILT,
    "consensus": MADE,
    "configure_optimizers": BUILT,
    "register_evaluators": MADE,
    "gradient_transform": BUILT,
    "init_plugin_state": "Where a new state is made, under jit.",
    "register_actions": MADE,
    "module_views": "By `engine.view(state, name)`, and by evaluations that ask for such weights.",
    "transform_batch": TRACED,
    "forward_sharding": "Wherever a forward pass is traced.",
    "output_sharding": "Wherever a forward pass is traced.",
    "loss_terms": "Wherever a forward pass is traced, in evaluations too; `ctx.training` says which.",
    "after_update": TRACED,
    "step_metrics": TRACED,
    "on_fit_start": "Once per fit, after `on_restore` and `open_logger`, before the first step.",
    "on_epoch_end": "At the last batch of an epoch, after everything else that is due there except saves.",
    "on_evaluate_end": "After each evaluation during training, once its metrics are computed.",
    "on_compile": "Each time an executable has been made.",
    "on_save": "Before a checkpoint is written, at its step.",
    "on_restore": "Once in a fit that resumes from a checkpoint, before everything else.",
    "on_exception": "Once, when a run ends with an exception, before sinks are closed.",
    "on_fit_end": "Once, when a run ends without an exception, after sinks are closed.",
    "open_logger": "Once per fit, before the first record.",
    "log_scalars": EMITTED,
    "log_media": EMITTED,
    "log_text": EMITTED,
    "log_config": EMITTED,
    "flush_logger": "By the checkpointer, when it saves, after all records up to that step have been passed on.",
    "rewind_logger": "By the checkpointer, in `on_restore`, before `open_logger`.",
    "close_logger": "Once per fit, after the last record.",
    "get_host_state": "Whenever a snapshot is taken, as the checkpointer does to save.",
    "set_host_state": "In a fit that resumes from a checkpoint, before `on_restore`.",
    "save_checkpoint": "By `run.save()`, which the checkpointer schedules, and when a run ends.",
    "restore_checkpoint": "By a fit with `resume=`, and by `init_from=` and `weights=`.",
}

ARGUMENTS = {
    "module": "the module being trained; its arrays are traced: they have shapes and dtypes, but no values",
    "state": "the train state",
    "mesh": "the mesh that the hook `mesh` returned, or None",
    "plugin_state": "this plugin's slice of the train state, as `init_plugin_state` made it",
    "batch": "the batch; `ctx.mask` says which examples count",
    "optimizers": "the optimizers by name; a single one is called `default`",
    "rule": "the rule so far",
    "optimizer": "the name of the optimizer",
    "key": "a random key, this plugin's own",
    "ctx": "the step's `fg.Context`, whose keys and `ctx.plugin_state`, the slice before the step, are this plugin's own",
    "output": "what the module's step returned, with all loss terms",
    "grads": "the gradients, as the optimizer received them",
    "updates": "what the optimizer returned",
    "run": "a view of the run, valid during the call",
    "epoch": "its number in this fit, from 0",
    "name": "the name of the evaluation, or of the executable",
    "metrics": "by name, as Python numbers or NumPy arrays",
    "batch_spec": "the batch that it was made for, as shapes",
    "compiled": "the JAX executable",
    "step": "the number of completed updates",
    "exception": "what ends the run",
    "result": "what the fit returns",
    "record": "the record; it must not be changed",
    "position": "the result of `flush_logger`, read from a checkpoint",
    "version": "the `state_version` of the plugin that wrote it",
    "reference": "which checkpoint, and which part of it",
    "template": "a state of shapes, with the shardings that its arrays should get",
    "engine": "the engine that asks for it",
}
OTHERWISE = {
    ("set_host_state", "state"): "the value of `get_host_state`, read from a checkpoint",
    ("state_sharding", "state"): "the train state, as shapes",
    ("batch_sharding", "batch"): "the batch, as shapes",
    ("step_metrics", "state"): "the train state after the update",
    ("after_update", "module"): "the module after its update, as the plugins before left it",
}

EXCLUSIVE = "One answer: two are an error that names both plugins."
SEVERAL = {
    "register_rng_streams": "Merged by name over the core's; two plugins with one name are an error.",
    "mesh": EXCLUSIVE,
    "state_sharding": EXCLUSIVE,
    "plugin_state_sharding": "Each plugin for its own slice.",
    "batch_sharding": EXCLUSIVE,
    "make_update_rule": EXCLUSIVE,
    "wrap_update_rule": "Folded: each gets the rule that the one before it returned.",
    "consensus": EXCLUSIVE,
    "configure_optimizers": EXCLUSIVE,
    "register_evaluators": "Concatenated; a name twice is an error.",
    "gradient_transform": "Chained in order, before the optimizer.",
    "init_plugin_state": "One slice for each plugin.",
    "register_actions": "All of them, by phase (`evaluate`, `decide`, `log`, `act`, `save`), then by `after` and `before`, "
    "then by plugin.",
    "module_views": "Merged; a name twice is an error.",
    "transform_batch": "Folded: each gets what the one before it returned.",
    "forward_sharding": EXCLUSIVE,
    "output_sharding": EXCLUSIVE,
    "loss_terms": "Merged; a name twice is an error.",
    "after_update": "The module is folded; each plugin gets and returns its own slice.",
    "step_metrics": "All of them, each under its plugin's name.",
    "open_logger": "Each sink for itself.",
    "log_scalars": "All.",
    "log_media": "All.",
    "log_text": "All.",
    "log_config": "All.",
    "flush_logger": "Each sink for itself.",
    "rewind_logger": "Each sink for itself.",
    "close_logger": "Each sink for itself.",
    "get_host_state": "Each plugin for itself.",
    "set_host_state": "Each plugin for itself.",
    "save_checkpoint": "One plugin, the checkpointer: two are an error that names both.",
    "restore_checkpoint": "One plugin, the checkpointer: two are an error that names both.",
}


def page() -> str:
    """The text of the page."""
    kinds = PluginManager(autoload=False).kinds
    functions = [
        node
        for node in ast.parse(inspect.getsource(hookspecs)).body
        if isinstance(node, ast.FunctionDef)
    ]
    parts = [INTRODUCTION]
    for kind, about in KINDS.items():
        parts.append(f"## {kind.capitalize()} hooks\n\n{about}\n")
        parts += [
            _entry(function, kind) for function in functions if kinds.get(function.name) == kind
        ]
    return "\n".join(parts)


def _entry(function: ast.FunctionDef, kind: str) -> str:
    name, given = function.name, function.args.args
    signature = ", ".join(["self", *(f"{one.arg}: {_written(one.annotation)}" for one in given)])
    several = "All of them, in order." if kind == "event" else SEVERAL[name]
    listed = "".join(
        f"- `{one.arg}`: {OTHERWISE.get((name, one.arg)) or ARGUMENTS[one.arg]}\n" for one in given
    )
    return (
        f"### {name}\n\n```python\ndef {name}({signature}) -> {_written(function.returns)}\n```\n\n"
        f"{ast.get_docstring(function)}\n\n{listed}\n"
        f"*Kind:* {kind}. *Called:* {CALLED[name]} *Several plugins:* {several}\n\n"
        f"```python\n{_example(name)}\n```\n"
    ).replace("\n\n\n", "\n\n")


def _example(hook: str) -> str:
    """The first implementation of a hook among the examples, in its class."""
    lines = EXAMPLES.read_text(encoding="utf-8").splitlines()
    for one in ast.parse("\n".join(lines)).body:
        for method in one.body if isinstance(one, ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef) and method.name == hook:
                first = method.decorator_list[0].lineno - 1
                return "\n".join([lines[one.lineno - 1], *lines[first : method.end_lineno]])
    raise LookupError(f"{EXAMPLES.name} has no example of {hook}")


def _written(annotation: ast.expr | None) -> str:
    """An annotation as it is read, without the quotes of a forward reference."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return "None" if annotation is None else ast.unparse(annotation)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
