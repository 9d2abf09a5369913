"""What a pass over all examples found out, kept in a file, so that the next start needs no pass."""

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from fulgurite.errors import DataError

from fulgurite_data.identity import shorten_identity

Plan = dict[str, np.ndarray]


def load_or_make(
    path: str | PathLike[str] | None, stages: tuple[str, ...], make: Callable[[], Plan]
) -> Plan:
    """Return a plan from its file, or make it and write the file.

    Args:
        path: of the file; None to make the plan without one.
        stages: of the node that the plan is for. They are in the file, and a file of others is
            refused.
        make: called without arguments; returns arrays by name.

    Raises:
        DataError: the file is damaged, or of another dataset.
    """
    if path is None:
        return make()
    target = Path(path)
    identity = "\n".join(shorten_identity(stages))
    if target.exists():
        return _load(target, identity)
    plan = make()
    partial = target.with_name(f"{target.name}.partial")
    with partial.open("wb") as file:
        np.savez(file, allow_pickle=False, identity=np.array(identity), **plan)
    partial.replace(target)
    return plan


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
