"""A program that runs exported folders where neither Equinox nor Fulgurite can be imported.

It reads lines `FOLDER FUNCTION INPUTS.npz OUTPUTS.npz`; names in the files are those of inputs and outputs, of
a single output `out`.
"""

import sys


class Blocker:
    """Refuses to import what an exported model must not need."""

    blocked = ("equinox", "fulgurite", "jaxtyping", "optax", "pluggy", "safetensors")

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ImportError(f"{name} is not installed here")


sys.meta_path.insert(0, Blocker())

import numpy as np  # noqa: E402
from fulgurite_export import load  # noqa: E402

for line in sys.stdin:
    folder, function, inputs, outputs = line.split()
    arrays = dict(np.load(inputs))
    result = load(folder).functions[function](arrays)
    np.savez(outputs, **(result if isinstance(result, dict) else {"out": result}))
assert not [name for name in sys.modules if name.partition(".")[0] in Blocker.blocked]
