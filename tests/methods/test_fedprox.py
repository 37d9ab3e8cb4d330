"""FedProx: FedAvg at mu = 0, the proximal point of a quadratic otherwise."""

import pytest
import torch

import fedpop as fp
from fedpop.client import local_sgd
from fedpop.errors import SettingsError
from fedpop.methods.whole import towards
from tests.helpers import FRAME, cohort_of, linear_model, quadratics, ragged, train_key

Q = quadratics()


@pytest.mark.parametrize("largest", [local_sgd.LARGEST_BATCHED, 0])
def test_without_its_term_it_is_fedavg_to_the_bit(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_sgd, "LARGEST_BATCHED", largest)
    local = fp.LocalSGD(epochs=2, rate=0.1, batch=2, momentum=0.5, decay=0.01)
    runs = [
        method.fit(ragged((4, 1, 0, 7)), rounds=3, progress=False).published
        for method in (
            fp.FedAvg(linear_model(), local=local),
            fp.FedProx(linear_model(), local=local, mu=0.0),
        )
    ]
    for name in ("phi", "z"):
        assert torch.equal(runs[0][name], runs[1][name])


@pytest.mark.parametrize("largest", [local_sgd.LARGEST_BATCHED, 0])
@pytest.mark.parametrize("mu", [0.1, 3.0])
def test_many_steps_reach_the_proximal_point(
    mu: float, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """w_i = (H_i + mu I)^-1 (H_i w_i* + mu w); the server takes their mean, weighted by size."""
    monkeypatch.setattr(local_sgd, "LARGEST_BATCHED", largest)
    # Curvatures of 1 to 4: 150 steps of rate .2 shrink an error to .8^150 < 1e-14 of itself.
    method = fp.FedProx(Q.model, mu=mu, local=fp.LocalSGD(epochs=150, rate=0.2))
    w, sizes = Q.start(), torch.tensor([8.0, 5.0, 12.0], dtype=torch.float64)
    for _ in range(2):
        w = torch.stack([Q.proximal(i, mu, w) for i in range(3)]).T @ (sizes / sizes.sum())
    found = method.fit(Q.clients, rounds=2, progress=False).published["z"]
    torch.testing.assert_close(found, w, rtol=1e-10, atol=1e-12)


def test_the_reported_loss_is_the_datas() -> None:
    """One full-batch step: the loss at w, where the proximal term is zero; then where it is not."""
    local = fp.LocalSGD(epochs=2, rate=0.1)
    one = fp.FedProx(Q.model, mu=2.0, local=local).fit(Q.clients, rounds=1, progress=False)
    total = 0.0
    for i, (x, y) in enumerate(Q.clients):
        w = Q.start()
        for _ in range(2):
            total += 0.5 * float((y - x @ w).square().sum() + len(y) * torch.log(torch.tensor(2 * torch.pi)))
            w = w - 0.1 * (Q.gradient(i, w) + 2.0 * (w - Q.start()))
    assert one.history[0]["loss"] == pytest.approx(total / 50, rel=1e-6)  # 2 epochs of 25 examples


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_refused_rates_are_those_that_diverge(momentum: float) -> None:
    """The pull alone, of strength 10: steady below 2 (1 + momentum), not above."""
    cohort = cohort_of(Q.model, Q.clients)
    method = fp.FedAvg(Q.model)
    start = Q.start().expand(3, -1)

    def flat(w: torch.Tensor, *rest: object) -> torch.Tensor:
        return 0 * w.sum()

    ends = []
    for share in (0.9, 1.1):
        local = fp.LocalSGD(epochs=100, rate=share * 2 * (1 + momentum) / 10, momentum=momentum)
        end = method.train(local, start, cohort, train_key(), aux=start + 1, loss=flat, pull=towards(10.0))
        ends.append(float((end.w - start - 1).abs().max()))
        if share < 1:
            fp.FedProx(Q.model, mu=10.0, local=local)
        else:
            with pytest.raises(SettingsError, match=r"mu 10 = .* unstable above"):
                fp.FedProx(Q.model, mu=10.0, local=local)
    assert ends[0] < 0.05  # .95^100 at worst
    assert ends[1] > 100


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf")])
def test_impossible_settings(mu: float) -> None:
    with pytest.raises(SettingsError, match="mu must be a finite number, 0 or more"):
        fp.FedProx(Q.model, mu=mu)


def test_its_moves_may_be_compressed() -> None:
    plain = fp.FedProx(linear_model()).fit(ragged((4, 7)), rounds=2, progress=False)
    fewer = fp.FedProx(linear_model(), compressor=fp.compressors.RandK(k=2)).fit(
        ragged((4, 7)), rounds=2, progress=False
    )
    assert plain.totals["bytes_up"] == 2 * 2 * (2 * FRAME + 4 * (8 + 1))
    each = fp.compressors.RandK(k=2).encoded_bytes(8) + FRAME + 4
    assert fewer.totals["bytes_up"] == 2 * 2 * each
