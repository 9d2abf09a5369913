"""The population of trials, as an experiment that `fulgurite fit` trains as any other.

It builds the experiment of each trial, finds in which numbers they differ, and refuses trials that
differ in anything else: a population has one program for all.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import leaves_with_paths, redact_value
from fulgurite_cli import Experiment, build_experiment, load_experiment
from fulgurite_population import (
    Population,
    list_hyperparameters,
    list_scheduled,
    make_init_key,
)
from fulgurite_runs import RunPlugin, describe_plugins, dumps, loads, replace_file

from fulgurite_sweeps.comparison import find_difference
from fulgurite_sweeps.members import FILE, VARIABLE, PopulationSettings, take_values

_PLUGINS = "FULGURITE_PLUGINS"
_SETTINGS = ("steps", "epochs", "limit_train_batches", "on_nonfinite", "fast_dev_run")
_NOT_NUMBERS = (
    "and the trials of a population may differ in numbers of optax.inject_hyperparams, in arrays "
    "of the module and in the seed alone: take local:N"
)


@dataclass(frozen=True)
class Member:
    """The experiment of a trial, as far as others are compared with it.

    Attributes:
        overrides: of the trial.
        seed: of its engine.
        module: as its model makes it.
        hyperparameters: the numbers in its optimizer's state, by name; several may have the same.
        scheduled: the names of those that schedules compute.
        settings: the settings of its engine and plugins, as JSON.
        batch: the arrays of its first batch.
        configuration: as its manifest will hold it.
        model: what makes the module.
    """

    overrides: list[str]
    seed: int
    module: Any
    hyperparameters: dict[str, list[np.ndarray]]
    scheduled: set[str]
    settings: str
    batch: list[np.ndarray]
    configuration: Any
    model: Callable[..., Any]


_STARTING: list[tuple[Population, list[Member]]] = []
"""The population that is being built, for the two plugins that the engine makes by their names."""


def experiment(run_dir: str = "") -> Experiment:
    """Return the population of the trials that the environment names.

    Args:
        run_dir: of the population.

    Raises:
        ConfigurationError: they differ in more than numbers.
    """
    settings = read_settings()
    factory = load_experiment(settings.program)
    members, vary = build_members(factory, settings.overrides)
    seeds = [member.seed for member in members]
    if not vary and len(set(seeds)) < len(seeds):
        vary = name_an_array(members)
    population = Population(seeds=seeds, vary=vary, exact=settings.is_exact)
    _STARTING[:] = [(population, members)]
    with _add_plugins("sweep_population", "sweep_members"):
        built = build_experiment(factory, settings.overrides[0], run_dir=run_dir)
    return Experiment(built.engine, population.stack(members[0].model), built.data)


def read_settings() -> PopulationSettings:
    """Return what the executor says in the environment.

    Raises:
        ConfigurationError: there is no executor.
    """
    if VARIABLE not in os.environ:
        raise ConfigurationError(
            "this program is the one that `fulgurite sweep --workers population:N` starts"
        )
    return PopulationSettings(**json.loads(os.environ[VARIABLE]))


def build_members(
    factory: Callable[..., Any], overrides: Sequence[list[str]]
) -> tuple[list[Member], dict[str, list[np.ndarray]]]:
    """Return the experiments of trials, and what they differ in besides their seeds.

    Args:
        factory: the function of the program.
        overrides: of each trial.

    Raises:
        ConfigurationError: they differ in more than a population can vary.
    """
    members = [build_member(factory, words) for words in overrides]
    for change in list_changes(overrides):
        check_is_seen(factory, members[0], change)
    return members, find_variation(members)


def build_member(factory: Callable[..., Any], overrides: list[str]) -> Member:
    """Return the experiment of a trial.

    Args:
        factory: the function of the program.
        overrides: of the trial.

    Raises:
        ConfigurationError: its model cannot be made for each member.
    """
    built = build_experiment(factory, overrides)
    engine, model = built.engine, built.model
    if isinstance(model, eqx.Module) or not callable(model):
        raise ConfigurationError(
            f"the model is a {type(model).__name__}, and a population makes one for each member: "
            "give Experiment what is called as model(key=key), or take local:N"
        )
    data = built.data() if callable(built.data) else built.data
    state = engine.init_state(model, data)
    numbers = list_hyperparameters(state.opt_state)
    batch = next(iter(engine.iter_batches(data, steps=1)))
    description = {name: getattr(engine, name) for name in _SETTINGS}
    description["plugins"] = describe_plugins(engine.plugins)
    return Member(
        overrides=overrides,
        seed=engine.seed,
        module=model(key=make_init_key(engine.seed)),
        hyperparameters={name: list(map(np.asarray, values)) for name, values in numbers.items()},
        scheduled=list_scheduled(state.opt_state),
        settings=dumps(description, sort_keys=True),
        batch=[np.asarray(leaf) for leaf in jax.tree.leaves(batch) if eqx.is_array_like(leaf)],
        configuration=loads(dumps(redact_value(engine.config))),
        model=model,
    )


def find_variation(members: Sequence[Member]) -> dict[str, list[np.ndarray]]:
    """Return what members differ in besides their seeds, as `Population(vary=...)` takes it.

    Args:
        members: the first of which has the program of all.

    Raises:
        ConfigurationError: they differ in more.
    """
    first = members[0]
    for member in members[1:]:
        check_same_program(first, member)
    vary = {
        name: [get_number(member, name) for member in members]
        for name, values in first.hyperparameters.items()
        if not all(are_equal(member.hyperparameters[name], values) for member in members)
    }
    arrays = [list_arrays(member.module) for member in members]
    # Those that the first program makes with each seed.
    expected = [list_arrays(first.model(key=make_init_key(member.seed))) for member in members]
    for path in arrays[0]:
        if any(not np.array_equal(a[path], b[path]) for a, b in zip(arrays, expected, strict=True)):
            vary[path] = [values[path] for values in arrays]
            check_is_number(first, path)
    return vary


def get_number(member: Member, name: str) -> np.ndarray:
    """Return the hyperparameter of a name, by which a population varies all that have it.

    Args:
        member: the trial.
        name: of the hyperparameter.

    Raises:
        ConfigurationError: several have the name and are not equal, or a schedule computes it.
    """
    label = f"{' '.join(member.overrides)}: the optimizer"
    number, *others = member.hyperparameters[name]
    if not are_equal(others, [number] * len(others)):
        raise ConfigurationError(
            f"{label} has several hyperparameters {name!r} that are not equal, and a population "
            "varies all of a name alike: make them optimizers of optax.multi_transform or of "
            "optax.named_chain, whose names tell them apart, or take local:N"
        )
    if name in member.scheduled:
        raise ConfigurationError(
            f"{label} computes {name!r} by a schedule, which differs between trials, {_NOT_NUMBERS}"
        )
    return number


def are_equal(first: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    """Return whether two lists hold the same arrays."""
    return len(first) == len(other) and all(map(np.array_equal, first, other))


def check_is_number(member: Member, path: str) -> None:
    """Raise a `ConfigurationError` if an array that differs between trials holds random keys.

    Args:
        member: a trial.
        path: of the array.
    """
    leaf = dict(leaves_with_paths(eqx.filter(member.module, eqx.is_array)))[path]
    if is_key(leaf):
        raise ConfigurationError(
            f"{' '.join(member.overrides)}: the random keys in the module.{path} differ between "
            f"trials by more than the seed of the engine, {_NOT_NUMBERS}"
        )


def name_an_array(members: Sequence[Member]) -> dict[str, list[np.ndarray]]:
    """Return an array of the module with the values that each member has anyway: trials may be the
    same, which a population refuses unless it is told in what they differ.

    Args:
        members: the trials.
    """
    arrays = [list_arrays(member.module) for member in members]
    leaves = leaves_with_paths(eqx.filter(members[0].module, eqx.is_array))
    numbers = {path: leaf for path, leaf in leaves if not is_key(leaf)}
    smallest = min(numbers, key=lambda path: numbers[path].size)
    return {smallest: [values[smallest] for values in arrays]}


def check_same_program(first: Member, other: Member) -> None:
    """Raise a `ConfigurationError` if a trial differs from the first one in more than numbers.

    Args:
        first: the first trial.
        other: the trial.
    """
    label = f"{' '.join(other.overrides)} differs from {' '.join(first.overrides)}"
    numbers = [
        (float(value), float(other_value))
        for name, values in first.hyperparameters.items()
        for value, other_value in zip(values, other.hyperparameters.get(name, ()), strict=False)
        if value.ndim == other_value.ndim == 0
    ]
    difference = find_difference(first.module, other.module, numbers)
    if difference is not None:
        raise ConfigurationError(f"{label} in {difference}, {_NOT_NUMBERS}")
    lengths = [{name: len(v) for name, v in m.hyperparameters.items()} for m in (first, other)]
    if lengths[0] != lengths[1]:
        raise ConfigurationError(f"{label} in its optimizer, {_NOT_NUMBERS}")
    if first.settings != other.settings:
        raise ConfigurationError(f"{label} in the settings of its engine, {_NOT_NUMBERS}")
    shapes = [[(leaf.shape, leaf.dtype) for leaf in member.batch] for member in (first, other)]
    is_same = all(map(np.array_equal, first.batch, other.batch)) or first.seed != other.seed
    if shapes[0] != shapes[1] or not is_same:
        raise ConfigurationError(f"{label} in its data, {_NOT_NUMBERS}")


def list_changes(overrides: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Return an override of the first trial, and another one of the same path, for each path in
    which trials differ.

    Args:
        overrides: of each trial.
    """
    changes = {}
    for other in overrides[1:]:
        for override, change in zip(overrides[0], other, strict=True):
            if override != change:
                changes.setdefault(override, change)
    return list(changes.items())


def check_is_seen(factory: Callable[..., Any], first: Member, change: tuple[str, str]) -> None:
    """Raise a `ConfigurationError` if an argument changes nothing of what can be seen here: then it
    may be a number in the program itself, such as `optax.adam(lr)`.

    Args:
        factory: the function of the program.
        first: the first trial.
        change: one of its overrides, and another one in its place.
    """
    override, other = change
    overrides = [other if text == override else text for text in first.overrides]
    member = build_member(factory, overrides)
    is_seen = member.seed != first.seed or find_variation([first, member])
    if not is_seen:
        raise ConfigurationError(
            f"{override} and {other} differ in nothing that a population can vary, {_NOT_NUMBERS}"
        )


def list_arrays(module: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a module by path; of random keys their bits."""
    arrays = eqx.filter(module, eqx.is_array)
    return {
        path: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        for path, leaf in leaves_with_paths(arrays)
    }


def is_key(leaf: Any) -> bool:
    """Return whether an array holds random keys."""
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class SweepMembers(RunPlugin):
    """Writes how each member of a population of trials has ended."""

    plugin_name = "sweep_members"

    def __init__(self, population: Population, members: Sequence[Member]) -> None:
        self._population = population
        self._members = members

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run) -> None:
        """Write it, unless the run is to be resumed."""
        if not run.is_complete or run.run_dir is None:
            return
        frozen = self._population.list_frozen(run.state)
        results = []
        for index, member in enumerate(self._members):
            metrics = {
                f"{source}/{name}": float(value)
                for source, values in run.metrics.items()
                for name, value in take_values(dict(values), index).items()
                if np.ndim(value) == 0
            }
            error = (
                f"NonFiniteError: not finite at step {frozen[index]}" if index in frozen else None
            )
            results.append(
                {
                    "step": frozen.get(index, run.step),
                    "metrics": metrics,
                    "error": error,
                    "configuration": member.configuration,
                }
            )
        run.run_dir.assert_locked()
        replace_file(run.run_dir.path / FILE, dumps(results))


def make_sweep_population() -> Population:
    """Return the population of the trials that are being built."""
    return _get_starting()[0]


def make_sweep_members() -> SweepMembers:
    """Return what writes how the trials that are being built have ended."""
    return SweepMembers(*_get_starting())


def _get_starting() -> tuple[Population, list[Member]]:
    if not _STARTING:
        raise ConfigurationError(
            "this plugin is for populations that `fulgurite sweep` starts: leave it out"
        )
    return _STARTING[0]


@contextmanager
def _add_plugins(*names: str) -> Iterator[None]:
    """Let engines that are built within the block have plugins."""
    former = os.environ.get(_PLUGINS)
    os.environ[_PLUGINS] = ",".join(filter(None, [former, *names]))
    try:
        yield
    finally:
        if former is None:
            del os.environ[_PLUGINS]
        else:
            os.environ[_PLUGINS] = former
