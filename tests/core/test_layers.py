"""The layers of the core: a module imports only modules of lower layers, imports for type checkers
included, and does no input or output."""

import ast
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "fulgurite"
PACKAGES = sorted(
    path.parent
    for kind in ("plugins", "contrib")
    for path in ROOT.glob(f"{kind}/*/src/*/__init__.py")
)

FACES = {"", "metrics", "plugins"}
"""What others import beside `errors`, which is layer 0: these only import names, from any layer."""
# Of `fulgurite._src`, from the lowest to the highest. A module imports only what stands in a line
# above its own, or before it in its own line.
LAYERS: Sequence[str] = """
    printable record_names errors face_names identity tracebacks callbacks timing waits foreign_names guards recent
    tree.path_grammar tree.paths tree.select tree.specs tree.typecheck tree.vectors
    threefry rng triggers redact sharding metrics.base metrics.accumulator metrics.columns metrics.weights metrics.basic metrics.conversion metrics.direction data.leaves data.resume_hints data.unread data.ahead data.batch data.seekable data.sources data.prefetch data.readers data.iterator
    plugins.markers plugins.ordering plugins.plugin plugins.selection plugins.usage plugins.answers plugins.implementations plugins.callers plugins.manager plugins.strategy
    model.media model.mode model.layers model.output model.loss model.context model.ambient_rng model.module
    training.compilations training.trace training.host_draws training.initializer training.nonfinite training.metric_window training.state training.update training.settings training.forward training.services
    training.step_rule training.step
    execution.debugging execution.dataflow execution.flops execution.executables execution.dispatch execution.flat_state execution.batch_buffer execution.step_parts execution.compiled_step execution.build execution.program execution.program_cache
    evaluation.evaluation evaluation.target evaluation.batch_metrics evaluation.local_strategy evaluation.loss_trial evaluation.padding_trial evaluation.program evaluation.totals evaluation.step evaluation.feed evaluation.prediction evaluation.evaluation_pass evaluation.trials evaluation.runner evaluation.service
    fit.actions fit.lambda_plugin fit.records fit.history fit.record_dispatcher fit.snapshot fit.signals fit.scheduler fit.schedule fit.engine_view fit.result fit.without_effect fit.start fit.request fit.losses fit.progress fit.current_state fit.running fit.compiling fit.plan fit.manual_loop fit.dispatcher fit.run_view fit.run fit.monitor fit.train_metrics fit.due fit.loop fit.ending fit.fit
    hookspecs
    engine
""".split()

IO_MODULES = {"argparse", "fcntl", "os", "pathlib", "shutil", "subprocess", "tempfile"}
# Selection reads environment variables and entry points, tracebacks an environment variable.
MAY_DO_IO = {"plugins.selection", "tracebacks"}


def test_every_module_of_the_core_has_a_layer() -> None:
    assert list_core_modules().keys() == {*LAYERS}


def test_the_page_of_the_architecture_names_every_package_and_every_single_module() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, _, table = page.partition("## The layers of the core")
    table, _, _ = table.partition("\n## ")
    packages = {f"{name.partition('.')[0]}/" for name in LAYERS if "." in name}
    modules = {name for name in LAYERS if "." not in name}
    assert not {name for name in packages | modules if f"`{name}`" not in table}


def test_the_face_of_metrics_knows_of_metrics_alone() -> None:
    modules = {target.rpartition(".")[0] for target in iter_imports(CORE / "metrics.py")}
    assert all(module.startswith("fulgurite._src.metrics.") for module in modules)


def test_a_module_imports_only_lower_layers() -> None:
    upward = set()
    for module, imported in iter_core_imports():
        if imported not in LAYERS or LAYERS.index(imported) >= LAYERS.index(module):
            upward.add((module, imported))
    assert not upward


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_no_plugin_has_a_circle_of_imports(package: Path) -> None:
    check_no_circle(package)


def test_the_core_opens_no_file_and_starts_no_process() -> None:
    users = set()
    for name, path in list_core_modules().items():
        imported = {target.partition(".")[0] for target in iter_imports(path)}
        if imported & IO_MODULES and name not in MAY_DO_IO:
            users.add(name)
    assert not users


def test_a_circle_of_imports_is_seen(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from package.a import thing\n")
    (package / "a.py").write_text("def f():\n    from package import b\n")
    (package / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.a import thing\n"
    )
    with pytest.raises(CycleError):
        check_no_circle(package)


def check_no_circle(package: Path) -> None:
    """Raise a CycleError if modules of a package import each other in a circle."""
    modules = list_modules(package)
    graph = {}
    for name, path in modules.items():
        if name:
            targets = {get_module(modules, package.name, target) for target in iter_imports(path)}
            graph[name] = targets - {None, ""}
    TopologicalSorter(graph).prepare()


def iter_core_imports() -> Iterator[tuple[str, str]]:
    """Yield pairs of a module of the core and a module of the core that it imports, a face among
    them."""
    everything = list_modules(CORE)
    for name, path in list_core_modules().items():
        targets = {get_module(everything, "fulgurite", target) for target in iter_imports(path)}
        for target in sorted(target for target in targets if target is not None):
            yield name, f"the face {target!r}" if target in FACES else target.removeprefix("_src.")


def list_core_modules() -> dict[str, Path]:
    """Return the files of the core below its faces, by the name in `LAYERS`."""
    return {
        name.removeprefix("_src."): path
        for name, path in list_modules(CORE).items()
        if name not in FACES and path.name != "__init__.py"
    }


def list_modules(package: Path) -> dict[str, Path]:
    """Return the files of a package by module name without the package's own; it is "" itself."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        modules[".".join(parts)] = path
    return modules


def get_module(modules: dict[str, Path], package: str, target: str) -> str | None:
    """Return the module of a package that an imported name belongs to, or None for others."""
    if target != package and not target.startswith(f"{package}."):
        return None
    name = target.removeprefix(package).removeprefix(".")
    while name not in modules:
        name = name.rpartition(".")[0]
    return name


def iter_imports(path: Path) -> Iterator[str]:
    """Yield what a file imports, inside functions and for type checkers too: `module.name`."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
