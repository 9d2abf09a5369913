"""Functions for the tests of workers.

A process imports them by their names, and knows no module of tests where `pytest` runs these by their files.
"""

import os
import signal
import threading
from typing import Any

import jax.numpy as jnp
import numpy as np


def add_noise(example: Any, rng: np.random.Generator) -> Any:
    return {"x": example["x"] + rng.integers(1000)}


def divide_by_jax(example: Any) -> Any:
    return {"x": np.asarray(jnp.asarray(example["x"]) / 3)}


def fail_at_two(example: Any) -> Any:
    if example["x"] == 2:
        raise ValueError("no two")
    return example


def die_at_nine(example: Any) -> Any:
    if example["x"] == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return example


def die_or_never_end(example: Any) -> Any:
    if example["x"] == 1:
        threading.Event().wait()
    if example["x"] == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return example


class Unreadable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def fail_unreadably(example: Any) -> Any:
    raise Unreadable(1, 2)
