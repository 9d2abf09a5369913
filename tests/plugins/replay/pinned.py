"""Resumes a run with pinned programs, in a process whose flags of XLA a test chooses."""

import sys

import fulgurite as fg
from fulgurite_checkpoint import Checkpointer
from fulgurite_replay import PinPrograms
from fulgurite_testing import TinyModel, tiny_data


def make_engine(run_dir: str, steps: int, on_change: str = "error") -> fg.Engine:
    plugins = [Checkpointer(every=4), PinPrograms(on_change)]  # type: ignore[arg-type]
    return fg.Engine(steps=steps, run_dir=run_dir, autoload=False, plugins=plugins)


if __name__ == "__main__":
    run_dir, steps, on_change = sys.argv[1:]
    result = make_engine(run_dir, int(steps), on_change).fit(TinyModel, tiny_data(), resume="auto")
    print(*result.messages, sep="\n")
