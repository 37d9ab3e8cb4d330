"""Client data in every form that people have it, and clients that have none."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import fedpop as fp
from fedpop.errors import DataError
from tests.helpers import linear_model, ragged

SIZES = (3, 1, 2)


class Items(Dataset):
    """A Dataset of pairs, one at a time."""

    def __init__(self, pairs: list[tuple[Any, Any]]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.pairs[index]


def named(clients: list[Any]) -> dict[str, Any]:
    return {f"client-{i}": c for i, c in enumerate(clients)}


def table(clients: list[tuple[Tensor, Tensor]], labels: Any) -> fp.Table:
    """The clients' rows in one table, shuffled."""
    order = torch.randperm(sum(SIZES), generator=torch.Generator().manual_seed(1))
    # Within a client rows keep their order, as a stable sort by owner does.
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES))[order]
    rows = torch.cat([order[owner == i].sort().values for i in range(3)])
    position = torch.empty_like(order)
    position[torch.cat([(owner == i).nonzero()[:, 0] for i in range(3)])] = rows
    x, y = (torch.cat([c[j] for c in clients])[position] for j in (0, 1))
    return fp.Table(x, y, labels(owner))


FORMS: dict[str, Any] = {
    "tensors": lambda c: c,
    "arrays": lambda c: [(x.numpy(), y.numpy()) for x, y in c],
    "lists of numbers": lambda c: [(x.tolist(), y.tolist()) for x, y in c],
    "double precision": lambda c: [(x.double().numpy(), y.double().numpy()) for x, y in c],
    "mapping": named,
    "tensor datasets": lambda c: [TensorDataset(x, y) for x, y in c],
    "datasets": lambda c: [Items(list(zip(x, y, strict=True))) for x, y in c],
    "datasets of arrays": lambda c: [
        Items([(x.numpy(), float(y)) for x, y in zip(*d, strict=True)]) for d in c
    ],
    "clients": lambda c: [fp.Client(x, y) for x, y in c],
    "table by number": lambda c: table(c, lambda owner: owner),
    "table by array": lambda c: table(c, lambda owner: owner.numpy()),
    "a federation": lambda c: fp.Federation.of(c),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_population(form: str) -> None:
    """Under the same names: a table names its clients itself."""
    clients = ragged(SIZES)
    given = FORMS[form](clients)
    names = fp.Federation.of(given).names
    expected = fp.FedSOUL(linear_model()).fit(dict(zip(names, clients, strict=True)), rounds=3)
    got = fp.FedSOUL(linear_model()).fit(given, rounds=3)
    assert torch.equal(got.published["phi"], expected.published["phi"])
    assert torch.equal(got.posterior(2).draws, expected.posterior(2).draws)


def test_names() -> None:
    clients = ragged(SIZES)
    assert fp.Federation.of(clients).names == ["client-0", "client-1", "client-2"]
    assert fp.Federation.of(clients * 5).names[9] == "client-09"
    assert fp.Federation.of(dict(zip("abc", clients, strict=True))).names == ["a", "b", "c"]
    assert fp.Federation.of(table(clients, lambda owner: owner + 10)).names == ["10", "11", "12"]


@pytest.mark.parametrize("column", [list, np.array, lambda v: np.array(v, dtype=object)])
def test_a_table_may_name_its_clients(column: Any) -> None:
    clients = ragged(SIZES)
    labels = ["anna"] * 3 + ["ben"] + ["cara"] * 2
    x, y = (torch.cat([c[j] for c in clients]) for j in (0, 1))
    federation = fp.Federation.of(fp.Table(x, y, column(labels)))
    assert list(federation.names) == ["anna", "ben", "cara"]
    assert federation.train.sizes.tolist() == list(SIZES)
    assert torch.equal(federation.train.x, x)


def test_datasets_may_hold_tuples_and_dicts() -> None:
    x, y = ragged((4,))[0]
    tuples = Items([((a[:2], a[2:]), b) for a, b in zip(x, y, strict=True)])
    dicts = Items([({"a": a[:2], "b": a[2:]}, b) for a, b in zip(x, y, strict=True)])
    assert torch.equal(fp.Federation.of([tuples]).train.x[1], x[:, 2:])
    assert torch.equal(fp.Federation.of([dicts]).train.x["a"], x[:, :2])
    assert torch.equal(fp.Federation.of([TensorDataset(x[:, :2], x[:, 2:], y)]).train.x[0], x[:, :2])


def test_validation_and_test_sets_are_kept_apart() -> None:
    (x, y), (other, target), (third, last) = ragged((3, 2, 1))
    clients = {
        "a": fp.Client(x, y, validation=(other, target)),
        "b": fp.Client(x, y, test=(third, last)),
    }
    federation = fp.Federation.of(clients)
    assert federation.splits["validation"].sizes.tolist() == [2, 0]
    assert federation.splits["test"].sizes.tolist() == [0, 1]
    cohort = federation.cohort(torch.tensor([1]), torch.device("cpu"), "test")
    assert torch.equal(cohort.x, third)
    assert "test" not in fp.Federation.of([(x, y)]).splits


def test_training_does_not_see_the_held_out_sets() -> None:
    clients = ragged(SIZES)
    held_out = [fp.Client(x, y, validation=(9 * x, 9 * y), test=(7 * x, 7 * y)) for x, y in clients]
    plain = fp.FedSOUL(linear_model()).fit(clients, rounds=3)
    other = fp.FedSOUL(linear_model()).fit(held_out, rounds=3)
    assert torch.equal(plain.published["phi"], other.published["phi"])


@pytest.mark.parametrize(
    "nothing",
    [(torch.zeros(0, 3), torch.zeros(0)), (np.zeros((0, 3)), np.zeros(0)), ([], [])],
    ids=["tensors", "arrays", "lists"],
)
def test_a_client_without_data_is_kept_and_its_posterior_is_the_prior(nothing: Any) -> None:
    clients = {"full": ragged((6,))[0], "empty": nothing, "other": ragged((5,), seed=1)[0]}
    population = fp.FedSOUL(linear_model()).fit(clients, rounds=5)
    assert population.names == ["full", "empty", "other"]
    draws = population.posterior("empty").flat
    n = len(draws)  # independent: the exact step with h = 1
    mean, sd = population.prior_mean, population.prior_sd
    assert bool(((draws.mean(0) - mean).abs() < 5 * sd / n**0.5).all())
    assert bool(((draws.std(0) / sd - 1).abs() < 5 / (2 * n) ** 0.5).all())
    full = population.posterior("full").sd
    assert bool((full < 0.9 * sd).any())


@pytest.mark.parametrize("method", [fp.FedAvg, fp.FedRep, fp.FedSOUL])
def test_a_client_without_data_changes_nothing_for_the_others(method: Any) -> None:
    """Up to rounding: a point method's mean is weighted by n; FedSOUL's start and phi see no rows."""
    a, b = ragged((6, 5))
    empty = (torch.zeros(0, 3), torch.zeros(0))
    options = {"prior": fp.priors.Normal(learn_mean=False, learn_scale=False)} if method is fp.FedSOUL else {}
    without = method(linear_model(), **options).fit([a, b], rounds=4)
    with_empty = method(linear_model(), **options).fit([a, b, empty], rounds=4)
    torch.testing.assert_close(without.published["phi"], with_empty.published["phi"])


def test_a_federation_of_empty_clients_learns_nothing_but_stands() -> None:
    empty = (torch.zeros(0, 3), torch.zeros(0))
    population = fp.FedSOUL(linear_model()).fit([empty, empty], rounds=2)
    torch.testing.assert_close(population.published["phi"], linear_model().initial_phi())


def test_clients_by_name_and_by_position() -> None:
    federation = fp.Federation.of(dict(zip("abc", ragged(SIZES), strict=True)))
    assert [federation.index(c) for c in ("b", 1, -2)] == [1, 1, 1]
    with pytest.raises(DataError, match=r"no client 'd'.*'a', 'b', 'c'.*new_client"):
        federation.index("d")
    with pytest.raises(DataError, match="no client 3"):
        federation.index(3)


def test_the_fingerprint_sees_any_change() -> None:
    clients = ragged(SIZES)
    here = fp.Federation.of(clients).fingerprint()
    assert here == fp.Federation.of([(x.clone(), y.clone()) for x, y in clients]).fingerprint()
    changed = [(x.clone(), y.clone()) for x, y in clients]
    changed[2][1][0] += 1e-6
    assert fp.Federation.of(changed).fingerprint() != here
    moved = [(clients[0][0][:2], clients[0][1][:2]), *clients[1:]]
    assert fp.Federation.of(moved).fingerprint() != here
    held_out = [fp.Client(*clients[0], validation=clients[1]), *clients[1:]]
    assert fp.Federation.of(held_out).fingerprint() != here


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([Stream()], "IterableDataset has no length"),
        ([Items([])], r"client 'client-0'.*empty Dataset.*x\[:0\]"),
        ([Items([(1, 2, 3)])], r"pair \(x, y\)"),
        ([torch.zeros(2, 3)], r"client 'client-0': expected \(x, y\)"),
        (torch.zeros(2, 3), "clients must be a list"),
        ("abc", "clients must be a list"),
        ([([[1.0], [1.0, 2.0]], [0.0, 1.0])], "cannot be read as numbers|unequal length"),
        ([(["a"], [0.0])], "cannot be read as numbers"),
        ([(torch.tensor(1.0), torch.zeros(1))], "one row per example"),
        ([((torch.zeros(2), torch.zeros(3)), torch.zeros(2))], "different numbers of rows"),
        (
            [(torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(2, 4), torch.zeros(2))],
            r"client-1.*\(4,\).*\(3,\)",
        ),
        (
            [(torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(2, 3), torch.zeros(2, 2))],
            "client-1.*y has shape",
        ),
        (fp.Table(torch.zeros(2, 3), torch.zeros(2), [1]), "2 rows but 1 client labels"),
        (fp.Table(torch.zeros(0, 3), torch.zeros(0), []), "no rows"),
    ],
)
def test_data_in_no_known_form_are_refused_by_name(clients: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fp.Federation.of(clients)
