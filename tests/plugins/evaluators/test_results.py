"""The file of results of standalone evaluators: what it says is read, and nothing else."""

import os
import resource
from pathlib import Path

import numpy as np
import pytest
from fulgurite.errors import CheckpointError
from fulgurite_evaluators import EvaluationRecord, read_results
from fulgurite_evaluators.results import ResultWriter
from fulgurite_runs import RunDirectory

LINE = '{"evaluator":"test","step":4,"commit":"00","metrics":{"loss":1.5},"loggers":{}}\n'


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "evaluations" / "side.jsonl"
    path.parent.mkdir()
    return path


def test_a_line_in_which_a_process_was_killed_is_cut_off(results: Path, tmp_path: Path) -> None:
    results.write_text(LINE + LINE[:30])
    assert read_results(tmp_path) == [EvaluationRecord("test", 4, "00", {"loss": 1.5})]
    writer = ResultWriter(RunDirectory(tmp_path), "side")
    writer.close()
    assert writer.done == {("test", 4, "00")}
    assert results.read_text() == LINE


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (LINE.replace("4", '"4"'), "step is '4'"),
        (LINE.replace('"00"', "[]"), r"commit is \[\]"),
        (LINE.replace('{"loss":1.5}', "3"), "metrics is 3"),
        (LINE.replace('"loggers":{}', '"loggers":[]'), r"loggers is \[\]"),
        (LINE.replace("1.5", f'{{"$float":{"9" * 400}}}'), "too large"),
        ("[" * 100_000 + "\n", "nested too deeply"),
        (f"{' ' * 2**24}\n", "longer than 16,777,216 bytes"),
    ],
)
def test_a_line_that_is_no_result_is_an_error_naming_it(
    line: str, message: str, results: Path, tmp_path: Path
) -> None:
    results.write_text(LINE + line)
    with pytest.raises(CheckpointError, match=rf"side\.jsonl, line 2 is not a result.*{message}"):
        read_results(tmp_path)


@pytest.mark.slow
def test_a_result_that_cannot_be_written_or_read_again_is_an_error_naming_it(
    results: Path, tmp_path: Path
) -> None:
    writer = ResultWriter(RunDirectory(tmp_path), "side")
    writer.append(EvaluationRecord("test", 4, "00", {"loss": 1.5}), {})
    where = r"side\.jsonl: the result of 'test' at step 8"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(LINE) + 9, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=rf"{where} could not be written: .*only 9 of"):
            writer.append(EvaluationRecord("test", 8, "00", {"loss": 1.0}), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    large = {"matrix": np.zeros(2**23, np.int8)}
    with pytest.raises(CheckpointError, match=rf"{where} has 16,777,\d+ bytes"):
        writer.append(EvaluationRecord("test", 8, "00", large), {})
    writer.close()
    assert results.read_text() == LINE


def test_a_commit_that_is_a_pipe_is_passed_over(results: Path, tmp_path: Path) -> None:
    """Reading it would wait forever."""
    results.write_text(LINE)
    checkpoint = tmp_path / "superseded" / "1" / "step-4"
    checkpoint.mkdir(parents=True)
    os.mkfifo(checkpoint / "COMMIT")
    assert len(read_results(tmp_path)) == 1


def test_a_file_of_results_that_is_a_pipe_or_was_deleted_is_an_error(
    results: Path, tmp_path: Path
) -> None:
    writer = ResultWriter(RunDirectory(tmp_path), "side")
    results.unlink()
    with pytest.raises(FileNotFoundError, match="was deleted or replaced while it was written to"):
        writer.append(EvaluationRecord("test", 4, "00", {"loss": 1.5}), {})
    writer.close()
    os.mkfifo(results)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(CheckpointError, match=r"side\.jsonl is not a regular file: remove it"):
        ResultWriter(RunDirectory(tmp_path), "side")
    assert os.listdir("/proc/self/fd") == before
