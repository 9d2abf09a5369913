"""A checkpoint whose small files were edited, with hashes that fit: the run resumes from it or from
the one before, or ends with an error of ours."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import fulgurite as fg
import numpy as np
import pytest
from fulgurite.errors import FulguriteError
from fulgurite_averaging import EMA, Average
from fulgurite_checkpoint import Checkpointer
from fulgurite_checkpoint.files import DamagedError, compute_checksum
from fulgurite_checkpoint.format import list_entries
from fulgurite_checkpoint.restoring import read_checkpoint
from fulgurite_evaluators import Evaluator
from fulgurite_logging import CSVLogger, JSONLLogger
from fulgurite_stopping import EarlyStopping, SpikeDetection, TimeLimit
from hypothesis import given, settings, strategies as st
from trained import NET, regression

SMALL_FILES = ("COMMIT", "host-0.json", "index.json", "manifest.json", "history.json")
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 10**30, 1.5, 1e308, "", "1", "module.first.weight", "\ud800", [], [1], {}, {"a": 1},
    {"$float": "nan"}, {"$float": "x"}, {"$bytes": "AA=="}, {"$array": [1], "dtype": "int32", "shape": [1]},
    {"$array": [1], "dtype": "S1000000000", "shape": [9, 9]},
)  # fmt: skip
NEW_KEYS = ("x", "", "../x", "module")

Place = tuple[Any, ...]
"""The keys and indices that lead to a value in JSON."""


def train(run: Path, steps: int, resume: Any = None) -> fg.FitResult:
    plugins = [
        Checkpointer(1, max_to_keep=2, monitor="test/loss", mode="min"),
        Evaluator("test", regression(shuffle=False), every=2),
        EarlyStopping("test/loss", patience=50),
        SpikeDetection(factor=100.0),
        TimeLimit("1h"),
        Average(EMA(0.9)),
        JSONLLogger(),
        CSVLogger(),
    ]
    engine = fg.Engine(run_dir=run, steps=steps, log_every=1, plugins=plugins, autoload=False)
    return engine.fit(NET, regression(), resume=resume)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("edited") / "run"
    train(run, 3)
    return run


def iter_places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the place of each value below one, that of the whole last."""
    entries: Any = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    for key, child in entries:
        yield from iter_places(child, (*place, key))
    yield place


def set_value(container: Any, key: Any, new_value: Any) -> None:
    container[key] = new_value


def delete(container: Any, key: Any, new_value: Any) -> None:
    del container[key]


def repeat(container: Any, key: Any, new_value: Any) -> None:
    """Have what is there a second time: at the end of a list, below another key."""
    if isinstance(container, list):
        container.append(container[key])
    else:
        container[NEW_KEYS[VALUES.index(new_value) % len(NEW_KEYS)]] = container[key]


Edit = Callable[[Any, Any, Any], None]
EDITS: tuple[Edit, ...] = (set_value, set_value, set_value, delete, repeat)


def edit_file(path: Path, place: int, edit: Edit, new_value: Any) -> str:
    """Edit JSON at the place of a number, and return where that is."""
    content = json.loads(path.read_text())
    places = list(iter_places(content))
    *parents, key = places[place % (len(places) - 1)]
    container = content
    for parent in parents:
        container = container[parent]
    edit(container, key, new_value)
    path.write_text(json.dumps(content))
    return f"{path.name} {[*parents, key]}: {edit.__name__} {new_value!r}"


def update_hashes(checkpoint: Path) -> None:
    """Make the hashes those of the files, as far as there still are any."""
    hashes_path = checkpoint / "hashes-0.json"
    hashes = json.loads(hashes_path.read_text())
    for name in SMALL_FILES[1:]:
        hashes[name] = list(compute_checksum(checkpoint / name))
    hashes_path.write_text(json.dumps(hashes))
    commit = json.loads((checkpoint / "COMMIT").read_text())
    if isinstance(commit.get("hashes"), list) and len(commit["hashes"]) == 1:
        commit["hashes"] = [hashlib.sha256(hashes_path.read_bytes()).hexdigest()]
    commit.pop("sha256", None)
    commit_text = json.dumps(commit, separators=(",", ":"))
    commit["sha256"] = hashlib.sha256(commit_text.encode()).hexdigest()
    (checkpoint / "COMMIT").write_text(json.dumps(commit))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "num_examples",
    [
        pytest.param(15, marks=pytest.mark.full),
        pytest.param(1_000, marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_from_an_edited_checkpoint_or_says_why_not(
    trained_run: Path, num_examples: int, tmp_path: Path
) -> None:
    run = tmp_path / "run"

    @settings(max_examples=num_examples, deadline=None, database=None)
    @given(
        name=st.sampled_from(SMALL_FILES),
        place=st.integers(0, 10_000),
        edit=st.sampled_from(EDITS),
        new_value=st.sampled_from(VALUES),
    )
    def check(name: str, place: int, edit: Edit, new_value: Any) -> None:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(trained_run, run)
        checkpoint = run / "checkpoints" / "step-3"
        print(edit_file(checkpoint / name, place, edit, new_value))
        update_hashes(checkpoint)
        with suppress(FulguriteError):
            result = train(run, 4, resume="auto")
            assert int(result.state.step) == 4
            assert np.isfinite(result.metrics["train"]["loss"])

    check()


@pytest.mark.parametrize(
    ("name", "place", "new_value", "reason"),
    [
        ("host-0.json", ("data_position", "batch"), -3, "data_position.batch is -3"),
        ("index.json", ("step_range", "start"), 10**30, "step_range.start is 1000"),
        ("manifest.json", ("settings", "steps"), True, "settings.steps is True"),
        (
            "manifest.json",
            ("plugins", 0),
            {"$array": [1], "dtype": "int8", "shape": [1]},
            "plugins is",
        ),
        ("history.json", ("records",), 1, "history is 1"),
    ],
)
def test_a_value_that_is_never_written_is_damage_that_names_file_and_field(
    trained_run: Path, tmp_path: Path, name: str, place: Place, new_value: Any, reason: str
) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-3"
    shutil.copytree(trained_run / "checkpoints" / "step-3", checkpoint)
    content = json.loads((checkpoint / name).read_text())
    set_value(reduce(getitem, place[:-1], content), place[-1], new_value)
    (checkpoint / name).write_text(json.dumps(content))
    update_hashes(checkpoint)
    (entry,) = list_entries(tmp_path)
    with pytest.raises(DamagedError) as caught:
        read_checkpoint(entry, "full")
    assert str(caught.value).startswith(f"{checkpoint / name} was not written by ")
    assert reason in str(caught.value)
