"""Independent draws in one go are those of the loop, to rounding; where they are not independent the loop
takes over.

The loop is run on the same kernel with ``draw_all`` taken away, so that random numbers, posteriors and
everything around them are the same.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.kernels import HMC, Exponential, JumpHMC, Kernel, MixtureDraw, Pass, Tuning, run
from fedpop.kernels.base import Noise
from fedpop.keys import Key
from fedpop.priors.normal import COVARIANCES
from tests.helpers import linear_model, ragged, seeded
from tests.oracles import DOUBLE, Case, gaussian_noise, make_case

KEY = Key(3, purpose="test")
IDS = torch.arange(3)


def mixture_case(covariance: str, outputs: int = 1, components: int = 2) -> Case:
    case = make_case("normal", covariance, outputs=outputs)
    prior, d = fp.priors.Mixture(components, covariance), len(case.mu)
    betas = [0.3 * gaussian_noise(70 + i, prior.component.size(d)) for i in range(components)]
    for i, own in enumerate(betas):
        own[:d] += 2.0 * (1 - 2 * i)
    weights = torch.linspace(1, 2, components, dtype=DOUBLE).log()
    return replace(case, prior=prior, beta=torch.cat((weights, *betas)))


@dataclass
class Spy:
    """How often draws were made at once."""

    asked: int = 0
    given: int = 0


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    seen = Spy()
    for cls in (Exponential, MixtureDraw):

        def watched(self, *args, plain=cls.draw_all):
            out = plain(self, *args)
            seen.asked += 1
            seen.given += out is not None
            return out

        monkeypatch.setattr(cls, "draw_all", watched)
    return seen


def by_loop(kernel: Kernel, *args, **options) -> Pass:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(kernel), "draw_all", Kernel.draw_all)
        return run(kernel, *args, **options)


def same(one: Pass, other: Pass, rtol: float = 1e-9) -> None:
    close = {"rtol": rtol, "atol": rtol}
    torch.testing.assert_close(one.draws, other.draws, **close)
    torch.testing.assert_close(one.grads, other.grads, rtol=100 * rtol, atol=100 * rtol)
    torch.testing.assert_close(one.state.z, other.state.z, **close)
    torch.testing.assert_close(one.state.value, other.state.value, **close)
    torch.testing.assert_close(one.state.grad, other.state.grad, rtol=100 * rtol, atol=100 * rtol)
    torch.testing.assert_close(one.acceptance, other.acceptance)
    assert torch.equal(one.diverged, other.diverged)
    assert one.gradient_evaluations == other.gradient_evaluations
    assert one.batched == other.batched == 0
    for name, value in other.tuning.to_local().items():
        torch.testing.assert_close(one.tuning.to_local()[name], value)


@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("kernel", [Exponential(), MixtureDraw()], ids=repr)
def test_draws_are_those_of_the_loop(kernel, covariance, outputs, chains, adapt, spy):
    mixture = isinstance(kernel, MixtureDraw)
    case = mixture_case(covariance, outputs) if mixture else make_case("normal", covariance, outputs=outputs)
    z = gaussian_noise(4, 3, chains, len(case.mu))
    arguments = (case.target(), z, Tuning.fresh(3, 0.0, z), 7, KEY, IDS)
    at_once = run(kernel, *arguments, adapt=adapt)
    assert spy.given == 1
    loop = by_loop(kernel, *arguments, adapt=adapt)
    assert spy.given == 1
    assert at_once.draws.shape == (3, 7, chains, len(case.mu))
    same(at_once, loop)
    # What likelihoods say is kept beside the whole, where it was made by itself.
    if at_once.likelihood_grads is not None:
        for m in range(7):
            _, grad = case.target().likelihood.value_and_grad(at_once.draws[:, m])
            torch.testing.assert_close(at_once.likelihood_grads[:, m], grad)


@pytest.mark.parametrize("kernel", [Exponential(), MixtureDraw()], ids=repr)
def test_in_single_precision_too(kernel):
    """To rounding: some hundreds of eps of the size of z."""
    model = linear_model()
    method = fp.FedSOUL(model, prior="mixture" if isinstance(kernel, MixtureDraw) else "normal")
    federation = fp.Federation.of(ragged())
    cohort = model.checked(federation).cohort(torch.arange(4), torch.device("cpu"))
    prior = method.hierarchy.prior
    target = method.hierarchy.target_at(model.initial_phi(), prior.init(torch.zeros(2), 1.0, KEY), cohort)
    z = torch.zeros(4, 2, 2)
    arguments = (target, z, Tuning.fresh(4, 0.0, z), 5, KEY, cohort.units)
    same(run(kernel, *arguments, adapt=True), by_loop(kernel, *arguments, adapt=True), rtol=1e-4)


@pytest.mark.parametrize("kernel", [Exponential(), MixtureDraw()], ids=repr)
def test_where_they_start_does_not_matter_at_all(kernel):
    """To the bit, also from where there is no density: no step is made from there."""
    mixture = isinstance(kernel, MixtureDraw)
    case = mixture_case("full") if mixture else make_case("normal", "full")
    draws = []
    for start in (0.0, 5.0, 1e200):
        z = torch.full((3, 2, 2), start, dtype=DOUBLE)
        draws.append(run(kernel, case.target(), z, Tuning.fresh(3, 0.0, z), 6, KEY, IDS, adapt=False).draws)
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])


# --- the loop takes over -------------------------------------------------------------------------


def test_a_client_whose_step_was_halved_makes_everyone_take_the_loop(spy):
    """With a shorter step a draw depends on the one before; the others' draws are what they were."""
    case = make_case("normal", "diagonal")
    z = gaussian_noise(4, 3, 2, 2)
    whole = Tuning.fresh(3, 0.0, z)
    at_once = run(Exponential(), case.target(), z, whole, 7, KEY, IDS, adapt=True)
    assert (spy.asked, spy.given) == (1, 1)
    halved = Tuning(torch.tensor([0.0, -0.7, 0.0], dtype=DOUBLE), whole.updates)
    mixed = run(Exponential(), case.target(), z, halved, 7, KEY, IDS, adapt=True)
    assert (spy.asked, spy.given) == (2, 1)
    same(mixed, by_loop(Exponential(), case.target(), z, halved, 7, KEY, IDS, adapt=True))
    others = [0, 2]
    torch.testing.assert_close(mixed.draws[others], at_once.draws[others], rtol=1e-9, atol=1e-9)
    assert not torch.isclose(mixed.draws[1], at_once.draws[1]).any()
    # Its step is the exponential one with h = e^-0.7, from where the chain stands.
    one = case.target([1])
    short = Tuning(halved.log_step[1:2], whole.updates[1:2])
    alone = run(Exponential(), one, z[1:2], short, 7, KEY, IDS[1:2], adapt=True)
    torch.testing.assert_close(mixed.draws[1:2], alone.draws)
    assert mixed.tuning.log_step.tolist() == halved.log_step.tolist()


def test_a_step_of_one_half_is_never_independent(spy):
    case = make_case("normal", "diagonal")
    z = gaussian_noise(4, 3, 2, 2)
    run(Exponential(h=0.5), case.target(), z, Tuning.fresh(3, 0.0, z), 7, KEY, IDS, adapt=True)
    assert spy.given == 0


@pytest.mark.parametrize("family", ["bernoulli", "poisson"])
def test_posteriors_that_are_not_gaussian_take_the_loop(family, spy):
    case = make_case(family, "isotropic")
    z = gaussian_noise(4, 3, 2, 2)
    assert not Exponential().independent(case.target())
    run(Exponential(), case.target(), z, Tuning.fresh(3, 0.0, z), 7, KEY, IDS, adapt=True)
    assert spy.given == 0


def test_heads_through_vmap_take_the_loop(spy):
    case = make_case("normal", "isotropic", head="vmap")
    z = gaussian_noise(4, 3, 2, 2)
    run(Exponential(), case.target(), z, Tuning.fresh(3, 0.0, z), 3, KEY, IDS, adapt=True)
    assert spy.given == 0


@pytest.mark.parametrize("kernel", [HMC(), JumpHMC()], ids=repr)
def test_other_kernels_have_nothing_to_draw_at_once(kernel):
    case = make_case("normal", "diagonal")
    z = gaussian_noise(4, 3, 2, 2)
    tuning = kernel.first_tuning(3, z)
    assert not kernel.independent(case.target())
    noise = Noise(KEY, IDS, z, 5)
    assert kernel.draw_all(case.target(), kernel.prepare(case.target(), z, tuning, 0), tuning, noise) is None


@pytest.mark.parametrize("kernel", [Exponential(), MixtureDraw()], ids=repr)
def test_too_many_numbers_to_hold_take_the_loop(kernel, spy, monkeypatch):
    mixture = isinstance(kernel, MixtureDraw)
    case = mixture_case("full") if mixture else make_case("normal", "full")
    z = gaussian_noise(4, 3, 2, 2)
    arguments = (case.target(), z, Tuning.fresh(3, 0.0, z), 7, KEY, IDS)
    at_once = run(kernel, *arguments, adapt=True)
    monkeypatch.setattr(Noise, "CHUNK", 3 * z.numel())
    chunked = run(kernel, *arguments, adapt=True)
    assert (spy.asked, spy.given) == (2, 1)
    same(chunked, at_once)


@pytest.mark.parametrize("kernel", [Exponential(), MixtureDraw()], ids=repr)
def test_a_client_without_density_takes_everyone_to_the_loop(kernel):
    """Its likelihood overflows wherever it stands: it stays there, and the others' draws are theirs."""
    mixture = isinstance(kernel, MixtureDraw)
    case = mixture_case("full") if mixture else make_case("normal", "full")
    x, y = case.clients[2]
    broken = replace(case, clients=[*case.clients[:2], (x, torch.full_like(y, 1e200))])
    z = gaussian_noise(4, 3, 2, 2)
    tuning = Tuning.fresh(3, 0.0, z)
    fine = run(kernel, case.target(), z, tuning, 7, KEY, IDS, adapt=True)
    done = run(kernel, broken.target(), z, tuning, 7, KEY, IDS, adapt=True)
    torch.testing.assert_close(done.draws[:2], fine.draws[:2], rtol=1e-9, atol=1e-9)
    assert done.diverged[:2].tolist() == [0, 0]
    assert torch.isfinite(done.draws).all()


# --- a kernel of one's own -----------------------------------------------------------------------


@dataclass(frozen=True)
class Shifted(Exponential):
    """Gives all draws at once, one away from where they should be, so that it can be told."""

    def draw_all(self, target, plan, tuning, noise) -> Tensor | None:
        out = super().draw_all(target, plan, tuning, noise)
        return None if out is None else out + 1.0


def test_the_hook_is_what_is_used():
    case = make_case("normal", "diagonal")
    z = gaussian_noise(4, 3, 2, 2)
    arguments = (case.target(), z, Tuning.fresh(3, 0.0, z), 7, KEY, IDS)
    plain, shifted = (run(k, *arguments, adapt=False) for k in (Exponential(), Shifted()))
    torch.testing.assert_close(shifted.draws, plain.draws + 1.0)
    value, grad = case.target().value_and_grad(shifted.draws[:, -1])
    torch.testing.assert_close(shifted.state.value, value)
    torch.testing.assert_close(shifted.state.grad, grad)


def test_a_run_is_the_same_either_way():
    clients = [(x.double(), y.double()) for x, y in ragged((3, 0, 5, 4))]
    backbone, head = seeded(nn.Linear(3, 2).double(), 1), seeded(nn.Linear(2, 1).double(), 2)
    model = fp.Composition(backbone, head, fp.likelihoods.Normal(0.5))
    for prior in ("normal", "mixture"):
        method = fp.FedSOUL(model, prior=prior)
        at_once = method.fit(clients, rounds=6, participation=0.7, seed=3)
        with pytest.MonkeyPatch.context() as patch:
            for cls in (Exponential, MixtureDraw):
                patch.setattr(cls, "draw_all", Kernel.draw_all)
            loop = method.fit(clients, rounds=6, participation=0.7, seed=3)
        for name, value in loop.published.items():
            torch.testing.assert_close(at_once.published[name], value, rtol=1e-7, atol=1e-7)
        x = clients[0][0]
        torch.testing.assert_close(at_once.predict(0, x).mean, loop.predict(0, x).mean, rtol=1e-6, atol=1e-6)
