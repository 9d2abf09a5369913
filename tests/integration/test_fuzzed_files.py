"""Every reader of a small file meets files that are damaged or hostile: it reads them, or raises an
error of ours, in bounded memory."""

import os
import resource
import shutil
import tracemalloc
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from edits import EDITS, VALUES
from fulgurite.errors import FulguriteError
from fulgurite_config.errors import ConfigError
from fuzzed_formats import ByteEdit, ValueEdit, edit_bytes
from fuzzed_readers import READERS, Reader, write_run
from hypothesis import given, settings, strategies as st

pytestmark = pytest.mark.full

MAX_KILOBYTES = 500_000
"""By which reading may raise the peak of the memory."""
MAX_TRACED = 200 * 2**20
"""Bytes that reading a file of a few small values may take; the files have up to 15 MB."""
NUM_EXAMPLES = int(os.environ.get("FULGURITE_FUZZ_EXAMPLES", "5000"))
"""Of the slow variant, for each reader."""

TOKENS = (
    b"{", b"}", b"[", b"]", b"[" * 100_000, b'{"a":' * 20_000, b"null", b"true", b"-1", b"1e999",
    b"NaN", b"9" * 5000, b'""', b'"\\ud800"', b"\xff", b"\0", b"\n", b",", b":", b'"', b"=", b"[profiles.a]",
    b"a.b = 1", b"profiles = 1", b"tool = 1", b"\xff\xff\xff\xff\xff\xff\xff\xff", b'{"$float":"x"}',
    b'{"$array":[1],"dtype":"S1000000000","shape":[9,9]}', b'{"$bytes":"?"}', b'{"$array":0}', b"a." * 2000,
    b"profiles = [{" + b"a." * 2000 + b"a = 1}]", b"(" * 5000,
)  # fmt: skip
BOMBS = (
    b"[" + b"{}," * 5_000_000 + b"{}]",
    b'{"a":[' + b'{"":0},' * 2_000_000 + b"0]}",
    b"a." * 20_000,
)
"""What is small as a file and large as values."""

byte_edits = st.lists(
    st.tuples(
        st.integers(0, 5000), st.integers(0, 400), st.sampled_from(TOKENS) | st.binary(max_size=8)
    ),
    max_size=4,
)
value_edits = st.lists(
    st.tuples(st.integers(0, 10_000), st.sampled_from(EDITS), st.sampled_from(VALUES)), max_size=3
)


@pytest.fixture(scope="module")
def written_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzzed") / "run"
    write_run(path)
    return path


class Neighbours:
    """The other files of a run and in the folder of a file, which some readers write to as well."""

    def __init__(self, run: Path, path: Path) -> None:
        files = {
            file
            for folder in (run, path.parent)
            for file in folder.iterdir()
            if file.is_file() and file != path
        }
        self._contents = {file: file.read_bytes() for file in files}
        self._states = {file: self._get_state(file) for file in files}

    def restore(self) -> None:
        """Write those again that have changed."""
        for file, content in self._contents.items():
            if self._get_state(file) != self._states[file]:
                file.write_bytes(content)
                self._states[file] = self._get_state(file)

    def _get_state(self, file: Path) -> tuple[int, int]:
        status = file.stat()
        return status.st_mtime_ns, status.st_size


def read_content(reader: Reader, path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=SyntaxWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return reader.read(path)


@pytest.mark.parametrize("name", READERS)
def test_a_file_as_it_is_written_is_read_to_its_full_content(
    name: str, written_run: Path, tmp_path: Path
) -> None:
    reader = READERS[name]
    shutil.copytree(written_run, tmp_path / "run")
    path = tmp_path / "run" / reader.file
    content = path.read_bytes()
    assert read_content(reader, path) == reader.expected
    # The same holds for what has gone through the structure of its format, and its hashes.
    path.write_bytes(reader.format.edit(content, [], []))
    if reader.repair is not None:
        reader.repair(path)
    assert read_content(reader, path) == reader.expected


@pytest.mark.parametrize("name", READERS)
def test_a_file_of_many_small_values_is_read_in_bounded_memory(
    name: str, written_run: Path, tmp_path: Path
) -> None:
    """A file of 15 MB would be 400 MB of values; a larger one, gigabytes."""
    reader = READERS[name]
    shutil.copytree(written_run, tmp_path / "run")
    path = tmp_path / "run" / reader.file
    for bomb in BOMBS:
        path.write_bytes(bomb)
        tracemalloc.start()
        try:
            with suppress(FulguriteError, ConfigError):
                read_content(reader, path)
            assert tracemalloc.get_traced_memory()[1] < MAX_TRACED
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("num_examples", [20, pytest.param(NUM_EXAMPLES, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READERS)
def test_a_reader_reads_or_raises_an_error_of_ours(
    name: str, num_examples: int, written_run: Path, tmp_path: Path
) -> None:
    reader = READERS[name]
    run = tmp_path / "run"
    shutil.copytree(written_run, run)
    path = run / reader.file
    valid = path.read_bytes()
    neighbours = Neighbours(run, path)
    outcomes: Counter[str] = Counter()

    def check(content: bytes, must_repair: bool) -> None:
        neighbours.restore()
        path.write_bytes(content)
        if must_repair and reader.repair is not None:
            with suppress(ValueError, RecursionError):
                reader.repair(path)
        try:
            read_content(reader, path)
            outcomes["read"] += 1
        except (FulguriteError, ConfigError):
            outcomes["refused"] += 1

    @settings(max_examples=num_examples, deadline=None, database=None)
    @given(
        changes=byte_edits, values=value_edits, is_structured=st.booleans(), hashes=st.booleans()
    )
    def check_edits(
        changes: list[ByteEdit], values: list[ValueEdit], is_structured: bool, hashes: bool
    ) -> None:
        if is_structured:
            check(reader.format.edit(valid, values, changes), must_repair=True)
        else:
            check(edit_bytes(valid, changes), must_repair=hashes)

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for token in TOKENS:
        check(token, must_repair=True)
        check(token + b"\n" + valid, must_repair=True)
    check_edits()
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    print(f"{name}: {dict(outcomes)}, {growth // 1024} MiB")
    assert growth < MAX_KILOBYTES
