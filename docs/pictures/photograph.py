"""Write `tensorboard.png`: what TensorBoard shows of `examples/digits.py`, as Chromium sees it.

python docs/pictures/photograph.py    # needs the command `chromium`, which the tests do not
"""

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fulgurite as fg
from fulgurite_evaluators import Evaluator

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))
# Without smoothing, the losses and accuracies; the page "Time series" needs a graphics card.
PAGE = "?darkMode=false#scalars&_smoothingWeight=0&tagFilter=%5E(accuracy%7Closs)"
SECONDS_TO_START = 60


def train(run_dir: Path) -> None:
    """Train with an evaluation every 50 steps."""
    from digits import experiment, load_arrays

    program = experiment()
    test = fg.ArrayData(load_arrays()[1], batch_size=120)
    plugins = ["rng", "-progress", "tensorboard", Evaluator("test", test, every=50)]
    engine = fg.Engine(steps=600, seed=0, log_every=50, run_dir=run_dir, plugins=plugins)
    engine.fit(program.model, program.data)


def find_port() -> int:
    """Return a port that nobody uses."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def wait_for(port: int) -> None:
    """Wait until a server answers on a port of this machine.

    Raises:
        TimeoutError: it did not answer in time.
    """
    end = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < end:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise TimeoutError(f"TensorBoard did not answer on port {port} in {SECONDS_TO_START} s")


def photograph(folder: Path, file: Path) -> None:
    """Show a folder in TensorBoard and write a picture of the page."""
    port = find_port()
    server = [sys.executable, "-m", "tensorboard.main", "--load_fast=false"]
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,760"]
    with subprocess.Popen([*server, "--logdir", ".", "--port", str(port)], cwd=folder) as process:
        try:
            wait_for(port)
            address = f"http://localhost:{port}/{PAGE}"
            shot = ["--virtual-time-budget=15000", f"--screenshot={file}"]
            subprocess.run(["chromium", *options, *shot, address], check=True)
        finally:
            process.terminate()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        train(Path(temporary))
        photograph(Path(temporary) / "tensorboard", HERE / "tensorboard.png")
