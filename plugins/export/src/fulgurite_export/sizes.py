"""Sizes of axes that are open: expressions such as `2*length + 1`, and constraints on them.

They are computed from a short text by an interpreter of their own, never by `eval`.
"""

import ast
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from fulgurite_export.errors import ExportError

MAX_TEXT = 200
"""Characters of an expression."""
_MAX_SIZE = 2**63
_MAX_EXPONENT = 8
_MAX_TRIES = 10_000
"""Sizes that are tried to find one that satisfies all constraints."""
_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
}
_FUNCTIONS: dict[str, Callable[[int, int], int]] = {
    "mod": lambda left, right: left % right,
    "floordiv": lambda left, right: left // right,
    "max": max,
    "min": min,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: lambda left, right: left == right,
    ast.GtE: lambda left, right: left >= right,
    ast.LtE: lambda left, right: left <= right,
}

Sizes = Mapping[str, int]
"""The sizes of open axes, by name."""


def compute_size(text: str | int, sizes: Sizes) -> int:
    """Return the size that an expression stands for.

    Args:
        text: the expression, as JAX writes it, or a size.
        sizes: what its names stand for.

    Raises:
        ExportError: it is another kind of expression.
    """
    if isinstance(text, int):
        return text
    size = _compute(_parse(text), sizes, text)
    if size < 0:
        raise ExportError(f"{text!r} would be {size}: a size is not negative")
    return size


def compute_shape(shape: tuple[int | str, ...], sizes: Sizes) -> tuple[int, ...]:
    """Return the shape of an array whose open axes have these sizes.

    Args:
        shape: sizes and expressions.
        sizes: what their names stand for.
    """
    return tuple(compute_size(size, sizes) for size in shape)


def is_satisfied(constraint: str, sizes: Sizes) -> bool:
    """Return whether sizes are as a constraint such as `mod(batch, 8) == 0` says.

    Args:
        constraint: two expressions with `==`, `>=` or `<=` between them.
        sizes: what their names stand for.
    """
    node = _parse(constraint)
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        raise ExportError(f"{constraint!r} is not a constraint, such as 'mod(batch, 8) == 0'")
    compare = _COMPARISONS.get(type(node.ops[0]))
    if compare is None:
        raise ExportError(f"{constraint!r}: a constraint has one of ==, >= and <=")
    left = _compute(node.left, sizes, constraint)
    return compare(left, _compute(node.comparators[0], sizes, constraint))


def collect_names(text: str | int) -> set[str]:
    """Return the names in an expression or a constraint, without those of its functions."""
    if isinstance(text, int):
        return set()
    names = {node.id for node in ast.walk(_parse(text)) if isinstance(node, ast.Name)}
    return names - _FUNCTIONS.keys()


def find_impossible(constraints: Iterable[str]) -> str | None:
    """Return a name for which no size satisfies the constraints on it alone; None where there is
    no such name, or where that cannot be decided.

    Args:
        constraints: which `is_satisfied` takes.
    """
    by_name: dict[str, list[str]] = {}
    for constraint in constraints:
        names = list(collect_names(constraint))
        if len(names) == 1:
            by_name.setdefault(names[0], []).append(constraint)
    for name, texts in by_name.items():
        candidates = _list_candidates(texts)
        if candidates is not None and not any(
            all(is_satisfied(text, {name: size}) for text in texts) for size in candidates
        ):
            return name
    return None


def _list_candidates(constraints: Sequence[str]) -> range | None:
    """Return sizes among which there is one that satisfies constraints on a name if there is any;
    None if these are too many.

    Args:
        constraints: on one name.
    """
    low, high, period = 1, math.inf, 1
    is_periodic = True
    for text in constraints:
        left, operator, number = _split_constraint(text)
        if isinstance(left, ast.Name) and number is not None:
            low = low if operator is ast.LtE else max(low, number)
            high = high if operator is ast.GtE else min(high, number)
        elif number is not None and (divisor := _find_divisor(left)) is not None:
            period = math.lcm(period, divisor)
        else:
            is_periodic = False
    if is_periodic:
        high = min(high, low + period - 1)
    return range(low, int(high) + 1) if high - low < _MAX_TRIES else None


def _split_constraint(text: str) -> tuple[ast.expr, type[ast.cmpop], int | None]:
    """Return a constraint as an expression, a comparison and a number; None for another
    expression."""
    node = _parse(text)
    assert isinstance(node, ast.Compare)  # `is_satisfied` took it
    left, operator, right = node.left, type(node.ops[0]), node.comparators[0]
    if not _has_names(left):
        left, right = right, left
        operator = {ast.GtE: ast.LtE, ast.LtE: ast.GtE}.get(operator, operator)
    return left, operator, None if _has_names(right) else _compute(right, {}, text)


def _has_names(node: ast.expr) -> bool:
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return bool(names - _FUNCTIONS.keys())


def _find_divisor(node: ast.expr) -> int | None:
    """Return the number after which the values of `mod(name, number)` repeat; None of any other
    expression."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    is_mod = node.func.id == "mod" and len(node.args) == 2 and isinstance(node.args[0], ast.Name)
    if not is_mod or not isinstance(node.args[1], ast.Constant):
        return None
    return node.args[1].value  # type: ignore[return-value]


def _parse(text: str) -> ast.expr:
    """Return the syntax tree of an expression, of which nothing is executed."""
    if len(text) <= MAX_TEXT and text.isascii() and text.isprintable():
        try:
            return ast.parse(text.replace("^", "**"), mode="eval").body  # JAX writes b^2
        except (SyntaxError, RecursionError, MemoryError, ValueError):
            pass
    raise ExportError(f"{text[:MAX_TEXT]!r} is not the size of an axis, such as '2*length + 1'")


def _compute(node: ast.expr, sizes: Sizes, text: str) -> int:
    """Return the value of a part of an expression.

    Args:
        node: the part.
        sizes: what its names stand for.
        text: the whole expression, for errors.
    """
    value = None
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.Name):
        value = sizes.get(node.id)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_compute(node.operand, sizes, text)
    elif isinstance(node, ast.BinOp):
        value = _compute_binary(node, sizes, text)
    elif isinstance(node, ast.Call):
        value = _compute_call(node, sizes, text)
    if value is None or abs(value) >= _MAX_SIZE:
        raise ExportError(
            f"{text!r} cannot be computed from {dict(sizes)}: sizes are whole numbers and names, "
            f"with + - *, {', '.join(_FUNCTIONS)}"
        )
    return value


def _compute_binary(node: ast.BinOp, sizes: Sizes, text: str) -> int | None:
    """Return the value of a sum, difference, product or power; None of anything else."""
    left = _compute(node.left, sizes, text)
    right = _compute(node.right, sizes, text)
    if isinstance(node.op, ast.Pow):
        return left**right if 0 <= right <= _MAX_EXPONENT else None
    function = _BINARY.get(type(node.op))
    return None if function is None else function(left, right)


def _compute_call(node: ast.Call, sizes: Sizes, text: str) -> int | None:
    """Return the value of a function of two sizes; None of anything else."""
    function = _FUNCTIONS.get(node.func.id) if isinstance(node.func, ast.Name) else None
    if function is None or len(node.args) != 2 or node.keywords:
        return None
    left, right = (_compute(argument, sizes, text) for argument in node.args)
    if node.func.id in ("mod", "floordiv") and right == 0:  # type: ignore[attr-defined]
        return None
    return function(left, right)
