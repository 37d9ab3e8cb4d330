"""The paper's synthetic claims, run afresh on a few seeds; the committed results are held to them over ten.

Principal angle against the exact optimum and FedRep, a relative error of 1e-3 within 100 rounds, stateless
chains, and coverage.
"""

import math
from statistics import mean, median, stdev

import pytest
import torch

import fedpop as fp
from fedpop.comparison.truth import as_matrix, exact, held_out, setting_of
from fedpop.data.synthetic import SyntheticTask
from fedpop.evaluation.subspace import principal_angle
from fedpop.keys import Key
from fedpop.report.results import Results, values
from research.synthetic import EXPERIMENT, MAIN, TASKS, run_task
from tests.helpers import federation_of

pytestmark = pytest.mark.slow
MAIN_TASKS = [pytest.param(t, id=f"b{t.b}-d{t.d}-k{t.k}") for t in TASKS[:MAIN]]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def angle(population, data):
    return principal_angle(data.phi, as_matrix(population.published["phi"], data.phi))


@pytest.mark.parametrize("task", MAIN_TASKS)
def test_fedsoul_reaches_the_exact_optimum_and_beats_fedrep(task):
    ratios, better, covered, covered_exact = [], [], [], []
    for seed in range(3):
        records = {
            o.record["method"]: o.record["metrics"]
            for o in run_task(task, seed, ("FedSOUL", "FedRep-spectral"), theta=False)
        }
        m = records["FedSOUL"]
        ratios.append(m["principal_angle"] / m["principal_angle_exact"])
        better.append(m["log_likelihood"] > records["FedRep-spectral"]["log_likelihood"])
        if not m["local_optimum"]:
            covered.append(m["coverage90"])
            covered_exact.append(m["coverage90_exact"])
    assert median(ratios) <= 1.10
    # Three seeds are too few to order medians of angles; predictions are better every time.
    assert all(better)
    assert abs(mean(covered) - mean(covered_exact)) <= 0.015


@pytest.mark.parametrize("task", MAIN_TASKS)
def test_committed_results_hold_what_the_readme_claims(task):
    results = Results.open(EXPERIMENT.folder)
    soul = results.of(setting_of(task), "FedSOUL")
    rep = results.of(setting_of(task), "FedRep-spectral")
    assert len(soul) == len(rep) == 10
    ratios = [r["metrics"]["principal_angle"] / r["metrics"]["principal_angle_exact"] for r in soul]
    assert median(ratios) <= 1.10
    # Within the same seeds: nowhere farther than chance allows, (100, 2, 5) being the hardest for us.
    angles = zip(values(soul, "principal_angle"), values(rep, "principal_angle"), strict=True)
    gains = [math.log(theirs / ours) for ours, theirs in angles]
    assert mean(gains) > -2 * stdev(gains) / len(gains) ** 0.5
    likelihoods = zip(values(soul, "log_likelihood"), values(rep, "log_likelihood"), strict=True)
    assert all(ours > theirs for ours, theirs in likelihoods)
    there = [r for r in soul if not r["metrics"]["local_optimum"]]
    gap = mean(values(there, "coverage90")) - mean(values(there, "coverage90_exact"))
    assert abs(gap) <= 0.015


def test_one_in_a_thousand_within_a_hundred_rounds():
    """The paper's claim on theta, from the default start: relative error of (phi mu, phi Sigma phi') < 1e-3.

    Rao-Blackwellised I and J (no draws enter them: M = 1, and 200 gradient evaluations of the head per client
    in all), Adam with short memory, a cosine schedule, EM steps on the prior, the last iterate; no annealing,
    which would take half of the rounds.
    """
    step = fp.steps.Adam(0.1, fp.steps.Cosine(), beta1=0.7, beta2=0.9)
    closed = fp.chains.Chain(rao_blackwell=True)
    settings = {"chain": closed, "local_steps": 1, "phi_step": step, "beta_step": fp.steps.EM(1.0, 1.0)}
    settings["anneal"] = fp.steps.Anneal(rounds=0)
    task = SyntheticTask()
    for seed in range(10):
        data = task.make(seed)
        method = fp.FedSOUL(task.model(seed), average=fp.steps.Averaging("last"), **settings)
        population = method.fit(data.clients, rounds=100, seed=seed)
        assert population.totals["gradient_evaluations"] == 100 * 100 * 2
        best = exact(task, data, seed, [population])
        reached, wanted = (
            identified(method, phi.double(), beta.double(), data)
            for phi, beta in (
                (population.published["phi"], population.published["beta"]),
                (best.phi, best.beta),
            )
        )
        assert float((reached - wanted).norm() / wanted.norm()) < 1e-3, seed


def identified(method, phi, beta, data):
    matrix, prior = as_matrix(phi, data.phi), method.hierarchy.prior
    return torch.cat((matrix @ prior.mu(beta), (matrix @ prior.sigma(beta) @ matrix.mT).reshape(-1)))


@pytest.mark.filterwarnings("ignore::fedpop.errors.ConvergenceWarning")  # plain steps, a nat or two short
def test_stateless_paper_preset_with_fifty_steps_equals_stateful_with_ten():
    task, kept, fresh = SyntheticTask(), [], []
    for seed in range(10):
        data = task.make(seed)
        for out, settings in (
            (kept, {"local_steps": 10}),
            (fresh, {"local_steps": 50, "chain": fp.chains.Chain(stateful=False)}),
        ):
            method = fp.FedSOUL.paper(task.model(seed), **settings)
            out.append(angle(method.fit(data.clients, rounds=600, seed=seed), data))
    assert abs(median(fresh) / median(kept) - 1) <= 0.10


def test_stateless_default_kernel_on_a_logistic_head():
    task = SyntheticTask(b=1000, share_small=1.0, n_small=20, logistic=True)
    kept, fresh = [], []
    for seed in range(10):
        data = task.make(seed)
        for out, settings in (
            (kept, {"local_steps": 10}),
            (fresh, {"local_steps": 50, "chain": fp.chains.Chain(stateful=False)}),
        ):
            method = fp.FedSOUL(task.model(seed), **settings)
            out.append(angle(method.fit(data.clients, rounds=60, seed=seed), data))
    assert median(kept) < 0.2
    assert abs(median(fresh) / median(kept) - 1) <= 0.10


def test_intervals_cover_ninety_percent_when_theta_is_known():
    task, covered = SyntheticTask(), []
    for seed in range(10):
        data = task.make(seed)
        method = fp.FedSOUL(task.model(seed))
        federation = federation_of(method.model, data.clients)
        beta = method.hierarchy.prior.init(torch.zeros(task.d), 1.0)
        truth = {"phi": data.phi.mT.reshape(-1).float(), "beta": beta}
        population = fp.Population(method, truth, Key(seed), federation).sample_all()
        covered.append(held_out(population.predict, data)["coverage90"])
    assert abs(mean(covered) - 0.90) <= 0.01


def test_thetas_own_uncertainty_brings_coverage_closer():
    task = SyntheticTask(b=50)
    plug_in, full = [], []
    for seed in range(5):
        data = task.make(seed)
        population = fp.FedSOUL(task.model(seed)).fit(data.clients, rounds=500, seed=seed).sample_all()
        plug_in.append(held_out(population.predict, data)["coverage90"])
        full.append(
            held_out(lambda i, x, p=population: p.predict(i, x, theta_uncertainty=True), data)["coverage90"]
        )
    assert abs(mean(full) - 0.9) < abs(mean(plug_in) - 0.9)
