"""Local states of clients, and the fixed plan that cuts them into cohorts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.files import parse_bytes
from fedpop.site.plan import Plan
from fedpop.site.store import LocalStore
from tests.helpers import federation_of, linear_model, plan_of, ragged

CPU = torch.device("cpu")


# --- the store ----------------------------------------------------------------------------------


def test_states_come_back_in_any_order() -> None:
    store = LocalStore(10)
    assert not bool(store.seen(torch.arange(10)).any())
    store.put(torch.tensor([7, 2]), {"z": torch.tensor([[7.0], [2.0]])})
    store.put(torch.tensor([4, 7]), {"z": torch.tensor([[4.0], [70.0]])})
    assert store.seen(torch.arange(10)).nonzero().flatten().tolist() == [2, 4, 7]
    assert store.get(torch.tensor([2, 7, 4]), CPU)["z"].flatten().tolist() == [2.0, 70.0, 4.0]


def test_memory_is_paid_for_clients_that_took_part() -> None:
    store = LocalStore(1_000_000)
    for i in range(0, 100, 2):
        store.put(torch.tensor([i, i + 1]), {"z": torch.full((2, 3), float(i))})
    assert store.tensors["z"].shape[0] <= 200
    assert store.state()["local.z"].shape == (100, 3)


def test_a_restored_store_is_a_copy() -> None:
    store = LocalStore(4)
    store.put(torch.tensor([3, 0]), {"z": torch.ones(2, 2), "log_step": torch.zeros(2)})
    other = LocalStore.restore(store.state())
    store.put(torch.tensor([3]), {"z": torch.full((1, 2), 9.0), "log_step": torch.ones(1)})
    assert other.get(torch.tensor([3]), CPU)["z"].tolist() == [[1.0, 1.0]]
    other.put(torch.tensor([1]), {"z": torch.full((1, 2), 5.0), "log_step": torch.ones(1)})
    assert other.get(torch.tensor([1, 0]), CPU)["z"].tolist() == [[5.0, 5.0], [1.0, 1.0]]


def test_methods_without_a_local_state_keep_nothing() -> None:
    store = LocalStore(3)
    store.put(torch.tensor([0]), {})
    assert store.seen(torch.arange(3)).tolist() == [True, False, False]  # it took part
    assert store.used == 0
    assert store.get(torch.tensor([0]), CPU) == {}
    assert set(store.state()) == {"slots", "entered"}


def test_what_a_question_left_behind_is_kept_by_units_that_never_took_part() -> None:
    store = LocalStore(4)
    store.put(torch.tensor([2, 0]), {"curvature": torch.tensor([2.0, 0.5])}, entered=False)
    assert not bool(store.seen(torch.arange(4)).any())
    store.put(torch.tensor([1, 2]), {"z": torch.tensor([[1.0], [2.0]])})
    for held in (store, LocalStore.restore(store.state())):
        assert held.noted == {"curvature"}
        assert held.seen(torch.arange(4)).tolist() == [False, True, True, False]
        assert held.get(torch.tensor([2, 0]), CPU)["curvature"].tolist() == [2.0, 0.5]
        assert held.get(torch.tensor([2]), CPU)["z"].tolist() == [[2.0]]
        assert held.get(torch.tensor([2, 3]), CPU) == {}  # one of them was never heard of


# --- the plan -----------------------------------------------------------------------------------


def test_groups_fit_the_budget_and_keep_the_order() -> None:
    plan = Plan(per_row=10.0, per_client=5.0, budget=100)
    sizes = torch.tensor([1, 2, 9, 1, 1, 1, 1, 1, 30])
    groups = plan.cut(torch.arange(9), sizes)
    assert torch.cat(groups).tolist() == list(range(9))
    for group in groups:
        cost = len(group) * (10 * int(sizes[group].max()) + 5)
        assert cost <= 100 or len(group) == 1
    assert [g.tolist() for g in groups] == [[0, 1], [2], [3, 4, 5, 6, 7], [8]]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
    st.sampled_from([0.0, 0.5, 7.0]),
    st.sampled_from([0.0, 0.3, 5.0]),
    st.integers(1, 150),
)
def test_groups_are_those_of_a_walk_along_the_clients(
    sizes: list[int], per_row: float, per_client: float, budget: int
) -> None:
    walked: list[list[int]] = [[]]
    for i, _ in enumerate(sizes):
        longer = [*walked[-1], i]
        cost = len(longer) * (max(sizes[j] for j in longer) * per_row + per_client)
        if walked[-1] and cost > budget:
            walked.append([i])
        else:
            walked[-1] = longer
    groups = Plan(per_row, per_client, budget).cut(torch.arange(len(sizes)), torch.tensor(sizes))
    if per_client >= 1 or per_row == per_client == 0:  # cheaper clients are cut at one for each byte
        assert [g.tolist() for g in groups] == walked
    assert torch.cat(groups).tolist() == list(range(len(sizes)))


def test_padding_counts() -> None:
    """Two clients whose own rows fit, but whose padded block does not."""
    plan = Plan(per_row=1.0, per_client=0.0, budget=12)
    assert len(plan.cut(torch.arange(2), torch.tensor([10, 1]))) == 2
    assert len(plan.cut(torch.arange(2), torch.tensor([6, 6]))) == 1


def test_nobody_makes_no_group() -> None:
    assert Plan(1.0, 1.0, 10).cut(torch.arange(0), torch.tensor([1, 2])) == []


def test_the_plan_grows_with_the_network_and_with_the_chain() -> None:
    federation = fp.Federation.of(ragged((3, 2)))
    small = plan_of(fp.FedSOUL(linear_model()), federation, 1)
    long = plan_of(fp.FedSOUL(linear_model(), local_steps=100), federation, 1)
    network = nn.Sequential(nn.Linear(3, 500), nn.ReLU(), nn.Linear(500, 2, bias=False))
    wide_model = fp.Composition(network, nn.Linear(2, 1, bias=False), fp.likelihoods.Normal(0.5))
    wide = plan_of(fp.FedSOUL(wide_model), federation, 1)
    assert long.per_row > small.per_row
    assert long.per_client > small.per_client
    assert wide.per_row - small.per_row >= 500 * 4  # at least the hidden layer, in float32


def test_the_plan_counts_what_a_head_through_vmap_keeps() -> None:
    """Ten exponentials in a row keep ten results of an example, for every draw of z."""

    def waves(count: int) -> fp.CustomModel:
        def outputs(phi: dict[str, Tensor], z: dict[str, Tensor], x: Tensor) -> Tensor:
            eta = z["a"] * x[:, 0]
            for _ in range(count):
                eta = torch.exp(-eta)
            return eta

        return fp.CustomModel(outputs=outputs, likelihood=fp.likelihoods.Normal(1.0), z={"a": 1.0})

    plans = []
    for count in (1, 11):
        federation = fp.Federation.of(ragged((3, 2)))
        model = waves(count).prepared(federation.example)
        federation = model.checked(federation)
        plans.append([plan_of(fp.FedSOUL(model, local_steps=m), federation, 1) for m in (5, 50)])
    (few, more), (deep, deeper) = plans
    assert deep.per_draw - few.per_draw == 10 * 8  # in double precision
    assert (deeper.per_row - deep.per_row) - (more.per_row - few.per_row) == 45 * 10 * 8
    assert plan_of(fp.FedSOUL(linear_model()), fp.Federation.of(ragged((3, 2))), 1).per_draw == 0


def test_the_plan_does_not_depend_on_the_machine() -> None:
    federation = fp.Federation.of(ragged((3, 2)))
    plans = [plan_of(fp.FedSOUL(linear_model()), federation, 2**20) for _ in range(2)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("text", "count"),
    [("1KiB", 1024), ("1.5 MiB", 3 * 2**19), (" 2GiB ", 2**31), ("77", 77), (77, 77)],
)
def test_sizes_of_memory(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["1GB", "-1KiB", "0", "", "much", "1.2.3KiB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(SettingsError, match="1GiB"):
        parse_bytes(text)


def test_methods_that_copy_phi_for_each_client_are_given_room_for_it():
    model = fp.Composition(nn.Linear(50, 40), nn.Linear(40, 1), fp.likelihoods.Normal(1.0))
    federation = federation_of(model, [(torch.zeros(3, 50), torch.zeros(3))] * 4)
    copies = 4 * 4 * 2040
    for method in (fp.FedAvg(model), fp.FedRep(model)):
        assert plan_of(method, federation, 2**20).per_client > copies
    steps = (fp.steps.PhiStep(), fp.steps.PhiStep(local=fp.LocalSGD()))
    plain, local = (plan_of(fp.FedSOUL(model, phi_step=s), federation, 2**20).per_client for s in steps)
    assert local == plain + copies
