"""Whether trials can be members of one population, in a process that may import jax."""

import sys

from fulgurite.errors import ConfigurationError
from fulgurite_cli import format_mistake, load_experiment

from fulgurite_sweeps.members import REFUSED
from fulgurite_sweeps.population import build_members, read_settings


def main() -> int:
    """Build the trials that the environment names; return `REFUSED` if a population cannot vary
    what they differ in."""
    try:
        settings = read_settings()
        build_members(load_experiment(settings.program), settings.overrides)
    except ConfigurationError as error:
        sys.stderr.write(format_mistake(error))
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
