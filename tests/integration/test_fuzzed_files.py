"""Every reader of a small file meets files that are damaged or hostile: it reads them, or raises an
error of ours, in bounded memory."""

import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fulgurite.errors import FulguriteError
from fulgurite_checkpoint.format import read_commit
from fulgurite_cli.start_config import read_config_file
from fulgurite_config import from_json
from fulgurite_config.errors import ConfigError
from fulgurite_evaluators.results import _read_records
from fulgurite_logging import iter_records
from fulgurite_mlflow.backend import read_run_id
from fulgurite_runs import RunDirectory
from fulgurite_runs.lock import read_owner
from fulgurite_sharding.profiles import _read_profiles
from fulgurite_tensorboard.events import read_events, truncate_events
from fulgurite_wandb.runfile import read_run
from hypothesis import given, settings, strategies as st

MAX_KILOBYTES = 500_000
"""By which reading may raise the peak of the memory."""

TOKENS = (
    b"{", b"}", b"[", b"]", b"[" * 100_000, b'{"a":' * 20_000, b"null", b"true", b"-1", b"1e999",
    b"NaN", b"9" * 5000, b'""', b'"\\ud800"', b"\xff", b"\0", b"\n", b",", b":", b'"', b"=", b"[profiles.a]",
    b"a.b = 1", b"profiles = 1", b"tool = 1", b"\xff\xff\xff\xff\xff\xff\xff\xff", b'{"$float":"x"}',
    b'{"$array":[1],"dtype":"S1000000000","shape":[9,9]}', b'{"$bytes":"?"}', b'{"$array":0}',
)  # fmt: skip

LINE = (
    b'{"evaluator":"test","step":4,"commit":"00","metrics":{"loss":1.5},"time":1.0,'
    b'"kind":"scalars","source":"train","values":{"loss":1.5},"stream":"exact"}\n'
)
JSON = b'{"format":1,"step":3,"arrays":{"a":[[3],"float32"]},"values":[1,2.5,"x",null,true]}'
OWNER = b'{"host":"a","boot_id":"b","pid":3,"started":1.0,"attempt":1,"is_local":true}'


def read_records_of_a_run(path: Path) -> None:
    list(iter_records(path.parent))


def read_manifest(path: Path) -> None:
    RunDirectory(path.parent.parent).read_manifest()


def cut_events(path: Path) -> None:
    truncate_events(path, 40)


READERS: dict[str, tuple[str, Callable[[Path], Any], bytes]] = {
    "commit": ("checkpoint/COMMIT", lambda path: read_commit(path.parent), JSON),
    "manifest": ("attempts/1", read_manifest, JSON),
    "lock": ("lock", read_owner, OWNER),
    "configuration file": ("config.json", lambda path: read_config_file(str(path)), JSON),
    "configuration": (
        "config.json",
        lambda path: from_json(path.read_text(errors="replace")),
        JSON,
    ),
    "results": ("results.jsonl", _read_records, LINE * 2),
    "records": ("records.jsonl", read_records_of_a_run, LINE * 2),
    "profiles": ("fulgurite.toml", _read_profiles, b"[profiles.a]\nnum_processes = 2\n"),
    "project": ("pyproject.toml", _read_profiles, b"[tool.fulgurite.profiles.a]\nb = 2\n"),
    "id at MLflow": (
        "mlflow.json",
        lambda path: read_run_id(path.parent),
        b'{"run_id": "c0ffee00c0ffee00c0ffee00c0ffee00"}',
    ),
    "events": ("events", lambda path: list(read_events(path)), b'\x18\0\0\0\0\0\0\0\xa3\x7fK"' * 3),
    "cut events": ("events", cut_events, b'\x18\0\0\0\0\0\0\0\xa3\x7fK"' * 3),
    "wandb": ("run.wandb", lambda path: list(read_run(path)), b":W&B\0\0\0" + b"\0" * 60),
}

edits = st.lists(
    st.tuples(
        st.integers(0, 400), st.integers(0, 400), st.sampled_from(TOKENS) | st.binary(max_size=8)
    ),
    max_size=4,
)


def apply_edits(content: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    """Return the content, in which pieces are replaced.

    Args:
        content: what our writers would write.
        changes: start, length and new bytes of each piece.
    """
    for start, length, new in changes:
        begin = start % (len(content) + 1)
        content = content[:begin] + new + content[begin + length % 50 :]
    return content


@pytest.mark.parametrize("num_examples", [60, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READERS)
def test_a_reader_reads_or_raises_an_error_of_ours(
    name: str, num_examples: int, tmp_path: Path
) -> None:
    file_name, read, valid = READERS[name]
    path = tmp_path / file_name
    path.parent.mkdir(exist_ok=True)

    def check(content: bytes) -> None:
        path.write_bytes(content)
        with suppress(FulguriteError, ConfigError):
            read(path)

    @settings(max_examples=num_examples, deadline=None, database=None)
    @given(changes=edits)
    def check_edits(changes: list[tuple[int, int, bytes]]) -> None:
        check(apply_edits(valid, changes))

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for token in TOKENS:
        check(token)
        check(token + b"\n" + valid)
    check_edits()
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert growth < MAX_KILOBYTES
