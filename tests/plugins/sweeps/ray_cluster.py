"""A cluster of Ray on this machine, in a process of its own: `python ray_cluster.py FOLDER` prints
its address. Each line of its input is the number of the process of a machine, which is removed at
once, as if it had lost its power; a new one is added. It ends with its input.

The head has no room for trials, the two machines for one each. Tests start it by `start_cluster`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""What keeps a cluster and its drivers on loopback."""
LOOPBACK = "127.0.0.1"
# A machine that is gone counts as such after a second, not after 15.
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 2,
}


class RayCluster:
    """A cluster that runs in another process.

    Args:
        process: of this program.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.address = self._read_line()
        assert self.address, "there is no cluster"

    def replace_machine(self, machine: int) -> None:
        """Remove a machine at once, and add a new one.

        Args:
            machine: as `find_machine` returns it.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{machine}\n")
        self._process.stdin.flush()
        assert self._read_line() == "replaced"

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def start_cluster() -> Iterator[RayCluster]:
    """Have a cluster of two machines within the block."""
    folder = tempfile.mkdtemp(prefix="fg-ray-")  # Ray needs a short path
    process = subprocess.Popen(
        [sys.executable, __file__, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield RayCluster(process)
    finally:
        process.communicate(timeout=120)
        shutil.rmtree(folder)


def find_machine(pid: int) -> int | None:
    """Return the process of the machine on which a trial runs; None if it has lost it.

    Args:
        pid: of the trial.
    """
    while pid > 1 and "raylet" not in read_name(pid):
        pid = read_parent(pid)
    return pid if pid > 1 else None


def read_parent(pid: int) -> int:
    """Return the process that has started another one; 0 if that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def read_name(pid: int) -> str:
    """Return the name of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")[0]
    except OSError:
        return ""


def run_cluster(folder: str) -> None:
    """Keep a cluster until the input ends.

    Args:
        folder: in which Ray keeps its files.
    """
    # Ray reads it when it is imported; it also notes its newest cluster there.
    os.environ["RAY_TMPDIR"] = folder
    (Path(folder) / "ray").mkdir()
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    head = {
        "num_cpus": 0,
        "num_gpus": 0,
        "node_ip_address": LOOPBACK,
        "include_dashboard": False,
        "_system_config": HEALTH,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        machines = [add_machine(cluster) for _ in range(2)]
        print(cluster.address, flush=True)
        for line in sys.stdin:
            numbers = [get_number(machine) for machine in machines]
            machine = machines.pop(numbers.index(int(line)))
            cluster.remove_node(machine, allow_graceful=False)
            machines.append(add_machine(cluster))
            print("replaced", flush=True)
    finally:
        cluster.shutdown()


def get_number(machine: Any) -> int:
    """Return the number of the process of a machine."""
    return machine.all_processes["raylet"][0].process.pid


def add_machine(cluster: Any) -> Any:
    """Add a machine with room for one trial."""
    return cluster.add_node(
        num_cpus=1, num_gpus=0, node_ip_address=LOOPBACK, object_store_memory=80 * 2**20
    )


if __name__ == "__main__":
    run_cluster(sys.argv[1])
