"""A check that starts two processes, connected by `jax.distributed`, and has them train one model
with the plugin."""

import inspect
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

from fulgurite_testing.subject import Broken, Subject

WAIT = 300
"""Seconds for both processes together."""


def processes(subject: Subject) -> None:
    """Two processes that train one model with it come to the same end."""
    made = subject.given
    if not callable(made) or "<" in getattr(made, "__qualname__", "<"):
        raise Broken(
            "the check `processes` makes the plugin in other processes: give check_plugin a class, "
            "or a function at "
            "the top of a file, without arguments"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "fulgurite_testing.together",
        str(port),
        str(subject.directory()),
    ]
    command += [inspect.getsourcefile(made) or "", made.__qualname__]
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "XLA_FLAGS": " ".join(flags),
    }
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
        both = [
            subprocess.Popen(
                [*command, str(number)], env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            for number, output in enumerate(outputs)
        ]
        deadline = time.monotonic() + WAIT
        # When one has failed the other may wait for it for ever.
        while any(one.poll() is None for one in both) and not any(one.returncode for one in both):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        ended = [one.poll() for one in both]
        for one in both:
            one.kill()
            one.wait()
        said = [(output.seek(0), output.read())[1] for output in outputs]
    # One that fails takes the other with it: what both said is told.
    told = [
        f"process {one} of 2 ended with code {ended[one]}: {said[one][-1500:]}"
        for one in range(2)
        if ended[one]
    ]
    if told:
        raise Broken("; ".join(told))
    if None in ended:
        raise Broken(f"two processes with it are not done after {WAIT} s: one waits for the other")
    ends = [line for text in said for line in text.splitlines() if line.startswith("state ")]
    if len(ends) != 2 or ends[0] != ends[1]:
        raise Broken(f"two processes with it end with different states: {ends}")
