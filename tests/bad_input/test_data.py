"""Data are read as they are, or refused by client, row and column."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import fedpop as fp
from fedpop.data.table_task import TableTask
from fedpop.errors import DataError, FedpopError
from fedpop.federation.participation import Roster
from tests.helpers import linear_model

X, Y = torch.ones(4, 3), torch.zeros(4)
GOOD = (X, Y)


class Items(Dataset[Any]):
    """A Dataset of these items, which may say another length."""

    def __init__(self, items: Sequence[Any], length: int | None = None) -> None:
        self.items, self.length = items, length

    def __len__(self) -> int:
        return len(self.items) if self.length is None else self.length

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


def classes() -> fp.Composition:
    return fp.Composition(nn.Linear(3, 2), nn.Linear(2, 3), "categorical")


def item(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(shape), torch.tensor(0.0)


def table(client: Any) -> fp.Table:
    return fp.Table(torch.ones(3, 3), torch.zeros(3), client)


CASES: dict[str, tuple[Any, Any, str]] = {
    "fractions of labels": (
        classes,
        {"a": (X, [0, 1, 1.5, 2])},
        "client 'a', row 2: the label is not a whole",
    ),
    "complex y": (linear_model, {"a": (X, torch.zeros(4, dtype=torch.complex64))}, "client 'a', y: complex"),
    "complex y of numpy": (linear_model, {"a": (X, np.zeros(4, dtype=complex))}, "client 'a', y: complex"),
    "complex x": (linear_model, {"a": (X + 1j, Y)}, "client 'a', x: complex"),
    "a sparse x": (linear_model, {"a": (X.to_sparse(), Y)}, "client 'a', x: a sparse"),
    "nobody's name": (linear_model, {None: GOOD}, "a client's name is None"),
    "a name that is no number": (linear_model, {math.nan: GOOD}, "a client's name is nan"),
    "an empty name": (linear_model, {" ": GOOD}, "a client's name is ' '"),
    "a name of two": (linear_model, {("a", 1): GOOD}, "a name is a text or a whole number"),
    "None in a table": (linear_model, table(["a", None, "b"]), "client column, row 1 is None"),
    "NaN in a table": (linear_model, table(np.array([0.0, math.nan, 1.0])), "client column, row 1 is"),
    "NaN among words": (linear_model, table(["a", "b", math.nan]), "client column, row 2 is nan"),
    "a nameless row": (linear_model, table(["a", "", "b"]), "client column, row 1 is ''"),
    "names in a grid": (
        linear_model,
        table(torch.zeros(3, 1)),
        r"one name per row, \[n\], not shape \(3, 1\)",
    ),
    "validation as a tensor": (
        linear_model,
        {"a": fp.Client(X, Y, validation=torch.ones(2, 3))},
        r"client 'a', validation set: a pair \(x, y\) is needed, not a Tensor of shape \(2, 3\)",
    ),
    "test as a triple": (
        linear_model,
        {"a": fp.Client(X, Y, test=(X, Y, Y))},
        r"client 'a', test set: a pair \(x, y\) is needed, not a tuple",
    ),
    "triples": (linear_model, {"a": (X, Y, Y)}, "client 'a': expected .*not a tuple of 3"),
    "singles": (linear_model, {"a": (X,)}, "client 'a': expected .*not a tuple of 1"),
    "a bare tensor": (linear_model, {"a": X}, "client 'a': expected .*not a Tensor"),
    "a word": (linear_model, {"a": "data.csv"}, "client 'a': expected .*not a str"),
    "a test set of another width": (
        linear_model,
        {"a": fp.Client(X, Y, test=(torch.ones(2, 4), torch.zeros(2)))},
        r"client 'a', test set: examples of x have shape \[\(4,\)\], other clients' have \[\(3,\)\]",
    ),
    "a validation set of another width": (
        linear_model,
        {"a": GOOD, "b": fp.Client(X, Y, validation=(torch.ones(2, 2), torch.zeros(2)))},
        r"client 'b', validation set: examples of x have shape \[\(2,\)\]",
    ),
    "a test set of other targets": (
        linear_model,
        {"a": fp.Client(X, Y, test=(X, torch.zeros(4, 2)))},
        "client 'a', test set: y has shape",
    ),
    "items of two shapes": (
        linear_model,
        {"a": Items([item(3), item(3), item(4)])},
        r"client 'a', x, item 2: shape \(4,\), but \(3,\) in item 0",
    ),
    "items of two lengths": (
        linear_model,
        {"a": Items([item(3), (*item(3), 1)])},
        r"client 'a', item 1: every item of a Dataset must be a pair \(x, y\), not 3 values",
    ),
    "items that are not there": (
        linear_model,
        {"a": Items([item(3)], length=3)},
        "client 'a': the Dataset says it has 3 items, but has no item 1",
    ),
    "items with other names": (
        linear_model,
        {"a": Items([({"u": 1.0}, 0.0), ({"v": 1.0}, 0.0)])},
        "client 'a', item 1: x has other parts than item 0",
    ),
    "items with more parts": (
        linear_model,
        {"a": Items([((1.0, 2.0), 0.0), ((1.0,), 0.0)])},
        "client 'a', item 1: x has other parts than item 0",
    ),
    "items of two kinds of y": (
        linear_model,
        {"a": Items([(torch.zeros(3), torch.zeros(1)), (torch.zeros(3), torch.zeros(2))])},
        r"client 'a', y, item 1: shape \(2,\), but \(1,\) in item 0",
    ),
    "a TensorDataset without y": (
        linear_model,
        {"a": TensorDataset(X)},
        "client 'a': a TensorDataset of one",
    ),
    "one number per example": (
        lambda: fp.Composition(nn.Linear(1, 2), nn.Linear(2, 1), "normal"),
        {"a": (torch.ones(4), Y)},
        r"use x\[:, None\]",
    ),
    "one number per example that fits by chance": (
        lambda: fp.Composition(nn.Linear(2, 2), nn.Linear(2, 1), "normal"),
        {"a": (torch.ones(4), Y)},
        r"use x\[:, None\]",
    ),
    "whole numbers": (linear_model, {"a": (X.long(), Y)}, r"use x\.float\(\)"),
    "a dict for one argument": (
        linear_model,
        {"a": ({"age": X}, Y)},
        r"a dict of inputs reaches the module as forward\(\*\*x\)",
    ),
    "a tuple for one argument": (
        linear_model,
        {"a": ((X, X), Y)},
        r"reaches the module as forward\(x\[0\], x\[1\]",
    ),
    "words for numbers": (
        linear_model,
        {"a": (X, ["lo", "hi", "lo", "hi"])},
        "y holds words .*normal target",
    ),
    "words and numbers": (
        classes,
        {"a": (X, ["cat", "dog", 3, "cat"])},
        "client 'a', y, row 2: 3 among words",
    ),
    "words here, numbers there": (
        classes,
        {"a": (X, [0, 1, 2, 0]), "b": (X, ["cat"] * 4)},
        "labels are numbers at client 'a' and words at client 'b'",
    ),
    "an empty label": (classes, {"a": (X, ["cat", "", "cat", "cat"])}, "client 'a': an empty label"),
    "too many labels": (
        classes,
        {"a": (X, ["a", "b", "c", "d"])},
        "y holds 4 labels .* the model has 3 classes",
    ),
    "labels in a grid": (
        classes,
        {"a": (X, [["a", "b"]] * 4)},
        r"one label per example, \[n\], not \(4, 2\)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_by_name(tmp_path: Path, case: str) -> None:
    make, clients, message = CASES[case]
    with pytest.raises(DataError, match=message):
        fp.FedAvg(make()).fit(clients, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- labels that are words -------------------------------------------------------------------------


def animals() -> dict[str, Any]:
    x = torch.eye(3)
    return {
        "anna": fp.Client(x, ["cat", "dog", "eel"], test=(x, ["cat", "dog", "eel"])),
        "ben": fp.Client(x, np.array(["cat", "dog", "dog"]), test=(x[:1], ["cat"])),
    }


def trained() -> fp.Population:
    model = fp.Composition(None, nn.Linear(3, 3), "categorical")
    method = fp.FedAvgFT(model, fine_tune=fp.LocalSGD(epochs=200, rate=1.0))
    return method.fit(animals(), rounds=2)


def test_words_come_back_in_predictions(tmp_path: Path) -> None:
    population = trained()
    found = population.predict("anna", torch.eye(3))
    assert found.labels == ("cat", "dog", "eel")
    assert found.most_likely == ["cat", "dog", "eel"]
    assert population.predict("ben", torch.eye(3)).most_likely == ["cat", "dog", "dog"]
    numbers = found.log_prob(torch.tensor([0, 1, 2]))
    torch.testing.assert_close(found.log_prob(["cat", "dog", "eel"]), numbers)
    with pytest.raises(DataError, match=r"row 1: the label 'dogg' was not there .*did you mean dog"):
        found.log_prob(["cat", "dogg", "eel"])
    assert set(torch.as_tensor(fp.evaluate(population).scores["accuracy"]).tolist()) == {1.0}
    again = fp.load(population.save(tmp_path / "saved"))
    assert again.predict("anna", torch.eye(3)).most_likely == ["cat", "dog", "eel"]


def test_a_new_clients_words_are_those_of_training() -> None:
    population = trained()
    new = population.new_client(torch.eye(3)[1:], ["dog", "eel"])  # by itself these would be 0 and 1
    assert new.predict(torch.eye(3)[1:]).most_likely == ["dog", "eel"]
    with pytest.raises(DataError, match="row 0: the label 'fox' was not there in training; known are 'cat'"):
        population.new_client(torch.eye(3)[:1], ["fox"])


def test_words_are_numbered_in_order_whoever_comes_first() -> None:
    there = fp.Federation.of(animals())
    assert there.labels == ("cat", "dog", "eel")
    assert there.train.y.tolist() == [0, 1, 2, 0, 1, 1]
    held = fp.hold_out(fp.Table(torch.ones(6, 3), ["b", "a"] * 3, ["u"] * 6), test=0.5)
    assert held.labels == ("a", "b")
    yes = fp.Composition(None, nn.Linear(3, 1), "bernoulli")
    told = fp.FedAvg(yes).fit({"a": (X, ["yes", "no", "yes", "no"])}, rounds=1).predict("a", X)
    assert told.labels == ("no", "yes")
    assert numbers(told.most_likely) <= {"no", "yes"}


def numbers(found: Any) -> set[str]:
    return set(found)


def test_classes_without_words_are_their_numbers() -> None:
    population = fp.FedAvg(classes()).fit({"a": (X, [0, 1, 2, 0])}, rounds=1)
    found = population.predict("a", X)
    assert found.labels == ()
    assert isinstance(found.most_likely, Tensor)


# --- files -----------------------------------------------------------------------------------------

ROWS = "age,weight,label,who\n"
FILES: dict[str, tuple[str, dict[str, Any], str]] = {
    "too many fields": ("1,2,0,a\n1,2,0,a,7\n", {}, "line 3: more values than the 4 columns"),
    "too few fields": ("1,2,0,a\n1,2\n", {}, "line 3"),
    "no client": ("1,2,0,a\n1,2,0,\n", {}, "line 3: no client.*'who'"),
    "a blank client": ("1,2,0,  \n", {}, "line 2: no client"),
    "no such column": ("1,2,0,a\n", {"x": ["age", "wieght"]}, "no column 'wieght'.*did you mean weight"),
    "no such y": ("1,2,0,a\n", {"y": "labels"}, "no column 'labels'.*did you mean label"),
    "a fraction of a label": ("1,2,0.5,a\n", {"likelihood": "categorical"}, "line 2: the label '0.5' is not"),
    "a word": ("1,two,0,a\n", {}, "line 2: weight is 'two', not a number"),
    "not a number": ("1,nan,0,a\n", {}, "line 2: weight is 'nan'"),
    "an endless number": ("1,inf,0,a\n", {}, "line 2: weight is 'inf'"),
    "nothing": ("1,,0,a\n", {}, "line 2: weight is ''"),
}


@pytest.mark.parametrize("case", FILES)
def test_rows_of_a_file(tmp_path: Path, case: str) -> None:
    text, changes, message = FILES[case]
    path = tmp_path / "rows.csv"
    path.write_text(ROWS + text)
    settings: dict[str, Any] = {"file": str(path), "x": ["age", "weight"], "y": "label", "client": "who"}
    with pytest.raises(DataError, match=message):
        TableTask(**(settings | changes)).split(seed=0)


TRACES: dict[str, tuple[Any, str]] = {
    "a fraction": ([[0, 0.5]], "round 0 of the trace: 0.5 is no client's position"),
    "a client twice": ([[0, 1], [1, 1]], "round 1 of the trace has the client at position 1 twice"),
    "truth values": ([[True, False]], "round 0 of the trace is a list of clients' positions"),
    "names": ([["anna"]], "round 0 of the trace is no list of clients' positions"),
    "a number": ([0, 1], "round 0 of the trace is no list"),
    "a grid": ([torch.zeros(2, 2)], "round 0 of the trace is a list of clients' positions"),
    "out of range": ([[0, 2]], "names them by their positions"),
    "negative": ([[-1, 0]], "names them by their positions"),
    "never there": ([[0]], "1 of 2 clients are never available"),
    "nobody": ([[], []], "nobody is ever available"),
}


@pytest.mark.parametrize("case", TRACES)
def test_traces(case: str) -> None:
    rounds, message = TRACES[case]
    with pytest.raises(DataError, match=message):
        fp.participation.Availability(rounds, clients=2)


def test_what_can_be_read_is_read_as_it_is() -> None:
    """Whole numbers written as floats, lists, arrays, tensors: the same federation."""
    forms: list[Any] = [X.tolist(), X.numpy(), X, X.double()]
    seen = {fp.Federation.of({"a": (x, Y)}).train.x.double().sum().item() for x in forms}  # type: ignore[union-attr]
    assert seen == {12.0}
    whole = fp.FedAvg(classes()).fit({"a": (X, [0.0, 1.0, 2.0, 1.0])}, rounds=1)
    assert whole.federation is not None
    assert whole.federation.train.y.tolist() == [0, 1, 2, 1]
    assert fp.participation.Availability([[0.0, 1.0]], clients=2).expected(Roster.numbered(2)) == 2.0


NONE_OF_X = [None, "abc", [["a"]], [[1.0], [2.0, 3.0]], {}, (), 3.0, print, [None], math.nan]


NONE_OF_X += [
    [[10**400]],
    torch.nested.nested_tensor([torch.zeros(3)] * 2),
    torch.zeros(2, 3, device="meta"),
    torch.zeros(2, 3, dtype=torch.float8_e4m3fn),
    torch.zeros(2, 3).to_sparse(),
]


@pytest.mark.parametrize(
    "x", NONE_OF_X, ids=lambda x: type(x).__name__ if isinstance(x, torch.Tensor) else str(x)[:20]
)
@pytest.mark.parametrize("what", ["train", "test", "predict", "new"])
def test_x_that_is_none(x: Any, what: str) -> None:
    method = fp.FedAvg(linear_model())
    population = method.fit({"a": GOOD}, rounds=1)
    calls = {
        "train": lambda: method.fit({"a": (x, Y)}, rounds=1),
        "test": lambda: method.fit({"a": fp.Client(X, Y, test=(x, Y))}, rounds=1),
        "predict": lambda: population.predict("a", x),
        "new": lambda: population.new_client(x, Y),
    }
    with pytest.raises(FedpopError):
        calls[what]()
