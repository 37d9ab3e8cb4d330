"""Centres of messages that a few hostile ones cannot move far."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.message import Aggregate, Message
from fedpop.server.robust import Krum, Median, Robust, RobustAggregate, TrimmedMean
from tests.helpers import generator, seeded

RULES: list[Robust] = [TrimmedMean(0.31), Median(), Krum(0.31)]


def rows(count: int = 20, size: int = 50) -> torch.Tensor:
    return 1 + 0.1 * torch.randn(count, size, generator=generator(0))


def test_a_trimmed_mean_and_a_median_are_those_of_each_coordinate() -> None:
    v = rows(9, 4)
    ordered = v.double().numpy().copy()
    ordered.sort(0)
    assert torch.allclose(TrimmedMean(0.2).centre({"J": v})["J"].double(), torch.tensor(ordered[2:7].mean(0)))
    assert torch.allclose(Median().centre({"J": v})["J"], v.median(0).values)
    even = rows(8, 4)
    assert torch.allclose(Median().centre({"J": even})["J"], even.quantile(0.5, 0))


def test_krum_keeps_the_rows_with_the_closest_neighbours() -> None:
    v = rows(10, 5)
    v[3], v[8] = 50.0, -50.0
    kept = 10 - 2 - 2
    far = ((v.unsqueeze(1) - v.unsqueeze(0)) ** 2).sum(2)
    best = far.sort(1).values[:, 1 : kept + 1].sum(1).argsort()[:kept]
    assert torch.allclose(Krum(0.2).centre({"J": v})["J"], v[best].mean(0))
    assert not {3, 8} & set(best.tolist())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("kind", ["scaled", "flipped", "constant", "colluding"])
@pytest.mark.parametrize("hostile", [2, 6])
def test_hostile_rows_move_a_centre_no_further_than_honest_ones_are_apart(
    rule, kind: str, hostile: int
) -> None:
    v = rows()
    honest = v[hostile:].clone()
    pushed = torch.randn(50, generator=generator(5)) * 10
    v[:hostile] = {"scaled": 1e6 * v[:hostile], "flipped": -v[:hostile], "constant": torch.full((50,), 1e3),
                   "colluding": pushed}[kind]  # fmt: skip
    centre = rule.centre({"J": v})["J"]
    assert bool((centre >= honest.amin(0)).all() & (centre <= honest.amax(0)).all())
    assert float((centre - 1).abs().mean()) < 0.15 < float((v.mean(0) - 1).abs().mean())


def test_a_total_is_the_centre_times_the_number_of_messages() -> None:
    v, n = rows(6, 3), torch.tensor([[4.0], [4], [4], [4], [4], [1e9]])
    v[5] = 1e9
    robust, plain = RobustAggregate(Median()), Aggregate()
    for part in (slice(0, 2), slice(2, 6)):
        ids = torch.arange(6)[part]
        message = Message(
            ids, torch.ones(len(ids), dtype=torch.int64), {"dw": n[part] * v[part], "n": n[part]}
        )
        for aggregate in (robust, plain):
            aggregate.add(message, torch.ones(len(ids)))
    total = robust.total(6, ratio=True)
    assert torch.allclose(total.mean("dw", "n"), Median().centre({"dw": v})["dw"])
    assert float(total.weighted["n"]) == 24
    assert total.count == plain.total(6, ratio=True).count == 6


def clients(count: int = 20) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = generator(0)
    xs = [torch.randn(12, 3, generator=g) for _ in range(count)]
    return [(x, x @ torch.tensor([1.0, -2.0, 0.5]) + 0.1 * torch.randn(12, generator=g)) for x in xs]


def model() -> fp.Composition:
    body, head = seeded(nn.Linear(3, 2), 1), seeded(nn.Linear(2, 1), 2)
    return fp.Composition(body, head, fp.likelihoods.Normal(0.5))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("method", [fp.FedAvg, fp.FedSOUK, fp.FedProx])
def test_runs_with_a_few_wild_clients(rule: Robust, method) -> None:
    data = clients()
    for i in (3, 7):
        data[i] = (data[i][0], -100 * data[i][1])
    made = method(model(), guard=None)
    wild = made.fit(data, rounds=15, aggregate=rule)
    x, y = clients(21)[20]
    error = float((wild.new_client().predict(x).mean.squeeze() - y).square().mean())
    plain = made.fit(data, rounds=15).new_client().predict(x).mean.squeeze()
    assert error < float((plain - y).square().mean())


def test_what_needs_the_sum_itself_is_refused() -> None:
    for made in (fp.SCAFFOLD(model()), fp.DGLMC(model()), fp.QLSD(model())):
        with pytest.raises(SettingsError, match="needs the sum itself"):
            made.fit(clients(), rounds=2, aggregate=Median())
    for more in ({"secure": True}, {"privacy": fp.privacy.Gaussian(noise=1.0, delta=1e-3)}):
        with pytest.raises(SettingsError, match="looks at single messages"):
            fp.FedAvg(model()).fit(clients(), rounds=2, aggregate=Median(), **more)
