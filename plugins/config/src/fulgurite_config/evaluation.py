"""Computing references and expressions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

from fulgurite_config.errors import ConfigError, NotAllowedError, suggest
from fulgurite_config.expressions import (
    APPLY,
    ITEM,
    OPERATORS,
    Expression,
    Reference,
    format_expression,
    format_path,
    get_expression,
    get_reference,
    is_node,
)
from fulgurite_config.limits import Budget, check_operands, check_result
from fulgurite_config.names import SAFE, Name, get_name, load
from fulgurite_config.required import Required, find_required


class Evaluation:
    """Reads values, and computes each reference once.

    Example:
        from fulgurite_config import L, ValueReader

        config = L(dict, size=32)
        ValueReader().compute(config.ref.size // 2)  # 16

    Args:
        allow: what may be imported for functions named in a file.
        budget: counts what is computed; one of its own by default.
    """

    def __init__(self, allow: Sequence[str] = (), budget: Budget | None = None) -> None:
        self._allow = allow
        self._values: dict[Any, Any] = {}
        self._active: dict[Any, str] = {}
        self._results: dict[int, Any] = {}
        self.budget = budget or Budget()

    def compute(self, value: Any) -> Any:
        """Return what a reference or an expression stands for, and any other value as it is: in a
        list references stay, so that it is the list that the configuration holds. What needs a
        `Required` is that."""
        try:
            return self._compute(value)
        except RecursionError:
            raise ConfigError("references are nested too deeply to be computed") from None

    def expand(self, value: Any) -> Any:
        """Return a value with what stands for the references in its lists and dictionaries too, as
        functions get it."""
        try:
            return self._expand(value)
        except RecursionError:
            raise ConfigError("references are nested too deeply to be computed") from None

    def is_result(self, value: Any) -> bool:
        """Return whether a list or dictionary was computed, so that no configuration holds it."""
        return id(value) in self._results

    def _compute(self, value: Any) -> Any:
        if isinstance(value, Reference):
            return self._follow(value)
        if not isinstance(value, Expression):
            return value
        symbol, operands = get_expression(value)
        if symbol == ITEM:
            container, item = map(self._compute, operands)
            if isinstance(container, Required):
                return container
            if isinstance(item, Required):
                return item
            self.budget.spend(len(container if hasattr(container, "__len__") else dir(container)))
            return self._enter(container, _get_item(container, item, value))
        function = OPERATORS.get(symbol)
        values = [self._expand(operand) for operand in operands[function is None :]]
        if function is None:
            _check_arguments(value, values)
            target = operands[0]
            function = load(target, self._allow) if isinstance(target, Name) else target
        missing = find_required(values)
        if missing is not None:
            return missing
        return self._mark(self._call(function, values, value))

    def _call(self, function: Any, values: list[Any], expression: Expression) -> Any:
        """Return what a function makes of values, if that is bounded.

        Args:
            function: of the expression.
            values: its arguments.
            expression: the expression, for errors.
        """
        symbol, _ = get_expression(expression)
        check_operands(symbol, values)
        self.budget.spend_on_call(function, values)
        try:
            result = function(*values)
        except (ConfigError, RecursionError):
            raise
        except Exception as error:
            text = format_expression(expression)
            if symbol == APPLY and get_name(function) not in SAFE:
                error.add_note(f"while {text} was computed")
                raise
            raise ConfigError(
                f"{text} cannot be computed: {type(error).__name__}: {error}"
            ) from error
        check_result(result)
        if hasattr(result, "__len__"):
            self.budget.spend(len(result))
        return result

    def _expand(self, value: Any) -> Any:
        self.budget.spend()
        value = self._compute(value)
        if isinstance(value, str | PurePath) or hasattr(type(value), "__config_get__"):
            self.budget.spend_on(value)
        if isinstance(value, list | tuple):
            return type(value)(self._expand(item) for item in value)
        if isinstance(value, dict):
            return {key: self._expand(item) for key, item in value.items()}
        return value

    def _enter(self, container: Any, child: Any) -> Any:
        """Compute a value that a container holds: one of a result is a part of that result."""
        child = self._compute(child)
        return self._mark(child) if self.is_result(container) else child

    def _mark(self, result: Any) -> Any:
        if isinstance(result, list | tuple | dict):
            self._results[id(result)] = result
        return result

    def _follow(self, reference: Reference) -> Any:
        root, path = get_reference(reference)
        key = (id(root), path)
        if key in self._values:
            return self._values[key]
        if key in self._active:
            cycle = " -> ".join([*self._active.values(), repr(reference)])
            raise ConfigError(f"references form a cycle: {cycle}")
        self.budget.spend(len(path))
        self._active[key] = repr(reference)
        current: Any = root
        try:
            for count, part in enumerate(path):
                if isinstance(current, Required):  # all that is below it is missing too
                    break
                child = _get_child(current, part, reference, path[:count])
                current = self._enter(current, child)
        finally:
            del self._active[key]
        self._values[key] = current
        return current


def _check_arguments(expression: Expression, values: Sequence[Any]) -> None:
    """Raise a `ConfigError` if a function of references would get a call that is not made yet."""
    for operand, value in zip(get_expression(expression)[1][1:], values, strict=True):
        if is_node(value):
            raise ConfigError(
                f"{format_expression(expression)}: {format_expression(operand)} is a call or a "
                "section, and nothing is made before the configuration is resolved. Write "
                "L(function, ...) to call the function with what it makes"
            )


@contextmanager
def say_where(place: str) -> Iterator[None]:
    """Let an error of a reference begin with the path at which it stands."""
    try:
        yield
    except NotAllowedError:
        raise
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def _get_child(value: Any, key: Any, reference: Reference, path: Sequence[Any]) -> Any:
    try:
        if is_node(value):
            return value.__config_get__(key)
        if isinstance(value, dict | list | tuple):
            return value[key]
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{reference!r} leads nowhere: {error}") from error
    raise ConfigError(
        f"{reference!r} leads nowhere: {format_path(path)} is {value!r}, which has no {key!r}"
    )


def _get_item(container: Any, key: Any, expression: Expression) -> Any:
    """Return one of several values, as the node, dictionary or list that has it holds it.

    Args:
        container: what has the values.
        key: the name or index of one of them.
        expression: which asks, for the error.
    """
    has_names = is_node(container)
    get = container.__config_get__ if has_names else None
    names: Sequence[Any] = ()
    if has_names:
        names = [name for name in dir(container) if name not in ("ref", "aux")]
    elif isinstance(container, dict):
        names = list(container)
    elif isinstance(container, list | tuple):
        names = range(-len(container), len(container))
    if key not in names:
        raise ConfigError(
            f"{format_expression(expression)} leads nowhere: there is no {key!r}. "
            f"{suggest(str(key), names)}"
        )
    return container[key] if get is None else get(key)
