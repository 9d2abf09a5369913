"""Turn values of records into what MLflow takes."""

import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fulgurite as fg
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite_runs import as_float

FOLDER = "mlruns"
"""The store beside the directory of a run."""

_SERVERS = {"databricks", "file", "http", "https"}
_DATABASES = {"mssql", "mysql", "postgresql", "sqlite"}
# The entry points of what else MLflow can be taught to write to.
_STORE_PLUGINS = "mlflow.tracking_store"

# What MLflow takes in the name of a metric or parameter: letters, digits and these.
_REFUSED = re.compile(r"[^\w.\- :/]")
_LONGEST_NAME = 250
_LONGEST_PARAMETER = 6000


def clean_name(name: str) -> str:
    """Return a name that MLflow takes: what it refuses becomes `_`.

    MLflow uses names as paths as well, so parts such as `..` or none between two slashes become
    `_`, too.
    """
    cleaned_name = _clean_parts(_REFUSED.sub("_", name))
    # In bytes: MLflow counts characters, but a store of files makes files of names.
    raw = cleaned_name.encode(errors="replace")
    if len(raw) <= _LONGEST_NAME:
        return raw.decode()
    # What the cut leaves of the last part may be nothing, for which a `_` comes.
    return _clean_parts(raw[: _LONGEST_NAME - 1].decode(errors="ignore"))


def _clean_parts(name: str) -> str:
    parts = name.split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)


def escape_surrogates(text: str) -> str:
    """Return a text that UTF-8 can encode: file names of other encodings hold lone surrogates."""
    return text.encode(errors="backslashreplace").decode()


def build_uri(uri: str | Path) -> str:
    """Return the address of a server as it is, and the path of a folder as an address.

    Raises:
        ConfigurationError: MLflow cannot use it. MLflow itself would say so at the first record.
    """
    if not isinstance(uri, str) or (":" not in uri and uri != "databricks"):
        return Path(uri).absolute().as_uri()
    scheme = uri.partition(":")[0].partition("+")[0]
    if scheme in _DATABASES:
        missing = [name for name in ("alembic", "sqlalchemy") if find_spec(name) is None]
        if missing:
            raise ConfigurationError(
                f"MLflow: a store in {scheme} needs {' and '.join(missing)}, which mlflow-skinny "
                "does not bring: pip install 'fulgurite-mlflow[sqlite]', or mlflow"
            )
    elif scheme not in _SERVERS:
        names = {entry_point.name for entry_point in entry_points(group=_STORE_PLUGINS)}
        if scheme not in names:
            raise ConfigurationError(
                f"MLflow: the tracking URI begins with {scheme}:, which MLflow does not know; give "
                "the path of a folder, http://SERVER:PORT, or sqlite:///FILE"
            )
    return uri


def flatten_numbers(record: fg.Record) -> Iterator[tuple[str, float]]:
    """Yield `SOURCE/NAME` and value of each number; elements of arrays are `SOURCE/NAME/INDEX`."""
    for name, value in record.values.items():
        full_name = f"{record.source}/{name}"
        if value is None or isinstance(value, str):
            continue
        if isinstance(value, int | float):
            yield full_name, as_float(value)
            continue
        array = np.asarray(value)
        for index in np.ndindex(array.shape):
            yield "/".join([full_name, *map(str, index)]), float(array[index])


def flatten_configuration(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and text of each leaf of a configuration, `plugins.0.every` and `100`.

    Args:
        value: JSON.
        prefix: the path of the value.
    """
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        yield prefix, escape_surrogates(str(value))[:_LONGEST_PARAMETER]
    for key, part in items:
        yield from flatten_configuration(part, f"{prefix}.{key}" if prefix else str(key))
