"""Which checkpoint is meant by what users pass to `fit(resume=...)` and to commands."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import fulgurite as fg
from fulgurite.errors import ConfigurationError

_STEP_PATH = re.compile(r"(?:(.+)/)?checkpoints/step-(0|[1-9][0-9]{0,11})/?")


def as_checkpoint_ref(resume: Any) -> fg.CheckpointRef:
    """Return a reference for a value of `fit(resume=...)`, of the run itself where it names none.

    A path `RUN/checkpoints/step-N` refers to that checkpoint, any other path to the newest one of
    the run there.

    Args:
        resume: "auto", "latest", "best", a step, a path or a `CheckpointRef`.

    Raises:
        ConfigurationError: it is not one of these.
    """
    if isinstance(resume, fg.CheckpointRef):
        return resolve_step_path(resume)
    if isinstance(resume, bool) or not isinstance(resume, int | str | os.PathLike) or resume == "":
        raise ConfigurationError(
            f"resume is {resume!r}, not 'auto', 'never', 'latest', 'best', a step or path"
        )
    if resume == "auto":
        return fg.CheckpointRef(None, optional=True)
    if isinstance(resume, int) or resume in ("latest", "best"):
        return fg.CheckpointRef(None, resume)  # type: ignore[arg-type]
    return resolve_step_path(fg.CheckpointRef(resume))


def advise_on_path(root: Path) -> str:
    """Return what to do about a path at which there is no run or checkpoint."""
    is_weights = root.name.endswith((".safetensors", ".safetensors.index.json"))
    if is_weights or (root.is_dir() and any(root.glob("*.safetensors"))):
        return (
            "safetensors are read by the plugin Pretrained of fulgurite-pretrained, which must be "
            "one of the engine's plugins"
        )
    return "check the path"


def resolve_step_path(reference: fg.CheckpointRef) -> fg.CheckpointRef:
    """Return a reference to a run and a step for one to the path of a checkpoint."""
    if reference.path is None or reference.step != "latest":
        return reference
    path = os.fspath(reference.path)
    match = _STEP_PATH.fullmatch(path) if isinstance(path, str) else None
    if match is None:
        return reference
    return replace(reference, path=match[1] or ".", step=int(match[2]))
