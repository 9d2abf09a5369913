"""Every public class has a short example in its docstring, and it runs."""

import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

ROOT = Path(__file__).parents[2]
MODULES = [
    "fulgurite",
    "fulgurite.metrics",
    "fulgurite.plugins",
    "fulgurite_logging.media",
    # Its package imports the public names from this module when the first one is used.
    "fulgurite_testing.api",
    *sorted(path.parent.name for path in ROOT.glob("plugins/*/src/*/__init__.py")),
]
EXAMPLE = re.compile(r"^Example:\n((?:\n| +.*(?:\n|\Z))+)", re.MULTILINE)


class Net(fg.Module):
    """The module of the examples: one linear layer."""

    linear: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        self.linear = eqx.nn.Linear(2, 1, key=key)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        preds = jax.vmap(self.linear)(batch["x"])[:, 0]
        return fg.Output(jnp.mean((preds - batch["y"]) ** 2), preds=preds)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def list_public_objects() -> dict[str, Any]:
    """Return the public classes and functions of the core and the plugins by the name that users
    import. Errors need no example and are left out."""
    names: dict[Any, str] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", dir(module)):
            value = getattr(module, name)
            is_error = inspect.isclass(value) and issubclass(value, Exception)
            is_public = not name.startswith("_") and not is_error
            if is_public and (inspect.isclass(value) or inspect.isfunction(value)):
                if value.__module__.startswith("fulgurite"):
                    names.setdefault(value, f"{module_name}.{name}")
    return {name: value for value, name in names.items()}


def find_example(value: Any) -> str | None:
    """Return the code of the section `Example:` of a docstring, or None without one."""
    # Not inspect.getdoc, which would return the docstring of a base class.
    docstring = inspect.cleandoc(value.__doc__ or "")
    match = EXAMPLE.search(docstring)
    return textwrap.dedent(match[1]) if match else None


def make_namespace() -> dict[str, Any]:
    """Return what the examples use without saying where it comes from."""
    return {
        "__name__": __name__,
        "eqx": eqx,
        "fg": fg,
        "jax": jax,
        "jnp": jnp,
        "np": np,
        "optax": optax,
        "Net": Net,
        "model": Net(jax.random.key(0)),
        "data": fg.ArrayData({"x": np.ones((8, 2), np.float32), "y": np.ones(8, np.float32)}, 4),
        "engine": fg.Engine(steps=2, log_every=1),
        "logits": jnp.array([[2.0, 0.5, 0.1], [0.3, 1.0, 0.2], [0.0, 0.1, 3.0], [1.0, 0.0, 0.0]]),
        "labels": jnp.array([0, 1, 2, 2]),
        "preds": jnp.array([0.1, 0.8, 0.6, 0.3]),
        "targets": jnp.array([0.0, 1.0, 1.0, 0.0]),
        "mask": jnp.array([True, True, True, False]),
    }


OBJECTS = list_public_objects()
EXAMPLES = {name: find_example(value) for name, value in OBJECTS.items()}


def test_public_classes_have_an_example() -> None:
    classes = {name for name in OBJECTS if inspect.isclass(OBJECTS[name])}
    missing = {name for name in classes if EXAMPLES[name] is None}
    assert not missing, "give their docstrings a section `Example:`"


LOADERS = {"datasets", "tensorflow", "torch"}
"""What CONTRIBUTING.md shows how to install, for the tests of adapters."""


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in EXAMPLES if EXAMPLES[name] is not None])
def test_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = EXAMPLES[name]
    assert example is not None
    monkeypatch.chdir(tmp_path)
    try:
        exec(compile(example, f"<example of {name}>", "exec"), make_namespace())
    except ModuleNotFoundError as error:
        if error.name not in LOADERS:
            raise
        pytest.skip(f"{error.name} is not installed: the example was not run")


def test_docstrings_hold_no_fenced_code() -> None:
    """The API page makes code blocks of the sections `Example:`."""
    files = [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    fenced = [str(file) for file in files if "```python" in file.read_text(encoding="utf-8")]
    assert not fenced
