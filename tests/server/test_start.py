"""The spectral start: unbiased cross products, exact eigenvectors, nothing from small clients."""

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.algorithms.base import Facts
from fedpop.channel import Channel
from fedpop.errors import SettingsError
from fedpop.evaluation.subspace import principal_angle
from fedpop.questions.spectral import SpectralStart, applies, working_response
from tests.helpers import cohort_of, generator, linear_model, population_data, train_key

WIDE = torch.float64
EYE = {"whitener": torch.eye(3, dtype=WIDE)}


def sums(start: SpectralStart, phase: str, clients: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    model = linear_model()
    return start.local(phase, model, EYE, cohort_of(model, clients), Channel())


def test_cross_products_are_unbiased_for_the_signal_alone() -> None:
    """One client redrawn 4000 times: S / (N (N - 1)) averages to phi z z' phi', noise or no noise."""
    g, n, replicates = generator(0), 4, 4000
    a = torch.tensor([1.0, -0.5, 0.3])  # phi z
    each = []
    for _ in range(replicates):
        x = torch.randn(n, 3, generator=g)
        y = x @ a + 1.5 * torch.randn(n, generator=g)
        v = x.T @ y
        each.append((torch.outer(v, v) - (x * y.square()[:, None]).T @ x) / (n * (n - 1)))
    # The same through the package, in one message.
    g = generator(0)
    clients = []
    for _ in range(replicates):
        x = torch.randn(n, 3, generator=g)
        clients.append((x, x @ a + 1.5 * torch.randn(n, generator=g)))
    message = sums(SpectralStart(), "spectral", clients)
    mean = message["cross"].reshape(3, 3) / message["pairs"]
    values = torch.stack(each)
    torch.testing.assert_close(mean, values.mean(0).to(WIDE), rtol=1e-4, atol=1e-4)
    error = values.std(0) / replicates**0.5
    assert bool(((mean - torch.outer(a, a)).abs() < 5 * error).all())


def test_exact_moments_give_back_phi_exactly() -> None:
    """Up to rotation: phi_hat' phi_hat = phi E[z z'] phi', in the coordinates of x."""
    g = generator(1)
    phi = torch.randn(2, 3, generator=g, dtype=WIDE)
    z = torch.randn(50, 2, generator=g, dtype=WIDE)
    second = z.T @ z / 50
    root = torch.randn(3, 3, generator=g, dtype=WIDE)
    cov = root @ root.T + torch.eye(3, dtype=WIDE)  # of x
    start = SpectralStart()
    whitener = start.whitener({"second": (30 * cov).reshape(-1), "count": torch.tensor([30.0])})
    torch.testing.assert_close(whitener @ cov @ whitener, torch.eye(3, dtype=WIDE))
    # In whitened coordinates y = (C^-1/2 x)' (C^1/2 phi' z).
    white = phi @ torch.linalg.inv(whitener)
    cross = white.T @ second @ white
    found = start.phi(
        {"cross": (7 * cross).reshape(-1), "pairs": torch.tensor([7.0])},
        whitener,
        torch.zeros(6, dtype=WIDE),
        2,
    ).reshape(2, 3)
    torch.testing.assert_close(found.T @ found, phi.T @ second @ phi)


@pytest.mark.parametrize("whitened", [True, False])
def test_correlated_inputs_are_whitened_first(whitened: bool) -> None:
    """With many examples the start is at the true subspace; without whitening it is not."""
    clients, phi, _ = population_data(150, 40, 4, 2, 0.1)
    mix = torch.tensor(
        [[3.0, 0.0, 0.0, 0.0], [2.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.0, 0.3]]
    )
    moved = [(x @ mix.T, y) for x, y in clients]  # y = x_new' mix^-T phi z
    truth = torch.linalg.inv(mix).T @ phi
    model = linear_model(4, 2, 0.1)
    method = fp.FedSOUL(model)
    cohort = cohort_of(model, moved)
    server = method.init(Facts(150, 1), train_key())
    for phase in ("moments", "spectral"):
        if phase == "spectral" and not whitened:
            server = server | {"whitener": torch.eye(4, dtype=WIDE)}
        broadcast = method.broadcast(phase, server)
        _, message, _ = method.local_round(phase, broadcast, cohort, {}, Channel(), train_key())
        server = method.server_round(phase, server, message, Facts(150, 1), train_key())
    angle = principal_angle(server["phi"].reshape(2, 4).T, truth)
    assert (angle < 0.1) is whitened


@pytest.mark.parametrize("phase", ["moments", "spectral"])
def test_clients_below_the_minimum_add_nothing(phase: str) -> None:
    clients, _, _ = population_data(6, 5, 3, 2, 0.1)
    small = [(x[:3], y[:3]) for x, y in clients]
    alone = sums(SpectralStart(minimum=4), phase, clients)
    both = sums(SpectralStart(minimum=4), phase, clients + small)
    for name, value in alone.items():
        torch.testing.assert_close(both[name], value)
    assert all(not bool(v.any()) for v in sums(SpectralStart(minimum=4), phase, small).values())


def test_one_example_makes_no_pair_whatever_the_minimum() -> None:
    clients, _, _ = population_data(6, 1, 3, 2, 0.1)
    message = sums(SpectralStart(minimum=1), "spectral", clients)
    assert float(message["pairs"]) == 0
    phi = torch.arange(6.0)
    assert torch.equal(SpectralStart().phi(message, EYE["whitener"], phi, 2), phi)


def test_negative_eigenvalues_are_clipped() -> None:
    cross = torch.diag(torch.tensor([2.0, -1.0, -3.0], dtype=WIDE))
    message = {"cross": cross.reshape(-1), "pairs": torch.ones(1, dtype=WIDE)}
    phi = SpectralStart().phi(message, EYE["whitener"], torch.zeros(6, dtype=WIDE), 2).reshape(2, 3)
    assert bool(torch.isfinite(phi).all())
    torch.testing.assert_close(phi[0].square().sum(), torch.tensor(2.0, dtype=WIDE))
    assert 0 < float(phi[1].norm()) < 0.5


def test_the_start_leaves_the_rest_of_phi_alone() -> None:
    clients, _, _ = population_data(6, 5, 3, 2, 0.1)
    population = fp.FedSOUL(linear_model(variance="learned"), phi_step=fp.steps.SGD(1e-30)).fit(clients, rounds=1)
    assert abs(float(population.phi["likelihood.log_variance"])) < 1e-20


def test_logistic_targets_are_linearised() -> None:
    model = fp.Composition(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False), "bernoulli")
    torch.testing.assert_close(
        working_response(model, torch.tensor([[0.0], [1.0]])), torch.tensor([[-2.0], [2.0]])
    )
    assert applies(model)


@pytest.mark.parametrize(
    "model",
    [
        fp.Composition(nn.Linear(3, 2), nn.Linear(2, 1, bias=False), "normal"),
        fp.Composition(nn.Linear(3, 2, bias=False), nn.Linear(2, 1), "normal"),
        fp.Composition(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False), "normal"),
        fp.Composition(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), nn.Linear(2, 1, bias=False), "normal"),
        fp.Split(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), "1.*", "normal"),
    ],
    ids=["backbone bias", "head bias", "two outputs", "network", "split"],
)
def test_models_without_a_spectral_start_begin_at_random_and_say_so(model: fp.Composition) -> None:
    assert not applies(model)
    assert "spectral" not in fp.FedSOUL(model).phases
    for method in (fp.FedSOUL, fp.FedRep):
        with pytest.raises(SettingsError, match="spectral start needs"):
            method(model, start="spectral")
    with pytest.raises(SettingsError, match="start is"):
        fp.FedSOUL(model, start="warm")
