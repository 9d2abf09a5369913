"""Errors that leave the engine: the user's frames and our sentence stand together."""

import inspect
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite._src import tracebacks
from fulgurite.errors import FulguriteError, ModelError, PluginError
from fulgurite_evaluators import Evaluator
from fulgurite_optimizers import Freeze

ROOT = Path(__file__).parents[2]
PACKAGES = {path.parent.name for path in ROOT.glob("*/*/src/*/__init__.py")}
DATA = fg.ArrayData({"x": np.ones((8, 3), np.float32)}, batch_size=4)


class Base(fg.Module):
    layer: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        self.layer = eqx.nn.Linear(3, 1, key=key)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


class WrongShape(Base):
    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.compute_loss(batch["x"]))

    def compute_loss(self, inputs: Any) -> Any:
        return jnp.sum(inputs @ jnp.ones((7, 2)))


class Valid(Base):
    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean(jax.vmap(self.layer)(batch["x"])))


class NoOutput(Base):
    def training_step(self, batch: Any, ctx: fg.Context) -> Any:
        return {"nothing": batch["x"]}


def fit_and_catch(model: Any) -> Exception:
    with pytest.raises(Exception) as caught:
        fg.Engine(steps=2, autoload=False).fit(model, DATA)
    return caught.value


def test_an_error_of_the_model_shows_the_lines_of_the_user_alone() -> None:
    error = fit_and_catch(WrongShape)
    frames = traceback.extract_tb(error.__traceback__)
    assert {frame.filename for frame in frames} == {__file__}
    assert [frame.name for frame in frames] == ["fit_and_catch", "training_step", "compute_loss"]
    text = "".join(traceback.format_exception(error))
    assert "FULGURITE_TRACEBACK=full" in text
    assert len(text.splitlines()) < 25, text


def test_an_error_of_ours_shows_the_call_and_the_sentence() -> None:
    error = fit_and_catch(NoOutput)
    assert isinstance(error, ModelError)
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["fit_and_catch"]


def test_errors_of_the_engine_s_constructor_and_of_the_history_show_the_call_alone() -> None:
    result = fg.Engine(steps=2, autoload=False).fit(Valid, DATA)
    calls: list[Any] = [
        lambda: fg.Engine(steps=0),
        lambda: fg.Engine(steps=1, max_steps=2),  # pyright: ignore[reportCallIssue]
        lambda: fg.Engine(steps=1, plugins=["no_such_plugin"]),
        lambda: result.history["train/no_such_metric"],
        lambda: result.history.steps("train/no_such_metric"),
    ]
    for call in calls:
        with pytest.raises(FulguriteError) as caught:
            call()
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert {frame.filename for frame in frames} == {__file__}
        assert any(tracebacks.TRACEBACK_VARIABLE in note for note in caught.value.__notes__)


def find_checked_classes() -> list[type]:
    """Return the plugins of this workspace that check their arguments, and what else users call."""
    plugins = [entry.load() for entry in entry_points(group="fulgurite.plugins")]
    plugins = [plugin for plugin in plugins if plugin.__module__.partition(".")[0] in PACKAGES]
    classes = [plugin for plugin in plugins if hasattr(plugin, "__post_init__")]
    assert len(classes) > 20
    return [*classes, fg.ArrayData, fg.DataSource, fg.Evaluation, fg.ScheduledAction, fg.Every]


@pytest.mark.parametrize("checked_class", find_checked_classes(), ids=lambda cls: cls.__name__)
def test_an_error_of_a_plugin_s_constructor_shows_the_lines_of_the_user_alone(
    checked_class: type,
) -> None:
    def refuse(self: Any) -> None:
        raise PluginError("not these values")

    class Refusing(checked_class):
        __post_init__ = refuse

    parameters = inspect.signature(checked_class).parameters.values()
    required = [parameter for parameter in parameters if parameter.default is parameter.empty]
    with pytest.raises(PluginError, match="not these values") as caught:
        Refusing(**{parameter.name: {} for parameter in required})
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.filename for frame in frames] == [__file__, __file__]
    assert tracebacks.HIDDEN_FRAMES_NOTE in caught.value.__notes__


def test_arguments_that_a_function_does_not_take_are_a_mistake_of_the_line_that_calls_it() -> None:
    engine: Any = fg.Engine(steps=1, autoload=False)
    calls: list[Any] = [
        lambda: fg.Engine(stepz=1),  # pyright: ignore[reportCallIssue]
        lambda: fg.Every(),  # pyright: ignore[reportCallIssue]
        lambda: Evaluator("test", DATA, evry=1),  # pyright: ignore[reportCallIssue]
        lambda: Freeze("net", untli=3),  # pyright: ignore[reportCallIssue]
        lambda: engine.fit(Valid, DATA, stepz=1),
        lambda: engine.init_state(Valid),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="argument") as caught:
            call()
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert [frame.name for frame in frames[1:]] == ["<lambda>"]
        assert not hasattr(caught.value, "__notes__")


def test_an_error_that_passed_no_code_of_the_user_has_no_frames_of_it() -> None:
    def train(*plugins: Any) -> Any:
        try:
            return fg.Engine(steps=1, autoload=False, plugins=plugins)
        except FulguriteError as error:
            traceback = error.__traceback__
            assert traceback is not None  # this frame is the one that catches
            return error.with_traceback(traceback.tb_next)

    def forbid() -> Any:
        raise PluginError("not today")

    assert not tracebacks.has_user_frames(train("no_such_plugin"))
    try:
        forbid()
    except PluginError as error:
        assert tracebacks.has_user_frames(error)


def test_errors_that_led_to_an_error_are_shortened_too() -> None:
    class Raising:
        @fg.hookimpl
        def on_fit_start(self, run: fg.Run) -> None:
            try:
                jax.eval_shape(lambda: jnp.ones(3) @ jnp.ones(2))
            except TypeError as error:
                raise ModelError("not this one") from error

    with pytest.raises(ModelError, match="not this one") as caught:
        fg.Engine(steps=1, plugins=[Raising()], autoload=False).fit(Valid, DATA)
    for error in (caught.value, caught.value.__cause__):
        assert error is not None
        frames = traceback.extract_tb(error.__traceback__)
        assert {frame.filename for frame in frames} == {__file__}


def test_frames_of_the_standard_library_go_with_those_that_called_them() -> None:
    """Of a thread pool that Fulgurite uses nothing is shown, of one that a user uses all."""

    def fail() -> None:
        raise ModelError("in a thread")

    class Raising:
        @fg.hookimpl
        def on_fit_start(self, run: fg.Run) -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(fail).result()

    with pytest.raises(ModelError) as caught:
        fg.Engine(steps=1, plugins=[Raising()], autoload=False).fit(Valid, DATA)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[1] == "on_fit_start"
    assert "__get_result" in names
    assert names[-1] == "fail"

    def fail_internally() -> None:
        ThreadPoolExecutor(1).submit(fail).result()

    hidden = {**fail_internally.__globals__, "__name__": "orbax.checkpoint"}
    internal = FunctionType(fail_internally.__code__, hidden, closure=fail_internally.__closure__)
    with pytest.raises(ModelError) as caught:
        tracebacks.hide_internal_frames(internal)()
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[1:] == ["fail"]


def test_a_mistake_of_fulgurite_keeps_the_place_where_it_happened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fulgurite._src.fit.fit.restore_host_states", None)
    error = fit_and_catch(Valid)
    *_, last = traceback.extract_tb(error.__traceback__)
    assert last.filename.endswith("fit/fit.py")


def test_the_whole_traceback_is_there_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULGURITE_TRACEBACK", "full")
    error = fit_and_catch(WrongShape)
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    assert any(name.endswith("fulgurite/_src/engine.py") for name in files)
    assert "FULGURITE_TRACEBACK" not in "".join(traceback.format_exception(error))


def test_a_package_of_others_is_shown_unless_it_carries_the_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever it is named."""
    package = ModuleType("fulgurite_mine")
    monkeypatch.setitem(sys.modules, package.__name__, package)

    def fail() -> None:
        raise ModelError("in a package")

    fail_in_package = FunctionType(
        fail.__code__, {**fail.__globals__, "__name__": package.__name__}
    )
    call = tracebacks.hide_internal_frames(lambda: fail_in_package())

    def list_names() -> list[str]:
        with pytest.raises(ModelError) as caught:
            call()
        return [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]

    assert list_names() == ["list_names", "<lambda>", "fail"]
    monkeypatch.setattr(package, "__tracebackhide__", True, raising=False)
    assert list_names() == ["list_names", "<lambda>"]
