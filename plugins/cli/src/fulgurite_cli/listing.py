"""The command `fulgurite plugins`: the installed plugins, and with `--all` what is in each.

Without `--all` and NAME it reads entry points only, and imports neither plugins nor the core.
"""

import argparse
import dataclasses
import inspect
import json
import os
import re
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fulgurite_cli.options import print_to_pipe

GROUP = "fulgurite.plugins"
AUTOLOAD = "fulgurite.autoload"
# An option in a docstring: `name: text`, or `name, name: text`, up to the next one.
_OPTION = re.compile(
    r"^ *(?P<names>\w+(?:, \w+)*): (?P<text>.*?)(?=\n *\w+(?:, \w+)*: |\n\n|\Z)", re.M | re.S
)


def run_plugins(arguments: list[str]) -> int:
    """List the installed plugins, or describe one."""
    parser = argparse.ArgumentParser("fulgurite plugins", description="List the installed plugins.")
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="describe this plugin and its configuration"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="import each plugin, and show its hooks, exclusive ones, and state",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    if options.name is not None:
        return _print_plugin(parser, options.name, options.json)
    rows = list_plugins(inspect_all=options.all)
    if options.json:
        print_to_pipe(json.dumps(rows, indent=2))
    elif rows:
        print_to_pipe("\n".join(line for row in rows for line in _format_row(row)))
    else:
        print_to_pipe("No plugins are installed. In a clone: pip install ./plugins/rng")
    return 1 if any(row.get("error") for row in rows) else 0


def list_plugins(inspect_all: bool = False) -> list[dict[str, Any]]:
    """Return a row for each installed plugin; with `inspect_all`, what is in it as well."""
    entries = entry_points()  # read once: distributions of two readings are not equal
    installed = entries.select(group=GROUP)
    autoload = {(entry.name, entry.dist) for entry in entries.select(group=AUTOLOAD)}
    names = sorted({entry.name for entry in installed if (entry.name, entry.dist) in autoload})
    activations = get_activations(names)
    rows = []
    for entry in installed:
        distribution = (
            f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown distribution"
        )
        row = {
            "name": entry.name,
            "distribution": distribution,
            "autoload": (entry.name, entry.dist) in autoload,
            "active": activations.get(entry.name),
            "object": entry.value,
        }
        rows.append(row | inspect_plugin(entry) if inspect_all else row)
    return rows


def get_activations(autoload: list[str]) -> dict[str, str]:
    """Return the plugins of an `Engine()` without arguments, each with the rule that makes it
    active.

    The core has the same rules (`fulgurite.plugins.selection`), but importing it imports jax; a
    test compares the two.

    Args:
        autoload: the plugins that ask to be loaded.
    """
    allowed = os.environ.get("FULGURITE_AUTOLOAD", "1")
    if allowed != "1":
        allow_list = [name.strip() for name in allowed.split(",")]
        autoload = [name for name in autoload if name in allow_list]
    activations = {name: "autoload" for name in autoload}
    names = [name.strip() for name in os.environ.get("FULGURITE_PLUGINS", "").split(",")]
    for name in filter(None, names):
        if not name.startswith("-"):
            activations[name] = "FULGURITE_PLUGINS"
    for name in names:
        activations.pop(name.removeprefix("-") if name.startswith("-") else "", None)
    return activations


def inspect_plugin(entry: EntryPoint) -> dict[str, Any]:
    """Return the hooks of a plugin's class with their kinds, the exclusive ones among them, and
    what state it owns, or why it cannot be imported."""
    from fulgurite.errors import PluginError
    from fulgurite.plugins import InstalledPlugin, find_hookspecs, get_options, hookspecs

    from fulgurite_cli.explanation import EXCLUSIVE_HOOKS

    try:
        cls = InstalledPlugin(entry, False).load()
    except PluginError as error:
        return {"error": str(error)}
    specs = find_hookspecs(hookspecs)
    further_specs = get_options(cls).hookspecs
    if further_specs is not None:
        specs |= find_hookspecs(further_specs)
    hooks: dict[str, str] = {}
    for name in dir(cls):
        marker = getattr(inspect.getattr_static(cls, name, None), "fulgurite_impl", None)
        if marker:
            hook = marker["specname"] or name
            hooks[hook] = specs[hook].kind if hook in specs else "unknown"
    state_hooks = {"init_plugin_state": "device", "get_host_state": "host"}
    return {
        "hooks": hooks,
        "exclusive": [hook for hook in EXCLUSIVE_HOOKS if hook in hooks],
        "state": [state for hook, state in state_hooks.items() if hook in hooks],
        "error": None,
    }


def _print_plugin(parser: argparse.ArgumentParser, name: str, as_json: bool) -> int:
    from fulgurite.errors import PluginError
    from fulgurite.plugins import find_installed_plugins, find_plugin

    try:
        plugin = find_plugin(name, find_installed_plugins())
    except PluginError as error:
        parser.exit(2, f"error: {error}\n")
    description = describe_plugin(name, plugin)
    text = json.dumps(description, indent=2) if as_json else _format_description(description)
    print_to_pipe(text)
    return 1 if "error" in description else 0


def describe_plugin(name: str, plugin: Any) -> dict[str, Any]:
    """Return what a plugin is for, and the fields of its configuration.

    Args:
        name: of the plugin.
        plugin: the `InstalledPlugin` of that name.
    """
    from fulgurite.errors import PluginError

    try:
        cls = plugin.load()
    except PluginError as error:
        return {"name": name, "distribution": plugin.distribution, "error": str(error)}
    # A subclass describes its own options after those of its bases, and wins.
    classes = reversed(cls.__mro__[:-1] if inspect.isclass(cls) else [cls])
    docstrings = [inspect.cleandoc(each.__doc__ or "") for each in classes]
    docs: dict[str, str] = {}
    for docstring in docstrings:
        for option in _OPTION.finditer(docstring):
            for field in option["names"].split(", "):
                docs[field] = " ".join(option["text"].split())
    fields = [
        {
            "name": parameter.name,
            "type": _format_annotation(parameter),
            "default": _format_default(cls, parameter),
            "doc": docs.get(parameter.name, ""),
        }
        for parameter in inspect.signature(cls).parameters.values()
    ]
    return {
        "name": name,
        "distribution": plugin.distribution,
        "doc": docstrings[-1].partition("\n\n")[0],
        "fields": fields,
    }


def _format_annotation(parameter: inspect.Parameter) -> str:
    if parameter.annotation is parameter.empty:
        return ""
    return inspect.formatannotation(parameter.annotation)


def _format_default(cls: type, parameter: inspect.Parameter) -> str | None:
    """Return a default as it is written; of a field with a factory, what the factory makes."""
    if parameter.default is parameter.empty:
        return None
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    for field in fields:
        has_factory = field.default_factory is not dataclasses.MISSING
        if field.name == parameter.name and has_factory:
            return repr(field.default_factory())  # type: ignore[misc]
    return repr(parameter.default)


def _format_row(row: dict[str, Any]) -> list[str]:
    if row["active"]:
        activation = f"active: {row['active']}"
    else:
        activation = "autoload, left out" if row["autoload"] else ""
    lines = [f"{row['name']:18} {row['distribution']:32} {activation:28} {row['object']}"]
    if row.get("error"):
        return [*lines, f"    error: {row['error']}"]
    if "hooks" in row:
        hooks = ", ".join(f"{hook} ({kind})" for hook, kind in row["hooks"].items())
        lines.append(f"    hooks: {hooks}")
        for key in ("exclusive", "state"):
            if row[key]:
                lines.append(f"    {key}: {', '.join(row[key])}")
    return lines


def _format_description(description: dict[str, Any]) -> str:
    lines = [f"{description['name']} ({description['distribution']})"]
    if "error" in description:
        return "\n".join([*lines, f"error: {description['error']}"])
    lines += ["", description["doc"], ""]
    for field in description["fields"]:
        annotation = f": {field['type']}" if field["type"] else ""
        default = "" if field["default"] is None else f" = {field['default']}"
        lines.append(f"  {field['name']}{annotation}{default}")
        if field["doc"]:
            lines.append(f"      {field['doc']}")
    if not description["fields"]:
        lines.append("  It takes no arguments.")
    return "\n".join(lines)
