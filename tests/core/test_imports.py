"""The core imports only its dependencies, and nothing heavy."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "fulgurite"
CORE_MAY_IMPORT = {
    "equinox",
    "fulgurite",
    "jax",
    "jaxtyping",
    "numpy",
    "optax",
    "pluggy",
    # The extra `history`, imported where a history becomes a table or a picture.
    "matplotlib",
    "pandas",
} | sys.stdlib_module_names
HEAVY = [
    "grain",
    "matplotlib",
    "orbax",
    "pandas",
    "rich",
    "sklearn",
    "tensorboard",
    "tensorflow",
    "torch",
    "wandb",
]


def test_the_core_imports_only_its_dependencies():
    strangers = {
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, line, name in imports_under(CORE)
        if name not in CORE_MAY_IMPORT
    }
    assert not strangers


@pytest.mark.full
def test_importing_the_core_imports_nothing_heavy():
    program = "import sys, fulgurite; print(*{name.partition('.')[0] for name in sys.modules})"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "fulgurite" in run.stdout.split()
    assert not set(run.stdout.split()) & set(HEAVY)


def test_importing_the_core_does_not_import_the_face_of_plugin_authors():
    program = "import sys, fulgurite; sys.exit('fulgurite.plugins' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_form_of_import_is_seen(tmp_path: Path):
    (tmp_path / "module.py").write_text(
        "import os.path, fulgurite_a.inner as a\n"
        "from fulgurite_b import thing\n"
        "def f():\n    from fulgurite_c.inner import thing\n"
        "try:\n    import fulgurite_d\nexcept ImportError:\n    pass\n"
    )
    assert {name for _, _, name in imports_under(tmp_path)} == {
        "os",
        "fulgurite_a",
        "fulgurite_b",
        "fulgurite_c",
        "fulgurite_d",
    }


def imports_under(folder: Path) -> Iterator[tuple[Path, int, str]]:
    """Every file, line and top-level package of an import, inside functions too."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield path, node.lineno, alias.name.partition(".")[0]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno}: a relative import; write it out"
                yield path, node.lineno, (node.module or "").partition(".")[0]


@pytest.mark.full
def test_any_module_may_be_imported_first():
    names = [
        f"fulgurite.{path.stem}" for path in sorted(CORE.glob("*.py")) if path.stem != "__init__"
    ]
    program = "\n".join(
        [
            "import importlib, sys, jax, optax, equinox",
            f"for name in {names}:",
            "    for loaded in [one for one in sys.modules if one.split('.')[0] == 'fulgurite']:",
            "        del sys.modules[loaded]",
            "    importlib.import_module(name)",
        ]
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
