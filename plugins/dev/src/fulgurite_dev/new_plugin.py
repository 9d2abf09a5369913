"""The command `fulgurite new-plugin`: a complete package, ready to be installed and tested."""

import argparse
import keyword
import re
import shlex
from importlib.metadata import distributions
from pathlib import Path
from string import Template

from fulgurite.errors import ConfigurationError
from fulgurite.plugins import find_installed_plugins

KINDS = ("logger", "traced", "evaluator")
DEPENDENCIES = {
    "logger": '"fulgurite>=0.1,<0.2", "fulgurite-logging>=0.1,<0.2"',
    "traced": '"fulgurite>=0.1,<0.2"',
    "evaluator": '"fulgurite>=0.1,<0.2"',
}
"""What the package of each kind depends on, as written into its pyproject.toml."""
README_ARGUMENTS = {
    "logger": 'run_dir="runs/example", plugins=[$cls()]',
    "traced": "plugins=[$cls()]",
    "evaluator": "plugins=[$cls(data, every=10)]",
}
"""What the example in the README of each kind passes to the engine."""
TEMPLATES = Path(__file__).parent / "templates"
TEMPLATE_NAMES = ("Any", "ConfigurationError", "FileLogger", "LogBackend", "Path", "Rows")
"""Names that the templates use, so that no plugin's class may have them."""
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def run_new_plugin(arguments: list[str]) -> int:
    """Write the package of a new plugin."""
    parser = argparse.ArgumentParser(
        "fulgurite new-plugin", description="Write the package of a new plugin."
    )
    parser.add_argument(
        "name", metavar="NAME", help="such as gradient-noise; the distribution is fulgurite-NAME"
    )
    parser.add_argument(
        "--kind", choices=KINDS, default="traced", help="what to start from (default: traced)"
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--folder", type=Path, metavar="DIR", help="default: fulgurite-NAME, here")
    place.add_argument(
        "--contrib", action="store_true", help="a member of contrib/ in a checkout of Fulgurite"
    )
    options = parser.parse_args(arguments)
    try:
        if options.contrib:
            folder, tests = write_contrib_plugin(options.name, options.kind, Path.cwd())
            print(
                f"{folder} and {tests} are written. Now add fulgurite-{options.name} to the extra "
                "'all' of core/pyproject.toml and to [tool.uv.sources] of pyproject.toml, and:\n"
                f"  uv run --all-packages pytest {tests}"
            )
            return 0
        folder = write_plugin(options.name, options.kind, options.folder)
    except ConfigurationError as error:
        parser.exit(2, f"error: {error}\n")
    install = f"pip install -e {shlex.quote(f'{folder}[test]')}"
    print(f"{folder} is written. Now:\n  {install}\n  pytest {shlex.quote(str(folder))}")
    return 0


def write_plugin(name: str, kind: str, folder: Path | None = None) -> Path:
    """Write the package of a plugin, and return its folder.

    Args:
        name: of the plugin, such as `gradient-noise`.
        kind: one of `KINDS`.
        folder: where to write it, which must not exist; by default `fulgurite-NAME` in the current
            directory.

    Raises:
        ConfigurationError: the name cannot be used, or the folder exists or cannot be written.
    """
    folder = Path(f"fulgurite-{name}") if folder is None else folder
    values = _get_template_values(name, kind, folder)
    for source in (TEMPLATES / "common", TEMPLATES / kind):
        _write_templates(source, folder, values)
    return folder


def write_contrib_plugin(name: str, kind: str, checkout: Path) -> tuple[Path, Path]:
    """Write a member of `contrib/`, and return its folder and that of its tests, from the checkout.

    Args:
        name: of the plugin, such as `gradient-noise`.
        kind: one of `KINDS`.
        checkout: the folder of a checkout of Fulgurite.

    Raises:
        ConfigurationError: the name cannot be used, this is not a checkout, or a folder exists or
            cannot be written.
    """
    if not (checkout / "contrib" / "README.md").is_file():
        raise ConfigurationError(
            f"{checkout} has no contrib/README.md: run --contrib in a checkout of Fulgurite, or "
            "leave it out for a package of your own"
        )
    folder = checkout / "contrib" / name
    values = _get_template_values(name, kind, folder)
    tests = checkout / "tests" / "plugins" / values["module"]
    if tests.exists():
        raise ConfigurationError(f"{tests} already exists: choose another name")
    _write_templates(TEMPLATES / "common" / "src", folder / "src", values)
    _write_templates(TEMPLATES / kind / "src", folder / "src", values)
    _write_templates(TEMPLATES / kind / "tests", tests, values)
    _write_templates(TEMPLATES / "contrib", folder, values)
    return folder.relative_to(checkout), tests.relative_to(checkout)


def _get_template_values(name: str, kind: str, folder: Path) -> dict[str, str]:
    """Return what the templates say of a plugin; an error if it cannot be written.

    Args:
        name: of the plugin.
        kind: one of `KINDS`.
        folder: where it is to be written.
    """
    module = name.replace("-", "_")
    cls = "".join(part.capitalize() for part in name.split("-"))
    _check_name(name)
    if folder.exists():
        raise ConfigurationError(f"{folder} already exists: choose another --folder or name")
    _check_not_taken(name, module, cls)
    return {
        "name": name,
        "module": module,
        "cls": cls,
        "dependencies": DEPENDENCIES[kind],
        "arguments": Template(README_ARGUMENTS[kind]).substitute(cls=cls),
    }


def _write_templates(source: Path, target: Path, values: dict[str, str]) -> None:
    """Write the files of a folder of templates.

    Args:
        source: the folder.
        target: where to write them.
        values: what to put for each name.
    """
    for path in sorted(source.rglob("*")):
        if path.is_file():
            # A template's own name ends in .txt, so that no tool takes it for what it becomes.
            relative = str(path.relative_to(source)).removesuffix(".txt")
            relative = relative.replace("MODULE", values["module"])
            _write_from_template(path, target / relative, values)


def _check_name(name: str) -> None:
    if name.startswith("fulgurite"):
        raise ConfigurationError(
            f"the name {name!r} begins with fulgurite: leave that out, it is put before it"
        )
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"the name {name!r} must be small letters, digits and hyphens, and begin with a "
            "letter, such as gradient-noise"
        )


def _check_not_taken(name: str, module: str, cls: str) -> None:
    """Raise a ConfigurationError if something else has one of the names of a plugin.

    Args:
        name: of the plugin.
        module: the name of its module.
        cls: the name of its class.
    """
    if keyword.iskeyword(cls) or cls in TEMPLATE_NAMES:
        raise ConfigurationError(
            f"the class of {name!r} would be called {cls}, which means something else: use a "
            "longer name"
        )
    for other in find_installed_plugins().get(module, ()):
        raise ConfigurationError(
            f"a plugin {module!r} is installed by {other.distribution}: choose another name"
        )
    if any(dist.name == f"fulgurite-{name}" for dist in distributions()):
        raise ConfigurationError(
            f"fulgurite-{name} is installed and would be replaced: choose another name"
        )


def _write_from_template(template: Path, target: Path, values: dict[str, str]) -> None:
    """Write a file from a template.

    Args:
        template: the template, with `$name` and the like.
        target: the file to write.
        values: what to put for each name.
    """
    text = Template(template.read_text(encoding="utf-8")).substitute(values)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{target} cannot be written: {error}") from error
