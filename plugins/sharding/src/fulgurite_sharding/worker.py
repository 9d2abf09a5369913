"""What `fulgurite launch` starts: `python -P -m fulgurite_sharding.worker PROGRAM ...`."""

import os
import runpy
import signal
import sys
import threading

from fulgurite.errors import FulguriteError
from fulgurite.plugins import find_installed_plugins

from fulgurite_sharding.distributed import exit_process, initialize_distributed
from fulgurite_sharding.launch import STOP_CODES


def main() -> None:
    """Connect this process with the others, then run the program as a script."""
    program, *arguments = sys.argv[1:]
    # Standard input ends with the launcher; the program itself reads nothing.
    launcher = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_kill_when_gone, args=(launcher,), daemon=True).start()
    try:
        initialize_distributed()
    except FulguriteError as error:
        sys.exit(f"error: {error}")
    sys.argv = [program, *arguments]
    find_installed_plugins()  # before the program's folder can be searched for plugins
    sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        if end.code is None or end.code in (0, *STOP_CODES):
            raise
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        exit_process(end.code if isinstance(end.code, int) else 1)


def _kill_when_gone(launcher: int) -> None:
    """End this process and what it started once the launcher is gone, however it ended."""
    while os.read(launcher, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
