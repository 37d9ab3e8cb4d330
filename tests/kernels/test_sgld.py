"""SGLD: mini-batches that are unbiased, and its own stationary law on Gaussians.

Oracles: all subsets of a client's examples, one by one; the covariance of the chain, which on a Gaussian
posterior solves a linear equation exactly, the gradient's noise included; ULA, where a batch holds all.
"""

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import ModelError, SettingsError
from fedpop.kernels import SGLD, ULA, Tuning, run
from fedpop.keys import Key
from fedpop.models.local import LocalLikelihood
from tests.helpers import train_key
from tests.oracles import DOUBLE, assert_mean, cohort_of, gaussian_noise, make_case

CASES = [
    make_case("normal", "isotropic"),
    make_case("categorical", "diagonal", features=1, outputs=3),
    make_case("poisson", "isotropic"),
    make_case("bernoulli", "isotropic", features=1, head="curved"),  # through vmap
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def picking(rows: tuple[int, ...]):
    """Numbers that make these rows the subset, for every client."""

    def uniform(count: int) -> Tensor:
        number = torch.full((3, count), 0.9)
        number[:, list(rows)] = 0.1
        return number

    return uniform


# --- subsets -----------------------------------------------------------------------------------


@cases
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_average_over_all_subsets_is_the_whole(case, size):
    local = case.target().likelihood
    z = gaussian_noise(1, 3, 2, len(case.mu))
    whole = local.value_and_grad(z)
    for client, n in enumerate((0, 3, 8)):
        # A client with too few examples keeps all: then there is one subset only, itself.
        subsets = list(combinations(range(n), min(size, n)))
        found = [local.subset(size, picking(rows)).value_and_grad(z) for rows in subsets]
        for j in range(2):
            mean = torch.stack([f[j][client] for f in found]).mean(0)
            torch.testing.assert_close(mean, whole[j][client])


@cases
def test_a_subset_is_the_client_with_those_examples(case):
    """n/|B| times the likelihood of a client who has only those; value alone as well."""
    z = gaussian_noise(1, 3, 2, len(case.mu))
    rows = (1, 4, 6)
    part = case.target().likelihood.subset(3, picking(rows))
    x, y = case.clients[2]
    cohort = cohort_of(case.model, [(x[list(rows)], y[list(rows)])])
    alone = case.model.bind(case.model.initial_phi(), cohort.x, cohort).value_and_grad(z[2:])
    for found, exact in zip((part.value(z), part.value_and_grad(z)[1]), alone, strict=True):
        torch.testing.assert_close(found[2:], exact * 8 / 3)


def test_all_subsets_are_equally_likely():
    """Pearson's statistic over the 28 pairs of eight examples, against its quantile at 1 - 1e-7."""
    copies = 6000
    x = torch.arange(8.0).unsqueeze(1)
    model = fp.Composition(None, nn.Linear(1, 1), "bernoulli")
    cohort = cohort_of(model, [(x, torch.zeros(8))] * copies)
    local = model.bind(model.initial_phi(), cohort.x, cohort)
    part = local.subset(2, lambda n: Key(0, purpose="subset").uniform(cohort.units, (n,)))
    pairs, counts = part.features[..., 0].unique(dim=0, return_counts=True)
    assert len(pairs) == 28
    assert (pairs[:, 0] < pairs[:, 1]).all()
    expected = copies / 28
    pearson = float((counts - expected).square().sum()) / expected
    # Wilson and Hilferty's approximation of the quantile, 5.2 normal standard deviations out.
    assert pearson < 27 * (1 - 2 / (9 * 27) + 5.2 * math.sqrt(2 / (9 * 27))) ** 3


def test_dropout_in_a_head_sees_the_chosen_examples():
    """The names of the examples go with them, so that each keeps its own dropout."""
    head = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 1))
    model = fp.Composition(None, head.double(), fp.likelihoods.Normal(1.0))
    x, y = gaussian_noise(1, 6, 2), gaussian_noise(2, 6)
    cohort = cohort_of(model, [(x, y)])
    phi, keys = model.initial_phi(), model.row_keys(cohort, train_key())
    local = model.bind(phi, cohort.x, cohort, keys)
    z = gaussian_noise(3, 1, 1, model.z_layout.size)
    singles = [
        local.subset(1, lambda n, r=r: torch.ones(1, n).index_fill(1, torch.tensor([r]), 0)) for r in range(6)
    ]
    torch.testing.assert_close(torch.stack([s.value(z) for s in singles]).mean(0), local.value(z))


def test_a_likelihood_without_examples_says_so():
    class Flat(LocalLikelihood):
        def value(self, z: Tensor) -> Tensor:
            return z.sum(-1)

        def value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
            return z.sum(-1), torch.ones_like(z)

    with pytest.raises(ModelError, match="Flat has no examples"):
        Flat().subset(2, lambda n: torch.zeros(1, n))
    with pytest.raises(ModelError, match="Flat does not know"):
        _ = Flat().sizes


# --- the chain ---------------------------------------------------------------------------------


@cases
def test_with_everything_in_a_batch_it_is_ula(case):
    z = gaussian_noise(4, 3, 2, len(case.mu))
    tuning = Tuning.fresh(3, 0.0, z)
    ids = torch.arange(3)
    kernels = SGLD(batch=8, step_size=0.4, decay=0.0), ULA(0.4)
    one, two = (run(k, case.target(), z, tuning, 5, Key(1), ids, adapt=False) for k in kernels)
    torch.testing.assert_close(one.draws, two.draws)
    # A client smaller than the batch takes ULA's steps whoever is beside it.
    some = run(SGLD(3, 0.4, decay=0.0), case.target(), z, tuning, 5, Key(1), ids, adapt=False)
    torch.testing.assert_close(some.draws[:2], two.draws[:2])
    assert not torch.isclose(some.draws[2, 1:], two.draws[2, 1:]).any()


def stationary(case, client: int, batch: int, gamma: float) -> Tensor:
    """The covariance S of z' = z + gamma g(z) + sqrt(2 gamma) xi with g from uniform subsets.

    Every example's gradient is affine, g_j(z) = a_j - H_j z, so the mean of z is the posterior's, and
    S = (I - gamma Q) S (I - gamma Q) + 2 gamma I + gamma^2 E V(z), where
    V(z) = c sum_j (g_j - mean)(g_j - mean)', c = n (n - B) / (B (n - 1)), whose mean is linear in S.
    """
    x, y = case.clients[client]
    n, d = len(x), len(case.mu)
    q, linear = case.precision(client)
    mean = torch.linalg.solve(q, linear)
    h = torch.einsum("ni,nj->nij", x, x)
    g = x * (y - (x @ mean).unsqueeze(1))
    h, g = h - h.mean(0), g - g.mean(0)
    c = n * (n - batch) / (batch * (n - 1))
    identity = torch.eye(d, dtype=DOUBLE)
    step = identity - gamma * q
    # vec(A S A') = (A kron A) vec(S)
    system = torch.eye(d * d, dtype=DOUBLE) - torch.kron(step, step)
    system = system - gamma**2 * c * sum(torch.kron(one, one) for one in h)
    source = 2 * gamma * identity + gamma**2 * c * g.mT @ g
    return torch.linalg.solve(system, source.reshape(-1)).reshape(d, d)


@pytest.mark.parametrize(("batch", "step"), [(1, 0.8), (3, 0.8), (3, 1.2)])
def test_stationary_law_on_gaussians(batch, step):
    """Mean and covariance, the gradient's noise included, at steps where it is far from the posterior's."""
    case = make_case("normal", "diagonal")
    copies = 600  # of the client with eight examples: chains of one client share batches, clients do not
    x, y = case.clients[2]
    cohort = cohort_of(case.model, [(x, y)] * copies)
    local = case.model.bind(case.model.initial_phi(), cohort.x, cohort)
    target = fp.kernels.Target(local, case.prior, case.beta)
    q, linear = case.precision(2)
    mean = torch.linalg.solve(q, linear)
    gamma = step * batch / 8 / float(torch.linalg.eigvalsh(q)[-1])
    exact = stationary(case, 2, batch, gamma)
    # First and second moments depend on themselves only, so this start is stationary as far as they go; the
    # first step, which has no batch yet, is forgotten to e^-10.
    z = (mean + gaussian_noise(9, copies, 2) @ torch.linalg.cholesky(exact).mT).unsqueeze(1)
    kernel = SGLD(batch, step, decay=0.0)
    warm = int(5 / (gamma * float(torch.linalg.eigvalsh(q)[0])))
    trace = run(
        kernel, target, z, Tuning.fresh(copies, 0.0, z), warm + 100, Key(2), cohort.units, adapt=False
    )
    assert float(trace.diverged.sum()) == 0
    draws = trace.draws[:, warm:, 0]
    centred = draws - mean
    second = torch.einsum("cmi,cmj->cij", centred, centred) / draws.shape[1]
    assert_mean(draws.mean(1), mean, "mean")
    assert_mean(second, exact, "covariance")
    # The tolerance can tell it from ULA's law at this step, and so sees the gradient's noise.
    identity = torch.eye(len(q), dtype=DOUBLE)
    with pytest.raises(AssertionError):
        assert_mean(second, torch.linalg.inv(q) @ torch.linalg.inv(identity - gamma * q / 2), "covariance")


def test_the_bias_of_the_covariance_is_of_order_gamma():
    case = make_case("normal", "diagonal")
    q, _ = case.precision(2)
    exact = torch.linalg.inv(q)
    slopes = [float((stationary(case, 2, 2, g) - exact).norm()) / g for g in (1e-4, 1e-5)]
    assert slopes[0] == pytest.approx(slopes[1], rel=1e-2)


def test_the_step_decreases_over_rounds_and_knows_the_batch():
    case, kernel = CASES[0], SGLD(batch=2, step_size=0.6, offset=3.0, decay=0.5)
    z = torch.zeros(3, 1, 2, dtype=DOUBLE)
    tuning = Tuning.fresh(3, 0.0, z)
    largest = torch.stack([torch.linalg.eigvalsh(case.precision(i)[0])[-1] for i in range(3)])
    share = torch.tensor([1, 2 / 3, 2 / 8], dtype=DOUBLE)  # |B|/n; without examples there is no batch
    for k in (0, 1, 13):
        gamma, factor = kernel.prepare(case.target(), z, tuning, k)
        torch.testing.assert_close(gamma.flatten(), 0.6 * share / largest * (3 + k) ** -0.5)
        torch.testing.assert_close(factor.flatten(), 1 / share)


@pytest.mark.parametrize(
    "settings",
    [{"batch": 0}, {"batch": 1.5}, {"step_size": 0.0}, {"step_size": 2.0}, {"offset": 0.0}, {"decay": -0.1}],
    ids=str,
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(SettingsError):
        SGLD(**settings)


# --- in a round --------------------------------------------------------------------------------


def test_what_a_round_reports_it_cost():
    """Examples that heads looked at: all at the start, then a batch (or all of a small client) per step."""
    model = fp.Composition(None, nn.Linear(2, 1), "bernoulli")
    sizes = (3, 0, 8)
    clients = [(gaussian_noise(i, n, 2).float(), torch.zeros(n)) for i, n in enumerate(sizes)]
    method = fp.FedSOUL(
        model,
        kernel=SGLD(batch=4),
        local_steps=7,
        chain=fp.chains.Chain(2, follow=False),
        prior=fp.priors.Normal(scale=1.0),
    )
    totals = method.fit(clients, rounds=3).totals
    assert totals["head_steps"] == 3 * 2 * ((3 + 8) + 7 * (3 + 4))
    assert totals["gradient_evaluations"] == 3 * 2 * 3 * (1 + 7)
