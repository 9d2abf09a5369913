"""The parts of path maps that families share."""

from collections.abc import Mapping


def map_arrays(layers: Mapping[str, str], array: str, end: str = "") -> dict[str, str]:
    """Return the map of an array that several layers have, such as their `weight`.

    Args:
        layers: their names in a file, each with the path in the module.
        array: the name of the array, in both.
        end: what is put after its path, such as `.T`.
    """
    return {f"{name}.{array}": f"{path}.{array}{end}" for name, path in layers.items()}
