"""Chains that follow the modes of their posteriors.

Oracles: the slope at a mode; Gaussian posteriors in closed form, whose covariance the map must carry exactly;
quadrature for logistic and softmax heads, whose moments chains must keep with theta at rest.
"""

from dataclasses import replace

import pytest
import torch

import fedpop as fp
from fedpop.kernels import HMC, Exponential, Target
from fedpop.kernels.follow import MODE_TOLERANCE, carried, first_place, follows, mode_from, whitened
from fedpop.keys import Key
from tests.helpers import run_of
from tests.oracles import DOUBLE, assert_mean, cohort_of, gaussian_cases, make_case

CASES = [
    make_case("bernoulli", "isotropic"),
    make_case("bernoulli", "full", features=1, head="bias"),
    make_case("categorical", "diagonal", features=1, outputs=3),
    make_case("poisson", "isotropic"),
]
UNITS = torch.tensor([11, 12, 13])


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_slope_vanishes_at_the_mode_and_the_climb_ends_there(case):
    target = case.target()
    mode, _ = mode_from(target, case.mu.expand(3, -1), 200)
    slope = target.value_and_grad(mode.unsqueeze(1))[1]
    d = mode.shape[1]
    assert bool(((slope * target.block_precision.solve(slope)).sum((1, 2)) <= MODE_TOLERANCE * d).all())
    again, spent = mode_from(target, mode, 200)
    assert torch.equal(again, mode)  # with theta at rest nothing moves
    assert spent <= 1


def test_a_mode_does_not_depend_on_who_else_is_there():
    case = CASES[2]
    alone = mode_from(case.target([2]), case.mu.expand(1, -1), 200)[0]
    torch.testing.assert_close(mode_from(case.target(), case.mu.expand(3, -1), 200)[0][2:], alone)


@pytest.mark.parametrize("covariance", ["isotropic", "diagonal"])
def test_gaussian_posteriors_are_carried_onto_one_another(covariance):
    """Old: under twice the standard deviations. Columns of a root of the old covariance, as chains, become
    those of a root of the new one."""
    case = next(c for c in gaussian_cases() if c.prior.covariance == covariance)
    d = len(case.mu)
    wide = case.prior.sd(case.beta) * 2
    was = torch.cat((case.mu, (wide[:1] if covariance == "isotropic" else wide).log()))
    old = Target(case.target().likelihood, case.prior, was)
    mean, cov = old.moments()
    chains = mean.unsqueeze(1) + torch.linalg.cholesky(cov).mT
    new, mode, _ = carried(case.target(), chains, mean, wide.expand(3, -1))
    apart = new - mode.unsqueeze(1)
    torch.testing.assert_close(torch.einsum("cki,ckj->cij", apart, apart), case.gaussian.cov)
    # The mode is as near as was promised.
    off = mode - case.gaussian.mean
    far = torch.einsum("ci,cij,cj->c", off, torch.linalg.inv(case.gaussian.cov), off)
    assert bool((far <= MODE_TOLERANCE * d).all())


@pytest.mark.parametrize("covariance", ["isotropic", "diagonal"])
def test_chains_are_carried_from_one_batch_of_examples_to_another(covariance):
    """Columns of a root of the posterior's covariance given some rows become, stored in their own width,
    those of a root given other rows."""
    case = next(c for c in gaussian_cases() if c.prior.covariance == covariance)
    target, units = case.target([2, 1, 2]), [1, 2, 0]  # others than those of then
    old = case.target(units)
    mean, cov = old.moments()
    chains, scale = torch.linalg.cholesky(cov).mT, old.prior.unit(old.beta).expand(3, -1)
    white = whitened(old, mean, chains, scale)
    eye = torch.eye(len(case.mu), dtype=white.dtype)
    torch.testing.assert_close(white.mT @ white, eye.expand(3, -1, -1))
    all_of_them, first = torch.ones(3, dtype=torch.bool), torch.tensor([True, False, False])
    new, mode, _ = carried(target, mean.unsqueeze(1) + chains, mean, scale, white, all_of_them)
    apart = new - mode.unsqueeze(1)
    torch.testing.assert_close(torch.einsum("cki,ckj->cij", apart, apart), case.gaussian.cov[[2, 1, 2]])
    mixed, _, _ = carried(target, mean.unsqueeze(1) + chains, mean, scale, white, first)
    without, _, _ = carried(target, mean.unsqueeze(1) + chains, mean, scale)
    assert torch.equal(mixed[0], new[0])
    assert torch.equal(mixed[1:], without[1:])
    assert not torch.allclose(mixed[0], without[0])


def test_a_chain_far_from_its_mode_stays_where_that_is_more_probable():
    case = CASES[0]
    target = case.target()
    mode, _ = mode_from(target, case.mu.expand(3, -1), 200)
    z = mode.unsqueeze(1).clone()
    wrong = mode + 50.0  # what was kept is not where the chain stands
    new, _, _ = carried(target, z, wrong, target.prior.unit(target.beta).expand(3, -1))
    assert torch.equal(new, z)


def test_exact_draws_mixtures_and_other_heads_do_not_follow():
    normal, logistic, general = gaussian_cases()[0], CASES[0], make_case("bernoulli", "full", head="vmap")
    assert not follows(Exponential(), normal.target())
    assert follows(HMC(), normal.target())
    assert follows(HMC(), logistic.target())
    assert not follows(HMC(), general.target())
    follow = fp.FedSOUL(logistic.model)
    assert follow.sampler.follows
    for other in (
        follow.replace(prior="mixture"),
        fp.FedSOUL.paper(logistic.model),
        fp.FedSOUL(normal.model),
    ):
        assert not other.sampler.follows


@pytest.mark.parametrize("case", CASES[:3], ids=lambda c: c.name)
def test_with_theta_at_rest_chains_keep_the_posterior(case):
    """100 chains of 100 rounds for each client, from where a first chain starts; moments by quadrature."""
    sampler = fp.FedSOUL(case.model, prior=case.prior, chain=fp.chains.Chain(chains=100)).sampler
    cohort, target = cohort_of(case.model, case.clients), case.target()
    local = sampler.enter(cohort.units, case.beta, Key(3), None)
    sums, squares = 0.0, 0.0
    good = torch.ones(3, dtype=torch.bool)
    for k in range(100):
        done = sampler.run(target, local, cohort, 2, Key(3, round=k), states=None)
        local = sampler.states(done, local, case.beta, good)
        if k >= 10:
            sums, squares = sums + done.draws.mean(1), squares + done.draws.square().mean(1)
    for i in range(3):
        assert_mean(sums[i] / 90, case.moments.mean[i], "mean")
        second = case.moments.cov[i].diagonal() + case.moments.mean[i].square()
        assert_mean(squares[i] / 90, second, "second moment")


def test_first_chains_start_by_the_mode_with_the_width_of_the_curvature():
    case = gaussian_cases()[0]
    z, mode, _ = first_place(case.target(), UNITS, 4000, Key(1))
    assert z.dtype == DOUBLE
    torch.testing.assert_close(mode, case.gaussian.mean, atol=0.02, rtol=0)
    apart = z - mode.unsqueeze(1)
    spread = torch.einsum("cki,ckj->ckij", apart, apart)
    for i in range(3):
        assert_mean(spread[i], case.gaussian.cov[i], "covariance")


def test_what_is_kept_is_private_and_in_the_state():
    case = CASES[2]
    method = fp.FedSOUL(case.model, prior=replace(case.prior, covariance="isotropic"))
    assert {"mode", "width"} <= set(method.private) & set(method.keeps)
    run = run_of(method, case.clients, rounds=2)
    run.train_round()
    held = run.sites.store.get(torch.arange(3), torch.device("cpu"))
    assert held["mode"].shape == held["width"].shape == (3, case.model.z_layout.size)
    assert not torch.equal(held["mode"][2], run.server["beta"][: held["mode"].shape[1]])
