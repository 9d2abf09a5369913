"""Files that are replaced all at once."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fulgurite_runs import replace_file


def test_a_file_that_cannot_be_written_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "file"
    replace_file(path, "old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was synced when the file got its name was the new one, whole, and then the folder."""
    path = tmp_path / "file"
    synced = []

    def note(descriptor: int) -> None:
        is_there = path.exists()
        synced.append((os.fstat(descriptor).st_size if not is_there else "folder", is_there))

    monkeypatch.setattr(os, "fsync", note)
    replace_file(path, "four")
    assert synced == [(4, False), ("folder", True)]


def test_several_may_replace_a_file_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As processes of two containers, which may have the same number."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    path = tmp_path / "file"
    texts = [str(number) * 1000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: replace_file(path, text), texts * 10))
    assert path.read_text() in texts
    assert os.listdir(tmp_path) == ["file"]
