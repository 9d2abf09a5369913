"""A check that starts two processes, connected by `jax.distributed`, which train one model with the
plugin."""

import inspect
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO, Any

from fulgurite_testing.subject import CheckError, PluginUnderTest

TIMEOUT = 300
"""Seconds for both processes together."""
POLL_INTERVAL = 0.05
"""Seconds."""


def check_processes(subject: PluginUnderTest) -> None:
    """Two processes that train one model with it end with the same state."""
    make_plugin = subject.plugin
    if not callable(make_plugin) or "<" in getattr(make_plugin, "__qualname__", "<"):
        raise CheckError(
            "the check `processes` builds the plugin in other processes: pass check_plugin a "
            "class, or a function without arguments at the top of a file"
        )
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
        codes = _run_two_processes(_build_command(subject, make_plugin), outputs)
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read())
    # A process that fails takes the other with it: the message holds the output of both.
    failures = [
        f"process {index} of 2 ended with code {code}: {text[-1500:]}"
        for index, (code, text) in enumerate(zip(codes, texts, strict=True))
        if code
    ]
    if failures:
        raise CheckError("; ".join(failures))
    if None in codes:
        raise CheckError(
            f"two processes with it are not done after {TIMEOUT} s: one waits for the other"
        )
    states = [line for text in texts for line in text.splitlines() if line.startswith("state ")]
    if len(states) != 2 or states[0] != states[1]:
        raise CheckError(f"two processes with it end with different states: {states}")


def _build_command(subject: PluginUnderTest, make_plugin: Any) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        sys.executable,
        "-P",
        "-m",
        "fulgurite_testing.process_worker",
        str(port),
        str(subject.create_run_dir()),
        inspect.getsourcefile(make_plugin) or "",
        make_plugin.__qualname__,
    ]


def _run_two_processes(command: list[str], outputs: Sequence[IO[str]]) -> list[int | None]:
    """Run a command in two processes, each with its index as the last argument.

    Args:
        command: without the index.
        outputs: the files that take what the processes write.

    Returns:
        The exit codes; None of a process that was killed because it did not end.
    """
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "XLA_FLAGS": " ".join(flags),
    }
    processes = [
        subprocess.Popen(
            [*command, str(index)], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        for index, output in enumerate(outputs)
    ]
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        # When one has failed the other may wait for it forever.
        if None not in codes or any(codes):
            break
        time.sleep(POLL_INTERVAL)
    codes = [process.poll() for process in processes]
    for process in processes:
        process.kill()
        process.wait()
    return codes
