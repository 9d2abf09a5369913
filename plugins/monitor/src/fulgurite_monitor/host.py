"""What the machine and the process do, as the operating system tells it."""

import psutil

_CHILDREN_EVERY = 10
"""Samples from one search for children to the next: it reads a file of every process there is."""


class HostSampler:
    """Reads memory and processor time of this process and its children, such as workers that load
    data, and those of the machine."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._children: dict[int, psutil.Process] = {}
        self._num_samples = 0
        self._process.cpu_percent()  # the first call only begins an interval
        psutil.cpu_percent()

    def sample(self) -> dict[str, float]:
        """Return the values by name: bytes, and percent of one processor core since the last call
        (of the process) or of all of them (of the machine)."""
        if self._num_samples % _CHILDREN_EVERY == 0:
            self._find_children()
        self._num_samples += 1
        rss = self._process.memory_info().rss
        percent = self._process.cpu_percent()
        for child in self._children.values():
            try:
                rss += child.memory_info().rss
                percent += child.cpu_percent()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # it has ended meanwhile
        return {
            "host/rss_bytes": float(rss),
            "host/cpu_percent": percent,
            "host/machine_memory_percent": psutil.virtual_memory().percent,
            "host/machine_cpu_percent": psutil.cpu_percent(),
        }

    def _find_children(self) -> None:
        children = {child.pid: child for child in self._process.children(recursive=True)}
        # The object of a child remembers since when its time is counted.
        self._children = {pid: self._children.get(pid, child) for pid, child in children.items()}
