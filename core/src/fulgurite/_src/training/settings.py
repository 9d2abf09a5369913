"""The settings of an engine: what its constructor is given, checked."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax

from fulgurite._src.training.nonfinite import NonFinitePolicy
from fulgurite._src.triggers import AtEnd, Every, Trigger
from fulgurite.errors import ConfigurationError, as_int, set_ints

StepsPerExecution = int | Literal["auto"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Settings:
    """The arguments of an engine, which describes them, without its plugins, and without `run_dir`,
    which programs may change later.

    Integers of other libraries become Python's.

    Raises:
        ConfigurationError: a value is not one that the setting can have.
    """

    steps: int | None
    epochs: int | None
    seed: int
    steps_per_execution: StepsPerExecution
    log_every: int | Trigger | None
    on_nonfinite: NonFinitePolicy
    max_compilations: int
    fast_dev_run: int | None
    limit_train_batches: int | None
    compilation_cache_dir: Any
    device: Any
    stop_timeout: float

    def __post_init__(self) -> None:
        set_ints(self, "steps", "epochs", "seed", "steps_per_execution", "log_every")
        set_ints(self, "max_compilations", "fast_dev_run", "limit_train_batches")
        check_count("steps", self.steps)
        check_count("epochs", self.epochs)
        check_steps_per_execution(self.steps_per_execution)
        check_count("limit_train_batches", self.limit_train_batches)
        check_count("fast_dev_run", self.fast_dev_run)
        check_count("max_compilations", self.max_compilations)
        self._check_policy()
        self._check_seed()
        self._check_stop_timeout()

    @property
    def log_trigger(self) -> Trigger | None:
        """When the engine itself closes the metric window; None for never."""
        if isinstance(self.log_every, int):
            return Every(self.log_every) | AtEnd()
        return self.log_every

    def find_device(self) -> Any:
        """Return the device to compute on, given as such or as `PLATFORM` or `PLATFORM:NUMBER`;
        None for that of JAX.

        Raises:
            ConfigurationError: there is no such device.
        """
        if self.device is None or isinstance(self.device, jax.Device):
            return self.device
        platform, _, number = str(self.device).partition(":")
        try:
            return jax.local_devices(backend=platform)[int(number or 0)]
        except (RuntimeError, ValueError, IndexError) as error:
            devices = ", ".join(f"{known.platform}:{known.id}" for known in jax.local_devices())
            raise ConfigurationError(
                f"Engine: there is no device {self.device!r}; there are {devices}"
            ) from error

    def choose_length(self, steps: Any, epochs: Any) -> tuple[int | None, int | None]:
        """Return the steps and epochs to train, of which one is None.

        Args:
            steps: used instead of the setting; None for the setting.
            epochs: likewise.

        Raises:
            ConfigurationError: there are both, or neither.
        """
        steps, epochs = as_int(steps), as_int(epochs)
        check_count("steps", steps)
        check_count("epochs", epochs)
        if self.fast_dev_run is not None:
            return self.fast_dev_run, None
        if steps is None and epochs is None:
            steps, epochs = self.steps, self.epochs
        if (steps is None) == (epochs is None):
            raise ConfigurationError(
                "how long to train: give Engine or fit either steps= or epochs="
            )
        return steps, epochs

    def limit_batches(self, num_batches: Any) -> int | None:
        """Return the number of batches of an evaluation or a prediction; None for all of them."""
        num_batches = as_int(num_batches)
        check_count("num_batches", num_batches)
        limits = [limit for limit in (num_batches, self.fast_dev_run) if limit is not None]
        return min(limits, default=None)

    def _check_policy(self) -> None:
        if self.on_nonfinite not in get_args(NonFinitePolicy):
            raise ConfigurationError(
                f"on_nonfinite is {self.on_nonfinite!r}; choose 'raise', 'skip' or 'ignore'"
            )

    def _check_seed(self) -> None:
        is_int = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if not is_int or not 0 <= self.seed < 2**63:
            raise ConfigurationError(
                f"seed is {self.seed!r}; it must be an integer of 63 bits that is not negative"
            )

    def _check_stop_timeout(self) -> None:
        seconds = self.stop_timeout
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not 0 < seconds < math.inf:
            raise ConfigurationError(
                f"Engine: stop_timeout is {seconds!r}; give seconds, more than 0, such as 30.0"
            )


def check_count(name: str, value: Any) -> None:
    """Raise a `ConfigurationError` for a number of steps, epochs or batches that cannot be one.

    Args:
        name: of the argument.
        value: None passes.
    """
    if value is None:
        return
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not 1 <= value < 2**31:
        raise ConfigurationError(f"{name} is {value!r}; it must be a positive integer below 2**31")


def check_steps_per_execution(value: Any) -> None:
    """Raise a `ConfigurationError` for what is neither a number of steps nor `auto`, nor None."""
    if value != "auto":
        check_count("steps_per_execution", value)
