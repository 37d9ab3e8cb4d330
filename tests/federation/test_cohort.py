"""Ragged rows, packed and padded, and back again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fedpop as fp
from fedpop.federation.cohort import Cohort
from fedpop.keys import unit_of
from tests.helpers import ragged

CPU = torch.device("cpu")
sizes_of = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def whole(sizes: list[int]) -> Cohort:
    federation = fp.Federation.of(ragged(tuple(sizes)))
    return federation.cohort(torch.arange(len(sizes)), CPU)


def per_client(cohort: Cohort, rows: Tensor) -> list[Tensor]:
    return list(rows.split(cohort.sizes.tolist()))


@given(sizes_of)
def test_padding_and_back(sizes: list[int]) -> None:
    cohort = whole(sizes)
    block = cohort.pad(cohort.x)
    assert block.shape == (len(sizes), max(sizes), 3)
    inside = torch.arange(max(sizes)) < torch.tensor(sizes).unsqueeze(1)
    assert torch.equal(block[inside], cohort.x)
    assert not bool(block[~inside].any())
    if cohort.mask is None:
        assert bool(inside.all())
    else:
        assert torch.equal(cohort.mask, inside)


@given(sizes_of)
def test_owner_and_position(sizes: list[int]) -> None:
    cohort = whole(sizes)
    expected = [(c, j) for c, n in enumerate(sizes) for j in range(n)]
    assert list(zip(cohort.owner.tolist(), cohort.position.tolist(), strict=True)) == expected


@given(sizes_of, st.data())
def test_select_is_the_same_clients_elsewhere(sizes: list[int], data: st.DataObject) -> None:
    cohort = whole(sizes)
    index = data.draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, unique=True))
    part = cohort.select(torch.tensor(index))
    assert part.units.tolist() == cohort.units[index].tolist()
    assert part.sizes.tolist() == [sizes[i] for i in index]
    assert part.longest == max(sizes[i] for i in index)
    for got, i in zip(per_client(part, part.x), index, strict=True):
        assert torch.equal(got, per_client(cohort, cohort.x)[i])


@given(sizes_of, st.data())
def test_a_federations_cohort_is_that_of_its_clients(sizes: list[int], data: st.DataObject) -> None:
    clients = ragged(tuple(sizes))
    ids = data.draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, unique=True))
    federation = fp.Federation.of(clients)
    cohort = federation.cohort(torch.tensor(ids), CPU)
    assert torch.equal(cohort.x, torch.cat([clients[i][0] for i in ids]))
    assert torch.equal(cohort.y, torch.cat([clients[i][1] for i in ids]))
    assert cohort.units.tolist() == [unit_of(federation.names[i]) for i in ids]


def test_take_keeps_rows_of_tuples_together() -> None:
    x, y = ragged((4,))[0]
    cohort = fp.Federation.of([((x[:, :1], x[:, 1:]), y)]).cohort(torch.tensor([0]), CPU)
    part = cohort.take(torch.tensor([3, 1]), cohort.units, torch.tensor([2]))
    assert torch.equal(torch.cat(part.x, 1), x[[3, 1]])
    assert torch.equal(part.y, y[[3, 1]])
    assert part.longest == 2


@pytest.mark.parametrize("sizes", [(2, 2), (0, 0)])
def test_no_mask_where_there_is_no_padding(sizes: tuple[int, ...]) -> None:
    assert whole(list(sizes)).mask is None


@given(sizes_of)
def test_one_by_one_they_are_the_same_clients(sizes: list[int]) -> None:
    cohort = whole(sizes)
    parts = list(cohort.one_by_one())
    assert [int(p.units) for p in parts] == cohort.units.tolist()
    assert [int(p.sizes) for p in parts] == [p.longest for p in parts] == sizes
    for part, rows in zip(parts, per_client(cohort, cohort.x), strict=True):
        assert torch.equal(part.x, rows)
