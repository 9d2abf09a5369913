"""What a TensorBoard server makes of the files while a run writes them, and what a browser shows of
it."""

import io
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import fulgurite as fg
import numpy as np
import pytest
from PIL import Image
from test_tensorboard import Emitting, Kill, Killed, Memory, Showing, fit

pytestmark = pytest.mark.full

pytest.importorskip("tensorboard", reason="no server: `pip install tensorboard`")


class Server:
    """A real server of the event files below `folder`, with the reader in Rust, or that in Python
    if not `fast`."""

    def __init__(self, folder: Path, *, fast: bool) -> None:
        reader = ["--load_fast", "auto" if fast else "false"]
        options = [
            *reader,
            "--logdir",
            str(folder),
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--reload_interval",
            "1",
        ]
        command = [sys.executable, "-m", "tensorboard.main", *options]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stderr is not None
        lines = (re.search(r"at (http://\S+)", line) for line in self._process.stderr)
        self.address = next(match[1] for match in lines if match)

    def data(self, plugin: str, what: str, **query: Any) -> Any:
        """What the page would be given."""
        return self._answer(f"{plugin}/{what}?{urlencode(query)}")

    def query(self, plugin: str, what: str, question: Any) -> Any:
        """What the page would be given for a question in JSON."""
        headers = {"Content-Type": "application/json"}
        return self._answer(f"{plugin}/{what}", data=json.dumps(question).encode(), headers=headers)

    def _answer(self, path: str, **request: Any) -> Any:
        with urlopen(Request(f"{self.address}data/plugin/{path}", **request), timeout=60) as answer:
            content = answer.read()
        return (
            json.loads(content)
            if answer.headers.get_content_type() == "application/json"
            else content
        )

    def curve(self, tag: str, run: str = "train") -> dict[int, float]:
        """Values by step; a step that is there twice is an error. Empty before the server has read
        any."""
        if tag not in self.data("scalars", "tags").get(f"tensorboard/{run}", {}):
            return {}
        points = self.data("scalars", "scalars", tag=tag, run=f"tensorboard/{run}")
        assert len({step for _, step, _ in points}) == len(points)
        return {step: value for _, step, value in points}

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Server], fg.FitResult]]:
    """Servers with either reader that have watched a run that was killed at step 7 and resumed from
    step 3; and what the run logged over its whole length, as a run tells that nothing happened
    to."""
    folder = tmp_path_factory.mktemp("shown")
    run, memory, servers = folder / "run", Memory(), list[Server]()
    (run / "tensorboard").mkdir(parents=True)
    try:
        servers += [Server(run, fast=fast) for fast in (True, False)]
        with pytest.raises(Killed):
            fit(run, Showing(), memory, Kill(7), steps=12)
        for server in servers:
            until(
                lambda server=server: (
                    (list(server.curve("loss")), list(server.curve("loss", "test")))
                    == ([2, 4, 6], [4])
                )
            )
        arguments = Emitting("config", {"configuration": {"rate": 0.5}})
        fit(run, Showing(), memory, arguments, steps=12, resume=fg.CheckpointRef(run, 3))
        for server in servers:
            until(
                lambda server=server: (
                    (
                        max(server.curve("loss"), default=0),
                        max(server.curve("loss", "test"), default=0),
                    )
                    == (12, 12)
                )
            )
        yield servers, fit(folder / "whole", Showing(), steps=12)
    finally:
        for server in servers:
            server.close()


def until(so: Callable[[], bool]) -> None:
    """Waits for what the server does on its own; it looks at the files every second."""
    deadline = time.monotonic() + 60
    while not so():
        assert time.monotonic() < deadline, "the server did not get there"
        time.sleep(0.1)


@pytest.mark.parametrize("reader", [0, 1])
def test_running_server_shows_one_curve_of_a_killed_and_resumed_run(reader: int, shown: Any):
    servers, whole = shown
    server = servers[reader]
    for tag in ("loss", "double"):
        expected = dict(
            zip(
                whole.history.steps(f"train/{tag}").tolist(),
                whole.history[f"train/{tag}"],
                strict=True,
            )
        )
        assert server.curve(tag) == expected and list(expected) == [2, 4, 6, 8, 10, 12]
    assert list(server.curve("loss", "test")) == [4, 8, 12]


def test_a_server_gives_pictures_histograms_and_text(shown: Any):
    (server, _), whole = shown
    steps = [4, 8, 12]
    pictures = server.data("images", "images", tag="pictures/1", run="tensorboard/train", sample=0)
    assert [picture["step"] for picture in pictures] == steps
    blob = server.data(
        "images", "individualImage", **dict(p.split("=") for p in pictures[0]["query"].split("&"))
    )
    assert (np.asarray(Image.open(io.BytesIO(blob))) == 255).all()
    histograms = server.data("histograms", "histograms", tag="weight", run="tensorboard/train")
    assert [step for _, step, _ in histograms] == steps
    weight = np.asarray(whole.module.weight)
    assert sum(count for _, _, count in histograms[-1][2]) == len(weight)
    texts = server.data("text", "text", tag="note", run="tensorboard/train")
    assert [text["step"] for text in texts] == steps and "a note" in texts[0]["text"]


def test_a_server_compares_metrics_by_hyperparameters(shown: Any):
    (server, _), whole = shown
    name = {"group": "train", "tag": "loss"}
    experiment = server.query("hparams", "experiment", {"experimentName": ""})
    assert name in [metric["name"] for metric in experiment["metricInfos"]]
    statuses = [f"STATUS_{status}" for status in ("UNKNOWN", "SUCCESS", "FAILURE", "RUNNING")]
    question = {
        "allowedStatuses": statuses,
        "colParams": [{"metric": name}],
        "startIndex": 0,
        "sliceSize": 10,
    }
    (group,) = server.query("hparams", "session_groups", question)["sessionGroups"]
    assert group["hparams"] == {"rate": 0.5}
    (value,) = [metric["value"] for metric in group["metricValues"] if metric["name"] == name]
    assert value == whole.history["train/loss"][-1]


def test_a_browser_shows_them(shown: Any, tmp_path: Path):
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if chromium is None:
        pytest.skip("no Chromium: `apt-get install chromium`")
    (server, _), whole = shown

    def browse(page: str, *do: str) -> str:
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--window-size=1200,1600",
        ]
        where = [
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=20000",
            f"{server.address}#{page}",
        ]
        return subprocess.run(
            [chromium, *options, *do, *where], capture_output=True, text=True, timeout=120
        ).stdout

    page = browse("timeseries", "--dump-dom")
    splits = {f"tensorboard/{name}" for name in ("train", "test", "telemetry=train")}
    assert splits <= set(re.findall(r">\s*([\w=/]+)\s*<", page))
    numbers = [float(number) for number in re.findall(r">\s*(-?\d+\.\d+)\s*<", page)]
    for value in (whole.history["train/batch_loss"][-1], whole.history["train/double"][-1]):
        assert np.isclose(numbers, value, rtol=1e-4).any()
    browse("images", f"--screenshot={tmp_path / 'images.png'}")
    picture = np.asarray(Image.open(tmp_path / "images.png").convert("RGB"))
    assert (picture == 0).all(
        -1
    ).sum() > 20_000  # `pictures/0`, which is black, of a page that is not
