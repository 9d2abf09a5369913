"""`fulgurite runs` and `fulgurite checkpoints`, on runs that were really trained."""

import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_checkpoint import Checkpointer, comparing
from fulgurite_checkpoint.comparing import build_columns, select_runs, sort_runs
from fulgurite_checkpoint.listing import RUN_COLUMNS, RunRow, format_size, list_runs
from fulgurite_cli.command import main
from fulgurite_runs import RunPlugin
from trained import ZEROS, Counting, engine

pytestmark = pytest.mark.full


class Following(fg.Module):
    """A weight to which each update adds the batch, and a count of how often it was trained."""

    weight: jax.Array
    table: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight, self.table = jnp.zeros(()), jnp.arange(6).reshape(2, 3)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(
            -self.weight * batch[0],
            metrics={"weight": fg.metrics.LastValue.from_values(self.weight)},
        )

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


@dataclass(frozen=True)
class Score:
    """A metric measured at every step: the number in `values` for it."""

    values: tuple[float, ...]

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [
            fg.ScheduledAction(
                "score",
                1,
                lambda run: run.log_scalars("test", {"score": self.values[run.step - 1]}),
            )
        ]


def train(
    run: Path, batches: tuple[float, ...] = (1, 1, 1, 7), stop: bool = False, **options: Any
) -> fg.FitResult:
    """Saves after each step; with 1, 1, 1, 7 the weight is 1, 2, 3, 10. With `stop`, stops after
    the second."""

    class Stopping:
        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [
                fg.ScheduledAction(
                    "stop",
                    fg.At(2),
                    lambda run: os.kill(os.getpid(), signal.SIGINT) if stop else None,
                )
            ]

    plugins = [
        Checkpointer(every=1, max_to_keep=None, monitor="test/score", mode="max"),
        Score((0.5, 0.9, 0.9, 0.1)),
        Stopping(),
    ]
    data = [np.full(1, value, np.float32) for value in batches]
    engine = fg.Engine(
        steps=len(batches), plugins=plugins, run_dir=run, log_every=1, autoload=False
    )
    return engine.fit(Following, data, resume="auto", **options)


@pytest.fixture(scope="module")
def template_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is complete, made once."""
    run = tmp_path_factory.mktemp("made") / "run"
    train(run)
    return run


@pytest.fixture
def run(template_run: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(template_run, tmp_path / "run"))


def printed(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> str:
    """What the command prints, the errors included."""
    assert main([str(argument) for argument in arguments]) == code
    out, err = capsys.readouterr()
    return err if code == 2 else out


def rows(capsys: pytest.CaptureFixture[str], *arguments: Any) -> list[dict[str, Any]]:
    return json.loads(printed(capsys, *arguments, "--json"))


ROWS = [
    RunRow(
        "a",
        "complete",
        step=9,
        best=("test/loss", 10.25, 9, "min"),
        arguments={"lr": 0.1, "name": "x"},
        metrics={"test/f1": 0.5},
    ),
    RunRow(
        "b",
        "killed",
        step=1_234_567,
        best=("test/loss", 1e-5, 4, "min"),
        arguments={"lr": 0.01, "name": "x"},
        metrics={"test/f1": 0.9},
    ),
    RunRow("c", "complete", arguments={"lr": 1, "name": "x", "deep": True}),
]


@pytest.mark.parametrize(
    ("conditions", "names"),
    [
        (["lr=0.1"], "a"),
        (["lr=0.10"], "a"),
        (["lr>0.05"], "ac"),
        (["lr!=1", "state=complete"], "a"),
        (["test/f1>=0.5"], "ab"),
        (["test/f1<0.6", "name=x"], "a"),
        (["deep=True"], "c"),
        (["step>9"], "b"),
        (["lr==0.1"], "a"),
        (["best<2"], "b"),
        (["name<1"], ""),
    ],
)
def test_runs_are_selected_by_arguments_metrics_and_columns(
    conditions: list[str], names: str
) -> None:
    assert "".join(row.run for row in select_runs(ROWS, conditions)) == names


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("lr", "bac"),
        ("-lr", "cab"),
        ("test/f1", "abc"),
        ("-test/f1", "bac"),
        ("best", "bac"),
        ("-best", "abc"),
    ],
)
def test_runs_are_sorted_and_those_without_a_value_come_last(name: str, names: str) -> None:
    assert "".join(row.run for row in sort_runs(ROWS, name)) == names


def test_columns_are_those_that_tell_runs_apart() -> None:
    columns = build_columns(RUN_COLUMNS, ROWS, ["test/f1"])
    names = ["run", "state", "attempts", "step", "best", "lr", "deep", "test/f1"]
    assert list(columns) == names
    cells = [[format_cell(row) for format_cell in columns.values()] for row in ROWS]
    assert cells[1:] == [
        ["b", "killed", "0", "1234567", "smallest test/loss 1e-05 at 4", "0.01", "", "0.9"],
        ["c", "complete", "0", "", "", "1", "true", ""],
    ]


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ("lr", "'lr' is not a condition: write NAME=VALUE"),
        ("lrr=1", "'lrr'. Did you mean 'lr'"),
        ("name<y", "'y' is not a number, and only numbers are larger or smaller"),
    ],
)
def test_conditions_that_mean_nothing_are_errors(condition: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        select_runs(ROWS, [condition])


def test_runs_are_compared(
    template_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(template_run, tmp_path / "a")
    assert printed(capsys, "compare", tmp_path / "a", template_run) == "no difference\n"
    train(tmp_path / "b", batches=(1, 1))
    text = printed(capsys, "compare", tmp_path / "a", tmp_path / "b", code=1)
    cells = [line.split() for line in text.splitlines()[1:]]
    assert ["settings.steps", "4", "2"] in cells
    assert ["test/score", "0.1", "0.9"] in cells
    assert not any(cell and cell[0].startswith(("versions", "plugins")) for cell in cells)
    arguments = ("--sort=-test/score", "--where", "test/score>0", "--csv")
    lines = printed(capsys, "runs", tmp_path, *arguments).splitlines()
    header = lines[0].split(",")
    values = [dict(zip(header, line.split(","), strict=True)) for line in lines[1:]]
    assert [(row["run"], row["step"], row["test/score"]) for row in values] == [
        ("b", "2", "0.9"),
        ("a", "4", "0.1"),
    ]
    assert "no run has an argument or a metric 'scoer'" in printed(
        capsys, "runs", tmp_path, "--show", "scoer", code=2
    )


def test_equal_runs_whose_telemetry_differs_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Speed(fg.Plugin):
        speed = 10.0

        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("log", fg.Every(1), self.log, stage="act")]

        def log(self, run: fg.Run) -> None:
            Speed.speed *= 2
            run.log_scalars("mine", {"speed": self.speed}, stream="telemetry")
            run.log_scalars("mine", {"score": np.float32(run.step)})

    for name in ("a", "b"):
        plugins = [Checkpointer(1, monitor="mine/score", mode="max"), Speed()]
        fg.Engine(
            steps=2, log_every=1, run_dir=tmp_path / name, autoload=False, plugins=plugins
        ).fit(Counting, ZEROS * 2)
    row = list_runs(tmp_path / "a")[0]
    assert row.metrics["mine/speed"] == 40 and "mine/speed" in row.telemetry
    # A number of NumPy is one by which the best is chosen.
    assert row.best == ("mine/score", 2.0, 2, "max")
    assert printed(capsys, "compare", tmp_path / "a", tmp_path / "b") == "no difference\n"


def test_numbers_that_differ_are_shown_with_the_digits_that_do() -> None:
    assert comparing._list_differences("", {"loss": 0.6931471}, {"loss": 0.6931472}) == [
        ("loss", "0.6931471", "0.6931472")
    ]


@pytest.mark.parametrize(
    ("count", "text"), [(999.4, "999 B"), (999_900, "1 MB"), (1e15, "1e+03 TB")]
)
def test_sizes_have_the_unit_that_they_round_to(count: float, text: str) -> None:
    assert format_size(count) == text


# --- runs -----------------------------------------------------------------------------------------


def test_runs_and_their_state(
    template_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(template_run, tmp_path / "a")
    train(tmp_path / "b", stop=True)
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    lock = tmp_path / "c" / "lock"
    owner = json.loads(lock.read_text()) | {"ended": False}
    lock.write_text(json.dumps(owner | {"pid": 2**22 + 5}))  # larger than any process's
    shutil.copytree(tmp_path / "c", tmp_path / "d")
    lock = tmp_path / "d" / "lock"
    lock.write_text(json.dumps(owner | {"host": "elsewhere"}))
    shutil.copytree(tmp_path / "d", tmp_path / "e")
    os.utime(tmp_path / "e" / "lock", (time.time() - 100, time.time() - 100))
    (tmp_path / "no run").mkdir()
    summary = {row["run"]: row for row in rows(capsys, "runs", tmp_path)}
    assert {name: row["state"] for name, row in summary.items()} == {
        "a": "complete",
        "b": "stopped",
        "c": "killed",
        "d": "running",
        "e": "killed",
    }
    assert (summary["a"]["step"], summary["a"]["attempts"], summary["a"]["best"]) == (
        4,
        1,
        ["test/score", 0.9, 2, "max"],
    )
    assert summary["b"]["step"] in (2, 3)
    assert summary["d"]["heartbeat"] < 60 and "elsewhere" in summary["d"]["note"]
    table = printed(capsys, "runs", tmp_path).splitlines()
    # Where the program of the tests lies in a repository there is its commit, too.
    columns = [name for name in table[0].split() if name != "commit"]
    assert columns == ["run", "state", "heartbeat", "attempts", "step", "best", "note"]
    best = ["largest", "test/score", "0.9", "at", "2"]
    assert table[1].split()[:9] == ["a", "complete", "1", "4", *best]
    assert rows(capsys, "runs", tmp_path / "a") == [summary["a"]]


def test_a_run_under_way_shows_its_heartbeat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(run: fg.Run) -> None:
        [row] = rows(capsys, "runs", tmp_path)
        observed.append((row["state"], row["heartbeat"] < 60, str(os.getpid()) in row["note"]))

    class Looking(RunPlugin):
        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("look", fg.At(2), look)]

    observed: list[Any] = []
    data = [np.ones(1, np.float32)]
    fg.Engine(steps=3, plugins=[Looking()], run_dir=tmp_path / "run", autoload=False).fit(
        Following, data
    )
    assert observed == [("running", True, True)]


def test_a_damaged_or_hostile_run_is_a_row(
    template_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(template_run, tmp_path / "a")
    (tmp_path / "a" / "checkpoints" / "step-3" / "COMMIT").write_text(
        '{"step": "\x1b[2J../../victim"}'
    )
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "checkpoints").symlink_to(template_run / "checkpoints")
    table = rows(capsys, "runs", tmp_path)
    assert [row["state"] for row in table] == ["complete", "unreadable"]
    assert table[0]["note"] == "damaged: 3" and "is a link" in table[1]["note"]
    assert "\x1b" not in printed(capsys, "checkpoints", tmp_path / "a")


# --- checkpoints ----------------------------------------------------------------------------------


def test_checkpoints_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = rows(capsys, "checkpoints", run)
    assert [row["step"] for row in summary] == [1, 2, 3, 4]
    assert [row["metrics"]["test/score"] for row in summary] == [0.5, 0.9, 0.9, 0.1]
    assert [row["marks"] for row in summary] == [[], ["best"], [], ["latest"]]
    files = [file for file in (run / "checkpoints" / "step-2").rglob("*") if file.is_file()]
    assert summary[1]["bytes"] == sum(file.stat().st_size for file in files)
    assert all(row["damage"] is None for row in summary)
    table = printed(capsys, "checkpoints", run).splitlines()
    assert len(table) == 5 and table[2].endswith("best") and "test/score 0.9" in table[2]


def test_damage_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step-1" / "COMMIT").unlink()
    files = [
        file for file in (run / "checkpoints" / "step-3" / "arrays").rglob("*") if file.is_file()
    ]
    large = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(large.read_bytes())
    content[len(content) // 2] ^= 1
    large.write_bytes(content)
    (run / "checkpoints" / "step-4" / "index.json").write_text("{}")
    damage = [row["damage"] for row in rows(capsys, "checkpoints", run)]
    assert "COMMIT" in damage[0] and damage[1:3] == [None, None] and "index.json" in damage[3]
    damage = [row["damage"] for row in rows(capsys, "checkpoints", run, "--full")]
    assert damage[1] is None and large.name in damage[2]
    assert "damaged: " in printed(capsys, "checkpoints", run)


def test_show_prints_arrays_and_manifest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "checkpoints", "show", run / "checkpoints" / "step-2")
    lines = [line.split() for line in text.splitlines()]
    assert ["module.table", "int32[2,3]", "24", "B"] in lines
    assert ["module.weight", "float32[]", "4", "B"] in lines
    shown = json.loads(printed(capsys, "checkpoints", "show", run, "--json"))
    assert shown["step"] == 4 and shown["metrics"]["test"] == {"score": 0.1}
    assert shown["arrays"]["module.table"] == {"shape": [2, 3], "dtype": "int32"}
    assert "checkpoints" in [plugin["name"] for plugin in shown["manifest"]["plugins"]]


def test_diff_says_what_differs(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = run / "checkpoints"
    assert printed(capsys, "checkpoints", "diff", run, steps / "step-4") == "no difference\n"
    lines = printed(
        capsys, "checkpoints", "diff", steps / "step-1", steps / "step-4", code=1
    ).splitlines()
    assert "module.weight: differs by up to 9" in lines
    assert "step: 1 of 1 differ" in lines
    assert not [line for line in lines if line.startswith("module.table")]

    class Wider(Following):
        def __init__(self, *, key: Any) -> None:
            self.weight, self.table = jnp.zeros(()), jnp.zeros((4, 3))

    data = [np.ones(1, np.float32)]
    fg.Engine(
        steps=1, seed=1, plugins=[Checkpointer(every=1)], run_dir=tmp_path / "b", autoload=False
    ).fit(Wider, data)
    lines = printed(
        capsys, "checkpoints", "diff", steps / "step-1", tmp_path / "b", code=1
    ).splitlines()
    assert "module.table: int32[2, 3] | float32[4, 3]" in lines
    assert "seed was 0 and is 1" in lines


def test_the_mean_of_checkpoints(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of weights 1, 2, 3 and 10: 4. What is not a float is that of the newest. A run may begin with
    it."""
    text = printed(capsys, "checkpoints", "average", run, "--last", 4, "--out", tmp_path / "mean")
    assert text == f"{tmp_path / 'mean'}: the mean of the steps 1, 2, 3, 4\n"
    shown = json.loads(printed(capsys, "checkpoints", "show", tmp_path / "mean", "--json"))
    assert sorted(shown["arrays"]) == ["key", "module.table", "module.weight", "step"]
    engine = fg.Engine(
        steps=1, plugins=[Checkpointer(every=5)], run_dir=tmp_path / "next", autoload=False
    )
    result = engine.fit(Following, [np.zeros(1, np.float32)], init_from=tmp_path / "mean")
    assert float(result.module.weight) == 4.0
    assert result.module.table.tolist() == [[0, 1, 2], [3, 4, 5]]
    printed(capsys, "checkpoints", "average", run, "--last", 2, "--out", tmp_path / "two")
    assert "module.weight: differs by up to 2.5" in printed(
        capsys, "checkpoints", "diff", tmp_path / "mean", tmp_path / "two", code=1
    )


def test_checkpoints_that_cannot_be_averaged_are_an_error(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(last: Any, out: Path) -> str:
        return printed(capsys, "checkpoints", "average", run, "--last", last, "--out", out, code=2)

    assert "has 4 checkpoints, not 5" in refused(5, tmp_path / "mean")
    assert "--last is 0" in refused(0, tmp_path / "mean")
    assert "already exists" in refused(2, run)
    assert "with which Orbax cannot write" in refused(2, tmp_path / "mean[1]")
    (run / "checkpoints" / "step-3" / "index.json").write_text("{}")
    assert "index.json" in refused(2, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_averaging_accepts_random_keys_and_an_invalid_output_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Keyed(Counting):
        key: Any = None
        waves: Any = None

        def __init__(self, *, key: Any) -> None:
            super().__init__()
            self.key, self.waves = key, jnp.zeros(2, jnp.complex64)

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(self.weight - jnp.sum(jnp.imag(self.waves)))

    engine(tmp_path / "run", Checkpointer(1), steps=2, log_every=None).fit(Keyed, ZEROS)
    average = "checkpoints", "average", tmp_path / "run", "--last", 2, "--out"
    (tmp_path / "file").write_text("")
    assert "cannot be written: [Errno" in printed(
        capsys, *average, tmp_path / "file" / "mean", code=2
    )
    printed(capsys, *average, tmp_path / "mean")
    mean = engine(None, Checkpointer(1)).load_weights(Keyed, fg.CheckpointRef(tmp_path / "mean"))
    assert (float(mean.module.weight), mean.module.key.dtype) == (-1.5, jax.random.key(0).dtype)
    first, second = (tmp_path / "run" / "checkpoints" / f"step-{step}" for step in (1, 2))
    either = [
        engine(None, Checkpointer(1)).load_weights(Keyed, fg.CheckpointRef(tmp_path / "run", step))
        for step in (1, 2)
    ]
    waves: list[Any] = [np.asarray(result.module.waves) for result in either]
    assert np.abs(waves[0].imag - waves[1].imag).min() == 1
    assert mean.module.waves.tolist() == ((waves[0] + waves[1]) / 2).tolist()
    assert "module.waves: differs by up to 1\n" in printed(
        capsys, "checkpoints", "diff", first, second, code=1
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs", "nowhere"], "no directory nowhere"),
        (["checkpoints", "nowhere"], "no run in nowhere"),
        (["checkpoints", "{run}/checkpoints/step-4"], "is not a run: give the directory"),
        (["checkpoints", "show", "nowhere"], "no run in nowhere"),
        (["checkpoints", "show", "{run}/checkpoints/step-9"], "no checkpoint of step 9 in"),
        (["checkpoints", "diff", "{run}", "nowhere"], "no run in nowhere"),
    ],
)
def test_missing_run_or_checkpoint_is_an_error(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in printed(capsys, *(argument.format(run=run) for argument in arguments), code=2)


def test_runs_inside_of_a_run_are_listed_after_it(tmp_path: Path) -> None:
    for run in (tmp_path / "a", tmp_path / "a" / "lr=1"):
        (run / "attempts").mkdir(parents=True)
    assert [row.run for row in list_runs(tmp_path / "a")] == ["a", "lr=1"]
    assert [row.run for row in list_runs(tmp_path)] == ["a"]
