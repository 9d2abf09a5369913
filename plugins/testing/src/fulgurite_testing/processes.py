"""A check that starts two processes, connected by `jax.distributed`, and has them train one model with the plugin."""

import inspect
import os
import socket
import subprocess
import sys

from fulgurite_testing.subject import Broken, Subject

WAIT = 300
"""Seconds for both processes together."""


def processes(subject: Subject) -> None:
    """Two processes that train one model with it come to the same end."""
    made = subject.given
    if not callable(made) or "<" in getattr(made, "__qualname__", "<"):
        raise Broken(
            "the check `processes` makes the plugin in other processes: give check_plugin a class, or a function at "
            "the top of a file, without arguments"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subject.directory() as run:
        command = [sys.executable, "-m", "fulgurite_testing.together", str(port), str(run)]
    command += [inspect.getsourcefile(made) or "", made.__qualname__]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    both = [
        subprocess.Popen(
            [*command, str(number)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for number in range(2)
    ]
    try:
        said = [one.communicate(timeout=WAIT)[0] for one in both]
    except subprocess.TimeoutExpired:
        raise Broken(f"two processes with it are not done after {WAIT} s: one waits for the other") from None
    finally:
        for one in both:
            one.kill()
    for number, (one, text) in enumerate(zip(both, said, strict=True)):
        if one.returncode:
            raise Broken(f"process {number} of 2 ended with code {one.returncode}: {text[-1500:]}")
    ends = [line for text in said for line in text.splitlines() if line.startswith("state ")]
    if len(ends) != 2 or ends[0] != ends[1]:
        raise Broken(f"two processes with it end with different states: {ends}")
