"""Which directories the logger for TensorBoard writes to."""

from pathlib import Path
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
