"""Programs whose function `experiment` returns a configuration of `fulgurite_config`."""

import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fulgurite.errors import ConfigurationError
from fulgurite.plugins import REDACTED, RedactedText, redact_value, register_secret
from fulgurite_config import (
    JSON_SOURCE,
    Budget,
    ConfigError,
    L,
    Lazy,
    Name,
    Node,
    NotAllowedError,
    Required,
    apply_overrides,
    apply_values,
    check_types,
    copy,
    diff,
    find_configured_names,
    format_path,
    from_json,
    get_argument_annotation,
    get_argument_default,
    get_node_state,
    get_public_name,
    is_constant,
    iter_argument_names,
    iter_children,
    iter_nodes,
    iter_nodes_by_path,
    iter_values,
    load_targets,
    resolve,
    to_plain,
)

from fulgurite_cli.replacing import has_only_evaluators, replace_evaluators
from fulgurite_cli.secrets import convert_secrets, is_secret_type

KEY = "config"
"""The key of a manifest's configuration that holds the JSON. It is one string there, since keys of
manifests do not begin with `$`."""
VALUES = "values"
"""The key that holds its values by path, for those who show or compare runs."""


def build_from_config(
    config: Node,
    overrides: Sequence[str],
    start_config: dict[str, Any] | None,
    allow: Sequence[str] = (),
) -> tuple[Any, dict[str, Any]]:
    """Return what a configuration resolves to, and the form of it that the manifest holds.

    Args:
        config: what the program returned.
        overrides: strings `path=value`, with paths and wildcards of `fulgurite_config`.
        start_config: what the run starts from, as `override_config` takes it.
        allow: what that may name, besides what the program's configuration names.

    Raises:
        ConfigurationError: an override matches nothing, or the configuration cannot be resolved.
    """
    with refer_to_options():
        names = find_allowed(config, allow)
        changed = override_config(config, overrides, start_config, names)
        return resolve(wrap_secrets(changed), names), _describe(changed)


def plan_from_config(
    config: Node,
    overrides: Sequence[str],
    start_config: dict[str, Any] | None,
    allow: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the form of a configuration that the manifest holds; nothing is resolved. Arguments
    and errors are those of `build_from_config`."""
    with refer_to_options():
        names = find_allowed(config, allow)
        return _describe(override_config(config, overrides, start_config, names))


@contextmanager
def refer_to_options() -> Iterator[None]:
    """Let errors of a configuration be those of the command line, with the options that help."""
    try:
        yield
    except NotAllowedError as error:
        options = " ".join(f"--allow {name}" for name in error.modules)
        raise ConfigurationError(
            f"the configuration names {', '.join(error.modules)}, which may not be imported: a "
            "configuration from a file or a run may name only what the program's own configuration "
            f"names. If you trust it, add {options}"
        ) from error
    except ConfigError as error:
        raise ConfigurationError(str(error)) from error


def find_allowed(program_config: Node, allow: Sequence[str]) -> list[str]:
    """Return what a configuration from a file may name: what the user lists, and what the program's
    own configuration names. Never a whole package that only a name is of, as a package may hold
    functions that run any string.

    Args:
        program_config: of the program. Its targets are loaded, as types are a part of them.
        allow: what the user lists.
    """
    load_targets(program_config, allow)
    return [*allow, *find_configured_names(program_config)]


def _describe(config: Node) -> dict[str, Any]:
    text = RedactedText(json.dumps(redact_value(to_plain(config)), ensure_ascii=False))
    return {KEY: text, VALUES: list_values(config)}


def rebuild_from_config(
    saved_config: dict[str, Any],
    overrides: Sequence[str],
    program_config: Node | None,
    allow: Sequence[str] = (),
) -> Any:
    """Return what the configuration of a run resolves to.

    Args:
        saved_config: the configuration in the run's manifest. It holds: an override that would
            change it is an error.
        overrides: strings `path=value`.
        program_config: of the program; what it names may be imported, and it knows the secrets that
            the manifest hides. One that has only evaluators replaces or adds those of the run. None
            without a program.
        allow: further names, packages and modules that may be imported.

    Raises:
        ConfigurationError: an override differs, or the configuration cannot be resolved.
    """
    with refer_to_options():
        names = list(allow)
        if program_config is not None:
            names = find_allowed(program_config, allow)
        saved = read_config(saved_config)
        load_targets(saved, names)
        changed = copy(saved)
        apply_overrides(changed, overrides)
        for path, (old, new) in diff(saved, changed).items():
            if REDACTED not in str(old) and not _is_same_number(old, new):
                raise ConfigError(
                    f"{path}={new} differs from what the run was started with, {path}={old}: "
                    "leave it out"
                )
        fill_secrets(changed, program_config)
        if program_config is not None and has_only_evaluators(program_config):
            replace_evaluators(changed, program_config)
        return resolve(wrap_secrets(changed), names)


def _is_same_number(old: str | None, new: str | None) -> bool:
    """Return whether two values that `diff` shows are one number, such as 1 and 1.0."""
    try:
        values = [json.loads(text or "") for text in (old, new)]
    except ValueError:
        return False
    return values[0] == values[1] and not any(isinstance(value, bool) for value in values)


def is_configuration(saved_config: dict[str, Any]) -> bool:
    """Return whether a configuration, as manifests hold it, is that of a program that returns one;
    not arguments or values by name, one of which may be called `config`."""
    text = saved_config.get(KEY)
    is_object = isinstance(text, str) and text.lstrip().startswith("{")
    return is_object and saved_config.keys() <= {KEY, VALUES}


def override_config(
    config: Node,
    overrides: Sequence[str],
    start_config: dict[str, Any] | None,
    allow: Sequence[str],
) -> Any:
    """Return a configuration, or the one that takes its place, changed by overrides.

    Args:
        config: what the program returned, whose targets are loaded; it is changed in place if
            nothing takes its place.
        overrides: strings `path=value`.
        start_config: what takes its place, as manifests hold it. Or values by path, which change
            the program's.
        allow: what the configuration that takes its place may name, as `find_allowed` returns it.

    Raises:
        ConfigError: an override matches nothing, or a secret is missing.
        NotAllowedError: the configuration names what is not allowed.
    """
    if start_config is None or not is_configuration(start_config):
        apply_values(config, start_config or {}, JSON_SOURCE)
        apply_overrides(config, overrides)
        register_secrets(config)
        return config
    changed = read_config(start_config)
    load_targets(changed, allow)
    check_types(changed)
    apply_overrides(changed, overrides)
    fill_secrets(changed, config)
    register_secrets(changed)
    return changed


def read_config(saved_config: dict[str, Any]) -> Any:
    """Return the configuration that a manifest holds, with `***` for each secret.

    Raises:
        ConfigurationError: it holds none.
        ConfigError: the text is not a configuration.
    """
    if not is_configuration(saved_config):
        raise ConfigurationError(
            "there is not a configuration, but arguments by name: use the program that they are of"
        )
    return from_json(saved_config[KEY])


def register_secrets(config: Any) -> None:
    """Have the strings of a configuration hidden that stand where a secret is wanted: an argument
    of the type `SecretStr`, or what such a type is called with."""

    def register(_: Any, text: str) -> str:
        register_secret(text)
        return text

    for node in iter_nodes(config, set()):
        target = get_node_state(node).target
        for key, value in _list_arguments(node):
            annotation = target if is_secret_type(target) else get_argument_annotation(node, key)
            convert_secrets(value, annotation, register)


def wrap_secrets(config: Any) -> Any:
    """Return a copy of a configuration in which each argument of the type `SecretStr` that is a
    text is a call of that type."""
    wrapped = copy(config)
    secrets: list[Any] = []

    def make(annotation: Any, text: str) -> Any:
        secrets.append(L(annotation, text))
        return secrets[-1]

    for node in list(iter_nodes(wrapped, set())):
        for key, value in _list_arguments(node):
            secrets.clear()
            new_value = convert_secrets(value, get_argument_annotation(node, key), make)
            if secrets:
                node[key] = new_value
    return wrapped


def _list_arguments(node: Node) -> list[tuple[str | int, Any]]:
    state = get_node_state(node)
    return [*enumerate(state.positional), *state.keywords.items()]


def fill_secrets(config: Any, program_config: Node | None) -> None:
    """Put what a program says in the place of each secret that a manifest hides.

    Args:
        config: from a manifest; changed in place.
        program_config: of the program, or None.

    Raises:
        ConfigError: the program does not say it.
    """
    known = dict(_iter_all_values(program_config, ()))
    for path, value, _ in list(iter_values(config)):
        if not isinstance(value, str) or REDACTED not in value:
            continue
        if not isinstance(known.get(path), str | int | float | list | tuple):
            raise ConfigError(
                f"the manifest hides the secret {path}: give {path}=..., or let the program read "
                "it from the environment"
            )
        apply_values(config, {path: known[path]})


def _iter_all_values(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Yield path and value of all that is below a value, the lists among it as well."""
    for key, child in iter_children(value):
        yield format_path((*path, key)), child
        yield from _iter_all_values(child, (*path, key))


def list_values(config: Any) -> dict[str, Any]:
    """Return the values of a configuration by path, as a manifest holds them, and of a call the
    name of what is called and the defaults, which a later version may change. What follows from
    others by a reference is left out: where runs are compared it would say the same again.

    Args:
        config: the configuration, whose targets are loaded.
    """
    values: dict[str, Any] = {}
    paths: dict[int, str] = {}
    budget = Budget()
    for path, node in iter_nodes_by_path(config):
        paths[id(node)] = path
        values |= _list_defaults(node, path)
    for path, value, _ in iter_values(config):
        if isinstance(value, Lazy):
            continue
        if isinstance(value, Node):
            value = f"that of {paths[id(value)]}"
        elif isinstance(value, Required):
            value = None
        elif not isinstance(value, bool | int | float | str | None):
            budget.spend_on(value)
            value = get_text(value)
        values[path] = redact_value(value, path.rpartition(".")[2])
    return values


def _list_defaults(node: Node, path: str) -> dict[str, Any]:
    """Return the defaults of a call that nothing has replaced, as far as they are constants.

    Args:
        node: the call.
        path: where it is.
    """
    defaults = {}
    for name in iter_argument_names(node):
        default = get_argument_default(node, name)
        if name not in get_node_state(node).keywords and is_constant(default):
            defaults[f"{path}.{name}"] = redact_value(default, name)
    return defaults


def get_text(value: Any) -> str:
    """Return a value that is not a JSON constant as text: a function or a class by its name."""
    is_named = isinstance(value, Name) or inspect.isroutine(value) or isinstance(value, type)
    return get_public_name(value) if is_named else str(value)
