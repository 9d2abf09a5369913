"""What could be written and never be read is an error when it is written, which names whose it is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fulgurite as fg
import numpy as np
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError, PluginError
from fulgurite_checkpoint import Checkpointer, SaveError, files
from fulgurite_checkpoint.validation import parse_array_specs
from fulgurite_runs import RunDirectory, json_codec
from trained import ZEROS, Act, Counting, counting, engine, steps_in


class Holding:
    """A plugin whose host state is what it is given."""

    plugin_name = "holding"

    def __init__(self, state: Any, state_version: Any = 1) -> None:
        self.state = state
        self.state_version = state_version

    @fg.hookimpl
    def get_host_state(self) -> Any:
        return {"kept": self.state}

    @fg.hookimpl
    def set_host_state(self, state: Any, version: int) -> None:
        self.state = state["kept"]


class Permuted:
    """Batches in an order that is part of the state, as of a shuffled list of that many files."""

    def __init__(self, order: Any) -> None:
        self.order = order

    def __iter__(self) -> Iterator[Any]:
        return iter(ZEROS * 9)

    def get_state(self) -> Any:
        return {"order": self.order}

    def set_state(self, state: Any) -> None:
        self.order = state["order"]


MANY_NUMBERS = [1.25] * 30_000
LONG_TEXT = "x" * 300_000


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits divided by 256: 256 KiB of JSON, and 1 MiB of memory."""
    monkeypatch.setattr(json_codec, "MAX_SIZE", 2**18)
    monkeypatch.setattr(json_codec, "MAX_MEMORY", 2**20)
    monkeypatch.setattr(files, "MAX_JSON_SIZE", 2**18)


def trial(data: Any, plugin: Any) -> fg.FitResult:
    settings: dict[str, Any] = {"steps": 5, "fast_dev_run": 2}
    return engine(None, Checkpointer(1, directory="unused"), plugin, **settings).fit(Counting, data)


@pytest.mark.full
@pytest.mark.parametrize("is_trial", [False, True])
def test_a_host_state_that_could_not_be_read_again_is_an_error_at_the_first_save(
    is_trial: bool, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def fit(plugin: Any) -> None:
        if is_trial:
            trial(ZEROS, plugin)
        else:
            counting(tmp_path / "run", plugin, steps=5)

    owner = "plugin 'holding', hook get_host_state: "
    with pytest.raises(
        ConfigurationError, match=rf"{owner}.*most of it in state\.kept.*300,\d+ bytes"
    ):
        fit(Holding(LONG_TEXT))
    with pytest.raises(ConfigurationError, match=rf"{owner}.*1,200,\d+ bytes of memory"):
        fit(Holding(MANY_NUMBERS))
    with pytest.raises(PluginError, match=r"Holding\.state_version is '1\.0'"):
        fit(Holding(1, state_version="1.0"))
    assert steps_in(tmp_path / "run") == []


@pytest.mark.full
@pytest.mark.parametrize("state", ["x" * 260_000, [1.25] * 13_000, list(range(25_000))])
def test_what_is_just_within_the_limits_can_be_written_and_read(
    state: Any, small: None, tmp_path: Path
) -> None:
    counting(tmp_path, Holding(state), steps=2, max_to_keep=1)
    resumed = Holding(None)
    assert float(counting(tmp_path, resumed, steps=3, resume=2).module.weight) == -3
    assert resumed.state == state


@pytest.mark.parametrize("is_trial", [False, True])
def test_a_state_of_the_data_that_could_not_be_read_again_is_an_error_at_the_first_save(
    is_trial: bool, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = Permuted(np.random.default_rng(0).permutation(30_000))
    with pytest.raises(
        ConfigurationError, match=r"the data source, get_state: .*too large to be read again"
    ):
        if is_trial:
            trial(data, Act(1, lambda run: None))
        else:
            engine(tmp_path / "run", Checkpointer(1), steps=5, log_every=None).fit(Counting, data)
    assert steps_in(tmp_path / "run") == []


def test_a_state_that_grows_too_large_is_a_save_that_fails(small: None, tmp_path: Path) -> None:
    """Hours after the first save, and with the result in hand."""
    growing = Holding(0)

    def grow(run: fg.Run) -> None:
        growing.state = LONG_TEXT

    with (
        pytest.warns(UserWarning, match="step [34] could not be written.*plugin 'holding'"),
        pytest.raises(SaveError, match=r"plugin 'holding'.*third failure in a row") as caught,
    ):
        counting(tmp_path, growing, Act(fg.At(3), grow), steps=9, async_save=False)
    assert float(caught.value.result.module.weight) == -5
    assert steps_in(tmp_path) == [1, 2]


def test_a_description_of_the_run_that_could_not_be_read_again_is_an_error_at_its_start(
    small: None, tmp_path: Path
) -> None:
    trainer = engine(tmp_path, Checkpointer(1), steps=2)
    trainer.config = {"names": LONG_TEXT, "seed": 0}
    with pytest.raises(
        ConfigurationError, match=r"description of the run .*most of it in configuration\.names"
    ):
        trainer.fit(Counting, ZEROS)
    with pytest.raises(CheckpointError, match="there is no run"):
        RunDirectory(tmp_path).read_manifest()


def test_an_array_of_more_than_two_billion_numbers_in_a_row_is_read() -> None:
    assert parse_array_specs({"module.table": [[2**31, 2], "int8"]}) == {
        "module.table": ((2**31, 2), "int8")
    }
    with pytest.raises(ValueError, match=r"from 0 to 2\*\*48"):
        parse_array_specs({"module.table": [[2**50], "int8"]})


def test_an_integer_of_thousands_of_digits_is_an_error_naming_the_plugin(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="plugin 'holding', hook get_host_state: a number cannot be writ"
    ):
        counting(tmp_path, Holding(10**5000), steps=2)
