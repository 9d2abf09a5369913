"""What a pass over all examples found out, kept in a file, so that the next start needs no pass."""

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from fulgurite.errors import ConfigurationError, DataError

from fulgurite_data.identity import Identity
from fulgurite_data.writing import write_whole

Plan = dict[str, np.ndarray]


def load_or_make(
    path: str | PathLike[str] | None, identify: Callable[[], Identity], make: Callable[[], Plan]
) -> Plan:
    """Return a plan from its file, or make it and write the file.

    Args:
        path: of the file; None to make the plan without one.
        identify: returns what decides the plan. It is in the file, and a file of another one is
            refused. Called if there is a path.
        make: called without arguments; returns arrays by name.

    Raises:
        DataError: the file is damaged, or of another dataset.
    """
    if path is None:
        return make()
    target = Path(path)
    identity = "\n".join(identify().list_for_file())
    if target.exists():
        return _load(target, identity)
    plan = make()
    with write_whole(target) as file:
        np.savez(file, allow_pickle=False, identity=np.array(identity), **plan)
    return plan


def check_seen(identity: Identity, where: str, advice: str) -> None:
    """Raise if a file could not tell whether it is of the same data.

    Args:
        identity: of the data.
        where: what has the path of the file.
        advice: what to do instead.

    Raises:
        ConfigurationError: a function holds something that cannot be looked into.
    """
    if identity.unseen:
        raise ConfigurationError(
            f"{where}: whether a file is of this data cannot be told, because "
            f"{identity.unseen[0]} cannot be looked into. Let the function hold arrays, numbers, "
            f"strings, or containers of these, or {advice}"
        )


def _load(path: Path, identity: str) -> Plan:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            plan = {name: content[name] for name in content.files}
        saved = str(plan.pop("identity"))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DataError(f"{path} does not hold a plan: {error!r}. Remove it") from error
    if saved != identity:
        lines = [text.replace("\n", ".") for text in (saved, identity)]
        raise DataError(
            f"{path} has the plan of {lines[0]}, not of {lines[1]}: remove it, or choose another "
            "path"
        )
    return plan
