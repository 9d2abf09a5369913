"""The command `fulgurite new-plugin`: a complete package, ready to be installed and tested."""

import argparse
import keyword
import re
from importlib.metadata import distributions
from pathlib import Path
from string import Template

from fulgurite.errors import ConfigurationError
from fulgurite.plugins.selection import find_installed

KINDS = ("logger", "traced", "evaluator")
DEPENDENCIES = {
    "logger": '"fulgurite>=0.1,<0.2", "fulgurite-logging>=0.1,<0.2"',
    "traced": '"fulgurite>=0.1,<0.2"',
    "evaluator": '"fulgurite>=0.1,<0.2"',
}
"""What the package of each kind depends on, as written into its pyproject.toml."""
TEMPLATES = Path(__file__).parent / "templates"
USED = ("Any", "ConfigurationError", "FileLogger", "LogBackend", "Path", "Rows")
"""Names that the templates use already."""
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def command(arguments: list[str]) -> int:
    """Runs the command; gives its exit code."""
    parser = argparse.ArgumentParser(
        "fulgurite new-plugin", description="Writes the package of a new plugin."
    )
    parser.add_argument(
        "name", metavar="NAME", help="such as gradient-noise; the distribution is fulgurite-NAME"
    )
    parser.add_argument(
        "--kind", choices=KINDS, default="traced", help="what to start from (default: traced)"
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="default: fulgurite-NAME, here")
    options = parser.parse_args(arguments)
    try:
        folder = new_plugin(options.name, options.kind, options.folder)
    except ConfigurationError as error:
        parser.exit(2, f"error: {error}\n")
    print(f"{folder} is written. Now:\n  pip install -e '{folder}[test]'\n  pytest {folder}")
    return 0


def new_plugin(name: str, kind: str, folder: Path | None = None) -> Path:
    """Writes the package of a plugin `name` of one of `KINDS` into `folder`, which must not be
    there yet; gives the folder."""
    if name.startswith("fulgurite"):
        raise ConfigurationError(
            f"the name {name!r} begins with fulgurite: leave that out, it is put before it"
        )
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"the name {name!r} must be small letters, digits and hyphens, and begin with a "
            f"letter, such as "
            "gradient-noise"
        )
    folder = Path(f"fulgurite-{name}") if folder is None else folder
    if folder.exists():
        raise ConfigurationError(f"{folder} already exists: choose another --folder")
    module, cls = name.replace("-", "_"), "".join(part.capitalize() for part in name.split("-"))
    if keyword.iskeyword(cls) or cls in USED:
        raise ConfigurationError(
            f"of the name {name!r} the class {cls} would be made, which means something else: use "
            f"a longer name"
        )
    for other in find_installed().get(module, ()):
        raise ConfigurationError(
            f"a plugin {module!r} is installed by {other.distribution}: choose another name"
        )
    if any(one.name == f"fulgurite-{name}" for one in distributions()):
        raise ConfigurationError(
            f"fulgurite-{name} is installed and would be replaced: choose another name"
        )
    values = {"name": name, "module": module, "cls": cls, "dependencies": DEPENDENCIES[kind]}
    for source in (TEMPLATES / "common", TEMPLATES / kind):
        for path in sorted(one for one in source.rglob("*") if one.is_file()):
            # A template's own name ends in .txt, so that no tool takes it for what it will become.
            relative = str(path.relative_to(source)).removesuffix(".txt").replace("MODULE", module)
            target = folder / relative
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(
                    Template(path.read_text(encoding="utf-8")).substitute(values), encoding="utf-8"
                )
            except OSError as error:
                raise ConfigurationError(f"{target} cannot be written: {error}") from error
    return folder
