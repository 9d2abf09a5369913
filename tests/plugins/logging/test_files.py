"""Bytes: what is written for given records, and what is left after going back."""

import csv
import errno
import json
import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fulgurite as fg
import numpy as np
import pytest
from fulgurite.errors import CheckpointError
from fulgurite_logging import JSONLBackend, iter_records, iter_telemetry
from fulgurite_logging.table import CSVBackend
from fulgurite_runs.json_codec import loads
from hypothesis import given, settings, strategies as st


def scalars(step: int, source: str = "train", /, **values: Any) -> fg.Record:
    return fg.Record("scalars", source, step, values)


def make_record(step: int, **values: Any) -> fg.Record:
    return fg.Record("scalars", "train", step, values, "telemetry", 2, 1.5)


# --- JSON lines -----------------------------------------------------------------------------------


def test_records_are_written_as_json_lines(tmp_path: Path) -> None:
    backend = JSONLBackend(tmp_path, None)
    backend.write(scalars(1, loss=0.5, accuracy=math.nan, count=3))
    backend.write(fg.Record("text", "note", 2, {"text": "é\n\udc80"}))
    backend.write(make_record(2, steps_per_second=math.inf))
    backend.write(
        scalars(3, "test", array=np.array([1, np.nan], np.float32), number=np.float32(0.1))
    )
    assert (tmp_path / "records.jsonl").read_bytes() == (
        b'{"kind":"scalars","source":"train","step":1,"values":'
        b'{"accuracy":{"$float":"nan"},"count":3,"loss":0.5}}\n'
        b'{"kind":"text","source":"note","step":2,"values":{"text":"\xc3\xa9\\n\\udc80"}}\n'
        b'{"kind":"scalars","source":"test","step":3,"values":'
        b'{"array":{"$array":[1.0,{"$float":"nan"}],"dtype":"float32","shape":[2]},"number":0.10000000149011612}}\n'
    )
    assert (tmp_path / "telemetry.jsonl").read_bytes() == (
        b'{"attempt":2,"kind":"scalars","source":"train","step":2,"values":'
        b'{"steps_per_second":{"$float":"inf"}},"wall_time":1.5}\n'
    )
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert math.isnan(loads(lines[0])["values"]["accuracy"])
    assert loads(lines[1])["values"]["text"] == "é\n\udc80"
    assert backend.get_position() == {"records.jsonl": (tmp_path / "records.jsonl").stat().st_size}


def test_replaced_table_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure to write down what is deleted ended the logger, which then closed a descriptor that
    it had no more."""
    sync = os.fsync

    def failing(descriptor: int) -> None:
        if os.fstat(descriptor).st_nlink == 0:
            raise OSError(errno.EIO, "a bad block")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    backend = CSVBackend(tmp_path, None)
    backend.write(scalars(1, loss=0.5))
    backend.write(scalars(2, loss=0.5, error=1))
    backend.close()
    assert (
        tmp_path / "records.csv"
    ).read_text() == "step,train/loss,train/error\n1,0.5,\n2,0.5,1\n"


def test_equal_records_are_equal_bytes(tmp_path: Path) -> None:
    for name, values in {
        "a": {"x": 1, "y": {"b": 1, "a": 2}},
        "b": {"y": {"a": 2, "b": 1}, "x": 1},
    }.items():
        (tmp_path / name).mkdir()
        JSONLBackend(tmp_path / name, None).write(fg.Record("config", "run", 1, values))
    assert (tmp_path / "a" / "records.jsonl").read_bytes() == (
        tmp_path / "b" / "records.jsonl"
    ).read_bytes()


def test_torn_line_without_a_position_is_dropped(tmp_path: Path) -> None:
    for name in ("records.jsonl", "telemetry.jsonl"):
        (tmp_path / name).write_bytes(b'{"step":1}\n' + b"x" * 100_000)
    backend = JSONLBackend(tmp_path, None)
    backend.write(make_record(2))
    assert (tmp_path / "records.jsonl").read_bytes() == b'{"step":1}\n'
    first, second = (tmp_path / "telemetry.jsonl").read_bytes().splitlines()
    assert first == b'{"step":1}' and json.loads(second)["step"] == 2


def test_records_are_read_from_a_path_that_is_a_string(tmp_path: Path) -> None:
    backend = JSONLBackend(tmp_path, None)
    records = [scalars(1, loss=0.5), make_record(2, rate=3.0)]
    for record in records:
        backend.write(record)
    backend.close()
    assert [*iter_records(str(tmp_path)), *iter_telemetry(f"{tmp_path}")] == records
    assert [*iter_records(f"{tmp_path}/records.jsonl")] == records[:1]


def test_telemetry_is_not_rewound(tmp_path: Path) -> None:
    backend = JSONLBackend(tmp_path, None)
    backend.write(make_record(1))
    position = backend.get_position()
    backend.write(make_record(2))
    backend.write(scalars(2))
    JSONLBackend(tmp_path, position)
    assert [
        json.loads(line)["step"]
        for line in (tmp_path / "telemetry.jsonl").read_bytes().splitlines()
    ] == [1, 2]
    assert (tmp_path / "records.jsonl").read_bytes() == b""


# --- CSV ------------------------------------------------------------------------------------------


def test_table_gains_columns_as_they_appear(tmp_path: Path) -> None:
    backend = CSVBackend(tmp_path, None)
    backend.write(scalars(1, loss=0.5, accuracy=math.nan))
    backend.write(
        scalars(2, "test, held out", loss=np.float64(1.5), words="a,b\nc", none=None, flag=True)
    )
    backend.write(
        scalars(3, loss=-math.inf, array=np.array([1, 2], np.float32), number=np.float32(0.5))
    )
    backend.write(make_record(3, rate=2))
    assert (tmp_path / "records.csv").read_text() == (
        "step,train/accuracy,train/loss,"
        '"test, held out/flag","test, held out/loss","test, held out/none","test, held out/words",'
        "train/array,train/number\n"
        "1,nan,0.5,,,,,,\n"
        '2,,,True,1.5,,"a,b c",,\n'
        '3,,-inf,,,,,"[1.0,2.0]",0.5\n'
    )
    assert (
        tmp_path / "telemetry.csv"
    ).read_text() == "attempt,wall_time,step,train/rate\n2,1.5,3,2\n"


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Let no file grow beyond that many bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_table_that_cannot_be_rewritten_leaves_nothing_behind(tmp_path: Path) -> None:
    backend = CSVBackend(tmp_path, None)
    backend.write(scalars(1, loss=0.5))
    before = os.listdir("/proc/self/fd")
    with limit_file_size(30), pytest.raises(OSError, match="File too large"):
        backend.write(scalars(2, loss=0.5, another_column=0.25))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records.csv", "telemetry.csv"]
    assert os.listdir("/proc/self/fd") == before
    assert (tmp_path / "records.csv").read_text() == "step,train/loss\n1,0.5\n"


def test_table_is_continued_after_a_resume(tmp_path: Path) -> None:
    backend = CSVBackend(tmp_path, None)
    backend.write(scalars(1, a=1))
    with open(tmp_path / "records.csv", "a") as file:
        file.write("2,torn")
    backend = CSVBackend(tmp_path, None)
    backend.write(scalars(2, b=2))
    assert (tmp_path / "records.csv").read_text() == "step,train/a,train/b\n1,1,\n2,,2\n"
    assert backend.get_position() == {"records.csv": {"bytes": 31, "columns": 3, "rows": 2}}


def test_foreign_table_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "records.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        CheckpointError, match=r"records\.csv is not a table of this plugin.*begin with step"
    ):
        CSVBackend(tmp_path, None)
    (tmp_path / "records.csv").write_text('step,"a\n')
    with pytest.raises(CheckpointError, match=r"records\.csv cannot be read"):
        CSVBackend(tmp_path, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step,a,a\n1,2,3\n", "a column occurs twice"),
        ('step,a\n1,"\n2,"\n', "cannot be read"),
        (f"step,{'a,' * 2**23}\n", "a line has 16,777,216 characters or more"),
    ],
)
def test_damaged_table_is_an_error_naming_it(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "records.csv").write_text(text)
    with pytest.raises(CheckpointError, match=rf"records\.csv .*{message}"):
        CSVBackend(tmp_path, None)


def test_table_with_a_large_array_is_continued(tmp_path: Path) -> None:
    """Python's csv module refuses cells of more than 131,072 characters."""
    backend = CSVBackend(tmp_path, None)
    backend.write(scalars(1, confusion=np.full((300, 300), 7)))
    position = backend.get_position()
    backend.write(scalars(2, loss=0.5))
    backend.close()
    CSVBackend(tmp_path, position).close()
    header, row = (tmp_path / "records.csv").read_text().splitlines()
    assert header == "step,train/confusion"
    assert row.count("7") == 90_000


@pytest.mark.full
@pytest.mark.parametrize(
    ("make_backend", "read"),
    [
        (JSONLBackend, lambda folder: [record.step for record in iter_records(folder)]),
        (CSVBackend, lambda folder: np.loadtxt(folder / "records.csv", str, delimiter=",")[1:, 0]),
    ],
)
def test_a_record_that_could_not_be_read_again_is_left_out_alone(
    make_backend: Any, read: Any, tmp_path: Path
) -> None:
    backend = make_backend(tmp_path, None)
    backend.write(scalars(1, loss=1.0))
    with pytest.warns(UserWarning, match="leaves a record of 'big' out, of step 2 first") as caught:
        for step in (2, 3):
            backend.write(scalars(step, "big", x=np.full(900_000, 1 / 3)))
    assert len(caught) == 1
    backend.write(scalars(4, loss=2.0))
    position = backend.get_position()
    backend.close()
    make_backend(tmp_path, position).close()
    assert [int(step) for step in read(tmp_path)] == [1, 4]


# --- going back -----------------------------------------------------------------------------------

VALUES = st.one_of(
    st.integers(-(10**20), 10**20),
    st.floats(width=32),
    st.booleans(),
    st.none(),
    st.text(max_size=5),
    st.just('",\r\n'),
)
NAMES = st.sampled_from(["a", "b", "c/d", 'odd, "name"\n', "é"])
RECORDS = st.lists(
    st.builds(
        lambda source, values, exact: fg.Record(
            "scalars", source, 1, values, "exact" if exact else "telemetry", 1, 0.5
        ),
        st.sampled_from(["train", "test"]),
        st.dictionaries(NAMES, VALUES, max_size=4),
        st.booleans(),
    ),
    max_size=8,
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("logger", "name"), [(JSONLBackend, "records.jsonl"), (CSVBackend, "records.csv")]
)
@settings(max_examples=40)
@given(
    before=RECORDS,
    lost=RECORDS,
    after=RECORDS,
    torn=st.binary(max_size=9).filter(lambda torn: b"\n" not in torn),
)
def test_records_after_a_rewind_are_written_as_if_first(
    tmp_path_factory: pytest.TempPathFactory,
    logger: Any,
    name: str,
    before: Any,
    lost: Any,
    after: Any,
    torn: bytes,
) -> None:
    """Whatever came in between, with other columns and a torn line at its end, at a position that
    went through JSON."""
    whole, cut = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("cut")
    straight, first = logger(whole, None), logger(cut, None)
    for record in before:
        straight.write(record)
        first.write(record)
    first.sync()
    position, content = json.loads(json.dumps(first.get_position())), (whole / name).read_bytes()
    for record in lost:
        first.write(record)
    first.close()
    with open(cut / name, "ab") as file:
        file.write(torn)
    second = logger(cut, position)
    assert (cut / name).read_bytes() == content
    assert second.get_position() == position
    for record in after:
        straight.write(record)
        second.write(record)
    straight.close()
    second.close()
    assert (cut / name).read_bytes() == (whole / name).read_bytes()


def test_every_row_has_every_column(tmp_path: Path) -> None:
    backend = CSVBackend(tmp_path, None)
    for step in range(1, 6):
        backend.write(scalars(step, **{f"new_{step // 2}": step}))
    with open(tmp_path / "records.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert {len(row) for row in rows} == {4} and [row[0] for row in rows[1:]] == [
        "1",
        "2",
        "3",
        "4",
        "5",
    ]


@pytest.mark.parametrize(
    ("logger", "position"),
    [
        (JSONLBackend, {"records.jsonl": 10_000}),
        (JSONLBackend, {"records.jsonl": 5}),
        (JSONLBackend, {"records.jsonl": -1}),
        (JSONLBackend, {"records.jsonl": True}),
        (JSONLBackend, {"records.jsonl": "../../victim"}),
        (JSONLBackend, {"../victim": 0}),
        (JSONLBackend, [1]),
        (CSVBackend, {"records.csv": {"bytes": 10_000, "columns": 2, "rows": 1}}),
        (CSVBackend, {"records.csv": {"bytes": 5, "columns": 2, "rows": 1}}),
        (CSVBackend, {"records.csv": {"bytes": 20, "columns": 9, "rows": 1}}),
        (CSVBackend, {"records.csv": {"bytes": 20, "columns": 1, "rows": 7}}),
        (CSVBackend, {"records.csv": {"bytes": 20, "columns": "2", "rows": None}}),
        (CSVBackend, {"records.csv": 7}),
    ],
)
def test_invalid_position_is_an_error_and_nothing_is_truncated(
    tmp_path: Path, logger: Any, position: Any
) -> None:
    backend = logger(tmp_path, None)
    backend.write(scalars(1, a=1))
    backend.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match="checkpoint"):
        logger(tmp_path, position)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# --- files that are not as they should be ---------------------------------------------------------


def test_links_and_other_things_are_not_written_to(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious\n")
    run = tmp_path / "run"
    run.mkdir()
    os.symlink(victim, run / "records.jsonl")
    with pytest.raises(OSError, match=r"records\.jsonl"):
        JSONLBackend(run, None)
    os.remove(run / "records.jsonl")
    os.mkfifo(run / "records.jsonl")
    with pytest.raises(OSError, match="not a regular file"):
        JSONLBackend(run, None)
    assert victim.read_text() == "precious\n"


@pytest.mark.parametrize("logger", [JSONLBackend, CSVBackend])
def test_a_file_that_was_deleted_is_noticed_at_the_next_record(tmp_path: Path, logger: Any) -> None:
    backend = logger(tmp_path, None)
    backend.write(scalars(1, a=1))
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"deleted or replaced while it was.*records\."):
        backend.write(scalars(2, a=1))


@pytest.mark.parametrize("logger", [JSONLBackend, CSVBackend])
def test_files_that_cannot_be_begun_leave_none_open(tmp_path: Path, logger: Any) -> None:
    """The second of two, and the first one where its position is not that of a checkpoint."""
    (tmp_path / "telemetry.jsonl").mkdir()
    (tmp_path / "telemetry.csv").write_text("of another program\n")
    before = os.listdir("/proc/self/fd")
    with pytest.raises((OSError, CheckpointError), match="telemetry"):
        logger(tmp_path, None)
    (tmp_path / "telemetry.jsonl").rmdir()
    (tmp_path / "telemetry.csv").unlink()
    with pytest.raises(CheckpointError, match="does not tell of"):
        logger(tmp_path, {})
    assert os.listdir("/proc/self/fd") == before
