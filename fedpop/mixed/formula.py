"""lme4's formulas: what they say, with grouping factors taken out before anything is expanded.

``formulae`` expands the algebra of terms (``*``, ``:``, ``/``, powers, removals) of the fixed part and
of each random part; it never sees a function call, a quoted name or a group. Calls are parts of their
own here (``log(x)``, ``I(x^2)``, ``factor(x)``), so that names come out as R prints them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from fedpop.errors import SettingsError
from fedpop.extras import library
from fedpop.federation.inputs import as_text

TOKEN = re.compile(
    r"`[^`]+`|'[^']*'|\"[^\"]*\"|(?:[^\W\d]|\.(?!\d))[\w.]*|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|\|\||\*\*|%[^%]*%|[<>=!]=|[()+\-*/:^|~,<>&!=]"
)
WORDS = re.compile(r"`|[^\W\d]|\.(?!\d)")
SYNTACTIC = re.compile(r"(?:[^\W\d_]|\.(?!\d))[\w.]*")
"""Names that R writes without quotes."""
SPACED = ("+", "-", "*", "/", "|", "||", "~", "<", ">", "<=", ">=", "==", "!=", "=", "&")
"""What R prints with spaces around."""
FACTORS = ("factor", "C", "as.factor", "relevel")
"""Calls that make categories of a column."""
COMPARED = ("<", ">", "<=", ">=", "==", "!=", "&", "|", "!")
"""What makes a yes or no: a factor in R, with the levels FALSE and TRUE."""
LOGICALS = ("TRUE", "FALSE")
WHOLE = ("scale", "center")
"""Calls that need a column's mean and standard deviation: those of the federation."""
BASES = ("poly", "ns")
"""Calls that make several columns, by sums over all rows."""
OF_ALL_ROWS = ("bs", "cut", "rank", "quantile")

MOST_TERMS = 1000
"""That an expression may stand for."""
DEEPEST = 50
"""Parentheses within parentheses."""
LONGEST_SHOWN = 200
"""Characters of a formula in an error."""

Tokens = tuple[str, ...]


@dataclass(frozen=True)
class FormulaPart:
    """A column or a call in a formula: what it is called in R, and its tokens."""

    text: str
    tokens: Tokens

    @property
    def column(self) -> str | None:
        """The column's name, where it is one."""
        return unquoted(self.tokens[0]) if len(self.tokens) == 1 and is_name(self.tokens[0]) else None

    @property
    def basis(self) -> bool:
        """A call of a basis: poly() or ns()."""
        return self.tokens[0] in BASES and self.tokens[1:2] == ("(",)

    @property
    def factor_of(self) -> str | None:
        """The column of which categories are made."""
        if self.tokens[0] not in FACTORS or len(self.tokens) < 2:
            return None
        column, *others = arguments(self.tokens)
        call, allowed = self.tokens[0], {"C": 1, "relevel": 1}.get(self.tokens[0], 0)
        if len(column) != 1 or not is_name(column[0]) or len(others) > allowed:
            raise SettingsError(
                f"{self.text}: give {call}() the name of a column; for another order of its "
                "levels, or another baseline, use levels={column: [...]}"
            )
        if call == "relevel" and self.baseline is None:
            raise SettingsError(f"{self.text}: relevel() takes a baseline, as in relevel(x, ref = 'a')")
        return unquoted(column[0])

    @property
    def baseline(self) -> str | None:
        """The level that ``relevel`` puts first."""
        if self.tokens[:2] != ("relevel", "("):
            return None
        given = arguments(self.tokens)[1:]
        value = given[0][2:] if given and given[0][:2] == ("ref", "=") else given[0] if given else ()
        return value[0].strip('"') if len(value) == 1 else None

    @property
    def contrast(self) -> str | None:
        """The coding that ``C(x, sum)`` names."""
        if self.tokens[:2] != ("C", "("):
            return None
        given = arguments(self.tokens)[1:]
        return given[0][0] if given and len(given[0]) == 1 else None

    @property
    def yes_or_no(self) -> bool:
        """A comparison inside ``I()``, which R codes as a factor."""
        inner = self.tokens[2:-1] if self.tokens[:2] == ("I", "(") else ()
        while inner[:1] == ("(",) and closing(inner, 0) == len(inner) - 1:
            inner = inner[1:-1]
        return bool(inner) and bool(_outer(inner, COMPARED))


@dataclass(frozen=True)
class FormulaTerms:
    """Products of parts, an intercept before them where there is one."""

    intercept: bool
    terms: tuple[tuple[FormulaPart, ...], ...]

    @property
    def parts(self) -> list[FormulaPart]:
        return [part for term in self.terms for part in term]


@dataclass(frozen=True)
class GroupingFactor:
    """Whose levels are groups: those of a column, or combinations of several; named as lme4 names it."""

    name: str
    columns: tuple[str, ...]
    """In the order in which their values are in a level's name."""


@dataclass(frozen=True)
class Formula:
    """``response ~ fixed + offsets + (block | group)``; effects within a block are correlated."""

    text: str
    response: FormulaPart
    fixed: FormulaTerms
    blocks: tuple[FormulaTerms, ...]
    offsets: tuple[FormulaPart, ...]
    factors: tuple[GroupingFactor, ...]
    """Each is nested in the next: levels of the last, the outermost, are the units."""
    factor_of: tuple[int, ...]
    """For each block the position of its factor; blocks of inner factors come first."""

    @property
    def group(self) -> str:
        """The outermost grouping factor."""
        return self.factors[-1].name

    @property
    def group_columns(self) -> tuple[str, ...]:
        """Columns of all grouping factors, those of the outermost first."""
        outward = [column for factor in reversed(self.factors) for column in factor.columns]
        return tuple(dict.fromkeys(outward))

    @property
    def parts(self) -> list[FormulaPart]:
        """Every part whose columns must be there, groups aside."""
        random = [part for block in self.blocks for part in block.parts]
        return [self.response, *self.fixed.parts, *random, *self.offsets]

    @property
    def columns(self) -> list[str]:
        """Names of all columns that it speaks of, those of groups last."""
        columns = [column for part in self.parts for column in columns_of(part.tokens)]
        return list(dict.fromkeys([*columns, *self.group_columns]))


def parse(text: str) -> Formula:
    """Read a formula in lme4's notation.

    >>> read = parse("log(y) ~ x * factor(s) + offset(w) + (x || g)")
    >>> read.group, [[p.text for p in term] for term in read.fixed.terms]
    ('g', [['x'], ['factor(s)'], ['x', 'factor(s)']])
    >>> [(b.intercept, [p.text for t in b.terms for p in t]) for b in read.blocks]
    [(True, []), (False, ['x'])]
    >>> [factor.name for factor in parse("y ~ x + (1 | batch/cask)").factors]
    ['cask:batch', 'batch']
    """
    tokens = scanned(text)
    if max(accumulate((t == "(") - (t == ")") for t in tokens), default=0) > DEEPEST:
        raise SettingsError(f"more than {DEEPEST} parentheses within each other: {text[:LONGEST_SHOWN]!r}")
    if tokens.count("~") != 1:
        raise SettingsError(f"a formula has one ~, as in 'y ~ x + (x | group)'; this is {text!r}")
    cut = tokens.index("~")
    left, right = tokens[:cut], tokens[cut + 1 :]
    if not left or not right:
        raise SettingsError(f"a formula needs a response before ~ and terms after it; this is {text!r}")
    fixed: list[str] = []
    offsets: list[FormulaPart] = []
    effects: list[tuple[Tokens, str, Tokens]] = []
    for sign, term in _summands(right, text):
        inner = term[1:-1] if len(term) > 2 and term[0] == "(" and closing(term, 0) == len(term) - 1 else ()
        bars = _bars(inner)
        if bars:
            if sign == "-" or len(bars) > 1:
                raise SettingsError(f"cannot read the random term {shown(term)!r} in {text!r}")
            effects.append((inner[: bars[0]], inner[bars[0]], inner[bars[0] + 1 :]))
        elif term[:2] == ("offset", "("):
            if sign == "-":
                raise SettingsError(f"an offset is added, not taken away: {text!r}")
            if len(given := arguments(term)) != 1 or not given[0]:
                raise SettingsError(f"offset() takes one column, or one expression: {text!r}")
            offsets.append(FormulaPart(shown(given[0]), given[0]))
        else:
            fixed += [sign, *term]
    factors, blocks = _nested(effects, text)
    return Formula(
        text.strip(),
        FormulaPart(shown(left), left),
        _expanded(tuple(fixed) or ("1",)),
        tuple(block for _, block in blocks),
        tuple(offsets),
        factors,
        tuple(at for at, _ in blocks),
    )


def scanned(text: str) -> Tokens:
    """The text's tokens."""
    out, at = [], 0
    as_text(text, "the formula")
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        found = TOKEN.match(text, at)
        if not found:
            raise SettingsError(f"cannot read {text[at]!r} in the formula {text!r}")
        if found[0].startswith("%"):
            raise SettingsError(f"{found[0]} is not known in formulas: {text!r}; write it as a product, a:b")
        token = "^" if found[0] == "**" else found[0]
        out.append(f'"{token[1:-1]}"' if token[0] == "'" else token)
        at = found.end()
    return tuple(out)


def shown(tokens: Sequence[str]) -> str:
    """Tokens as R prints them.

    >>> shown(scanned("I( x**2+log(`a b`,2) )"))
    'I(x^2 + log(`a b`, 2))'
    """
    out = ""
    for i, token in enumerate(tokens):
        unary = token == "-" and (i == 0 or tokens[i - 1] in "(+-*/^,~<>=")
        if token == ",":
            out += ", "
        elif token[0] == "`" and SYNTACTIC.fullmatch(token[1:-1]):
            out += token[1:-1]  # R does without quotes where it can
        elif token in SPACED and not unary:
            out += f" {token} "
        else:
            out += token
    return out


def unquoted(name: str) -> str:
    return name.strip("`")


def is_name(token: str) -> bool:
    return WORDS.match(token) is not None


def columns_of(tokens: Tokens) -> list[str]:
    """Names in an expression that are not those of functions."""
    if tokens[:2] == ("C", "("):  # what follows its column is a coding
        tokens = tokens[:3]
    following = (*tokens[1:], "")
    found = zip(tokens, following, strict=True)
    return [unquoted(t) for t, n in found if is_name(t) and n not in ("(", "=") and t not in LOGICALS]


def arguments(call: Tokens) -> list[Tokens]:
    """Of a call, as its tokens."""
    inner = call[2:-1]
    return _pieces(inner, _outer(inner, (",",)))


def calls_in(tokens: Tokens) -> list[str]:
    following = (*tokens[1:], "")
    return [t for t, n in zip(tokens, following, strict=True) if is_name(t) and n == "("]


def closing(tokens: Tokens, at: int) -> int:
    """Where the parenthesis that opens here closes."""
    depth = 0
    for i in range(at, len(tokens)):
        depth += (tokens[i] == "(") - (tokens[i] == ")")
        if not depth:
            return i
    raise SettingsError(f"a parenthesis is not closed in {shown(tokens)!r}")


def _outer(tokens: Tokens, wanted: Sequence[str]) -> list[int]:
    depth, out = 0, []
    for i, token in enumerate(tokens):
        depth += (token == "(") - (token == ")")
        if depth < 0:
            raise SettingsError(f"a parenthesis closes that was not opened in {shown(tokens)!r}")
        if depth == 0 and token in wanted:
            out.append(i)
    return out


def _bars(tokens: Tokens) -> list[int]:
    return _outer(tokens, ("|", "||"))


def _summands(tokens: Tokens, text: str) -> list[tuple[str, Tokens]]:
    """Terms of a sum with their signs."""
    if tokens and tokens[-1] in ("+", "-", "*", "/", ":", "^"):
        raise SettingsError(f"the formula {text!r} ends with {tokens[-1]!r}")
    if _bars(tokens):
        raise SettingsError(f"random terms are written in parentheses, as in (x | group): {text!r}")
    cuts = _outer(tokens, ("+", "-"))
    starts = [(("+"), 0)] if not cuts or cuts[0] else []
    starts += [(tokens[i], i + 1) for i in cuts]
    ends = [*[i for i in cuts if i], len(tokens)]
    out = []
    for (sign, start), end in zip(starts, ends, strict=True):
        if start == end:
            raise SettingsError(f"a term is missing beside {sign!r} in {text!r}")
        out.append((sign, tokens[start:end]))
    return out


def _nested(
    effects: Sequence[tuple[Tokens, str, Tokens]], text: str
) -> tuple[tuple[GroupingFactor, ...], list[tuple[int, FormulaTerms]]]:
    """Grouping factors, each nested in the next, and blocks with the positions of their factors."""
    if not effects:
        raise SettingsError(
            f"{text!r} has no random term: add one for the groups, as (1 | group) or (x | group)"
        )
    found: dict[frozenset[str], tuple[GroupingFactor, list[FormulaTerms]]] = {}
    for slopes, bar, group in effects:
        blocks = [block for block in _blocks(slopes, bar) if block.intercept or block.terms]
        for factor in _factors(group, text):
            if blocks:
                found.setdefault(frozenset(factor.columns), (factor, []))[1].extend(blocks)
    if not found:
        raise SettingsError(f"the random terms of {text!r} are empty")
    chain = sorted(found, key=len, reverse=True)
    for inner, outer in pairwise(chain):
        if not outer < inner:
            raise _crossed(found[inner][0].name, found[outer][0].name)
    blocks_of = [(i, block) for i, columns in enumerate(chain) for block in found[columns][1]]
    return tuple(found[columns][0] for columns in chain), blocks_of


def _crossed(one: str, other: str) -> SettingsError:
    nested = f"(1 | {one}/{other}) or (1 | {other}/{one})"
    if ":" in one + other:
        nested = "(1 | outer/inner)"
    return SettingsError(
        f"the grouping factors {one} and {other} are crossed: neither is nested in the other, and effects "
        "that cut across groups cannot be found from sums over groups. If each level of one belongs to a "
        f"single level of the other, say so: {nested} is the same model then. Else keep one of them random "
        "and give the other a fixed effect for each level (+ factor(...))"
    )


def _factors(group: Tokens, text: str) -> list[GroupingFactor]:
    """What a random term's right side stands for: ``a/b`` is ``a`` and ``b:a``."""
    if not group:
        raise SettingsError(f"a random term of {text!r} names no group after its bar, as in (1 | group)")
    cuts = [-1, *_outer(group, ("/",)), len(group)]
    out: list[GroupingFactor] = []
    for start, end in pairwise(cuts):
        piece = [t for t in group[start + 1 : end] if t not in "()"]  # c:(b:a) is c:b:a
        names, signs = piece[::2], piece[1::2]
        if len(piece) % 2 == 0 or not all(map(is_name, names)) or any(sign != ":" for sign in signs):
            inner = ", ".join(dict.fromkeys(columns_of(group))) or shown(group)
            raise SettingsError(
                f"the grouping factor {shown(group)!r} is computed (of {inner}): make it a column of its "
                "own; factors are nested as in (1 | a/b)"
            )
        columns = [unquoted(n) for n in names]
        name = ":".join(columns)
        if out:
            within = out[-1].name
            name = f"{name}:({within})" if len(out[-1].columns) > 1 else f"{name}:{within}"
            columns += out[-1].columns
        twice = [c for i, c in enumerate(columns) if c in columns[:i]]
        if twice:
            raise SettingsError(f"the grouping factor {shown(group)!r} has {twice[0]!r} twice")
        out.append(GroupingFactor(name, tuple(columns)))
    return out


def _blocks(slopes: Tokens, bar: str) -> list[FormulaTerms]:
    """Correlated effects together; after ``||`` each term by itself."""
    if not slopes:
        raise SettingsError("a random term needs something before its bar, as in (1 | group)")
    whole = _expanded(slopes)
    if bar == "|":
        return [whole]
    first = [FormulaTerms(True, ())] if whole.intercept else []
    return [*first, *[FormulaTerms(False, (term,)) for term in whole.terms]]


def _expanded(tokens: Tokens) -> FormulaTerms:
    """The algebra of terms, by formulae; terms of lower order first, as in R."""
    parts: dict[FormulaPart, str] = {}
    plain: list[str] = []
    at = 0
    while at < len(tokens):
        token, end = tokens[at], at + 1
        if token == ".":
            raise SettingsError(f"'.' in {shown(tokens)!r}: all other columns cannot be meant; name them")
        if is_name(token):
            if tokens[at + 1 : at + 2] == ("(",):
                end = closing(tokens, at + 1) + 1
            inner = tokens[at:end]
            _check_call(inner)
            part = FormulaPart(shown(inner), inner)
            plain.append(parts.setdefault(part, f"v{len(parts)}"))
        elif token in ("|", "||"):
            raise SettingsError(f"cannot read {shown(tokens)!r}: a bar belongs into a random term")
        elif token[0] in ".0123456789" and token not in ("0", "1") and tokens[at - 1 : at] != ("^",):
            raise SettingsError(f"cannot read the number {token} in {shown(tokens)!r}; I(...) makes a column")
        else:
            plain.append("**" if token == "^" else token)
        at = end
    _require_few(tokens)
    for i in range(1, len(plain)):
        if plain[i - 1] == "**" and plain[i].isdigit():  # a product of more parts than there are adds none
            plain[i] = str(min(_power(plain[i]), max(len(parts), 1)))
    text = " ".join(plain)
    named: Mapping[str, FormulaPart] = {name: part for part, name in parts.items()}
    if set(plain) <= {"+", "0", *named} or set(plain) <= {"+", "1", *named}:
        # A plain sum says itself what its terms are; to import formulae takes longer than most fits.
        return FormulaTerms("0" not in plain, tuple((part,) for part in parts))
    model_description = _formulae()
    try:
        found = model_description(f"y ~ {text}").common_terms
    except Exception as error:  # formulae raises many kinds, its parser's among them
        raise SettingsError(f"cannot read {shown(tokens)!r} as terms of a formula: {error}") from error
    place = {part: i for i, part in enumerate(parts)}  # R writes a term's parts in the order of the formula
    terms = [
        tuple(sorted((named[c.name] for c in t.components), key=place.__getitem__))
        for t in found
        if getattr(t, "components", None)
    ]
    intercept = any(type(t).__name__ == "Intercept" for t in found)
    return FormulaTerms(intercept, tuple(sorted(terms, key=len)))


def _require_few(tokens: Tokens) -> None:
    if _terms_in(tokens) > MOST_TERMS:
        raise SettingsError(
            f"{shown(tokens)[:LONGEST_SHOWN]!r} stands for more than {MOST_TERMS} terms; write those meant"
        )


def _terms_in(tokens: Tokens) -> int:
    """How many terms this expands to, or a bound above that.

    >>> [_terms_in(scanned(t)) for t in ("a + b", "a*b", "(a + b + c)^2", "(a + b)^1000000", "a/b:c")]
    [2, 3, 6, 3, 3]
    """
    if cuts := _outer(tokens, ("+", "-")):
        return sum(map(_terms_in, _pieces(tokens, cuts)))
    if cuts := _outer(tokens, ("*", "/")):
        return math.prod(1 + _terms_in(piece) for piece in _pieces(tokens, cuts)) - 1
    if cuts := _outer(tokens, (":",)):
        return math.prod(map(_terms_in, _pieces(tokens, cuts)))
    if cuts := _outer(tokens, ("^",)):
        among = min(_terms_in(tokens[: cuts[0]]), MOST_TERMS + 1)
        return sum(math.comb(among, i + 1) for i in range(min(_power(tokens[-1]), among)))
    if len(tokens) > 2 and tokens[0] == "(" and closing(tokens, 0) == len(tokens) - 1:
        return _terms_in(tokens[1:-1])
    return 1


def _pieces(tokens: Tokens, cuts: Sequence[int]) -> list[Tokens]:
    return [tokens[a + 1 : b] for a, b in pairwise([-1, *cuts, len(tokens)])]


def _power(token: str) -> int:
    """
    >>> _power("2"), _power("9" * 5000) > MOST_TERMS
    (2, True)
    """
    return int(token[:9]) if token.isdigit() else 1


def _check_call(tokens: Tokens) -> None:
    for at, call in enumerate(calls_in(tokens)):
        if call in BASES and at:
            raise SettingsError(f"{shown(tokens)}: {call}() makes several columns, and is a term of its own")
        if call in OF_ALL_ROWS:
            raise SettingsError(
                f"{shown(tokens)}: {call}() needs all rows in one place, and they are not; make its columns "
                "beforehand"
            )


def _formulae() -> Any:
    return library("formulae", "formula", "mixed models").model_description
