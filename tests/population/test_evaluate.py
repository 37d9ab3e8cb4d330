"""The protocol: exact scores on cases small enough to work out, every client judged, nothing disturbed."""

import math

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.errors import DataError, SettingsError
from fedpop.evaluation import scores
from fedpop.evaluation.scores import Bin, ece_of, reliability, scored, worst_tenth
from fedpop.keys import Key
from fedpop.models import likelihoods
from fedpop.models.predictive import Predictive
from fedpop.population import evaluate_few, evaluate_new
from tests.helpers import generator, linear_model, population_data, seeded

EXACT = {"rtol": 0, "atol": 1e-12}  # float64, a handful of operations


def classes(probs):
    """A plug-in predictive distribution with these class probabilities."""
    eta = torch.tensor(probs, dtype=torch.float64).log().unsqueeze(0)
    return Predictive(eta, likelihoods.resolve("categorical"), {}, Key(0), plug_in=True)


def numbers(eta, variance=1.0, plug_in=True):
    """Draws ``[L][n]`` of the mean of a normal target."""
    eta = torch.tensor(eta, dtype=torch.float64).unsqueeze(-1)
    return Predictive(eta, likelihoods.Normal(variance), {}, Key(0), plug_in=plug_in)


def test_scores_of_classes_by_hand():
    anna = classes([[0.75, 0.25], [0.5625, 0.4375]]), torch.tensor([0, 1])
    ben = classes([[0.125, 0.875]]), torch.tensor([1])
    got = scored([("anna", *anna), ("ben", *ben)])
    assert got.names == ["anna", "ben"]
    expected = {
        "accuracy": [0.5, 1.0],
        "nll": [-(math.log(0.75) + math.log(0.4375)) / 2, -math.log(0.875)],
        "brier": [(2 * 0.25**2 + 2 * 0.5625**2) / 2, 2 * 0.125**2],
        # Bins of width 1/15: .75 and .5625 lie in different ones.
        "ece": [(0.25 + 0.5625) / 2, 0.125],
    }
    for name, values in expected.items():
        torch.testing.assert_close(got.scores[name], torch.tensor(values, dtype=torch.float64), **EXACT)
    assert got.pooled["nll"] == pytest.approx(-math.log(0.75 * 0.4375 * 0.875) / 3, abs=1e-12)
    assert got.pooled["ece"] == pytest.approx((0.25 + 0.5625 + 0.125) / 3, abs=1e-12)
    summary = got.summary()
    assert summary["accuracy"] == 0.75  # over clients, not over examples
    assert summary["accuracy_sd"] == 0.25
    assert summary["accuracy_worst"] == 0.5
    assert summary["nll_worst"] == pytest.approx(expected["nll"][0], abs=1e-12)
    assert got.plug_in


def test_scores_of_numbers_by_hand():
    # 90 % intervals of N(m, 4) reach 2 * 1.6449 to either side.
    half = 2 * 1.6448536269514722
    y = torch.tensor([[0.0], [1.0], [half + 0.001]], dtype=torch.float64)
    got = scored([("anna", numbers([[0.0, 3.0, 0.0]], variance=4.0), y)])
    log_two_pi = math.log(2 * math.pi * 4)
    nll = (3 * log_two_pi + (0 + 4 + (half + 0.001) ** 2) / 4) / 6
    assert float(got.scores["rmse"]) == pytest.approx(math.sqrt((4 + (half + 0.001) ** 2) / 3), abs=1e-12)
    assert float(got.scores["nll"]) == pytest.approx(nll, abs=1e-12)
    assert float(got.scores["coverage"]) == pytest.approx(2 / 3, abs=1e-12)
    # The bisection halves 36 standard deviations 40 times.
    assert float(got.scores["width"]) == pytest.approx(2 * half, abs=1e-9)


def test_draws_are_mixed_before_scoring():
    got = scored([("anna", numbers([[-1.0], [1.0]], plug_in=False), torch.zeros(1, 1, dtype=torch.float64))])
    assert float(got.scores["rmse"]) == 0.0  # of the mean prediction
    assert float(got.scores["nll"]) == pytest.approx(0.5 * math.log(2 * math.pi) + 0.5, abs=1e-12)
    assert not got.plug_in


def test_yes_no_targets_are_classes():
    eta = torch.tensor([[[0.0], [math.log(3.0)]]], dtype=torch.float64)
    p = Predictive(eta, likelihoods.resolve("bernoulli"), {}, Key(0), plug_in=True)
    got = scored([("anna", p, torch.tensor([[0.0], [1.0]], dtype=torch.float64))])
    assert float(got.scores["nll"]) == pytest.approx(-(math.log(0.5) + math.log(0.75)) / 2, abs=1e-12)
    assert float(got.scores["brier"]) == pytest.approx((2 * 0.25 + 2 * 0.0625) / 2, abs=1e-12)


def test_clients_scored_together_have_the_scores_they_have_alone():
    g = generator(0)
    clients = []
    for i, n in enumerate((4, 1, 7, 3)):
        probs = torch.softmax(torch.randn(n, 3, generator=g, dtype=torch.float64), -1).tolist()
        clients.append((str(i), classes(probs), torch.randint(3, (n,), generator=g)))
    together = scored(clients)
    for i, one in enumerate(clients):
        for name, values in scored([one]).scores.items():
            torch.testing.assert_close(values[0], together.scores[name][i], **EXACT)


def test_the_memory_of_a_group_is_bounded(monkeypatch):
    monkeypatch.setattr(scores, "ENTRIES_AT_ONCE", 5)
    seen = []
    examples = scores._examples
    monkeypatch.setattr(scores, "_examples", lambda p, *a: (seen.append(p.eta.numel()), examples(p, *a))[1])
    one = numbers([[0.0, 1.0]]), torch.zeros(2, 1, dtype=torch.float64)
    scored([(str(i), *one) for i in range(5)])
    assert seen == [4, 4, 2]


@pytest.mark.parametrize(("count", "taken"), [(1, 1), (9, 1), (10, 1), (11, 2), (100, 10)])
def test_the_worst_tenth(count, taken):
    values = torch.arange(count, dtype=torch.float64)
    assert worst_tenth(values, high_is_good=True) == (taken - 1) / 2
    assert worst_tenth(values, high_is_good=False) == count - 1 - (taken - 1) / 2


def calibration_error(confidence, right):
    """The definition, one prediction after the other; who is exactly sure is in a bin alone."""
    bins = {}
    for c, r in zip(confidence.tolist(), right.tolist(), strict=True):
        bins.setdefault(math.floor(scores.CALIBRATION_BINS * c), []).append((c, r))
    return sum(abs(sum(c for c, _ in b) - sum(r for _, r in b)) for b in bins.values()) / len(right)


def test_the_reliability_curve_gives_the_calibration_error():
    g = generator(1)
    logits = 3 * torch.randn(500, 4, generator=g, dtype=torch.float64)
    logits[:5, 0] = 1e4  # some are exactly sure
    probs, labels = torch.softmax(logits, -1), torch.randint(4, (500,), generator=g)
    confidence, chosen = probs.max(-1)
    bins = reliability(confidence, (chosen == labels).double())
    assert sum(b.count for b in bins) == 500
    expected = calibration_error(confidence, (chosen == labels).double())
    assert ece_of(bins) == pytest.approx(expected, abs=1e-12)
    p = Predictive(logits.unsqueeze(0), likelihoods.resolve("categorical"), {}, Key(0), plug_in=True)
    got = scored([("all", p, labels)])
    assert got.pooled["ece"] == pytest.approx(expected, abs=1e-12)
    assert float(got.scores["ece"]) == pytest.approx(expected, abs=1e-12)
    assert isinstance(got.reliability[0], Bin)


def with_test(clients, held=2):
    return [fp.Client(x[:-held], y[:-held], test=(x[-held:], y[-held:])) for x, y in clients]


def data(b=6, n=6):
    return with_test(population_data(b, n, 3, 2, 0.1)[0])


def test_every_client_is_judged_whoever_was_active():
    watch = fp.callbacks.Watch(last=1)
    population = fp.FedAvg(linear_model()).fit(
        data(), rounds=3, participation=fp.participation.Uniform(1), callbacks=[watch]
    )
    evaluation = fp.evaluate(population)
    assert list(evaluation.names) == list(population.names)
    for i, client in enumerate(data()):
        x, y = client.test
        p = population.predict(i, x)
        torch.testing.assert_close(float(evaluation.scores["nll"][i]), float(-p.log_prob(y).mean()))
        rmse = (p.mean - y).square().mean().sqrt()
        torch.testing.assert_close(float(evaluation.scores["rmse"][i]), float(rmse))
    assert watch.points[0]["rmse"] == pytest.approx(evaluation.summary()["rmse"], rel=1e-6)


METHODS = [
    lambda m: fp.FedSOUL(m, start="random", kernel="hmc", local_steps=2),
    lambda m: fp.FedRep(m),
    lambda m: fp.FedAvgFT(m),
]


@pytest.mark.parametrize("build", METHODS, ids=["FedSOUL", "FedRep", "FedAvgFT"])
def test_looking_changes_no_bit_of_a_run(build, tmp_path):
    def run(callbacks, out):
        method = build(linear_model())
        return method.fit(data(), rounds=6, participation=3, callbacks=callbacks, out=out)

    watch = fp.callbacks.Watch(every=1, last=3)
    alone, watched = run([], tmp_path / "a"), run([watch], tmp_path / "b")
    assert [p["round"] for p in watch.points] == [1, 2, 3, 4, 5, 6]
    for name, value in alone.published.items():
        assert torch.equal(value, watched.published[name])
    assert torch.equal(alone.store.slots, watched.store.slots)
    for name, value in alone.store.tensors.items():
        assert torch.equal(value, watched.store.tensors[name])
    costs = ("bytes_up", "bytes_down", "backbone_passes", "head_steps")
    assert {n: alone.totals[n] for n in costs} == {n: watched.totals[n] for n in costs}
    for a, b in zip(alone.history, watched.history, strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {
            k: v for k, v in b.items() if k != "seconds"
        }


def test_the_mean_of_the_last_rounds_and_a_watch_that_resumes():
    watch = fp.callbacks.Watch(last=2)
    watch.points = [{"round": r, "rmse": v, "seconds": 1.0} for r, v in ((1, 9.0), (9, 1.0), (10, 3.0))]
    assert watch.mean_of_last() == {"rmse": 2.0}
    again = fp.callbacks.Watch(last=2)
    again.restore(watch.state())
    assert again.points == watch.points
    again.points.append({"round": 11, "rmse": None, "seconds": 1.0})
    assert again.mean_of_last() == {"rmse": None}


def test_a_model_that_diverged_has_no_finite_score():
    population = fp.FedAvg(linear_model()).fit(data(), rounds=1)
    population.published["z"][:] = math.nan
    summary = fp.evaluate(population).summary()
    assert all(math.isnan(summary[n]) for n in ("rmse", "nll", "coverage"))
    head = nn.Linear(3, 2)
    x, y = torch.randn(4, 3, generator=generator(0)), torch.tensor([0, 1, 0, 1])
    population = fp.FedAvg(fp.Composition(None, head, "categorical")).fit(
        [fp.Client(x, y, test=(x, y))], rounds=1
    )
    population.published["z"][:] = math.nan
    summary = fp.evaluate(population).summary()
    assert all(math.isnan(summary[n]) for n in ("accuracy", "nll", "ece", "pooled_ece"))


def test_a_client_without_a_model_is_named_and_the_others_are_judged():
    x, y = torch.eye(3), torch.ones(3)
    clients = {"anna": fp.Client(x, y, test=(x, y)), "ben": fp.Client(x[:0], y[:0], test=(x, y))}
    model = linear_model()
    population = fp.FedRep(model, heads="exact").fit(clients, rounds=1)
    population.sites.store.entered[:] = False  # nobody was ever active
    evaluation = fp.evaluate(population)
    assert (list(evaluation.names), list(evaluation.unserved)) == (["anna"], ["ben"])


def test_features_computed_once_are_judged_as_features():
    body = seeded(nn.Linear(3, 2), 1).requires_grad_(False)
    head = seeded(nn.Linear(2, 1), 2)
    normal = fp.likelihoods.Normal(0.5)
    population = fp.FedSOUL(fp.Composition(body, head, normal)).fit(data(), rounds=3)
    assert population.federation.embedded
    evaluation = fp.evaluate(population)
    for i, client in enumerate(data()):
        x, y = client.test
        expected = float(-population.predict(i, x).log_prob(y).mean())
        assert float(evaluation.scores["nll"][i]) == pytest.approx(expected, rel=1e-5)


def test_a_split_that_is_not_there_is_an_error_before_the_first_round():
    population = fp.FedAvg(linear_model()).fit(data(), rounds=1)
    with pytest.raises(DataError, match="no validation data"):
        fp.evaluate(population, "validation")
    with pytest.raises(DataError, match="validation data to be judged on"):
        fp.FedAvg(linear_model()).fit(data(), rounds=1, callbacks=[fp.callbacks.Watch(split="validation")])
    with pytest.raises(SettingsError, match="every"):
        fp.callbacks.Watch(every=0)


# --- clients never in training ----------------------------------------------------------------


def test_new_clients_are_judged_in_the_way_each_method_allows():
    known, new = data(8)[:6], data(8)[6:]
    x, y = new[0].test
    soul = fp.FedSOUL(linear_model()).fit(known, rounds=5)
    both = evaluate_new(soul, new)
    assert float(both.without.scores["nll"][0]) == pytest.approx(
        float(-soul.new_client().predict(x).log_prob(y).mean()), rel=1e-5
    )
    own = soul.new_client(new[0].x, new[0].y).predict(x)
    assert float(both.own_data.scores["nll"][0]) == pytest.approx(float(-own.log_prob(y).mean()), rel=1e-5)
    first = evaluate_few(soul, new, 1)
    one = soul.new_client(new[0].x[:1], new[0].y[:1]).predict(x)
    assert float(first.scores["nll"][0]) == pytest.approx(float(-one.log_prob(y).mean()), rel=1e-5)
    none, all_of_them = evaluate_few(soul, new, 0), evaluate_few(soul, new, 10**6)
    torch.testing.assert_close(none.scores["nll"], both.without.scores["nll"], rtol=0, atol=0)
    torch.testing.assert_close(all_of_them.scores["nll"], both.own_data.scores["nll"], rtol=0, atol=0)
    rep = evaluate_new(fp.FedRep(linear_model(), heads="exact").fit(known, rounds=2), new)
    assert rep.without is None
    assert len(rep.own_data.names) == 2


def test_a_new_client_that_was_in_training_is_refused():
    population = fp.FedAvg(linear_model()).fit(data(), rounds=1)
    with pytest.raises(DataError, match="new client 1 is client 'client-3'"):
        evaluate_new(population, [data(8)[7], data()[3]])
    with pytest.raises(DataError, match="new client 0: give"):
        evaluate_new(population, [fp.Client(torch.eye(3), torch.ones(3))])


def test_new_clients_of_the_tasks_are_none_of_the_others():
    from fedpop.data.synthetic import SyntheticTask

    task = SyntheticTask(b=5, k=4, d=2)
    data, new = task.make(0), task.newcomers(0, 3)
    assert [len(c.y) for c in new] == [5, 5, 5]
    held = {tuple(row.tolist()) for c in data.clients for row in (*c.x, *c.test[0])}
    assert not any(tuple(row.tolist()) in held for c in new for row in (*c.x, *c.test[0]))
    # Drawn from the same population: with the true phi, each has a z of its own that explains its examples.
    for c in new:
        x, y = (torch.cat((a, b)).double() for a, b in zip((c.x, c.y), c.test, strict=True))
        f = x @ data.phi
        left = (y - f @ (torch.linalg.pinv(f) @ y)).square().sum() / (len(y) - task.d)
        # A mean of 53 squares of variance .1: six standard errors.
        assert abs(float(left) - task.variance) < 6 * task.variance * math.sqrt(2 / 53)
    again = task.make(0, validation=4)
    assert torch.equal(again.clients[2].x, data.clients[2].x)
    assert len(again.clients[0].validation[1]) == 4


def test_new_clients_whose_data_do_not_fit_are_an_error_not_a_method_without_an_offer() -> None:
    x = torch.ones(4, 3)
    model = linear_model()
    population = fp.FedRep(model, heads="exact").fit([(x, x[:, 0])], rounds=1)
    narrow = fp.Client(x[:, :2], x[:, 0], test=(x[:, :2], x[:, 0]))
    with pytest.raises(DataError, match="does not accept examples"):
        evaluate_new(population, [narrow])
