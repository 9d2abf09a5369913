"""What `fulgurite plugins` tells: the installed plugins, and with `--all` what is in each of
them."""

import argparse
import dataclasses
import inspect
import json
import re
from typing import Any

from fulgurite.errors import PluginError
from fulgurite.plugins.selection import (
    InstalledPlugin,
    autoload_names,
    find,
    find_installed,
    selection_from_environment,
)

_OPTION = re.compile(
    r"^ *(?P<names>\w+(?:, \w+)*): (?P<text>.*?)(?=\n *\w+(?:, \w+)*: |\n\n|\Z)", re.M | re.S
)


def plugins(arguments: list[str]) -> int:
    """Runs the command. Imports plugins only for `--all` and for the one that is named."""
    parser = argparse.ArgumentParser(
        "fulgurite plugins", description="Lists the installed plugins."
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="describe this plugin and its configuration"
    )
    parser.add_argument(
        "--all", action="store_true", help="import each plugin, and show its hooks, slots and state"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    available = find_installed()
    try:
        if options.name is not None:
            told = describe_plugin(options.name, find(options.name, available))
            print(json.dumps(told, indent=2) if options.json else _description(told))
            return 1 if "error" in told else 0
    except PluginError as error:
        parser.exit(2, f"error: {error}\n")
    active = _active(available)
    rows = [
        {
            "name": name,
            "distribution": one.distribution,
            "autoload": one.autoload,
            "active": active.get(name),
            "object": one.entry.value,
            **(inspect_plugin(one) if options.all else {}),
        }
        for name, entries in available.items()
        for one in entries
    ]
    lines = [line for row in rows for line in _lines(row)]
    listing = "\n".join(lines) or "No plugins are installed. In a clone: pip install ./plugins/rng"
    print(json.dumps(rows, indent=2) if options.json else listing)
    return 1 if any(row.get("error") for row in rows) else 0


def inspect_plugin(one: InstalledPlugin) -> dict[str, Any]:
    """The hooks of a plugin's class with their kinds, the slots among them, what state it owns, or
    why it cannot be imported."""
    import fulgurite.hookspecs as hookspecs
    from fulgurite.explain import SLOTS
    from fulgurite.plugins.markers import find_hookspecs

    try:
        cls = one.load()
    except PluginError as error:
        return {"error": str(error)}
    known = {name: metadata.kind for name, metadata in find_hookspecs(hookspecs).items()}
    own = getattr(cls, "hookspecs", None)
    if own is not None:
        known |= {name: metadata.kind for name, metadata in find_hookspecs(own).items()}
    marks = {
        name: getattr(inspect.getattr_static(cls, name, None), "fulgurite_impl", None)
        for name in dir(cls)
    }
    names = [mark["specname"] or name for name, mark in marks.items() if mark]
    found = {name: known.get(name, "unknown") for name in names}
    state = [
        what
        for hook, what in (("init_plugin_state", "device"), ("get_host_state", "host"))
        if hook in found
    ]
    return {
        "hooks": found,
        "slots": [hook for hook in SLOTS if hook in found],
        "state": state,
        "error": None,
    }


def describe_plugin(name: str, one: InstalledPlugin) -> dict[str, Any]:
    """What a plugin is for and the fields of its configuration, with types, defaults and docs."""
    try:
        cls = one.load()
    except PluginError as error:
        return {"name": name, "distribution": one.distribution, "error": str(error)}
    classes = reversed(cls.__mro__[:-1] if inspect.isclass(cls) else [cls])
    texts = [inspect.cleandoc(one.__doc__ or "") for one in classes]
    docs = {
        named: " ".join(option["text"].split())
        for text in texts
        for option in _OPTION.finditer(text)
        for named in option["names"].split(", ")
    }
    fields = [
        {
            "name": parameter.name,
            "type": ""
            if parameter.annotation is parameter.empty
            else inspect.formatannotation(parameter.annotation),
            "default": None if parameter.default is parameter.empty else _default(cls, parameter),
            "doc": docs.get(parameter.name, ""),
        }
        for parameter in inspect.signature(cls).parameters.values()
    ]
    return {
        "name": name,
        "distribution": one.distribution,
        "doc": texts[-1].partition("\n\n")[0],
        "fields": fields,
    }


def _default(cls: type, parameter: inspect.Parameter) -> str:
    """A default as it is written; of a field that makes a new one each time, what it makes."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    made = {
        one.name: one.default_factory
        for one in fields
        if one.default_factory is not dataclasses.MISSING
    }
    return repr(made[parameter.name]() if parameter.name in made else parameter.default)


def _active(available: dict[str, list[InstalledPlugin]]) -> dict[str, str]:
    """What an `Engine()` without arguments has, each with the rule that makes it active."""
    chosen = selection_from_environment()
    left_out = {name[1:] for name in chosen if name.startswith("-")}
    rules = {name: "autoload" for name in autoload_names(available)}
    rules |= {name: "FULGURITE_PLUGINS" for name in chosen if not name.startswith("-")}
    return {name: rule for name, rule in rules.items() if name not in left_out}


def _lines(row: dict[str, Any]) -> list[str]:
    rule = (
        f"active: {row['active']}"
        if row["active"]
        else "autoload, left out"
        if row["autoload"]
        else ""
    )
    lines = [f"{row['name']:18} {row['distribution']:32} {rule:28} {row['object']}"]
    if row.get("error"):
        return [*lines, f"    error: {row['error']}"]
    if "hooks" in row:
        lines.append(
            "    hooks: " + ", ".join(f"{hook} ({kind})" for hook, kind in row["hooks"].items())
        )
        lines += [f"    {what}: {', '.join(row[what])}" for what in ("slots", "state") if row[what]]
    return lines


def _description(told: dict[str, Any]) -> str:
    lines = [f"{told['name']} ({told['distribution']})"]
    if "error" in told:
        return "\n".join([*lines, f"error: {told['error']}"])
    lines += ["", told["doc"], ""]
    for one in told["fields"]:
        default = "" if one["default"] is None else f" = {one['default']}"
        lines.append(f"  {one['name']}{': ' * bool(one['type'])}{one['type']}{default}")
        lines += [f"      {one['doc']}"] if one["doc"] else []
    return "\n".join(lines if told["fields"] else [*lines, "  It takes no arguments."])
