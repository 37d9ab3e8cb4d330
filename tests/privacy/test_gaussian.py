"""Differential privacy: bounds, noise, ledgers, refusals, and an attacker who tells two runs apart."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import fedpop as fp
from fedpop.errors import FedpopWarning, PrivacyError, SettingsError
from fedpop.message import Aggregate, Answer, Message
from fedpop.privacy import ledger
from fedpop.privacy.gaussian import BIT, CLIP, bound_of, bounded, system_noise
from fedpop.run import private
from fedpop.run.private import PrivateTerms, PrivateTotals, private_method
from fedpop.site.work import private_answer
from tests.helpers import generator, seeded

pytest.importorskip("dp_accounting")

OFFERED = ["FedSOUL", "FedSOUK", "FedAvg", "FedAvgFT", "FedProx", "FedPer", "FedRep", "LGFedAvg", "Ditto",
           "PFedMe", "APFL", "FedBABU"]  # fmt: skip


def clients(count: int = 40, rows: int = 6) -> dict[str, fp.Client]:
    g, out = generator(0), {}
    for i in range(count):
        x = torch.randn(rows, 3, generator=g)
        out[f"c{i}"] = fp.Client(x, x @ torch.ones(3) + 0.1 * torch.randn(rows, generator=g))
    return out


def model() -> fp.Composition:
    body, head = seeded(nn.Linear(3, 2, bias=False), 1), seeded(nn.Linear(2, 1, bias=False), 2)
    return fp.Composition(body, head, fp.likelihoods.Normal(0.5))


def settings(**more) -> fp.privacy.Gaussian:
    return fp.privacy.Gaussian(**{"noise": 1.0, "delta": 1e-3} | more)


# --- ledgers ---------------------------------------------------------------------------------


def test_the_ledger_is_that_of_dp_accounting_called_by_hand() -> None:
    import dp_accounting
    from dp_accounting import pld, rdp

    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.41))
    for kind, ours in ((pld.PLDAccountant, ledger.epsilon), (rdp.RdpAccountant, ledger.renyi_epsilon)):
        accountant = kind()
        accountant.compose(event, 40)
        assert ours(1.41, 0.1, 40, 1e-6) == pytest.approx(accountant.get_epsilon(1e-6), rel=0.05)
    assert ledger.epsilon(1.41, 0.1, 40, 1e-6) <= ledger.renyi_epsilon(1.41, 0.1, 40, 1e-6)


def test_the_ledger_has_known_values() -> None:
    """The Gaussian mechanism's exact curve (Balle and Wang, 2018); Abadi et al.'s MNIST example by Renyi
    divergences (q .01, sigma 4, 10,000 rounds: epsilon 1.26 at 1e-5 by the moments accountant)."""
    for sigma, rounds in ((3.0, 1), (8.5, 200)):
        mu = math.sqrt(rounds) / sigma
        eps = ledger.epsilon(sigma, 1.0, rounds, 1e-5)
        delta = stats.norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * stats.norm.cdf(-mu / 2 - eps / mu)
        assert delta == pytest.approx(1e-5, rel=0.02)
    assert ledger.renyi_epsilon(4.0, 0.01, 10_000, 1e-5) <= 1.27
    assert ledger.epsilon(8.5, 1.0, 200, 1e-5) == pytest.approx(8, rel=0.01)


def test_noise_for_a_budget_spends_it_and_not_more() -> None:
    sigma = ledger.noise_for(2.0, 0.2, 30, 1e-5)
    assert ledger.epsilon(sigma, 0.2, 30, 1e-5) <= 2.0 < ledger.epsilon(0.99 * sigma, 0.2, 30, 1e-5)
    assert ledger.affordable(2.0, sigma, 0.2, 1e-5, 30) == 30
    most = ledger.affordable(1.5, sigma, 0.2, 1e-5, 30)
    assert ledger.epsilon(sigma, 0.2, most, 1e-5) <= 1.5 < ledger.epsilon(sigma, 0.2, most + 1, 1e-5)


def test_vectors_of_a_round_are_one_event() -> None:
    for vectors in (("I", "J"), ("dw",)):
        for quantile in (0.5, None):
            found = settings(quantile=quantile).multipliers(2.5, vectors)
            assert sum(s**-2 for s in found.values()) == pytest.approx(2.5**-2)
            assert (len(found) > len(vectors)) == (quantile is not None)


# --- bounds and noise ------------------------------------------------------------------------


def test_no_row_is_longer_than_the_bound_and_short_ones_stay() -> None:
    v = torch.randn(200, 37, generator=generator(0)) * torch.logspace(-3, 30, 200).unsqueeze(1)
    out, inside = bounded(v, 5.0)
    assert float(torch.linalg.vector_norm(out.double(), dim=1).max()) <= 5.0
    assert out[inside].equal(v[inside])
    assert inside.tolist() == (torch.linalg.vector_norm(v.double(), dim=1) <= 5.0).tolist()
    cosine = torch.nn.functional.cosine_similarity(out[~inside].double(), v[~inside].double())
    assert torch.allclose(cosine, torch.ones_like(cosine), atol=1e-5)


@pytest.mark.parametrize("covariance", ["isotropic", "diagonal", "full"])
def test_a_whitened_score_has_unit_variance_under_the_prior_and_comes_back(covariance: str) -> None:
    prior = fp.priors.Normal(covariance=covariance)
    beta = prior.init(torch.tensor([1.0, -2.0, 0.5]).double(), 0.3)
    beta = beta + 0.2 * torch.randn(beta.shape, generator=generator(3), dtype=torch.float64)
    z = prior.sample(beta, torch.randn(200_000, 1, 3, generator=generator(1), dtype=torch.float64))
    score = prior.score(beta, z, torch.zeros_like(z), "left")
    white = prior.whitened_score(beta, score)
    covariance_seen = white.mT @ white / len(white)
    assert torch.allclose(covariance_seen, torch.eye(len(beta)).double(), atol=0.02)
    assert torch.allclose(prior.whitened_score(beta, white, inverse=True), score)


def test_the_systems_noise_is_standard_normal() -> None:
    x = system_noise(200_001)
    assert x.shape == (200_001,)
    assert x.dtype == torch.float64
    assert stats.kstest(x.numpy(), "norm").pvalue > 1e-6
    assert not system_noise(10).equal(system_noise(10))


def totals(method, given: fp.privacy.Gaussian, units: int, heard: float, sigma: float = 1.0) -> PrivateTotals:
    return PrivateTotals(PrivateTerms(given, sigma, heard / units, heard, units, 100), method, None)


def sums(method, given, broadcast, answers: list[Answer]):
    aggregate = Aggregate()
    for i, answer in enumerate(answers):
        sent = private_answer(method, answer, broadcast, given.quantile is not None)
        units = torch.arange(len(answer.good)) + 100 * i
        aggregate.add(Message.of(sent, units), torch.ones(len(units)))
    return aggregate.total(10, ratio=True)


def test_noise_on_a_total_has_the_ledgers_size_and_the_rest_is_the_bounded_mean() -> None:
    method, given = private_method(fp.FedAvg(model())), settings(quantile=0.5)
    size = method.footprint.compressed
    g = generator(0)
    n = torch.tensor([[3.0], [7.0]])
    moves = torch.stack((torch.randn(size, generator=g), 100 * torch.randn(size, generator=g)))
    broadcast = {"w": torch.zeros(size), f"{CLIP}dw": torch.tensor(10.0, dtype=torch.float64)}
    answer = Answer(torch.tensor([True, True]), {"dw": n * moves, "n": n}, cost={"examples": 10.0})
    exact = sums(method, given, broadcast, [answer])
    assert exact.numbers == {}  # nothing else leaves
    private = totals(method, given, units=20, heard=4.0)
    seen = torch.stack([private.noised(exact, method, broadcast, k).mean("dw", "n") for k in range(2000)])
    clipped = bounded(moves, 10.0)[0].sum(0)
    width = private.multipliers["dw"] * 10.0 / 4.0
    error = (seen.mean(0) - clipped / 4.0) / (width / math.sqrt(2000))
    assert float(error.abs().max()) < 5
    assert float(seen.std(0).mean()) == pytest.approx(width, rel=0.02)
    assert exact.plain[f"{BIT}dw"].tolist() == [0.0]  # one inside, one not


def test_the_bound_follows_the_quantile() -> None:
    method, given = private_method(fp.FedAvg(model())), settings(quantile=0.8, clip=1000.0)
    size = method.footprint.compressed
    moves = torch.nn.functional.normalize(torch.randn(400, size, generator=generator(0)), dim=1)
    moves = moves * torch.linspace(0.01, 10, 400).unsqueeze(1)
    private = totals(method, given, units=400, heard=400.0)
    for k in range(150):
        broadcast = {"w": torch.zeros(size)} | private.bounds
        answer = Answer(torch.ones(400, dtype=torch.bool), {"dw": moves, "n": torch.ones(400, 1)})
        private.noised(sums(method, given, broadcast, [answer]), method, broadcast, k)
    assert float(private.bounds[f"{CLIP}dw"]) == pytest.approx(8.0, rel=0.15)


def test_an_empty_round_is_noise_of_the_same_size() -> None:
    method, given = private_method(fp.FedAvg(model())), settings()
    broadcast = {"w": torch.zeros(method.footprint.compressed), f"{CLIP}dw": torch.tensor(10.0).double()}
    private = totals(method, given, units=20, heard=4.0)
    found = private.noised(Aggregate().total(20, ratio=True), method, broadcast, 0)
    assert float(found.weighted["dw"].std()) > 0


# --- an attacker -----------------------------------------------------------------------------

DELTA, RUNS = 0.01, 30_000


def told_apart(change=lambda private: None, size: float = 1.0, clipped: bool = True) -> tuple[float, float]:
    """The lower bound on epsilon that a likelihood-ratio attacker proves (Clopper-Pearson at 1e-4), who knows
    all but whether one unit took part whose vectors are as long as they may be; and the ledger's."""
    method = private_method(fp.FedSOUK(model()))
    given = settings(delta=DELTA)
    beta = method.hierarchy.prior.init(torch.zeros(2), 1.0)
    broadcast = {"phi": torch.zeros(method.model.phi_layout.size), "beta": beta}
    sigma = ledger.noise_for(1.0, 1.0, 1, DELTA)
    private = totals(method, given, units=10, heard=10.0, sigma=sigma)
    broadcast |= private.bounds
    change(private)
    unit = {"I": torch.zeros(1, 3), "J": torch.zeros(1, len(broadcast["phi"]))}
    unit["I"][0, 0], unit["J"][0, 1] = size * 100.0, size * 100.0
    good = torch.ones(1, dtype=torch.bool)
    others = Answer(good, {n: torch.zeros_like(v) for n, v in unit.items()})
    if clipped:
        canary = private_answer(method, Answer(good, unit), broadcast, adaptive=True).vectors
    else:  # a bound on the site's sum, too wide for one unit
        canary = {n: size * 3 * bounded(v, bound_of(n, v.shape[1], broadcast))[0] for n, v in unit.items()}
        canary[f"{BIT}J"] = -torch.full((1, 1), 0.5, dtype=torch.float64)
    statistics = []
    for there in (False, True):
        aggregate = Aggregate()
        rest = private_answer(method, others, broadcast, adaptive=True)
        aggregate.add(Message.of(rest, torch.tensor([1])), torch.ones(1))
        if there:
            aggregate.add(Message(torch.tensor([2]), torch.ones(1, dtype=torch.int64), canary), torch.ones(1))
        total = aggregate.total(10, ratio=True)
        seen = np.zeros(RUNS)
        for name in ("I", "J", f"{BIT}J"):
            vector = name.removeprefix(BIT)
            scale = 0.5 if name.startswith(BIT) else bound_of(name, len(total.plain[name]), broadcast)
            claimed = settings(delta=DELTA).multipliers(sigma, ("I", "J"))[name] * scale
            real = private.multipliers[name] * scale
            direction = canary[name][0].double()
            projected = float(total.plain[name].double() @ direction)
            noise = real * float(direction.norm()) * system_noise(RUNS).numpy()
            seen += (projected + noise) / max(real, 1e-3 * claimed) ** 2
            del vector
        statistics.append(seen)
    out, inside = statistics
    best = 0.0
    for level in (0.02, 0.05, 0.1, 0.2):
        threshold = np.quantile(out[: RUNS // 3], 1 - level)
        false, hits = (int((s[RUNS // 3 :] > threshold).sum()) for s in (out, inside))
        count = RUNS - RUNS // 3
        most_false = stats.beta.ppf(1 - 1e-4, false + 1, count - false)
        least_hits = stats.beta.ppf(1e-4, hits, count - hits + 1) if hits else 0.0
        if least_hits > DELTA:
            best = max(best, math.log((least_hits - DELTA) / most_false))
    return best, ledger.epsilon(sigma, 1.0, 1, DELTA)


def test_what_an_attacker_proves_is_below_the_ledger_and_above_half_of_it() -> None:
    proved, claimed = told_apart()
    assert claimed == pytest.approx(1, abs=0.01)
    assert claimed / 2 < proved < claimed


def halved(private: PrivateTotals) -> None:
    private.multipliers = {n: s / 2 for n, s in private.multipliers.items()}


def left_off(private: PrivateTotals) -> None:
    private.multipliers["I"] = 0.0


@pytest.mark.parametrize("wrong", [{"change": halved}, {"change": left_off}, {"clipped": False}])
def test_the_attacker_finds_noise_that_is_too_small_and_bounds_of_a_site(wrong) -> None:
    proved, claimed = told_apart(**wrong)
    assert proved > claimed


# --- runs ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::fedpop.errors.FedpopWarning")
@pytest.mark.parametrize("name", OFFERED)
def test_every_method_on_offer_runs_and_says_what_it_spent(name: str) -> None:
    method = getattr(fp, name)(model())
    population = method.fit(clients(), rounds=4, participation=0.5, privacy=settings())
    last = population.history[-1]
    assert last["epsilon"] > 0
    assert last["epsilon_server"] == "none: it sees each message"
    assert last["left_out"] == []
    assert "loss" not in last or last["loss"] is None
    assert "against readers of theta" in str(population)
    for tensor in population.published.values():
        assert bool(torch.isfinite(tensor.double()).all())


def test_with_little_noise_it_learns_what_an_ordinary_run_learns() -> None:
    """A bound that shortens nobody, noise of next to nothing, everyone in every round."""
    given = fp.privacy.Gaussian(noise=1e-8, delta=1e-3, clip=1e4, quantile=None)
    data = clients(30)
    ordinary = fp.FedAvg(model()).fit(data, rounds=5).published
    found = fp.FedAvg(model()).fit(data, rounds=5, privacy=given).published  # all have as many examples
    for name, tensor in ordinary.items():
        assert torch.allclose(found[name], tensor, atol=1e-3)


@pytest.mark.filterwarnings("ignore::fedpop.errors.FedpopWarning")
def test_sites_of_several_clients_bound_each_of_them() -> None:
    data, names = clients(30), [f"c{i}" for i in range(30)]
    given = settings(insecure_seed=3, noise=0.5)
    sites = {"a": names[:11], "b": names[11:12], "c": names[12:]}
    alone = fp.FedAvg(model()).fit(data, rounds=4, privacy=given).published
    together = fp.FedAvg(model()).fit(data, rounds=4, privacy=given, sites=sites).published
    for name, tensor in alone.items():
        assert torch.allclose(together[name], tensor, atol=1e-4)


@pytest.mark.filterwarnings("ignore::fedpop.errors.FedpopWarning")
def test_a_client_whose_numbers_are_not_finite_adds_nothing_and_is_not_named() -> None:
    data = clients(30)
    data["c3"] = fp.Client(
        data["c3"].x * 1e38 if hasattr(data["c3"], "x") else torch.ones(6, 3) * 1e38, torch.zeros(6)
    )
    population = fp.FedAvg(model()).fit(data, rounds=3, privacy=settings())
    assert all(m["left_out"] == [] for m in population.history)


@pytest.mark.filterwarnings("ignore::fedpop.errors.FedpopWarning")
def test_a_run_ends_before_it_would_overspend_with_its_population() -> None:
    given = settings(noise=2.0, epsilon=4.0)
    population = fp.FedAvg(model()).fit(clients(), rounds=30, participation=0.5, privacy=given)
    made = population.rounds
    assert 0 < made < 30
    assert ledger.epsilon(2.0, 0.5, made, 1e-3) <= 4.0 < ledger.epsilon(2.0, 0.5, made + 1, 1e-3)


@pytest.mark.filterwarnings("ignore::fedpop.errors.FedpopWarning")
@pytest.mark.parametrize("every", [1, 3])
def test_a_killed_run_resumes_to_the_same_bits_without_new_noise(tmp_path, monkeypatch, every: int) -> None:
    def fit(where, **more):
        given = settings(insecure_seed=5, noise=1.0)
        return fp.FedSOUK(model()).fit(
            clients(), rounds=7, participation=0.5, privacy=given, out=where, checkpoint_every=every, **more
        )

    whole = fit(tmp_path / "whole")

    class Killed(BaseException):
        pass

    step = fp.FedSOUK.server_round

    def killed(self, server, total, facts, key):
        if key.round == 5:
            raise Killed  # the noisy total is in its file, theta has not moved
        return step(self, server, total, facts, key)

    monkeypatch.setattr(fp.FedSOUK, "server_round", killed)
    with pytest.raises(Killed):
        fit(tmp_path / "cut")
    monkeypatch.setattr(fp.FedSOUK, "server_round", step)
    drawn = []
    monkeypatch.setattr(private, "system_noise", lambda n: drawn.append(n))
    before = sorted(p.name for p in (tmp_path / "cut" / "privacy").iterdir())
    assert "round-00000005.safetensors" in before
    again = fit(tmp_path / "cut", resume=True)
    assert again.history[-1]["epsilon"] == whole.history[-1]["epsilon"]  # no second entry
    for name, tensor in whole.published.items():
        assert again.published[name].equal(tensor)


@pytest.mark.filterwarnings("ignore::fedpop.errors.FedpopWarning")
def test_with_the_systems_noise_a_resumed_round_takes_it_from_the_file(tmp_path, monkeypatch) -> None:
    class Killed(BaseException):
        pass

    step, seen = fp.FedAvg.server_round, []

    def killed(self, server, total, facts, key):
        if key.round == 2:
            seen.append(total.weighted["dw"])
            if len(seen) == 1:
                raise Killed
        return step(self, server, total, facts, key)

    monkeypatch.setattr(fp.FedAvg, "server_round", killed)
    given = {"rounds": 4, "participation": 0.5, "privacy": settings(), "out": tmp_path, "checkpoint_every": 1}
    with pytest.raises(Killed):
        fp.FedAvg(model()).fit(clients(), **given)
    population = fp.FedAvg(model()).fit(clients(), **given, resume=True)
    assert seen[0].equal(seen[1])
    assert population.rounds == 4
    assert population.history[-1]["epsilon"] == ledger.epsilon(1.0, 0.5, 4, 1e-3)


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"method": fp.SCAFFOLD}, "SCAFFOLD is not offered"),
        ({"method": fp.FSGLD}, "FSGLD is not offered"),
        ({"method": fp.MaximumMarginalLikelihood}, "not offered"),
        ({"rounds": None}, "has a number of rounds"),
        ({"restarts": 2}, "likelihoods by which restarts"),
        ({"callbacks": [fp.callbacks.EarlyStop()]}, "EarlyStop would tell"),
        ({"participation": {f"c{i}": 0.5 + i / 100 for i in range(40)}}, "one probability for all"),
        ({"settings": {"clip": 3.0}}, "leave out clip"),
        ({"privacy": {"against": "server"}}, "sees each message"),
        ({"privacy": {"delta": 0.1}}, "one of 40 units"),
        ({"privacy": {"noise": 0.3, "epsilon": 0.5}}, "one round at noise"),
        ({"method": fp.FedSOUL, "settings": {"engine": "exact"}}, "exact engine"),
        ({"method": fp.FedSOUL, "settings": {"prior": "mixture"}}, "has no bound"),
        ({"method": fp.FedSOUL, "settings": {"start": "spectral"}}, "start='random'"),
        ({"method": fp.FedSOUL.paper, "settings": {}}, "trial rounds"),
        ({"method": fp.FedRep, "settings": {"start": "spectral"}}, "start='random'"),
    ],
)  # fmt: skip
def test_what_is_refused_says_why(more, words: str) -> None:
    more = dict(more)
    made = more.pop("method", fp.FedAvg)(model(), **more.pop("settings", {}))
    given = {"rounds": 3, "privacy": settings(**more.pop("privacy", {}))} | more
    with pytest.raises((PrivacyError, SettingsError), match=words):
        made.fit(clients(), **given)


def test_questions_are_refused_in_a_private_run() -> None:
    from fedpop.evaluation.marginal import MarginalLikelihood
    from fedpop.federation.participation import Everyone
    from fedpop.keys import Key
    from fedpop.run.run import Run, Settings

    method = fp.FedSOUK(model()).prepared(fp.Federation.of(clients()).example)
    run = Run(method, fp.Federation.of(clients()), Settings(3, 0, Everyone(), privacy=settings()))
    run.begin()
    with pytest.raises(PrivacyError, match="would tell of the data"):
        run.ask(MarginalLikelihood(method.hierarchy), run.server, Key(0))


def test_few_units_are_told_so_before_the_run_with_the_number_that_would_do() -> None:
    with pytest.warns(
        FedpopWarning, match=r"with 40 units, of which 4 take part .* about 217 units"
    ) as found:
        fp.FedAvg(model()).fit(clients(), rounds=1, participation=0.1, privacy=settings(noise=1.3))
    del found


def test_settings_are_checked() -> None:
    with pytest.raises(PrivacyError, match="needs epsilon"):
        fp.privacy.Gaussian()
    with pytest.raises(SettingsError, match="against"):
        fp.privacy.Gaussian(epsilon=1.0, against="nobody")
    with pytest.warns(FedpopWarning, match="protects nobody"):
        replace(fp.privacy.Gaussian(epsilon=1.0), insecure_seed=1)
