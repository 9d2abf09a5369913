"""The memory of a sweep on disk: Optuna's journal, and who works on which trial."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import optuna
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite_runs import Lock, RunDirectory, read_owner
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from fulgurite_sweeps.attributes import AXES, SETTINGS
from fulgurite_sweeps.objectives import Direction

STUDY = "sweep"
"""The name of the study in the journal."""


class KernelLock:
    """A lock of the kernel, which is free as soon as its owner is gone.

    Optuna's own locks are files that a killed process leaves, for which others wait 30 seconds.

    Args:
        path: of a file that is made where it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Wait for the lock."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Let others have it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class JournalLock(KernelLock):
    """The lock of whoever writes to Optuna's journal.

    Where the disk is full, a line may be written in part. Optuna would write the next one behind
    it, and could read the journal no more: so what is there of such a line is removed first.

    Args:
        path: of the lock's file.
        journal: which is written to.
    """

    def __init__(self, path: Path, journal: Path) -> None:
        super().__init__(path)
        self._journal = journal

    def acquire(self) -> bool:
        """Wait for the lock, and remove what a writer before has left of a line."""
        super().acquire()
        try:
            self._remove_torn_line()
        except BaseException:
            self.release()
            raise
        return True

    def _remove_torn_line(self) -> None:
        with self._journal.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if file.read(1) not in (b"", b"\n"):
                content = self._journal.read_bytes()
                file.truncate(content.rfind(b"\n") + 1)


class Journal(NamedTuple):
    """What Optuna remembers of a sweep.

    Attributes:
        study: its trials.
        storage: where they are.
    """

    study: optuna.Study
    storage: BaseStorage

    def get_trial_id(self, number: int) -> int:
        """Return what the storage calls a trial."""
        study_id = self.storage.get_study_id_from_name(STUDY)
        return self.storage.get_trial_id_from_study_id_trial_number(study_id, number)

    def get_trial(self, number: int) -> optuna.trial.FrozenTrial:
        """Return a trial as it stands now."""
        return self.storage.get_trial(self.get_trial_id(number))

    def set_attribute(self, number: int, name: str, value: Any) -> None:
        """Note something of a trial that runs.

        Args:
            number: of the trial.
            name: of the attribute.
            value: JSON.
        """
        self.storage.set_trial_user_attr(self.get_trial_id(number), name, value)

    def set_constraint(self, number: int, name: str, excess: float) -> None:
        """Note whether a trial that runs fulfils a constraint.

        Args:
            number: of the trial.
            name: of the constraint.
            excess: by how much it is violated; 0 or less if it is fulfilled.
        """
        if name not in self.get_trial(number).constraints:
            optuna.Trial(self.study, self.get_trial_id(number)).set_constraint(name, excess)


class SweepDirectory:
    """The layout of a sweep on disk.

        journal.jsonl    Optuna's journal: space, trials, values
        sweep.json       what a report shows of it
        trial-N/         the run directory of a trial
        trial-N.log      what it prints
        locks/           who may ask for trials, and who works on which

    Args:
        path: of the folder, which need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = RunDirectory(path).path

    @property
    def journal(self) -> Path:
        """Optuna's journal."""
        return self.path / "journal.jsonl"

    @property
    def summary(self) -> Path:
        """What a report shows of the sweep."""
        return self.path / "sweep.json"

    @property
    def exists(self) -> bool:
        """Whether a sweep was begun there."""
        return self.journal.is_file()

    def get_run(self, number: int) -> RunDirectory:
        """Return the run directory of a trial."""
        return RunDirectory(self.path / f"trial-{number}")

    def get_log(self, number: int) -> Path:
        """Return the file that a trial prints to."""
        return self.path / f"trial-{number}.log"

    def make(self) -> None:
        """Make the folder.

        Raises:
            ConfigurationError: there is a run in it, or it cannot be made.
        """
        if RunDirectory(self.path).num_attempts:
            raise ConfigurationError(f"{self.path} is a run: give a sweep a directory of its own")
        try:
            (self.path / "locks").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"{self.path} cannot be made: {error}. Choose another directory"
            ) from error

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only one who asks for trials within the block; waits for others."""
        lock = KernelLock(self.path / "locks" / "sweep")
        lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def claim(self, number: int) -> Lock | None:
        """Return the lock of a trial; None if somebody works on it, or its process still lives.

        Args:
            number: of the trial.
        """
        path = self.path / "locks" / f"trial-{number}"
        # Of the driver, and of the trial's process, which may be elsewhere.
        for entry in (read_owner(path), self.get_run(number).read_owner()):
            if entry is None:
                continue
            owner, heartbeat = entry
            # To take the lock of another machine would wait for its next heartbeat.
            if not owner.is_local and owner.is_running(heartbeat):
                return None
        try:
            # A trial whose driver was killed saves before it ends.
            self.get_run(number).check_unused()
            return Lock(path, attempt=1)
        except CheckpointError:
            return None

    def check_unbegun(self, number: int) -> None:
        """Raise an error if there is a run where a trial begins only now: its results would be
        taken for those of the trial, or it would be resumed with the values of the trial.

        Args:
            number: of the trial.

        Raises:
            CheckpointError: there is.
        """
        path = self.get_run(number).path
        if path.is_dir() and any(path.iterdir()):
            raise CheckpointError(
                f"trial-{number} in {self.path} begins only now, and a run of an earlier sweep is "
                "there: choose another directory, or remove what the earlier sweep has left"
            )

    def is_in_use(self, number: int) -> bool:
        """Return whether a driver works on a trial, as far as this machine can tell.

        Args:
            number: of the trial.
        """
        entry = read_owner(self.path / "locks" / f"trial-{number}")
        if entry is None:
            return False
        owner, heartbeat = entry
        return owner.is_running(heartbeat)

    def _open_storage(self) -> BaseStorage:
        lock = cast(Any, JournalLock(self.path / "locks" / "journal", self.journal))
        return JournalStorage(JournalFileBackend(str(self.journal), lock_obj=lock))

    def load(self, pruner: optuna.pruners.BasePruner | None = None) -> Journal:
        """Return the journal of a sweep that was begun.

        Args:
            pruner: who is asked whether to give a trial up.

        Raises:
            ConfigurationError: there is none.
        """
        if not self.exists:
            raise ConfigurationError(f"there is no sweep in {self.path}: check the path")
        storage = self._open_storage()
        with suppress(KeyError):
            study = optuna.load_study(study_name=STUDY, storage=storage, pruner=pruner)
            if AXES in study.user_attrs.get(SETTINGS, {}):
                return Journal(study, storage)
        raise ConfigurationError(
            f"the sweep in {self.path} had not begun, or an earlier version has begun it: start it "
            "again, an earlier one in another directory"
        )

    def open(self, directions: Sequence[Direction], settings: dict[str, Any]) -> Journal:
        """Return the journal of a sweep, which begins here or was begun earlier. One of which no
        trial was started yet may begin with other settings.

        Args:
            directions: of its objectives.
            settings: what must not change between two starts, as JSON by name.

        Raises:
            ConfigurationError: the earlier start had other settings.
        """
        self.make()
        with self.lock():
            journal = self._load_begun(settings)
            if journal is not None:
                return journal
            storage = self._open_storage()
            study = optuna.create_study(study_name=STUDY, storage=storage, directions=directions)
            study.set_user_attr(SETTINGS, settings)
            return Journal(study, storage)

    def _load_begun(self, settings: dict[str, Any]) -> Journal | None:
        """Return the journal of a sweep that was begun; None if none of its trials was started.

        Args:
            settings: what it must have been begun with.
        """
        if not self.exists:
            return None
        storage = self._open_storage()
        with suppress(KeyError):
            study = optuna.load_study(study_name=STUDY, storage=storage)
            if all(trial.state == TrialState.WAITING for trial in study.get_trials(deepcopy=False)):
                if study.user_attrs.get(SETTINGS) == settings:
                    return Journal(study, storage)
                optuna.delete_study(study_name=STUDY, storage=storage)
                return None
            self._check_settings(study.user_attrs[SETTINGS], settings)
            return Journal(study, storage)
        return None

    def _check_settings(self, earlier: dict[str, Any], settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            if earlier.get(name) != value:
                raise ConfigurationError(
                    f"the sweep in {self.path} was begun with another {name}: it was "
                    f"{earlier.get(name)} and is {value}. Give the same, or another directory"
                )
