"""Which directories the logger for TensorBoard writes to."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fulgurite as fg
import numpy as np
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_tensorboard import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_tensorboard import BATCHES, Line


def misspell_average(source: str, name: str) -> tuple[str, str]:
    return ("trian" if name == "loss_average" else source, name)


def test_values_of_an_unknown_source_are_left_out_with_one_warning(tmp_path: Path):
    logger = TensorBoardLogger(layout=misspell_average, sources=("train", "test"))
    plugins = [logger, "environment"]
    engine = fg.Engine(steps=4, log_every=2, run_dir=tmp_path, plugins=plugins, autoload=False)
    with pytest.warns(UserWarning, match="leaves") as warned:
        result = engine.fit(Line, fg.DataSource(BATCHES))
    (average,) = (str(warning.message) for warning in warned)
    assert "leaves 'trian/loss_average' out, of step 2 first: ConfigurationError: " in average
    assert "there is no source 'trian'. Did you mean 'train'?" in average
    assert not result.failures
    folder = tmp_path / "tensorboard"
    assert not list(folder.glob("*trian*"))
    assert list(folder.glob("*environment"))  # which describes the run
    read = EventAccumulator(str(folder / "train")).Reload()
    assert set(read.Tags()["scalars"]) == {"loss", "batch_loss", "double"}
    np.testing.assert_array_equal(
        [event.value for event in read.Scalars("double")],
        np.float32(result.history["train/double"]),
    )


def test_values_whose_layout_fails_are_left_out_alone(tmp_path: Path):
    places = {"whole": ("train", "whole"), "part": "train", "odd": ("train", 3)}
    logger = TensorBoardLogger(layout=lambda source, name: places[name])  # pyright: ignore[reportArgumentType]
    run: Any = SimpleNamespace(
        run_dir=SimpleNamespace(path=tmp_path), step=0, step_range=SimpleNamespace(start=0)
    )
    backend = logger.open_backend(run, None)
    values = dict.fromkeys([*places, "missing"], 0.5)
    with pytest.warns(UserWarning, match="leaves") as warned:
        for step in (1, 2):
            backend.write(fg.Record("scalars", "train", step, values))
    backend.close()
    messages = sorted(str(warning.message).partition(": ") for warning in warned)
    assert [message[0] for message in messages] == [
        f"tensorboard leaves 'train/{name}' out, of step 1 first"
        for name in ("missing", "odd", "part")
    ]
    assert messages[0][2] == "KeyError: 'missing'"
    assert "layout returned 'train'; it must return two strings" in messages[2][2]
    read = EventAccumulator(str(tmp_path / "tensorboard" / "train")).Reload()
    assert [(event.step, event.value) for event in read.Scalars("whole")] == [(1, 0.5), (2, 0.5)]
    with pytest.raises(ConfigurationError, match="layout is 'train'; it must be a function"):
        TensorBoardLogger(layout="train")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("sources", ["train", b"train", 3, ["train", 3]])
def test_sources_that_are_no_names_are_refused(sources: Any):
    with pytest.raises(ConfigurationError, match="TensorBoardLogger: sources is .* a tuple"):
        TensorBoardLogger(sources=sources)


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("keys", "give sources="),
        ("allow_new_keys", "leave sources= out"),
        ("auto_flush", "at once"),
        ("tag_to_key", "give layout="),
    ],
)
def test_arguments_of_another_writer_are_answered_with_a_hint(argument: str, hint: str):
    with pytest.raises(ConfigurationError, match=f"no argument '{argument}': .*{hint}"):
        TensorBoardLogger(**{argument: True})  # pyright: ignore[reportArgumentType]
