"""What a user installs: wheels of every member in a fresh environment, and plugins that are not of
this workspace."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
WORKSPACE = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]
MEMBERS = [
    path.parent
    for pattern in WORKSPACE["members"]
    for path in sorted(ROOT.glob(f"{pattern}/pyproject.toml"))
]
DEPENDENCIES = {"equinox", "jax", "jaxtyping", "numpy", "optax", "pluggy"}

PROGRAM = """
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fulgurite as fg


class Line(fg.Module):
    layer: eqx.nn.Linear

    def __init__(self, *, key):
        self.layer = eqx.nn.Linear(3, 1, key=key)

    def training_step(self, batch, ctx):
        return fg.Output(jnp.mean((jax.vmap(self.layer)(batch["x"]) - batch["y"]) ** 2))

    def configure_optimizers(self):
        return optax.sgd(0.1)


class Scribe:
    @fg.hookimpl
    def on_fit_start(self, run):
        print("scribe")


def fit(plugins, steps=300, **options):
    x = np.random.default_rng(0).normal(size=(256, 3)).astype(np.float32)
    y = x @ np.float32([[1], [-2], [3]]) + np.float32(0.5)
    engine = fg.Engine(steps=steps, seed=0, plugins=plugins, **options)
    return engine.fit(Line, fg.ArrayData({"x": x, "y": y}, batch_size=32, shuffle=True))


def train(plugins):
    layer = fit(plugins).module.layer
    print(fg.__file__)
    print(*(round(float(value), 3) for value in [*layer.weight[0], *layer.bias]))
"""
TRAINED = "1.0 -2.0 3.0 0.5"

OUTSIDER = {
    "pyproject.toml": """
[project]
name = "outsider-dist"
version = "0.3"
dependencies = ["fulgurite"]

[project.entry-points."fulgurite.plugins"]
outsider = "outsider:Outsider"

[project.entry-points."fulgurite.autoload"]
outsider = "outsider:Outsider"

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
include = ["outsider.py"]
""",
    "outsider.py": """
from dataclasses import dataclass

import fulgurite as fg


@dataclass(frozen=True)
class Outsider:
    fail: bool = False
    after = ("scribe",)

    @fg.hookimpl
    def on_fit_start(self, run):
        if self.fail:
            raise RuntimeError("out of ink")
        print("outsider")
""",
}


@pytest.mark.slow
def test_core_alone_installs_only_its_dependencies(core_alone: Path):
    installed = {
        str(canonicalize_name(distribution.name)): distribution
        for distribution in distributions(path=[site_packages(core_alone)])
    }
    needed, todo = set(), ["fulgurite"]
    while todo:
        name = todo.pop()
        needed.add(name)
        todo += [
            requirement
            for requirement in required_by(installed[name].requires or [])
            if requirement not in needed
        ]
    assert required_by(installed["fulgurite"].requires or []) == DEPENDENCIES
    assert set(installed) - {"pip"} == needed


@pytest.mark.slow
def test_core_alone_trains(core_alone: Path):
    where, trained = run(core_alone, "train([])").stdout.splitlines()
    assert Path(where).is_relative_to(core_alone)
    assert trained == TRAINED


@pytest.mark.full
def test_extra_train_runs_the_example_and_lives_without_one_of_its_plugins(
    wheels: Path, tmp_path: Path
):
    """As from an index: pip's name and extra, and a folder where the distributions are."""
    folder = tmp_path / "environment"
    uv("venv", "--python", sys.executable, folder)
    options = ["--no-compile-bytecode", "--python", python(folder)]
    (core,) = wheels.glob("fulgurite-*.whl")
    uv("pip", "install", *options, "--find-links", wheels, f"{core}[train]", "scikit-learn")

    example = tmp_path / "digits.py"
    example.write_text((ROOT / "examples" / "digits.py").read_text())
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FULGURITE_", "PYTHON"))}

    def train(run_dir: str) -> str:
        done = subprocess.run(
            [python(folder), example, "steps=2", "--run", tmp_path / run_dir],
            env=inherited,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    assert "step 2/2" in train("with")
    assert list((tmp_path / "with" / "checkpoints").iterdir())

    uv("pip", "uninstall", "--python", python(folder), "fulgurite-progress")
    assert "step 2/2" not in train("without")
    records = [(tmp_path / name / "records.jsonl").read_text() for name in ("with", "without")]
    assert records[0] == records[1] != ""


def test_all_members_train_together(everything: Path):
    projects = [
        tomllib.loads((member / "pyproject.toml").read_text())["project"]["name"]
        for member in MEMBERS
    ]
    names = [canonicalize_name(project).replace("-", "_") for project in projects]
    files = run(
        everything, "".join(f"\nimport {name}; print({name}.__file__)" for name in names)
    ).stdout.splitlines()
    assert len(files) == len(MEMBERS) and all(
        Path(file).is_relative_to(everything) for file in files
    )
    assert run(everything, "train(['rng'])").stdout.splitlines()[-1] == TRAINED


def test_outside_plugin_is_found_by_name(everything: Path):
    assert (
        run(everything, "fit(['outsider'], 1)", {"FULGURITE_AUTOLOAD": "0"}).stdout == "outsider\n"
    )


def test_outside_plugin_is_ordered(everything: Path):
    assert run(everything, "fit(['outsider', Scribe()], 1)").stdout == "scribe\noutsider\n"


def test_outside_plugin_is_named_in_its_errors(everything: Path):
    failed = run(everything, "fit([{'outsider': {'fail': True}}], 1)", check=False)
    assert failed.returncode == 1
    assert "RuntimeError: out of ink" in failed.stderr
    assert "plugin 'outsider' (outsider-dist 0.3), hook on_fit_start" in failed.stderr


def test_outside_plugin_is_autoloaded(everything: Path):
    assert run(everything, "fit([], 1)").stdout == "outsider\n"


@pytest.mark.parametrize(
    ("call", "variables"),
    [
        ("fit(['-outsider'], 1)", {}),
        pytest.param("fit([], 1, autoload=False)", {}, marks=pytest.mark.slow),
        pytest.param("fit([], 1)", {"FULGURITE_PLUGINS": "-outsider"}, marks=pytest.mark.slow),
        pytest.param("fit([], 1)", {"FULGURITE_AUTOLOAD": "0"}, marks=pytest.mark.slow),
        pytest.param("fit([], 1)", {"FULGURITE_AUTOLOAD": "rng"}, marks=pytest.mark.slow),
    ],
)
def test_autoloaded_outside_plugin_can_be_disabled(
    everything: Path, call: str, variables: dict[str, str]
):
    assert run(everything, call, variables).stdout == ""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of every member and of a plugin that is not one."""
    folder = tmp_path_factory.mktemp("wheels")
    outsider = tmp_path_factory.mktemp("outsider")
    for name, text in OUTSIDER.items():
        (outsider / name).write_text(text)
    for sources in (["--all-packages", ROOT], [outsider]):
        uv("build", "--wheel", "--out-dir", folder, *sources)
    assert len(list(folder.glob("*.whl"))) == len(MEMBERS) + 1
    return folder


@pytest.fixture(scope="module")
def core_alone(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the core's wheel."""
    return environment(tmp_path_factory.mktemp("core_alone"), *wheels.glob("fulgurite-*.whl"))


@pytest.fixture(scope="module")
def everything(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with every wheel."""
    return environment(tmp_path_factory.mktemp("everything"), *wheels.glob("*.whl"))


def environment(folder: Path, *packages: Path) -> Path:
    """With pip, which installs the wheels themselves; what they need comes from uv's cache."""
    uv("venv", "--allow-existing", "--python", sys.executable, folder)
    uv("pip", "install", "--no-compile-bytecode", "--python", python(folder), "pip", *packages)
    pip = [python(folder), "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall"]
    subprocess.run([*pip, *map(str, packages)], check=True)
    return folder


def uv(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "uv", "--quiet", *map(str, arguments)], check=True)


def run(
    folder: Path, call: str, variables: dict[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """`call` after PROGRAM, with the environment's Python and nothing of this checkout."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FULGURITE_", "PYTHON"))}
    done = subprocess.run(
        [python(folder), "-c", PROGRAM + call],
        env=inherited | (variables or {}),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def python(folder: Path) -> str:
    return str(folder / "bin" / "python")


def site_packages(folder: Path) -> str:
    return str(next(folder.glob("lib/python*/site-packages")))


def required_by(requirements: list[str]) -> set[str]:
    """The names of those requirements that hold here without extras; these environments have this
    Python."""
    parsed_requirements = [Requirement(text) for text in requirements]
    return {
        canonicalize_name(requirement.name)
        for requirement in parsed_requirements
        if not requirement.marker or requirement.marker.evaluate({"extra": ""})
    }
