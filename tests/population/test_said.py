"""What a population says of itself: a summary that costs nothing, and diagnostics that are computed."""

from typing import Any

import pytest
import torch

import fedpop as fp
from fedpop.evaluation.diagnostics import rhat_and_ess
from fedpop.evaluation.oracle import exact_optimum
from fedpop.federation.clients import Federation
from fedpop.keys import Key, unit_of
from fedpop.population import Population
from fedpop.site.sites import Sites
from tests.helpers import linear_model, ragged


def test_diagnostics_are_quiet_at_the_optimum_and_loud_elsewhere(population: fp.Population) -> None:
    """The gradient at the exact maximum is Monte-Carlo noise; elsewhere it is not."""
    method, federation = population.algorithm, population.federation
    best = exact_optimum(method, federation, [(population.published["phi"], population.published["beta"])])
    at = {"phi": best.phi.float(), "beta": best.beta.float()}
    good = Population(method, at, Key(0), federation).diagnostics()
    assert good.warnings == []
    assert good.theta.phi_gradient < 5
    far = {"phi": at["phi"].roll(1), "beta": at["beta"]}
    bad = Population(method, far, Key(0), federation).diagnostics()
    assert bad.theta.phi_gradient > 20
    assert any("run more rounds" in w for w in bad.warnings)
    wide = {"phi": at["phi"], "beta": at["beta"] + torch.tensor([0.0, 0.0, 2.0])}
    worse = Population(method, wide, Key(0), federation).diagnostics()
    assert worse.theta.beta_gradient > 5
    assert any("run more rounds" in w for w in worse.warnings)


def test_diagnostics_count_clients_and_mixing_tells_about_each(population: fp.Population) -> None:
    chains = population.diagnostics().chains
    assert chains.units == len(population) == 9
    assert chains.unmixed == 0
    each = [population.mixing(name) for name in population.names]
    assert max(rhat for rhat, _ in each) < 1.05
    assert min(ess for _, ess in each) > 400
    for level, count in chains.rhat_below.items():
        assert count == sum(rhat <= level for rhat, _ in each)
    for level, count in chains.ess_above.items():
        assert count == sum(ess >= level for _, ess in each)
    assert population.mixing("site-3") == rhat_and_ess(population.posterior("site-3").draws)


def test_diagnostics_of_some_clients_say_nothing_about_the_gradient(population: fp.Population) -> None:
    some = population.diagnostics(limit=3)
    assert some.chains.units == 3
    assert some.theta.phi_gradient is None  # a sum over all clients, which were not all looked at
    assert some.theta.drift == population.drift


def test_a_scale_at_its_bound_is_reported() -> None:
    same = ragged((6,))[0]  # clients that do not differ: the scale goes to zero
    prior = fp.priors.Normal(scale=0.3, bounds=(0.2, 5.0))
    population = fp.FedSOUL(linear_model(), prior=prior, engine="sampled").fit([same] * 6, rounds=60)
    told = population.diagnostics().warnings
    assert any("the prior's scale is at its lower bound 0.2 (" in word for word in told)
    assert "warning  the prior's scale is at its lower bound" in str(population)


def test_print_says_what_was_learned(population: fp.Population) -> None:
    text = str(population)
    for words in (
        "FedSOUL population: 9 clients, 48 examples (0 to 6 each), 120 rounds",
        "Composition(phi: 6, z: 2",
        "Normal, isotropic: norm of mean",
        "kernel   Exponential(h=1.0), 10 per round",
        "MB up",
        "theta    moved by",
        "diagnostics() tells whether",
    ):
        assert words in text
    assert max(len(line) for line in text.splitlines()) < 140


def test_diagnostics_say_whether_chains_and_theta_have_settled(population: fp.Population) -> None:
    text = str(population.diagnostics())
    for words in (
        "chains   R-hat at most",
        "effective draws at least",
        "over 9 client(s)",
        "theta    converged to a local optimum: 0.0",
        "gradient over its Monte-Carlo error: phi",
        "drift over the tail",
    ):
        assert words in text


def test_print_computes_nothing_and_diagnostics_do(
    population: fp.Population, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No final pass, no question to anybody: a population can be looked at for nothing."""

    def no(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("computed")

    with monkeypatch.context() as nothing:
        nothing.setattr(fp.FedSOUL, "personalise", no)
        nothing.setattr(Sites, "ask", no)
        nothing.setattr(Federation, "cohort", no)
        nothing.setattr(Key, "bits", no)
        assert "FedSOUL population: 9 clients" in str(population)
        assert repr(population) == "Population(FedSOUL, 9 clients, 120 rounds)"
        for loud in (population.diagnostics, lambda: population.mixing("site-1")):
            with pytest.raises(AssertionError, match="computed"):
                loud()
    asked: list[int] = []
    real = fp.FedSOUL.personalise

    def personalise(self: Any, published: Any, cohort: Any, local: Any, key: Key) -> Any:
        asked.extend(cohort.units.tolist())
        return real(self, published, cohort, local, key)

    monkeypatch.setattr(fp.FedSOUL, "personalise", personalise)
    population.diagnostics()
    assert sorted(asked) == sorted(unit_of(name) for name in population.names)


@pytest.mark.parametrize("method", [fp.FedAvg, fp.FedRep, fp.LocalOnly])
def test_printing_a_point_method_computes_nothing_either(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    population = method(linear_model()).fit(ragged((4, 3)), rounds=1)

    def no(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("computed")

    monkeypatch.setattr(method, "personalise", no)
    assert f"{method.name} population: 2 clients, 7 examples" in str(population)
    assert repr(population) == f"Population({method.name}, 2 clients, 1 rounds)"


def test_theta_by_name(population: fp.Population) -> None:
    assert len(population) == 9
    assert population.phi["backbone.weight"].shape == (2, 3)
    assert population.prior_mean.shape == (2,)
    assert float(population.prior_sd[0]) == pytest.approx(float(population.published["beta"][2].exp()))
