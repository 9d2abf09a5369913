"""Hands records to wandb. All of it runs on the writer's thread."""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fulgurite as fg
import numpy as np
from fulgurite_logging import media
from fulgurite_runs.json_codec import dumps, loads

from fulgurite_wandb.runfile import last_step

# A line of records.jsonl longer than this is none of ours.
_LONGEST_LINE = 64 * 2**20


@dataclass(frozen=True)
class Resumed:
    """What a resumed run goes on from: its step, and the first `size` bytes of its records, if
    there are any."""

    step: int
    records: Path | None
    size: int


class Backend:
    """A run at Weights & Biases.

    `wandb.init` gets `settings`. Which steps have arrived is looked up where they arrive, at the
    server or in the run's
    files: what was handed over before a kill is not all there.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        mode: Any,
        folder: Path,
        timeout: float,
        resumed: Resumed | None,
    ) -> None:
        self._settings, self._mode, self._folder, self._timeout = settings, mode, folder, timeout
        self._resumed, self._run, self._arrived, self._step = resumed, None, -1, -1
        self._values: dict[str, Any] = {}
        self._refused = set[str]()

    def write(self, record: fg.Record) -> None:
        """Takes one record. Those of one step become one row, which is handed over with the next
        step."""
        run = self._run or self._begin()
        if record.kind == "config":
            self._configure(run, record)
        elif record.step > self._arrived:
            self._add(record)

    def sync(self) -> None:
        """wandb cannot be asked to make anything durable."""

    def get_position(self) -> None:
        """None: what wandb has got cannot be taken back."""

    @property
    def connected(self) -> bool:
        """Whether the run has begun, at the server or here."""
        return self._run is not None

    @property
    def place(self) -> str:
        """Where wandb keeps the run until it is sent."""
        return str(self._folder / "wandb") if self._run is None else self._run.settings.sync_dir

    def close(self) -> None:
        """Hands over the last row and ends the run."""
        if self._run is not None:
            self._hand_over()
            self._run.finish()

    def _begin(self) -> Any:
        """Connects, and sends what is missing up to the checkpoint that is gone on from."""
        # Else wandb measures itself for its makers, which takes a third of the time of each row.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # wandb's own process that one of this program's parents had begun, and that may be gone.
        os.environ.pop("WANDB_SERVICE", None)
        with _thrifty():
            return self._connect()

    def _connect(self) -> Any:
        import wandb
        from wandb.errors import CommError, UsageError

        self._folder.mkdir(parents=True, exist_ok=True)
        files = (
            sorted(self._folder.glob(f"wandb/*run-*-{self._settings['id']}/*.wandb"))
            if self._resumed
            else []
        )
        quiet = wandb.Settings(
            disable_git=True,
            save_code=False,
            console="off",
            silent=True,
            init_timeout=self._timeout,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        arguments = {
            "dir": str(self._folder),
            "resume": "allow",
            "settings": quiet,
            **self._settings,
        }
        try:
            with _unasked(quiet):
                mode: Any = self._mode
                self._run = wandb.init(mode=mode, **arguments)
        except (CommError, UsageError) as error:
            if self._mode == "offline":
                raise
            warnings.warn(
                f"wandb cannot be reached and goes on offline: {error}. Later `wandb sync` sends "
                f"what is in "
                f"{self._folder / 'wandb'}",
                stacklevel=2,
            )
            wandb.teardown()  # else the id would still be in use
            self._mode = "offline"
            self._run = wandb.init(mode="offline", **arguments)
        if self._resumed is not None:
            # What an attempt that was online had here may be at the server or not, which that one
            # knows.
            known = [
                one
                for one in files
                if self._mode == "offline" or one.parent.name.startswith("offline-")
            ]
            arrived = max(map(last_step, known), default=-1)
            self._arrived = (
                max(arrived, self._run.starting_step - 1) if self._mode == "online" else arrived
            )
            self._fill(self._resumed)
        return self._run

    def _fill(self, resumed: Resumed) -> None:
        """Sends the records between the last step that arrived and the checkpoint."""
        if resumed.records is None or not resumed.size:
            if self._arrived < resumed.step:
                warnings.warn(
                    f"wandb has the steps up to {max(self._arrived, 0)} of {resumed.step} and "
                    f"there is no "
                    "records.jsonl with the rest: add the plugin 'jsonl' of fulgurite-logging",
                    stacklevel=2,
                )
            return
        for record in _scalars(resumed):
            if self._arrived < record.step <= resumed.step:
                self._add(record)

    def _add(self, record: fg.Record) -> None:
        if record.step != self._step:
            self._hand_over()
            self._step = record.step
        for name, value in record.values.items():
            where = f"{record.source}/{name}"
            try:
                self._values.update(_shown(where, value))
            except (
                Exception
            ) as error:  # of a figure's own code, too: the rest of the row does not depend on it
                if where not in self._refused:
                    self._refused.add(where)
                    why = f"{type(error).__name__}: {error}"
                    warnings.warn(
                        f"wandb leaves {where!r} out, of step {record.step} first: {why}",
                        stacklevel=2,
                    )

    def _hand_over(self) -> None:
        if self._values and self._run is not None:
            self._run.log(self._values, step=self._step)
            self._values = {}

    def _configure(self, run: Any, record: fg.Record) -> None:
        if record.source == "best":
            run.summary.update({f"best/{name}": value for name, value in record.values.items()})
            return
        values = json.loads(dumps(record.values))
        arguments = values.pop("configuration", None) or {}
        run.config.update({**arguments, record.source: values}, allow_val_change=True)


@contextmanager
def _unasked(quiet: Any) -> Iterator[None]:
    """Nobody is asked for a key, lest training wait for the answer. What `wandb.init` is given does
    not see to that."""
    import wandb

    everywhere = wandb.setup().settings
    wandb.termsetup(quiet, None)
    try:
        yield
    finally:
        wandb.termsetup(everywhere, None)


@contextmanager
def _thrifty() -> Iterator[None]:
    """wandb's own process, which is written in Go and starts within, leaves the processors to
    training: a row costs it less with one thread at work and rarer collections of garbage.

    A small step keeps two cores busy, so every other program slows it down. A row takes 0.5 ms of
    wandb's Python and 0.4 ms of its Go. A process of our own around wandb would move this work and
    not save it.
    """
    added = {
        name: value
        for name, value in {"GOMAXPROCS": "1", "GOGC": "400"}.items()
        if name not in os.environ
    }
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _scalars(resumed: Resumed) -> Iterator[fg.Record]:
    """The records of scalars that the checkpoint knows of."""
    assert resumed.records is not None
    left = resumed.size
    with open(resumed.records, "rb") as file:
        while left > 0 and (line := file.readline(min(left, _LONGEST_LINE))).endswith(b"\n"):
            left -= len(line)
            record = loads(line)
            if record["kind"] == "scalars":
                yield fg.Record("scalars", record["source"], record["step"], record["values"])


def _shown(name: str, value: Any) -> dict[str, Any]:
    """What wandb is told of one value."""
    if value is None or isinstance(value, int | float):
        return {name: value}
    if isinstance(value, fg.Media):
        show = next((show for kind, show in _MEDIA.items() if isinstance(value, kind)), None)
        if show is None:
            raise TypeError(f"this logger cannot show fg.Media of type {type(value).__name__}")
        return {name: show(value)}
    if isinstance(value, str):
        return {name: _text(media.Text(value))}
    array = np.asarray(value)
    if array.ndim == 2:
        import wandb

        columns: list[Any] = [str(column) for column in range(array.shape[1])]
        return {name: wandb.Table(columns=columns, data=array.tolist())}
    return {
        "/".join([name, *map(str, index)]): array[index].item() for index in np.ndindex(array.shape)
    }


def _image(image: media.Image) -> Any:
    # wandb takes Pillow as it finds it, were it half imported by the thread of another logger.
    import PIL.Image  # noqa: F401
    import wandb

    pixels = np.asarray(image.pixels)
    return wandb.Image(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def _images(images: media.Images) -> Any:
    return [_image(media.Image(one)) for one in np.asarray(images.pixels)]


def _histogram(histogram: media.Histogram) -> Any:
    import wandb

    counts, edges = np.asarray(histogram.counts), np.asarray(histogram.edges)
    # More bins than wandb takes are put together, so many each.
    begins = np.arange(0, len(counts), -(-len(counts) // wandb.Histogram.MAX_LENGTH))
    return wandb.Histogram(
        np_histogram=(np.add.reduceat(counts, begins), np.append(edges[begins], edges[-1]))
    )


def _text(text: media.Text) -> Any:
    import wandb

    return wandb.Table(columns=["text"], data=[[text.text]])


def _figure(figure: media.Figure) -> Any:
    import PIL.Image  # noqa: F401
    import wandb
    from matplotlib.figure import Figure

    drawn = figure.draw(figure.values)
    if not isinstance(drawn, Figure):
        raise TypeError(f"`draw` gave {type(drawn).__name__} and no matplotlib.figure.Figure")
    try:
        return wandb.Image(drawn)
    finally:
        if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
            pyplot.close(drawn)  # which keeps each figure that it made


_MEDIA: dict[type, Callable[[Any], Any]] = {
    media.Image: _image,
    media.Images: _images,
    media.Histogram: _histogram,
    media.Text: _text,
    media.Figure: _figure,
}
