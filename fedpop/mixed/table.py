"""Rows of a table as a formula needs them: columns with a type, groups with a name, nothing missing."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedpop.errors import DataError
from fedpop.extras import library
from fedpop.federation.inputs import as_text
from fedpop.federation.reading import require_separator
from fedpop.federation.table_format import MINIMUM, USUAL_TABLE, TableFormat
from fedpop.files import opened
from fedpop.mixed.formula import Formula
from fedpop.questions.schema import sorted_levels

MISSING = ("drop", "error")
NA = ("NA",)
"""Words of a file that stand for missing values, beside empty fields; as in R."""
PARQUET = (".parquet", ".pq")
DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}")
"""How dates are written: year, month and day, or the other way round; a time may follow."""
NOT_A_NUMBER = "NaN"
LARGEST_VALUE = 1e150
"""Of numbers whose squares, and sums of them, are finite."""
FEW_BAD_CELLS = 10
"""Different numbers that may be names of levels."""


def pandas() -> Any:
    """pandas, or an error that says how to get it."""
    return library("pandas", "formula", "mixed models")


def read_csv(path: str | Path, na: Sequence[str] = NA, table: TableFormat = USUAL_TABLE) -> Any:
    """A table out of a CSV file, or one error that says what is wrong with it; ``na`` are the words for
    missing values beside empty fields."""
    pd, path = pandas(), Path(path)
    written = {"encoding": table.text_encoding, "sep": table.separator, "keep_default_na": False}
    words = ["", *na]
    try:
        opened(path).close()
        frame = pd.read_csv(path, decimal=table.decimal, low_memory=False, na_values=words, **written)
        head = pd.read_csv(path, header=None, nrows=1, dtype=str, **written)
    except UnicodeDecodeError as error:
        wide = error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.start}: {error.object[error.start]:#x}); save it as "
            f"UTF-8, or convert it: iconv -f {'utf-16' if wide else 'latin1'} -t utf-8"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise DataError(f"{path} is not a table of comma-separated values: {error}") from error
    if len(frame) and not isinstance(frame.index, pd.RangeIndex):
        raise DataError(
            f"{path}: rows hold more values than the {len(frame.columns)} columns of the first line"
        )
    if len(frame.columns) and str(frame.columns[0]).startswith("Unnamed:"):
        frame, head = frame.iloc[:, 1:], head.iloc[:, 1:]  # row names, as R writes them
    for place, (_, values) in enumerate(frame.items()):
        if not pd.api.types.is_numeric_dtype(values.dtype) and bool((values == NOT_A_NUMBER).any()):
            numbers = pd.to_numeric(values, errors="coerce")
            if bool((numbers.notna() | values.isna() | (values == NOT_A_NUMBER)).all()):
                frame.isetitem(place, numbers)  # R's word for a number that is none
    frame.columns = head.iloc[0].tolist()  # as they are: pandas tells columns of one name apart by numbers
    return frame


def read_parquet(path: Path) -> Any:
    """A table out of a Parquet file, whose nulls are what is missing."""
    arrow = library("pyarrow", "data", "Parquet files")
    try:
        opened(path).close()
        return pandas().read_parquet(path, engine="pyarrow").reset_index(drop=True)
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise DataError(f"cannot read {path}: {' '.join(str(error).split())}") from error


def read_file(path: str | Path, na: Sequence[str] = NA, table: TableFormat = USUAL_TABLE) -> Any:
    """A table out of a Parquet file, by its ending, or else of a CSV file."""
    if Path(path).suffix.lower() in PARQUET:
        return read_parquet(Path(path))
    return read_csv(path, na, table)


@dataclass(frozen=True)
class Rows:
    """Columns that a formula speaks of (floats, or pandas categories), and whose each row is."""

    columns: Mapping[str, Any]
    groups: np.ndarray | None
    """Names ``[n]`` of the outermost grouping factor's levels; None where rows belong to nobody."""
    sites: np.ndarray | None
    numbers: np.ndarray
    """Of each row its place in the table that was given, for errors."""
    dropped: int = 0
    missing: Mapping[str, int] = field(default_factory=dict)
    """Rows in which a column has no value, by its name."""
    marks: np.ndarray | None = None
    """Of each row a number that its label in the table gives: what tells rows of two fits apart."""
    by_site: Mapping[str, Sequence[str]] | None = None
    """Groups of each site, where they were given and ``sites`` does not say."""
    inner: Sequence[np.ndarray] = ()
    """The same of factors that are nested in it, the innermost first."""

    def __len__(self) -> int:
        return len(self.numbers)


def as_frame(data: Any, na: Sequence[str] = NA) -> Any:
    """A data frame out of a frame, a file's name, columns by name, or frames by site."""
    pd = pandas()
    if isinstance(data, pd.DataFrame):
        return data
    if isinstance(data, str | Path):
        return read_file(data, na)
    if isinstance(data, Mapping) and data and all(isinstance(v, pd.DataFrame) for v in data.values()):
        return pd.concat(list(data.values()), ignore_index=True)
    try:
        return pd.DataFrame(data)
    except (TypeError, ValueError) as error:
        raise DataError(f"cannot make a table of {type(data).__name__}: {error}") from error


def rows_of(
    frame: Any,
    formula: Formula,
    *,
    columns: Sequence[str],
    sites: str | None = None,
    missing: str = "drop",
    group: bool = True,
) -> Rows:
    """The rows without those that miss something; ``group`` False where nobody is asked for."""
    wanted = [*columns, *(formula.group_columns if group else []), *([sites] if sites else [])]
    for name in dict.fromkeys(wanted):
        if name not in frame.columns:
            require_separator(list(map(str, frame.columns)), wanted, ",", "the table", True)
            names = ", ".join(map(str, list(frame.columns)[:20])) or "nothing"
            raise DataError(f"there is no column {name!r} in the table; it has {names}")
        if (frame.columns == name).sum() > 1:
            raise DataError(f"there are several columns {name!r} in the table")
    if not len(frame):
        raise DataError("the table has no rows")
    typed = {name: _typed(frame[name], name) for name in dict.fromkeys(columns)}
    _require_no_dates(typed, formula)
    there, lost = np.ones(len(frame), dtype=bool), dict[str, int]()
    of_groups = {name: frame[name] for name in formula.group_columns} if group else {}
    for name, values in (typed | of_groups).items():
        none = values.isna().to_numpy()
        if not none.any():
            continue
        if missing == "error":
            raise DataError(
                f"column {name!r} has {int(none.sum())} missing value(s), the first in row "
                f"{int(none.argmax())}; missing='drop' leaves such rows out"
            )
        there &= ~none
        lost[name] = int(none.sum())
    if not there.any():
        counts = ", ".join(f"{name} in {count}" for name, count in lost.items())
        raise DataError(f"every row misses something ({counts}); there is nothing left to fit")
    if sites and bool(frame[sites].isna().any()):
        raise DataError(f"column {sites!r} has rows without a site")
    whole_rows = np.flatnonzero(there)
    whole = len(whole_rows) == len(frame)
    levels = level_names(frame, formula, whole_rows) if group else []
    return Rows(
        {n: v if whole else v.iloc[whole_rows] for n, v in typed.items()},
        levels[-1] if group else None,
        labels(frame[sites])[whole_rows] if sites else None,
        whole_rows,
        len(frame) - len(whole_rows),
        lost,
        _marks(frame.index)[whole_rows],
        inner=levels[:-1],
    )


def _marks(index: Any) -> np.ndarray:
    """A number of thirty bits for each row, by its label: sums of them over rows are exact."""
    pd = pandas()
    found: np.ndarray = (pd.util.hash_array(np.asarray(index), categorize=False) >> 34).astype(np.float64)
    return found


def _require_no_dates(columns: Mapping[str, Any], formula: Formula) -> None:
    """Raise where a predictor holds dates as text: each day would be a level."""
    for part in formula.parts[1:]:
        name = part.column
        if name is None or not hasattr(columns.get(name), "cat"):
            continue
        words = [str(v) for v in columns[name].cat.categories]
        if words and all(DATE.match(w) for w in words):
            raise DataError(
                f"column {name!r} holds dates as text, {words[0]!r} among them: make it a number (days since "
                f"the first of them, say), or write factor({name}) where each date is a category"
            )


def level_names(frame: Any, formula: Formula, rows: np.ndarray) -> list[np.ndarray]:
    """Of each of these rows the levels of all grouping factors, the innermost first: ``a:A`` is level ``a``
    within ``A``."""
    pd, single = pandas(), {name: labels(frame[name])[rows] for name in formula.group_columns}
    codes = {name: pd.factorize(names) for name, names in single.items()}
    out = []
    for factor in formula.factors:
        if len(factor.columns) == 1:
            out.append(single[factor.columns[0]])
            continue
        place = np.zeros(len(rows), dtype=np.int64)
        for name in factor.columns:
            # Whether there are few combinations or many, their numbers stay below those of rows squared.
            place = pd.factorize(place)[0] * np.int64(len(codes[name][1])) + codes[name][0]
        place, _ = pd.factorize(place)
        first = np.unique(place, return_index=True)[1]
        parts = zip(*(single[name][first] for name in factor.columns), strict=True)
        names = [":".join(part) for part in parts]
        if len(set(names)) < len(names):
            raise DataError(
                f"two levels of {factor.name} have the same name, because names in {factor.columns} hold "
                "colons; rename them"
            )
        out.append(np.array(names, dtype=object)[place])
    return out


def labels(values: Any) -> np.ndarray:
    """Names ``[n]`` of a column's values; whole numbers without a decimal point."""
    pd = pandas()
    if pd.api.types.is_float_dtype(values.dtype):
        known = values.dropna()
        if len(known) and bool((known == known.round()).all()) and float(known.abs().max()) < 2**53:
            values = values.astype("Int64")
    if isinstance(values.dtype, pd.CategoricalDtype):
        codes, distinct = values.cat.codes.to_numpy(), values.cat.categories
    else:
        codes, distinct = pd.factorize(values)
    where = f"a name in column {values.name!r}"
    names = np.array([*[as_text(str(v), where) for v in distinct], None], dtype=object)
    found: np.ndarray = names[codes]  # -1, the last: missing
    return found


def _typed(values: Any, name: str) -> Any:
    """A column as floats, or as categories."""
    try:
        return _numbers_or_levels(values, name)
    except OverflowError as error:
        raise DataError(f"column {name!r} holds a number that is too large; rescale the column") from error


def _numbers_or_levels(values: Any, name: str) -> Any:
    pd, where = pandas(), f"a level of column {name!r}"
    kind = values.dtype
    if isinstance(kind, pd.CategoricalDtype):
        names = [as_text(word(c), where) for c in values.cat.categories]
        if len(set(names)) < len(names):
            twice = next(n for i, n in enumerate(names) if n in names[:i])
            raise DataError(f"column {name!r} has two categories that are both called {twice!r}; rename one")
        return values.cat.rename_categories(names)
    if pd.api.types.is_bool_dtype(kind) or pd.api.types.infer_dtype(values, skipna=True) == "boolean":
        words = values.map({True: "TRUE", False: "FALSE"}, na_action="ignore")
        return words.astype(pd.CategoricalDtype(["FALSE", "TRUE"]))
    if pd.api.types.is_numeric_dtype(kind):
        numbers = values.astype("float64")
        bad = np.isinf(numbers.to_numpy())
        if bad.any():
            raise DataError(f"column {name!r} is infinite in row {int(bad.argmax())}")
        large = np.abs(numbers.to_numpy()) > LARGEST_VALUE
        if large.any():
            row = int(large.argmax())
            raise DataError(
                f"column {name!r} is {numbers.iloc[row]:.6g} in row {row}, too large to be squared; rescale "
                "the column"
            )
        return numbers
    if not pd.api.types.is_string_dtype(kind) and not pd.api.types.is_object_dtype(kind):
        raise DataError(
            f"column {name!r} is of type {kind}; a formula takes numbers and categories: turn it into one"
        )
    there = values.notna().to_numpy()
    text = np.array([isinstance(v, str) for v in values], dtype=bool)
    numbers = pd.to_numeric(values, errors="coerce")
    good = numbers.notna().to_numpy()
    if there.any() and not text.any() and bool((good | ~there).all()):
        return numbers.astype("float64")  # numbers in a column of objects
    odd = there & ~good
    if odd.any() and good.sum() > 0.5 * there.sum() and _measured(numbers[good], int(odd.sum())):
        row = int(odd.argmax())
        raise DataError(
            f"column {name!r} mixes numbers and text: row {row} is {values.iloc[row]!r}; mend it, or make "
            "all of it text that does not look like numbers"
        )
    words = values.map(word, na_action="ignore")
    distinct = sorted_levels({as_text(w, where) for w in words.dropna().unique()})
    return words.astype(pd.CategoricalDtype(distinct))


def _measured(numbers: Any, odd: int) -> bool:
    """Whether a column that is mostly numbers was meant to be all of them, and not names such as 1, 2, 3+:
    many different ones, or broken ones, or too few others for a level."""
    distinct = numbers.unique()
    return len(distinct) > FEW_BAD_CELLS or bool((distinct != distinct.round()).any()) or odd < MINIMUM


def word(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "TRUE" if value else "FALSE"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def as_categories(values: Any) -> Any:
    """A column of numbers as categories, by ``factor()``."""
    pd = pandas()
    if hasattr(values, "cat"):
        return values
    codes, distinct = pd.factorize(values, sort=True)
    names = [word(float(v)) for v in distinct]
    return pd.Series(pd.Categorical.from_codes(codes, names), index=values.index)
