"""FedRep: private heads, a shared body that converges geometrically without noise."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.evaluation.subspace import principal_angle
from fedpop.methods.base import Facts
from tests.helpers import answers, begun, cohort_of, generator, linear_model, ragged, seeded, train_key

WIDE = torch.float64


def noise_free(
    b: int = 30, n: int = 15, k: int = 6, d: int = 2
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    g = generator(0)
    phi = torch.linalg.qr(torch.randn(k, d, generator=g, dtype=WIDE))[0]
    clients = []
    for _ in range(b):
        x = torch.randn(n, k, generator=g, dtype=WIDE)
        clients.append((x, x @ phi @ torch.randn(d, generator=g, dtype=WIDE)))
    return clients, phi


class Angles(fp.callbacks.Callback):
    def __init__(self, truth: Tensor) -> None:
        self.truth, self.seen = truth, []

    def after_round(self, run: object, metrics: dict[str, object]) -> bool:
        self.seen.append(principal_angle(run.server["phi"].reshape(2, -1).T, self.truth))
        return False


def model(k: int = 6, d: int = 2) -> fp.Composition:
    return fp.Composition(
        seeded(nn.Linear(k, d, bias=False).to(WIDE), 1),
        seeded(nn.Linear(d, 1, bias=False).to(WIDE), 2),
        fp.likelihoods.Normal(1.0),
    )


def test_without_noise_the_angle_falls_geometrically() -> None:
    """Every ten rounds at least halve it, down to ten digits (Collins et al., theorem 1)."""
    clients, truth = noise_free()
    angles = Angles(truth)
    fp.FedRep(model(), heads="exact", body=fp.LocalSGD(rate=0.5)).fit(clients, rounds=171, callbacks=[angles])
    marks = angles.seen[::10]
    assert marks[0] > 0.3
    for before, after in pairwise(marks):
        assert after < 0.5 * before or before < 1e-12
    assert marks[-1] < 1e-10


def test_exact_heads_are_least_squares() -> None:
    method = fp.FedRep(model(3), heads="exact")
    clients = [(x.to(WIDE), y.to(WIDE)) for x, y in ragged((6, 0, 1))]
    cohort = cohort_of(method.model, clients)
    phi = method.model.initial_phi()
    heads = method.fit_head(phi, cohort, torch.zeros(3, 2, dtype=WIDE), train_key())
    for (x, y), head in zip(clients, heads, strict=True):
        expected = torch.linalg.pinv(x @ phi.reshape(2, 3).T) @ y  # of least norm where there is a choice
        torch.testing.assert_close(head, expected)


def test_heads_are_fitted_with_the_body_frozen_and_then_the_body_with_the_heads() -> None:
    """One client, full batches: two runs of torch's SGD, one after the other."""
    method = fp.FedRep(model(3), head=fp.LocalSGD(epochs=3, rate=0.1), body=fp.LocalSGD(epochs=2, rate=0.05))
    x, y = (t.to(WIDE) for t in ragged((5,))[0])
    found = method.fit([(x, y)], rounds=1)
    body, head = (m.weight.detach().clone().requires_grad_() for m in method.model.modules())

    def loss() -> Tensor:
        return 0.5 * (y - (x @ body.T @ head.T)[:, 0]).square().mean()

    for parameter, epochs, rate in ((head, 3, 0.1), (body, 2, 0.05)):
        for _ in range(epochs):
            (g,) = torch.autograd.grad(loss(), parameter)
            with torch.no_grad():
                parameter -= rate * g
    torch.testing.assert_close(found.phi["backbone.weight"], body.detach())
    torch.testing.assert_close(found.store.get(torch.tensor([0]), torch.device("cpu"))["z"], head.detach())


def test_heads_are_never_in_the_message() -> None:
    method = fp.FedRep(model(3), heads="exact", start="spectral")
    cohort = cohort_of(method.model, ragged((6,)))
    server, local = begun(method, cohort, Facts(1, 5), train_key())
    done = answers(method, cohort, local, method.broadcast(server), train_key())
    sent = done.total.plain
    assert set(sent) == set(done.total.weighted) == {"dphi", "n"}
    assert sent["dphi"].shape == server["phi"].shape
    assert float(sent["n"]) == 6
    assert "z" in method.private
    # Nor in what the server keeps: its z is the modules' own, for clients that come later.
    server = method.server_round(server, done.total, Facts(1, 5), train_key())
    assert torch.equal(server["z"], method.model.initial_z())
    assert not torch.allclose(done.local["z"][0], server["z"])


def test_the_server_takes_the_weighted_mean_of_the_bodies() -> None:
    """Two clients in one round against each alone."""
    method = fp.FedRep(linear_model(), heads="exact", body=fp.LocalSGD(rate=0.1))
    clients = ragged((6, 2))
    both = method.fit(clients, rounds=1).published["phi"]
    each = [method.fit([c], rounds=1).published["phi"] for c in clients]
    torch.testing.assert_close(both, (6 * each[0] + 2 * each[1]) / 8)


def test_an_optimiser_may_take_the_mean_as_a_gradient() -> None:
    """Plain steps at the rate of the body are FedRep itself."""
    clients = ragged((6, 2))
    plain = fp.FedRep(linear_model(), body=fp.LocalSGD(rate=0.1)).fit(clients, rounds=3)
    stepped = fp.FedRep(linear_model(), body=fp.LocalSGD(rate=0.1), phi_step=fp.steps.SGD(0.1)).fit(
        clients, rounds=3
    )
    torch.testing.assert_close(plain.published["phi"], stepped.published["phi"])


def test_each_client_predicts_with_its_own_head() -> None:
    clients, _ = noise_free(b=4)
    population = fp.FedRep(model(), heads="exact", body=fp.LocalSGD(rate=0.3)).fit(clients, rounds=150)
    for i, (x, y) in enumerate(clients):
        torch.testing.assert_close(population.predict(i, x).mean, y, rtol=0.05, atol=0.05)
    x, y = noise_free(b=5)[0][4]
    newcomer = population.new_client(x[:8], y[:8])
    assert newcomer.predict(x).mean.shape == y.shape


def test_names_and_impossible_settings() -> None:
    assert fp.FedRep(linear_model()).label == "FedRep"
    assert fp.FedRep(linear_model(), start="spectral").label == "FedRep-spectral"
    with pytest.raises(SettingsError, match="heads must be one of sgd, exact"):
        fp.FedRep(linear_model(), heads="guess")
    with pytest.raises(SettingsError, match="normal likelihood"):
        fp.FedRep(fp.Composition(None, nn.Linear(3, 2), "categorical"), heads="exact")
    with pytest.raises(SettingsError, match="start must be"):
        fp.FedRep(linear_model(), start="warm")
