"""The data of an experiment in one object: prepared once, read by every process."""

import socket
import zlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from fulgurite.errors import DataError

from fulgurite_data.locking import hold_lock


class DataModule:
    """The data of an experiment, as an object with the parts `train`, `evaluations` and `predict`,
    of which each call of an engine takes the one it needs.

    A subclass sets `folder` and defines what it needs of `prepare`, `setup`, `make_train`,
    `make_evaluations` and `make_predict`. The first use of a part prepares and sets up.

    Example:
        from fulgurite_data import Arrays, DataModule


        class Squares(DataModule):
            folder = "squares"

            def prepare(self):
                np.save(f"{self.folder}/x.npy", np.arange(100.0))

            def setup(self):
                x = np.load(f"{self.folder}/x.npy", mmap_mode="r")
                self.examples = Arrays({"x": x, "y": x**2}).shuffle(seed=0, reshuffle=False)

            def make_train(self):
                return self.examples.skip(20).shuffle().batch(8)

            def make_evaluations(self):
                return {"validation": self.examples.take(20).batch(20)}


        data = Squares()
        validation = data.evaluations["validation"]

    Attributes:
        folder: where `prepare` writes, a string or a path. Where several machines share it, one
            after the other prepares.
    """

    folder: Any
    _is_loaded: bool = False

    def prepare(self) -> None:
        """Write what is read later into the folder: download, convert, tokenize.

        It is called at each start, in one process of each machine, and no other one that calls it
        for the same folder runs meanwhile. So it should see what is done already, as `tokenize`
        does.
        """

    def setup(self) -> None:
        """Open what was prepared, in each process."""

    def make_train(self) -> Any:
        """Return the data that is trained on."""
        return None

    def make_evaluations(self) -> Mapping[str, Any]:
        """Return the data of evaluations by name."""
        return {}

    def make_predict(self) -> Any:
        """Return the data that is predicted on."""
        return None

    def load(self) -> None:
        """Prepare and set up, unless that was done in this process. All processes call it.

        Raises:
            DataError: another process failed to prepare.
        """
        if self._is_loaded:
            return
        try:
            self._prepare_once()
            self.setup()
        except AttributeError as error:
            # As a property's, it would say that the data has no part of this name.
            raise DataError(f"{type(self).__name__} cannot be prepared: {error}") from error
        self._is_loaded = True

    @cached_property
    def train(self) -> Any:
        """The data that is trained on."""
        return self._make("train")

    @cached_property
    def evaluations(self) -> Mapping[str, Any]:
        """The data of evaluations by name."""
        return self._make("evaluations")

    @cached_property
    def predict(self) -> Any:
        """The data that is predicted on."""
        return self._make("predict")

    def _make(self, part: str) -> Any:
        self.load()
        try:
            return getattr(self, f"make_{part}")()
        except AttributeError as error:
            # As a property's, it would say that the data has no part of this name.
            raise DataError(f"{type(self).__name__}.make_{part} failed: {error}") from error

    def _prepare_once(self) -> None:
        failure = None
        if _is_first_of_machine():
            try:
                with hold_lock(Path(self.folder)):
                    self.prepare()
            except Exception as error:
                failure = error
        # The others wait here, and learn of a failure instead of waiting without end.
        have_failed = _gather(failure is not None)
        if failure is not None:
            raise failure
        if have_failed.any():
            raise DataError(
                f"process {int(np.flatnonzero(have_failed)[0])} failed to prepare the data of "
                f"{type(self).__name__}: its own error says why"
            )


def _is_first_of_machine() -> bool:
    """Return whether no process of this machine has a smaller number."""
    hosts = _gather(zlib.crc32(socket.gethostname().encode()))
    return int(np.flatnonzero(hosts == hosts[jax.process_index()])[0]) == jax.process_index()


def _gather(value: int) -> np.ndarray:
    """Return the value of each process, uint32 `(processes,)`."""
    if jax.process_count() == 1:
        return np.array([value], np.uint32)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(np.uint32(value))).reshape(-1)
