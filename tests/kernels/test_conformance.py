"""What every kernel must do, whatever it samples: all kernels, linear heads and heads through vmap.

Oracles: exact equality; the kernel's own stationary law on Gaussian posteriors, written out, from which it is
started and in which it must stay; quadrature for a logistic head. Tolerance: five standard errors from chains
that never meet.
"""

import pytest
import torch

from fedpop.errors import SettingsError
from fedpop.kernels import (
    HMC,
    MALA,
    SGLD,
    ULA,
    Exponential,
    JumpHMC,
    Kernel,
    MixtureDraw,
    Target,
    Tuning,
    resolve_kernel,
)
from fedpop.kernels.base import Noise
from fedpop.models.local import LinearLikelihood
from fedpop.site.store import LocalStore
from tests.kernels.every_kernel import (
    CASES,
    KERNELS,
    KEY,
    SIZES,
    cases,
    everything,
    first,
    go,
    kernels,
    start,
)
from tests.oracles import (
    DOUBLE,
    Moments,
    assert_mean,
    effective_draws,
    gaussian_noise,
    make_case,
    sample,
)

# --- which kernels there are -----------------------------------------------------------------


def test_every_kernel_is_here():
    # MixtureDraw needs posteriors that are mixtures of Gaussians: test_mixture_draw.py has its own.
    ours = {k for k in Kernel.__subclasses__() if k.__module__.startswith("fedpop.")}
    assert {type(k) for k in KERNELS} - {JumpHMC} == ours - {MixtureDraw}


@kernels
def test_every_kernel_has_a_name(kernel):
    model, prior = CASES[0].model, CASES[0].prior
    assert resolve_kernel(kernel, model, prior) is kernel
    assert resolve_kernel(kernel.name.lower(), model, prior) == type(kernel)()
    assert resolve_kernel(kernel.name, model, prior) == type(kernel)()


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(
        SettingsError, match=r"unknown kernel 'nuts'; .*exponential, .*hmc, .*mala, .*sgld, .*ula"
    ):
        resolve_kernel("nuts", CASES[0].model, CASES[0].prior)


# --- its law ---------------------------------------------------------------------------------

GAUSSIANS = [make_case("normal", "diagonal"), make_case("normal", "full", head="vmap")]


def law(case, kernel: Kernel) -> Moments:
    """The kernel's stationary law on the case's Gaussian posteriors."""
    if kernel.adjusted or isinstance(kernel, Exponential):
        return case.gaussian
    assert isinstance(kernel, ULA | SGLD)  # with everything in a batch SGLD is ULA
    covs = []
    for i in range(len(SIZES)):
        q, _ = case.precision(i)
        gamma = kernel.step_size / torch.linalg.eigvalsh(q)[-1]
        covs.append(torch.linalg.inv(q) @ torch.linalg.inv(torch.eye(len(q), dtype=DOUBLE) - gamma * q / 2))
    return Moments.of_gaussians(case.gaussian.mean, torch.stack(covs), case.mu)


@pytest.mark.parametrize("case", GAUSSIANS, ids=lambda c: c.name)
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k != SGLD(batch=4)], ids=repr)
def test_started_in_its_law_it_stays_there(kernel, case):
    """No mixing needed: exact draws go in, and after some steps exact draws come out."""
    if isinstance(kernel, Exponential) and not case.target().linear:
        pytest.skip("without Q its law is not known; it is not for such heads")
    exact, chains, ids = law(case, kernel), 20_000, [0, 1, 2]
    root = torch.linalg.cholesky(exact.cov)
    z = exact.mean.unsqueeze(1) + gaussian_noise(4, 3, chains, len(case.mu)) @ root.mT
    target = case.target()
    tuning = first(kernel, target, 3, z)
    if tuning.mass is not None:  # an arbitrary one, as if learned elsewhere: the law must not care
        other = gaussian_noise(5, 3, 50, len(case.mu))
        mass = tuning.mass.after(other, -3 * other.square(), tuning.updates)
        tuning = Tuning(tuning.log_step, tuning.updates, mass)
    trace = go(kernel, target, z, ids, steps=8, tuning=tuning)
    after = trace.draws[:, -1].transpose(0, 1)
    centred = after - exact.mean
    assert_mean(after, exact.mean, "mean")
    assert_mean(centred.unsqueeze(-1) * centred.unsqueeze(-2), exact.cov, "covariance")
    assert_mean((after - case.mu).square().sum(-1), exact.distance, "mean of norm(z - mu)^2")
    # It moved: hardly a chain is where it was.
    assert ((after.transpose(0, 1) != z).any(-1).to(DOUBLE).mean(1) > 0.9).all()


@pytest.mark.parametrize("head", ["linear", "vmap"])
@pytest.mark.parametrize("kernel", [HMC(), MALA()], ids=repr)
def test_adjusted_kernels_on_a_logistic_head(kernel, head):
    """Mean, covariance and norm(z - mu)^2 by quadrature; the mass of the vmap head is adapted first."""
    case = make_case("bernoulli", "isotropic", head=head)
    many = 5 // kernel.gradients_per_step
    trace = sample(kernel, case.target(), chains=600, warmup=50 * many, draws=60 * many)
    z, exact = trace.draws.movedim(2, 0), case.moments
    centred = z - exact.mean.unsqueeze(1)
    assert_mean(z.mean(2), exact.mean, "mean")
    assert_mean(torch.einsum("kcmi,kcmj->kcij", centred, centred) / z.shape[2], exact.cov, "covariance")
    assert_mean((z - case.mu).square().sum(-1).mean(2), exact.distance, "mean of norm(z - mu)^2")
    assert effective_draws(z.mean(2), exact.cov.diagonal(dim1=-2, dim2=-1)).min() > 1000
    assert trace.diverged.sum() == 0


# --- what it returns -------------------------------------------------------------------------


@kernels
@cases
def test_shapes_and_state(kernel, case):
    z = start(case, [0, 1, 2])
    trace = go(kernel, case.target(), z, [0, 1, 2])
    assert trace.draws.shape == trace.grads.shape == (3, 6, *z.shape[1:])
    assert trace.acceptance.shape == trace.diverged.shape == (3,)
    assert trace.draws.dtype == z.dtype
    assert ((trace.acceptance > 0) & (trace.acceptance <= 1)).all()
    # The last draw is the state, and each draw carries the gradient at itself, or on a mini-batch an
    # estimate of it.
    assert torch.equal(trace.draws[:, -1], trace.state.z)
    whole = [i for i, n in enumerate(SIZES) if kernel.batch_size is None or n <= kernel.batch_size]
    for m in range(6):
        value, grad = case.target().value_and_grad(trace.draws[:, m])
        torch.testing.assert_close(trace.grads[whole, m], grad[whole])
        for i in set(range(3)) - set(whole):
            assert not torch.isclose(trace.grads[i, m], grad[i]).all()
    torch.testing.assert_close(trace.state.value[whole], value[whole])


@kernels
@cases
def test_same_key_same_draws_and_another_key_others(kernel, case):
    z = start(case, [0, 1, 2])
    one, two = (go(kernel, case.target(), z, [0, 1, 2]) for _ in range(2))
    assert torch.equal(one.draws, two.draws)
    later = go(kernel, case.target(), z, [0, 1, 2], key=KEY.at(round=1))
    assert not (one.draws == later.draws).any()


@kernels
@cases
def test_fewer_steps_are_the_first_of_more(kernel, case):
    z = start(case, [0, 1, 2])
    long, short = (go(kernel, case.target(), z, [0, 1, 2], steps=m) for m in (6, 4))
    torch.testing.assert_close(long.draws[:, :4], short.draws)


@kernels
def test_noise_fetched_in_chunks_is_the_same(kernel, monkeypatch):
    case, ids = CASES[0], [0, 1, 2]
    z = start(case, ids)
    whole = go(kernel, case.target(), z, ids)
    monkeypatch.setattr(Noise, "CHUNK", 2 * z.numel())
    torch.testing.assert_close(whole.draws, go(kernel, case.target(), z, ids).draws)


@kernels
@cases
@pytest.mark.parametrize("ids", [[1], [2, 1], [0, 1]], ids=str)
def test_draws_do_not_depend_on_who_else_is_there(kernel, case, ids):
    everyone = go(kernel, case.target(), start(case, [0, 1, 2]), [0, 1, 2], adapt=True)
    some = go(kernel, case.target(ids), start(case, ids), ids, adapt=True)
    # Sums over other padding round differently, nothing else changes.
    torch.testing.assert_close(some.draws, everyone.draws[ids], rtol=1e-10, atol=1e-10)
    for name, value in everything(some.tuning).items():
        torch.testing.assert_close(value, everything(everyone.tuning)[name][ids])


@kernels
@cases
def test_gradient_evaluations_are_what_is_reported(kernel, case, monkeypatch):
    calls, products = [], []
    plain, slope, pull_back = Target.value_and_grad, Target.grad, torch.func.vjp
    of_data, of_mean = LinearLikelihood.value_and_slope, LinearLikelihood.grad

    def counted(self, z):
        calls.append(z.shape)
        return plain(self, z)

    def counted_slope(self, z):
        calls.append(z.shape)
        return slope(self, z)

    def counted_data(self, z, *rows):
        calls.append(z.shape)
        return of_data(self, z, *rows)

    def counted_mean(self, z):
        calls.append(z.shape)
        return of_mean(self, z)

    def counted_products(f, z):
        out, product = pull_back(f, z)
        return out, lambda v: (products.append(v.shape), product(v))[1]

    monkeypatch.setattr(Target, "value_and_grad", counted)
    monkeypatch.setattr(Target, "grad", counted_slope)
    monkeypatch.setattr(torch.func, "vjp", counted_products)
    if kernel.independent(case.target()):
        # All seven draws of both chains at once, and before them their mean, one point for each client.
        monkeypatch.undo()
        monkeypatch.setattr(LinearLikelihood, "value_and_slope", counted_data)
        monkeypatch.setattr(LinearLikelihood, "grad", counted_mean)
        trace = go(kernel, case.target(), start(case, [0, 1, 2]), [0, 1, 2], steps=7)
        assert [shape[1] for shape in calls] == [1, 7 * 2]
        assert trace.gradient_evaluations == 1 + 7
        return
    trace = go(kernel, case.target(), start(case, [0, 1, 2]), [0, 1, 2], steps=7)
    assert all(shape[1] == 2 for shape in calls + products)
    assert len(calls) + len(products) == trace.gradient_evaluations
    assert kernel.gradients_per_step == getattr(kernel, "leapfrog", 1) + isinstance(kernel, JumpHMC)
    curvature = isinstance(kernel, ULA | SGLD) and not case.target().linear
    assert len(products) == (20 if curvature else 0)
    assert len(calls) == 1 + 7 * kernel.gradients_per_step + curvature
    assert trace.batched == (7 if isinstance(kernel, SGLD) else 0)


# --- tuning ----------------------------------------------------------------------------------


@kernels
@cases
def test_adaptation_is_on_or_off(kernel, case):
    ids = [0, 1, 2]
    z = start(case, ids, 50)
    tuning = first(kernel, case.target(), 3, z)
    assert go(kernel, case.target(), z, ids, adapt=False, tuning=tuning).tuning is tuning
    # A step far too large and one far too small, for kernels that listen to acceptance.
    for log_step in (kernel.initial_log_step, kernel.initial_log_step - 3):
        begun = Tuning(torch.full_like(tuning.log_step, log_step), tuning.updates, tuning.mass)
        trace = go(kernel, case.target(), z, ids, adapt=True, tuning=begun)
        assert (trace.tuning.updates == 1).all()
        if kernel.target_acceptance is None:
            assert (trace.tuning.log_step == log_step).all()
        else:
            wanted = log_step + trace.acceptance - kernel.target_acceptance
            torch.testing.assert_close(trace.tuning.log_step, wanted.clamp(max=kernel.largest_log_step))
        if trace.tuning.mass is not None:
            assert kernel.adapts_mass
            assert (trace.tuning.mass.weight == 6 * 50).all()


@kernels
@cases
def test_frozen_tuning_is_frozen(kernel, case):
    """Draws with adaptation off are those of the tuning that was handed in, pass after pass."""
    ids = [0, 1, 2]
    z = start(case, ids)
    tuning = go(kernel, case.target(), z, ids, adapt=True).tuning
    before = {name: value.clone() for name, value in everything(tuning).items()}
    one = go(kernel, case.target(), z, ids, tuning=tuning, key=KEY.at(round=5))
    go(kernel, case.target(), z, ids, tuning=one.tuning, key=KEY.at(round=6))
    two = go(kernel, case.target(), z, ids, tuning=one.tuning, key=KEY.at(round=5))
    assert torch.equal(one.draws, two.draws)
    assert all(torch.equal(value, before[name]) for name, value in everything(one.tuning).items())


@kernels
@cases
def test_tuning_goes_on_after_it_was_stored(kernel, case):
    """Pass after pass, through the tensors that a checkpoint holds: the same bits as without."""
    ids = [0, 1, 2]
    z = start(case, ids)
    kept, store = first(kernel, case.target(), 3, z), LocalStore(3)
    stored, here, there = kept, z, z
    for k in range(4):
        key = KEY.at(round=k)
        one = go(kernel, case.target(), here, ids, key=key, adapt=True, tuning=kept)
        two = go(kernel, case.target(), there, ids, key=key, adapt=True, tuning=stored)
        assert torch.equal(one.draws, two.draws)
        here, kept = one.state.z, one.tuning
        store.put(torch.arange(3), {"z": two.state.z} | two.tuning.to_local())
        store = LocalStore.restore(store.state())
        local = store.get(torch.arange(3), torch.device("cpu"))
        there, stored = local["z"], Tuning.from_local(local)
