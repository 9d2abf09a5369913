"""Programs whose function `experiment` returns a configuration of `fulgurite_config`."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from fulgurite.errors import ConfigurationError
from fulgurite.redact import MASK
from fulgurite_config import (
    ConfigError,
    Node,
    apply_overrides,
    copy,
    diff,
    from_json,
    resolve,
    to_plain,
)
from fulgurite_runs.redact import redact

KEY = "config"
"""The key of a manifest's configuration that holds the JSON. It is one text there, since keys of
manifests do not begin with `$`."""


def build_from_config(
    config: Node, overrides: Sequence[str], start_config: dict[str, Any] | None
) -> tuple[Any, dict[str, Any]]:
    """Return what a configuration resolves to, and the form of it that the manifest holds.

    Args:
        config: what the program returned.
        overrides: texts `path=value`, with paths and wildcards of `fulgurite_config`.
        start_config: a configuration, as manifests hold it, that takes the place of the program's
            before the overrides. It may name only what is defined in the packages that the
            program's own configuration names.

    Raises:
        ConfigurationError: an override matches nothing, or the configuration cannot be resolved.
    """
    try:
        allow = _find_packages(config)
        changed = override_config(config, overrides, start_config)
        form = to_plain(changed)
        return resolve(changed, allow), {KEY: json.dumps(redact(form), ensure_ascii=False)}
    except ConfigError as error:
        raise ConfigurationError(str(error)) from error


def rebuild_from_config(
    saved_config: dict[str, Any], overrides: Sequence[str], allow: Sequence[str] | Node
) -> Any:
    """Return what the configuration of a run resolves to.

    Args:
        saved_config: the configuration in the run's manifest. It holds: an override that would
            change it is an error.
        overrides: texts `path=value`.
        allow: the modules that it may name; or the configuration of a program, for the packages
            that this one names.

    Raises:
        ConfigurationError: an override differs, or the configuration cannot be resolved.
    """
    try:
        saved = read_config(saved_config)
        changed = copy(saved)
        apply_overrides(changed, overrides)
        for path, (old, new) in diff(saved, changed).items():
            raise ConfigError(
                f"{path}={new} differs from what the run was started with, {path}={old}: leave it "
                "out"
            )
        return resolve(saved, _find_packages(allow) if isinstance(allow, Node) else allow)
    except ConfigError as error:
        raise ConfigurationError(str(error)) from error


def override_config(
    config: Node, overrides: Sequence[str], start_config: dict[str, Any] | None
) -> Any:
    """Return a configuration, or the one that takes its place, changed by overrides.

    Args:
        config: what the program returned; it is changed in place if nothing takes its place.
        overrides: texts `path=value`.
        start_config: what takes its place, as manifests hold it.

    Raises:
        ConfigurationError: `start_config` is none.
        ConfigError: an override matches nothing.
    """
    changed = config if start_config is None else read_config(start_config)
    apply_overrides(changed, overrides)
    return changed


def read_config(saved_config: dict[str, Any]) -> Any:
    """Return the configuration that a manifest holds.

    Raises:
        ConfigurationError: it holds none, or hides a secret.
        ConfigError: the text is no configuration.
    """
    text = saved_config.get(KEY)
    if not isinstance(text, str):
        raise ConfigurationError(
            "the run was started by a program without a configuration: use that program"
        )
    if MASK in text:
        raise ConfigurationError(
            "the run's manifest hides a secret of its configuration, so the run cannot be built "
            "again: let the program read secrets from the environment"
        )
    return from_json(text)


def _find_packages(config: Node) -> list[str]:
    """Return the packages of the functions and classes that a configuration names."""
    return sorted(set(_iter_packages(to_plain(config))))


def _iter_packages(form: Any) -> Iterator[str]:
    if isinstance(form, dict):
        for key, value in form.items():
            if key in ("$call", "$partial", "$name"):
                yield value.partition(":")[0].partition(".")[0]
            yield from _iter_packages(value)
    elif isinstance(form, list):
        for value in form:
            yield from _iter_packages(value)
