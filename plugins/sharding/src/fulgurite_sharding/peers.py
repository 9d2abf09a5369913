"""Who the processes of a run are, so that an error can name the one that has ended.

A collective operation fails with the address of a socket; that says nothing to whoever looks for
the output of the process behind it.
"""

import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

_FOLDER = "fulgurite/process/"
# Seconds until a process that has closed its connections has ended, too.
_PATIENCE = 2.0


@dataclass(frozen=True)
class Peer:
    """A process of a run.

    Attributes:
        process: its number.
        host: the name of its machine.
        pid: of its process there.
    """

    process: int
    host: str
    pid: int

    @classmethod
    def current(cls) -> "Peer":
        """Return this process."""
        return cls(jax.process_index(), platform.node(), os.getpid())

    @property
    def has_ended(self) -> bool:
        """Whether it has, as far as this machine can tell."""
        if self.host != platform.node():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False  # it is there, and somebody else's
        # Until its parent asks for the exit code, it is there as a zombie.
        status = Path(f"/proc/{self.pid}/stat")
        try:
            return status.read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return False

    def __str__(self) -> str:
        return f"process {self.process} (pid {self.pid} on {self.host})"


def register_process(client: Any) -> None:
    """Tell the others who this process is.

    Args:
        client: of the coordination service.
    """
    peer = Peer.current()
    client.key_value_set(f"{_FOLDER}{peer.process}", json.dumps(asdict(peer)))


def describe_lost_peer(client: Any, error: BaseException) -> str | None:
    """Say which process ended, if that is what an error comes from.

    Args:
        client: of the coordination service.
        error: of an operation in which all processes take part.
    """
    try:
        texts = [text for _, text in client.key_value_dir_get(_FOLDER)]
    except jax.errors.JaxRuntimeError:
        return "process 0 has ended, and with it the service by which all find each other"
    others = [peer for peer in (Peer(**json.loads(text)) for text in texts) if not _is_self(peer)]
    ended = _wait_for_ended(others)
    if ended:
        return f"{' and '.join(map(str, ended))} ended"
    if "onnection" not in str(error):
        return None
    return f"the connection to another process is lost: to {' or '.join(map(str, others))}"


def _is_self(peer: Peer) -> bool:
    return peer.process == jax.process_index()


def _wait_for_ended(peers: list[Peer]) -> list[Peer]:
    """Return those that have ended, as soon as one has, or none after a while."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        ended = [peer for peer in peers if peer.has_ended]
        if ended or time.monotonic() > deadline:
            return ended
        time.sleep(0.05)
