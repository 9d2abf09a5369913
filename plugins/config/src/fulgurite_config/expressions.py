"""References to values of a configuration, and expressions over them."""

import operator
from collections.abc import Callable, Iterator, Sequence
from keyword import iskeyword
from typing import Any, NoReturn
from unicodedata import normalize

from fulgurite_config.errors import ConfigError
from fulgurite_config.names import Name, get_name

OPERATORS: dict[str, Callable[..., Any]] = {
    **{"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv},
    **{"//": operator.floordiv, "%": operator.mod, "**": operator.pow},
    **{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    **{"==": operator.eq, "!=": operator.ne, "&": operator.and_, "|": operator.or_},
    **{"~": operator.not_, "neg": operator.neg},
}
APPLY = "apply"
ITEM = "[]"


class Lazy:
    """A value that is computed when it is read: a reference or an expression.

    Comparison makes an expression too, so instances are never equal to each other.

    Example:
        from fulgurite_config import L, Lazy

        config = L(dict, size=32)
        isinstance(config.ref.size * 2, Lazy)  # True
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
            f"{format_expression(self)} has no string while the configuration is written: join "
            "strings with +, or use apply(str.format, 'w{}', reference)"
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
    if is_node(value):
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


def is_node(value: Any) -> bool:
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
