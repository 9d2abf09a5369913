"""What `fulgurite launch` starts: `python -m fulgurite_sharding.launched PROGRAM ...`."""

import os
import runpy
import signal
import sys
import threading

from fulgurite.errors import FulguriteError

from fulgurite_sharding.distributed import distributed


def main() -> None:
    """Connects this process with the others, then runs the program as a script."""
    program, *arguments = sys.argv[1:]
    launcher = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    try:
        distributed()
    except FulguriteError as error:
        sys.exit(f"error: {error}")
    sys.argv = [program, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    runpy.run_path(program, run_name="__main__")


def _end_with(launcher: int) -> None:
    """Ends this process and what it started once the launcher is gone, however it went."""
    while os.read(launcher, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
