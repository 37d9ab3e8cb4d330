"""Expressions in a formula, evaluated row by row: arithmetic and a few functions, nothing else."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedpop.errors import DataError, SettingsError
from fedpop.mixed.formula import WHOLE, FormulaPart, Tokens, is_name, shown, unquoted
from fedpop.questions.schema import Moments

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "I": lambda x: x,
    "abs": np.abs,
    "as.numeric": lambda x: x,
    "ceiling": np.ceil,
    "cos": np.cos,
    "exp": np.exp,
    "expm1": np.expm1,
    "floor": np.floor,
    "log": lambda x, base=None: np.log(x) if base is None else np.log(x) / np.log(base),
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
}
OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def evaluated(part: FormulaPart, rows: Mapping[str, Any], moments: Mapping[str, Moments]) -> np.ndarray:
    """Numbers ``[n]`` of an expression at these rows; ``moments`` are those of columns that it
    scales."""
    names: dict[str, str] = {}
    source = []
    for token in part.tokens:
        if is_name(token):
            names.setdefault(token, f"v{len(names)}")
            source.append(names[token])
        else:
            source.append("**" if token == "^" else token)
    own = {alias: unquoted(token) for token, alias in names.items()}
    try:
        tree = ast.parse(" ".join(source), mode="eval").body
    except SyntaxError as error:
        raise SettingsError(f"cannot read the expression {part.text!r} in the formula") from error

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return float(node.value)
        if isinstance(node, ast.Name):
            return _numbers(rows, own[node.id], part)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.operand))
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPERATORS:
            return OPERATORS[type(node.ops[0])](value(node.left), value(node.comparators[0])) * 1.0
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return call(own[node.func.id], node.args)
        raise SettingsError(f"cannot read the expression {part.text!r} in the formula")

    def call(name: str, arguments: list[ast.expr]) -> Any:
        if name in WHOLE:
            if len(arguments) != 1 or not isinstance(arguments[0], ast.Name):
                raise SettingsError(f"{part.text}: {name}() takes the name of a column")
            column = own[arguments[0].id]
            known = moments[column]
            centred = value(arguments[0]) - known.mean
            return centred if name == "center" else centred / known.sd
        if name not in FUNCTIONS:
            raise SettingsError(
                f"{part.text}: there is no function {name!r} for formulas; there are "
                f"{', '.join(sorted((*FUNCTIONS, 'factor', *WHOLE)))}"
            )
        try:
            return FUNCTIONS[name](*[value(a) for a in arguments])
        except TypeError as error:
            raise SettingsError(f"{part.text}: {name}() does not take {len(arguments)} arguments") from error

    with np.errstate(all="ignore"):  # what is not finite is told with its row by whoever asked
        found = np.asarray(value(tree), dtype=np.float64)
    length = len(next(iter(rows.values())))
    return np.broadcast_to(found, (length,))


def _numbers(rows: Mapping[str, Any], column: str, part: FormulaPart) -> np.ndarray:
    values = rows[column]
    if hasattr(values, "cat"):
        raise DataError(f"{part.text}: column {column!r} has categories, not numbers")
    return np.asarray(values, dtype=np.float64)


def scaled_columns(tokens: Tokens) -> list[str]:
    """Columns inside ``scale()`` or ``center()``."""
    out = []
    for i, token in enumerate(tokens[:-2]):
        if token in WHOLE and tokens[i + 1] == "(":
            if not is_name(tokens[i + 2]) or tokens[i + 3 : i + 4] != (")",):
                raise SettingsError(f"{shown(tokens)}: {token}() takes the name of a column")
            out.append(unquoted(tokens[i + 2]))
    return out
