"""References to values of a configuration, and expressions over them."""

import operator
from collections.abc import Callable, Iterator, Sequence
from keyword import iskeyword
from typing import Any, NoReturn
from unicodedata import normalize

from fulgurite_config.errors import ConfigError, suggest
from fulgurite_config.names import Name, get_name, load
from fulgurite_config.required import Required, find_required

OPERATORS: dict[str, Callable[..., Any]] = {
    **{"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv},
    **{"//": operator.floordiv, "%": operator.mod, "**": operator.pow},
    **{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    **{"==": operator.eq, "!=": operator.ne, "&": operator.and_, "|": operator.or_},
    **{"~": operator.not_, "neg": operator.neg},
}
APPLY = "apply"
ITEM = "[]"
MAX_LENGTH = 10_000
MAX_BITS = 4_096
MAX_VALUES = 1_000_000


class Lazy:
    """A value that is computed when it is read: a reference or an expression.

    Comparison makes an expression too, so instances are never equal to each other.
    """

    __slots__ = ()
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __bool__(self) -> NoReturn:
        raise ConfigError(
            f"{format_expression(self)} has no value while the configuration is written: combine "
            "conditions with & and |, or read the value itself, without `.ref`"
        )

    def __iter__(self) -> NoReturn:
        raise ConfigError(
            f"{format_expression(self)} cannot be iterated over: use apply(function, reference)"
        )

    def __add__(self, other: Any) -> "Expression":
        return Expression("+", self, other)

    def __radd__(self, other: Any) -> "Expression":
        return Expression("+", other, self)

    def __sub__(self, other: Any) -> "Expression":
        return Expression("-", self, other)

    def __rsub__(self, other: Any) -> "Expression":
        return Expression("-", other, self)

    def __mul__(self, other: Any) -> "Expression":
        return Expression("*", self, other)

    def __rmul__(self, other: Any) -> "Expression":
        return Expression("*", other, self)

    def __truediv__(self, other: Any) -> "Expression":
        return Expression("/", self, other)

    def __rtruediv__(self, other: Any) -> "Expression":
        return Expression("/", other, self)

    def __floordiv__(self, other: Any) -> "Expression":
        return Expression("//", self, other)

    def __rfloordiv__(self, other: Any) -> "Expression":
        return Expression("//", other, self)

    def __mod__(self, other: Any) -> "Expression":
        return Expression("%", self, other)

    def __rmod__(self, other: Any) -> "Expression":
        return Expression("%", other, self)

    def __pow__(self, other: Any) -> "Expression":
        return Expression("**", self, other)

    def __rpow__(self, other: Any) -> "Expression":
        return Expression("**", other, self)

    def __and__(self, other: Any) -> "Expression":
        return Expression("&", self, other)

    def __rand__(self, other: Any) -> "Expression":
        return Expression("&", other, self)

    def __or__(self, other: Any) -> "Expression":
        return Expression("|", self, other)

    def __ror__(self, other: Any) -> "Expression":
        return Expression("|", other, self)

    def __lt__(self, other: Any) -> "Expression":
        return Expression("<", self, other)

    def __le__(self, other: Any) -> "Expression":
        return Expression("<=", self, other)

    def __gt__(self, other: Any) -> "Expression":
        return Expression(">", self, other)

    def __ge__(self, other: Any) -> "Expression":
        return Expression(">=", self, other)

    def __eq__(self, other: object) -> Any:
        return Expression("==", self, other)

    def __ne__(self, other: object) -> Any:
        return Expression("!=", self, other)

    def __invert__(self) -> "Expression":
        return Expression("~", self)

    def __neg__(self) -> "Expression":
        return Expression("neg", self)

    def __repr__(self) -> str:
        return format_expression(self)

    def __str__(self) -> NoReturn:
        raise ConfigError(
            f"{format_expression(self)} has no text while the configuration is written: join texts "
            "with +, or use apply(str.format, 'w{}', reference)"
        )

    def __format__(self, spec: str) -> NoReturn:
        str(self)
        raise AssertionError

    def __float__(self) -> NoReturn:
        _refuse(self, "float")

    def __int__(self) -> NoReturn:
        _refuse(self, "int")

    def __index__(self) -> NoReturn:
        _refuse(self, "int")

    def __abs__(self) -> NoReturn:
        _refuse(self, "abs")

    def __round__(self, digits: int | None = None) -> NoReturn:
        _refuse(self, "round")

    def __len__(self) -> NoReturn:
        _refuse(self, "len")


def _refuse(value: Lazy, function: str) -> NoReturn:
    raise ConfigError(
        f"{function}({format_expression(value)}) has no value while the configuration is written: "
        f"write apply({function}, {format_expression(value)})"
    )


class Reference(Lazy):
    """The value at a path below a node, as `cfg.ref.model.width`; or, with a reference in brackets,
    that of several which it names: `cfg.ref.models[cfg.ref.name]`."""

    __slots__ = ("_config_path", "_config_root")

    def __init__(self, root: Any, path: tuple[str | int, ...] = ()) -> None:
        self._config_root = root
        self._config_path = path

    def __getattr__(self, name: str) -> "Reference":
        if name.startswith(("__", "_config_")):
            raise AttributeError(name)
        return Reference(self._config_root, (*self._config_path, name))

    def __getitem__(self, key: Any) -> Any:
        _check_key(self, key)
        if isinstance(key, Lazy):
            return Expression(ITEM, self, key)
        return Reference(self._config_root, (*self._config_path, key))


class Expression(Lazy):
    """An operator and its operands, or `apply` with a function and its arguments."""

    __slots__ = ("_config_operands", "_config_operator")

    def __init__(self, symbol: str, *operands: Any) -> None:
        for operand in operands:
            _check_operand(operand)
        self._config_operator = symbol
        self._config_operands = operands

    def __getattr__(self, name: str) -> "Expression":
        if name.startswith(("__", "_config_")):
            raise AttributeError(name)
        if self._config_operator != ITEM:
            raise AttributeError(
                f"{format_expression(self)} has no {name!r}: it is computed, and no place"
            )
        return Expression(ITEM, self, name)

    def __getitem__(self, key: Any) -> "Expression":
        _check_key(self, key)
        return Expression(ITEM, self, key)


def _check_key(value: Lazy, key: Any) -> None:
    if not isinstance(key, str | int | Lazy):
        raise ConfigError(
            f"{format_expression(value)} has one value for each name or index, and none for "
            f"{key!r}: write apply(function, {format_expression(value)}) with a function of a "
            "module that returns what you need"
        )


def _check_operand(value: Any) -> None:
    """Raise a `ConfigError` if a call or a section stands in an expression."""
    if _is_node(value):
        raise ConfigError(
            "a call or a section cannot stand in an expression: give it a place in the "
            "configuration, and refer to its values. To call a function with what it makes, write "
            "L(function, ...)"
        )
    for item in iter_items(value):
        _check_operand(item)


def iter_items(value: Any) -> Iterator[Any]:
    """Yield the items of a list or tuple, or the values of a dictionary."""
    if isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()


def _is_node(value: Any) -> bool:
    """Return whether a value is a `Node`, which is a class of a module above."""
    return hasattr(type(value), "__config_get__")


def apply(function: Callable[..., Any] | str, *arguments: Any) -> Any:
    """Return the value of a function of references, computed when it is read.

    `apply(str.join, "/", cfg.ref.parts)` joins what `cfg.parts` holds then.

    Args:
        function: a function of a module, or a name `module:function`.
        arguments: its arguments; references among them are read first.
    """
    target = Name(function, is_trusted=True) if isinstance(function, str) else function
    get_name(target)
    return Expression(APPLY, target, *arguments)


def get_reference(reference: Reference) -> tuple[Any, tuple[str | int, ...]]:
    """Return the node that a reference starts from, and its path."""
    return reference._config_root, reference._config_path


def set_function(expression: Expression, function: Callable[..., Any]) -> None:
    """Let `apply` call a function where it names one."""
    expression._config_operands = (function, *expression._config_operands[1:])


def get_expression(expression: Expression) -> tuple[str, tuple[Any, ...]]:
    """Return the operator of an expression and its operands."""
    return expression._config_operator, expression._config_operands


def has_lazy(value: Any) -> bool:
    """Return whether a value is a reference or an expression, or holds one in a list, tuple or
    dictionary."""
    return isinstance(value, Lazy) or any(map(has_lazy, iter_items(value)))


def is_attribute(name: str) -> bool:
    """Return whether a name can be written after a dot, and be found there again."""
    is_name = name.isidentifier() and not iskeyword(name)
    is_special = name.startswith(("__", "_config_"))
    return is_name and not is_special and normalize("NFKC", name) == name


def format_path(path: Sequence[Any]) -> str:
    """Return a path as `model.layers[0]['x']`."""
    text = ""
    for key in path:
        if isinstance(key, str) and is_attribute(key):
            text += f".{key}" if text else key
        else:
            text += f"[{key!r}]"
    return text


def format_expression(value: Any, root: str = "cfg") -> str:
    """Return a reference or an expression as Python.

    Args:
        value: the expression, or a constant in one.
        root: how the node that references start from is called.
    """
    if isinstance(value, Reference):
        path = format_path(value._config_path)
        return f"{root}.ref{path if path.startswith('[') or not path else f'.{path}'}"
    if not isinstance(value, Expression):
        return repr(value)
    symbol, operands = get_expression(value)
    texts = [format_expression(operand, root) for operand in operands[symbol == APPLY :]]
    if symbol == APPLY:
        return f"apply({get_name(operands[0])}, {', '.join(texts)})"
    return format_operation(symbol, texts)


def format_operation(symbol: str, texts: Sequence[str]) -> str:
    """Return an operation as Python.

    Args:
        symbol: of the operator.
        texts: its operands as Python.
    """
    if symbol == ITEM:
        return f"{texts[0]}[{texts[1]}]"
    if len(texts) == 1:
        return f"{'-' if symbol == 'neg' else symbol}({texts[0]})"
    return f"({texts[0]} {symbol} {texts[1]})"


class Evaluation:
    """Reads values, and computes each reference once.

    Args:
        allow: what may be imported for functions named in a file.
    """

    def __init__(self, allow: Sequence[str] = ()) -> None:
        self._allow = allow
        self._values: dict[Any, Any] = {}
        self._active: dict[Any, str] = {}
        self._results: dict[int, Any] = {}
        self._count = 0

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
        check_operands(symbol, values)
        try:
            result = function(*values)
        except ConfigError:
            raise
        except Exception as error:
            error.add_note(f"while {format_expression(value)} was computed")
            raise
        check_result(result)
        return self._mark(result)

    def _expand(self, value: Any) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:  # a few references can stand for lists without end
            raise ConfigError(f"references stand for more than {MAX_VALUES:_} values")
        value = self._compute(value)
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
        self._active[key] = repr(reference)
        current: Any = root
        for count, part in enumerate(path):
            if isinstance(current, Required):  # all that is below it is missing too
                break
            child = _get_child(current, part, reference, path[:count])
            current = self._enter(current, child)
        del self._active[key]
        self._values[key] = current
        return current


def _check_arguments(expression: Expression, values: Sequence[Any]) -> None:
    """Raise a `ConfigError` if a function of references would get a call that is not made yet."""
    for operand, value in zip(get_expression(expression)[1][1:], values, strict=True):
        if _is_node(value):
            raise ConfigError(
                f"{format_expression(expression)}: {format_expression(operand)} is a call or a "
                "section, and nothing is made before the configuration is resolved. Write "
                "L(function, ...) to call the function with what it makes"
            )


def _get_child(value: Any, key: Any, reference: Reference, path: Sequence[Any]) -> Any:
    try:
        if _is_node(value):
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
    is_node = _is_node(container)
    get = container.__config_get__ if is_node else None
    names: Sequence[Any] = ()
    if is_node:
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


def check_operands(symbol: str, values: Sequence[Any]) -> None:
    """Raise a `ConfigError` if an operation would need much time or memory."""
    if symbol == "*":
        lengths = [len(value) for value in values if hasattr(value, "__len__")]
        counts = [value for value in values if isinstance(value, int)]
        if lengths and counts and lengths[0] * counts[0] > MAX_LENGTH:
            raise ConfigError(f"a reference makes more than {MAX_LENGTH} items")
    if symbol == "%" and isinstance(values[0], str):
        raise ConfigError("% formats no text here: join texts with + or apply(str.join, ...)")
    if symbol == "**" and all(isinstance(value, int) for value in values):
        base, exponent = values
        if base.bit_length() * abs(exponent) > MAX_BITS:
            raise ConfigError(f"{base} ** {exponent} has more than {MAX_BITS} bits")


def check_result(value: Any) -> None:
    """Raise a `ConfigError` if a computed value is too large for a configuration."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ConfigError(f"a reference makes a number of more than {MAX_BITS} bits")
    if isinstance(value, str | list | tuple | dict) and len(value) > MAX_LENGTH:
        raise ConfigError(f"a reference makes more than {MAX_LENGTH} items")
