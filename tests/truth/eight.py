"""Checks pairs of the table on eight simulated devices, and prints what became of each as JSON.
Started by `test_devices.py`.

    python eight.py FEATURE-KIND...
"""

import json
import sys
import traceback
import warnings

import jax
from table import check_pair


def check(pair: str) -> str:
    """Return what became of a pair: its outcome, or the traceback of its failure."""
    try:
        return check_pair(*pair.split("-"))
    except BaseException as error:  # also what pytest raises where no error came
        return "".join(traceback.format_exception(error, limit=-3))


def main() -> None:
    """Check the pairs of the command line."""
    # As pytest is configured here.
    warnings.simplefilter("error")
    warnings.simplefilter("default", DeprecationWarning)
    assert jax.device_count() == 8
    print(json.dumps({pair: check(pair) for pair in sys.argv[1:]}))


if __name__ == "__main__":
    main()
