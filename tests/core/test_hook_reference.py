"""Every hook is specified, tested, documented and shown by an example that runs.

A test says by `@pytest.mark.hook("on_save")` that it tests a hook.
"""

import ast
import importlib.util
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import fulgurite as fg
import numpy as np
import pytest
from fulgurite.plugins import find_hookspecs, hookspecs, leaves_with_paths
from hook_plugins import engine, plugin
from models import Act, Linear, regression

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
HOOKS = find_hookspecs(hookspecs)


def test_every_hook_has_a_test() -> None:
    tested = {hook for path in TESTS.rglob("test_*.py") for hook in iter_tested_hooks(path)}
    untested = sorted(HOOKS.keys() - tested)
    assert not untested, "mark the test of each by @pytest.mark.hook"
    unknown = sorted(tested - HOOKS.keys())
    assert not unknown, "a test is marked with what is not a hook"


def iter_tested_hooks(path: Path) -> Iterator[str]:
    """Yield the hooks that the marks of a file's tests name."""
    source = path.read_text(encoding="utf-8")
    if "pytest.mark.hook(" not in source:
        return
    for function in ast.parse(source).body:
        if not isinstance(function, ast.FunctionDef) or not function.name.startswith("test_"):
            continue
        for mark in function.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.hook":
                yield from map(ast.literal_eval, mark.args)


def test_every_hook_has_a_docstring() -> None:
    silent = [hook for hook in HOOKS if not (getattr(hookspecs, hook).__doc__ or "").strip()]
    assert not silent


def test_the_reference_is_up_to_date() -> None:
    """It shows an example of each hook, so that a hook without one is an error."""
    written = (DOCS / "hooks.md").read_text(encoding="utf-8")
    assert written == load("generate_hooks").page(), "run python docs/generate_hooks.py"
    for hook in HOOKS:
        assert f"\n### {hook}\n\n```python\ndef {hook}(self" in written


@pytest.mark.full
def test_every_hook_has_an_example_that_runs(tmp_path: Path) -> None:
    shown = load("hook_examples")
    called: set[str] = set()
    for example in iter_plugin_classes(shown):
        note_calls(example, called)
    data = regression()
    media = plugin(
        "shows",
        on_fit_start=lambda self, run: (run.log_media("shows", {}), run.log_config("shows", {})),
    )
    arguments = {shown.Patience: (data, 5)}
    logger, saver = shown.Lines(tmp_path / "lines.txt"), shown.InMemory()
    examples = [
        example(*arguments.get(example, ()))
        for example in iter_plugin_classes(shown)
        if example not in (shown.Lines, shown.InMemory)
    ]
    plugins = [*examples, media]

    def failing(run: fg.Run) -> None:
        raise RuntimeError("on purpose")

    replacing = Act(3, lambda run: fg.ReplaceState(run.state), instance="replacing")

    engine(*plugins, logger, saver, steps=10, log_every=5).fit(Linear, data)
    trainer = engine(*plugins, logger, saver, steps=20, log_every=5)
    result = trainer.fit(Linear, data, resume="latest")
    trainer.evaluate(trainer.get_module_view(result.state, "averaged"), data)
    arrays = {path: leaf for path, leaf in leaves_with_paths(result.module)}
    np.savez(tmp_path / "weights.npz", **arrays)
    trainer.evaluate(Linear, data, weights=tmp_path / "weights.npz")
    # Only an update rule that accumulates gradients calls it, and the core has none.
    averages = result.state.plugin_states["averaged"]
    shown.Averaged().after_finalize(result.state.module, averages)
    with pytest.raises(RuntimeError, match="on purpose"):
        engine(*plugins, replacing, Act(5, failing), steps=10).fit(Linear, data)
    assert sorted(HOOKS.keys() - called) == []
    assert result.failures == {}
    steps = [
        line.split()[0]
        for line in (tmp_path / "lines.txt").read_text().splitlines()
        if "train" in line
    ]
    assert steps == ["5", "10", "15", "20"]


def iter_plugin_classes(module: ModuleType) -> Iterator[type]:
    """Yield the classes of a module that implement a hook."""
    for value in vars(module).values():
        if isinstance(value, type) and HOOKS.keys() & vars(value).keys():
            yield value


def note_calls(example: type, called: set[str]) -> None:
    """Have the methods of a plugin note their names where they are called.

    Args:
        example: the class of the plugin, which is changed.
        called: to which the names are added.
    """

    def make_noting(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(method.__name__)
            return method(*args, **kwargs)

        return call

    for name in HOOKS.keys() & vars(example).keys():
        setattr(example, name, make_noting(vars(example)[name]))


def load(name: str) -> ModuleType:
    """Import a file of the documentation."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
