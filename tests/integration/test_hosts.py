"""Evaluation in lock step: 1, 2 and 4 processes find what scikit-learn finds over the whole set."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score, log_loss, roc_auc_score

pytestmark = pytest.mark.full

PROGRAM = Path(__file__).with_name("hosts.py")


@cache
def run_hosts(processes: int, *arguments: str) -> list[list[dict[str, Any]]]:
    """What each process printed."""
    command = [
        sys.executable,
        "-c",
        "from fulgurite_cli.command import main; raise SystemExit(main())",
    ]
    launch = [*command, "launch", "--processes", str(processes), str(PROGRAM), *arguments]
    ended = subprocess.run(launch, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    lines = [line.partition("{") for line in ended.stdout.splitlines() if "{" in line]
    by: dict[str, list[dict[str, Any]]] = {}
    for process, _, rest in lines:
        by.setdefault(process, []).append(json.loads("{" + rest))
    assert len(by) == processes, ended.stdout
    return [by[process] for process in sorted(by)]


def expected() -> tuple[dict[str, float], np.ndarray]:
    """The metrics over the whole set, in double precision, and the predictions."""
    namespace: dict[str, Any] = {}
    source = PROGRAM.read_text()
    start = source.index("def examples()")
    exec(source[start : source.index("def batches")].replace("-> Batch", ""), {"np": np}, namespace)
    scores, label = namespace["examples"]().values()
    exponents = np.exp(scores.astype(np.float64))
    loss = log_loss(label, exponents / exponents.sum(-1, keepdims=True), labels=[0, 1, 2])
    best = scores.argmax(-1)
    return {
        "loss": loss,
        "accuracy": accuracy_score(label, best),
        "f1": f1_score(label, best, average="macro"),
        "auc": roc_auc_score(label == 1, scores[:, 1] - scores[:, 0]),
        "largest": scores.max(),
    }, scores


@pytest.mark.parametrize(
    "processes", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 4))]
)
def test_uneven_hosts_compute_what_scikit_learn_computes_over_the_whole_set(processes: int) -> None:
    hosts = run_hosts(processes, *(["failures"] if processes == 2 else []))
    same = [[line for line in lines if "error" not in line] for lines in hosts]
    assert all(lines == same[0] for lines in same)
    metrics, scores = expected()
    for lines in same:
        values = {name: value for line in lines for name, value in line.items()}
        for what in ("evaluated", "padded", "along", "after"):
            assert values[what] == pytest.approx(metrics, rel=1e-6, abs=1e-6), what
        np.testing.assert_array_equal(np.asarray(values["predicted"], np.float32), scores)
        assert sum(values["handed"]) == 103


def test_failure_on_one_host_is_raised_on_all() -> None:
    first, second = run_hosts(2, "failures")
    errors = [[line["error"] for line in lines if "error" in line] for lines in (first, second)]
    why = "process 1 failed to make batch {} of an evaluation: {}"
    assert errors[0][0] == "ProcessError: " + why.format(1, "OSError: the disk is gone")
    assert errors[1][0] == "OSError: the disk is gone"
    assert errors[0][1].startswith(
        "ProcessError: " + why.format(0, "DataError: the data (list) has no batch 0")
    )
    assert errors[1][1].startswith("DataError: the data (list) has no batch 0")
    assert errors[0][2] == errors[1][2] and errors[0][2].startswith(
        "DataError: batch 0 of an evaluation is "
    )
    for (message, other), words in zip(
        zip(errors[0][3:9], errors[1][3:9], strict=True),
        [
            "steps: 1 on process 0, and 2 on process 1",
            "seed: 0 on",
            "arrays: ",
            "float32[16, 3]",
            "an epoch: 1 on",
            "what is in label at [(0,)] of the mesh: ",
        ],
        strict=True,
    ):
        assert message == other and message.startswith(
            "ConfigurationError: the processes of one training differ in "
        ), message
        assert words in message
    assert errors[0][9].startswith(
        "ProcessError: process 1 failed to make batch 0 of an evaluation: OSError"
    )
    assert errors[1][9].startswith("OSError: the file is gone")
    assert first[-1] == second[-1] == {"again": first[0]["evaluated"]["loss"]}
