"""Building the experiment of a run again, from its manifest."""

import os
import reprlib
from collections.abc import Sequence

from fulgurite.errors import ConfigurationError
from fulgurite.plugins import RedactedText
from fulgurite_runs import RunDirectory

from fulgurite_cli.configuration import KEY, rebuild_from_config
from fulgurite_cli.experiment import Experiment, as_experiment, build_experiment
from fulgurite_cli.fit import load_experiment
from fulgurite_cli.importing import find_allowed_modules_here
from fulgurite_cli.programs import find_program


def rebuild_experiment(
    run_dir: str, program: str | None, overrides: Sequence[str] = (), allow: Sequence[str] = ()
) -> Experiment:
    """Return the experiment of a run, with the configuration in its manifest.

    Args:
        run_dir: the run's directory.
        program: the program's file; one whose configuration has only `evaluators` puts them in the
            place of the run's. None for the file of that name in the current directory; or, if
            `allow` is not empty, for none: the configuration in the manifest is resolved alone.
        overrides: arguments that the run does not record.
        allow: names `module:name`, packages and modules that the configuration may import. Without
            a program those in the current directory are found, and nothing else that is in it.

    Raises:
        CheckpointError: there is no run.
        ConfigurationError: there is no such program, the configuration names what is not allowed,
            or an override differs from it.
    """
    manifest = RunDirectory(run_dir).read_manifest()
    config = manifest.get("configuration")
    if not isinstance(config, dict | None):
        raise ConfigurationError(
            f"the manifest of {run_dir} holds no configuration, but {reprlib.repr(config)}: check "
            "the path"
        )
    if program is None and allow:
        find_allowed_modules_here(allow)
        arguments = config or {}
        experiment = as_experiment(rebuild_from_config(arguments, overrides, None, allow))
        experiment.engine.config = arguments | {KEY: RedactedText(arguments[KEY])}
        return experiment
    path = program or find_program(manifest)
    if path is None:
        description = manifest.get("program")
        file = description.get("file") if isinstance(description, dict) else None
        # As `find_program`, which takes the plain name of a file for nothing else.
        is_here = isinstance(file, str) and os.path.basename(file) == file and os.path.isfile(file)
        if is_here:
            raise ConfigurationError(
                f"the run's program {file} defines no function `experiment`, and commands build a "
                "run again by calling it: let it define `def experiment(): return "
                "fulgurite_cli.Experiment(engine, model, data)` (docs/command-line.md), or call "
                "the functions of the plugin in the program itself"
            )
        if file is None:
            raise ConfigurationError(
                f"the run {run_dir} was not trained by a file, but in a notebook or a shell of "
                "Python: name a file that defines a function `experiment` which returns the same "
                "fulgurite_cli.Experiment(engine, model, data)"
            )
        raise ConfigurationError(
            f"the run's program {file!r} is not in this directory: go where it is, name its file, "
            "or, for a run whose program is a configuration, give --allow NAME for each package "
            "or module:name that may be imported"
        )
    experiment = load_experiment(path)
    return build_experiment(experiment, overrides, config, run_dir=run_dir, allow=allow)
