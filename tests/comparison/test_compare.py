"""Comparisons: the same draws and budgets for all, nothing run twice, nobody left out in silence."""

import json
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.cli import main
from fedpop.comparison import run
from fedpop.comparison.budget import rounds_within
from fedpop.comparison.run import details_path
from fedpop.comparison.terms import Terms
from fedpop.errors import CheckpointError, DataError, SettingsError
from fedpop.federation.participation.rules import Uniform
from fedpop.keys import Key
from fedpop.report.results import BESIDE, COSTS, Results
from fedpop.run.members import active_units
from tests.crash import Crash
from tests.helpers import generator, linear_model, population_data

ROUNDS = 12


def data(b=8, n=8):
    drawn = population_data(b, n, 3, 2, 0.1)[0]
    return [fp.Client(x[:5], y[:5], test=(x[5:], y[5:])) for x, y in drawn]


def drawn_of(rule, clients, seed, round):
    """Positions of those who take part."""
    return active_units(rule, fp.Federation.of(clients), Key(seed), round).ids.tolist()


def methods():
    model, local = linear_model(), fp.LocalSGD(rate=0.05)
    return [fp.FedSOUL(model), fp.FedAvg(model, local=local), fp.FedRep(model, heads="exact")]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    known, new = data(10)[:8], data(10)[8:]
    result = fp.compare(
        methods(), known, rounds=ROUNDS, seeds=2, participation=4, newcomers=new, every=4, last=3, out=folder
    )
    return result, folder


def test_records_have_scores_costs_and_files_beside_them(compared):
    _, folder = compared
    records = Results.open(folder).records
    assert len(records) == 6
    for r in records:
        assert r["experiment"] == "compare"
        assert set(r["cost"]) == {*COSTS, *BESIDE}
        assert r["cost"]["rounds"] == ROUNDS
        assert {"test_rmse", "test_rmse_worst", "test_nll", "test_coverage", "last_rmse", "new_rmse"} <= set(
            r["metrics"]
        )
        details = json.loads(details_path(folder, r["method"], r["seed"]).read_text())
        assert [p["round"] for p in details["points"]] == [4, 8, 10, 11, 12]
        tail = [p["rmse"] for p in details["points"][-3:]]
        assert r["metrics"]["last_rmse"] == pytest.approx(sum(tail) / 3, rel=1e-12)
        assert len(details["scores"]["rmse"]) == 8
        mean = sum(details["scores"]["rmse"]) / 8
        assert r["metrics"]["test_rmse"] == pytest.approx(mean, rel=1e-12)
    flags = {r["method"]: r["metrics"]["plug_in"] for r in records}
    assert flags == {"FedSOUL": 0.0, "FedAvg": 1.0, "FedRep": 1.0}
    without = {r["method"]: r["metrics"].get("new_without_rmse") is not None for r in records}
    assert without == {"FedSOUL": True, "FedAvg": True, "FedRep": False}


def test_a_method_compared_is_the_method_run_alone(compared):
    result, _ = compared
    alone = fp.FedAvg(linear_model(), local=fp.LocalSGD(rate=0.05)).fit(
        data(10)[:8], rounds=ROUNDS, seed=1, participation=4
    )
    expected = fp.evaluate(alone).summary()["rmse"]
    mine = next(r for r in result.of_method("FedAvg") if r["seed"] == 1)
    assert mine["metrics"]["test_rmse"] == expected


def test_the_print_is_a_table_that_says_who_is_plug_in(compared):
    lines = str(compared[0]).splitlines()
    assert len(lines) == 4
    assert lines[0].split()[:3] == ["method", "active", "rounds"]
    assert lines[1].startswith("FedSOUL ")
    assert lines[2].startswith("FedAvg *")
    assert lines[2].split()[2:4] == ["4", "12"]
    assert len(max(lines, key=len)) <= 150


def test_coverage_with_thetas_uncertainty_has_a_column_where_it_exists(tmp_path):
    """Forty clients of five examples determine eleven parameters well enough; FedAvg has no information."""
    clients = fp.hold_out(population_data(40, 6, 4, 2, 0.3)[0], test=0.4, seed=0)
    model = linear_model(4, 2, 0.3)
    soul = fp.FedSOUL(model)
    result = fp.compare([soul, fp.FedAvg(model)], clients, rounds=90, seeds=1, out=tmp_path)
    record = result.of_method("FedSOUL")[0]["metrics"]
    population = soul.fit(clients, rounds=90, seed=0)
    alone = fp.evaluate(population, theta_uncertainty=True)
    assert record["theta_coverage"] == pytest.approx(float(alone.scores["coverage"].mean()))
    by_hand = []
    for i in range(40):
        own = population.federation.cohort(torch.tensor([i]), population.device, "test")
        low, high = population.predict(i, own.x, theta_uncertainty=True).interval(0.9)
        y = own.y.flatten()
        by_hand.append(float(((y >= low) & (y <= high)).float().mean()))
    assert sum(by_hand) / 40 == pytest.approx(record["theta_coverage"], abs=0.02)
    assert record["theta_coverage"] >= record["test_coverage"]
    assert "theta_coverage" not in result.of_method("FedAvg")[0]["metrics"]
    table = (tmp_path / "results.md").read_text()
    assert "theta too" in table
    head, first, second, *_ = str(result).splitlines()
    assert "theta too, %" in head
    assert f"{100 * record['theta_coverage']:.1f}" in first
    assert " - " in second


def test_the_page_stands_alone_and_has_every_figure(compared):
    _, folder = compared
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 8  # three axes and NLL, two methods client by client, coverage, width
    for outside in ('src="http', "<link", "url(http", "<script"):
        assert outside not in page
    table = (folder / "results.md").read_text()
    assert "## Cost" in table
    assert "| FedAvg |" in table
    before = (folder / "results.md").read_bytes()
    main(["report", str(folder)])
    assert (folder / "results.md").read_bytes() == before


def test_what_is_there_is_not_run_again_unless_its_settings_changed(compared, tmp_path, monkeypatch):
    ran = []
    inner = run.run_one

    def counted(source, entry, *rest):
        ran.append((entry.label, rest[1]))
        return inner(source, entry, *rest)

    monkeypatch.setattr(run, "run_one", counted)
    two = methods()[1:]
    settings = {"rounds": 2, "last": 1, "every": 2, "out": tmp_path}
    fp.compare(two, data(), **settings)
    with pytest.raises(CheckpointError, match="resume=True"):
        fp.compare(two, data(), **settings)
    ran.clear()
    fp.compare(two, data(), resume=True, seeds=2, **settings)
    assert ran == [("FedAvg", 1), ("FedRep", 1)]
    ran.clear()
    other = [fp.FedAvg(linear_model(), local=fp.LocalSGD(rate=0.01)), two[1]]
    fp.compare(other, data(), resume=True, seeds=2, **settings)
    assert ran == [("FedAvg", 0), ("FedAvg", 1)]
    with pytest.raises(CheckpointError, match=r"another comparison \(rounds differ"):
        fp.compare(two, data(), resume=True, **(settings | {"rounds": 3}))


def test_a_run_that_was_interrupted_goes_on_in_its_midst(tmp_path, monkeypatch):
    """To the numbers of one that never was: points on the way, bytes and scores; nothing is left of it."""
    settings = {"rounds": 40, "last": 2, "every": 3, "seeds": 2}
    model = linear_model()
    two = [fp.FedAvg(model), fp.FedRep(model, heads="exact")]
    whole = fp.compare(two, data(), out=tmp_path / "whole", **settings)
    look, rounds, until = run.Looks.after_round, [], [60]

    def dies(self, now, metrics):
        rounds.append(now.round)
        if len(rounds) == until[0]:
            raise Crash
        return look(self, now, metrics)

    monkeypatch.setattr(run.Looks, "after_round", dies)
    with pytest.raises(Crash):
        fp.compare(two, data(), out=tmp_path / "cut", **settings)
    assert [p.name for p in (tmp_path / "cut" / "runs").iterdir()] == [
        run.run_path(tmp_path, "FedRep", 0).name
    ]
    rounds.clear()
    until[0] = 10**6
    again = fp.compare(two, data(), out=tmp_path / "cut", resume=True, **settings)
    assert rounds[0] == 19  # the twentieth was under way, the last checkpoint two rounds before
    assert len(rounds) == 22 + 2 * 40
    assert not (tmp_path / "cut" / "runs").exists()
    for one, other in zip(whole.records, again.records, strict=True):
        assert one["metrics"] == other["metrics"]
        assert one["cost"]["bytes_up"] == other["cost"]["bytes_up"]
    for path in (tmp_path / "whole" / "details").glob("*seed*.json"):
        points, others = (
            [{k: v for k, v in p.items() if k != "seconds"} for p in json.loads(f.read_text())["points"]]
            for f in (path, tmp_path / "cut" / "details" / path.name)
        )
        assert points == others
    # Without resume nothing old is gone on with.
    (tmp_path / "new" / "runs" / "old").mkdir(parents=True)
    fp.compare(two[:1], data(), out=tmp_path / "new", rounds=1, last=0)
    assert not (tmp_path / "new" / "runs").exists()


def test_no_mean_is_over_old_and_new_settings(tmp_path):
    settings = {"rounds": 2, "last": 1, "every": 2, "out": tmp_path}
    model = linear_model()
    fp.compare([fp.FedAvg(model), fp.FedRep(model, heads="exact")], data(), seeds=3, **settings)
    other = fp.FedAvg(model, local=fp.LocalSGD(rate=0.02))
    result = fp.compare([other], data(), seeds=1, resume=True, **settings)
    found = [(r["method"], r["seed"], r["config"].get("local", {}).get("rate")) for r in result.records]
    assert found == [("FedAvg", 0, 0.02), *[("FedRep", s, None) for s in range(3)]]
    assert "FedAvg: 1 of 3 seeds only" in str(result)
    assert "FedAvg: 1 of 3 seeds only" in (tmp_path / "results.md").read_text()


def test_other_new_clients_are_another_comparison(tmp_path):
    known, new = data(10)[:8], data(10)[8:]
    settings = {"rounds": 1, "last": 0, "out": tmp_path, "resume": True}
    fp.compare([fp.FedAvg(linear_model())], known, newcomers=new, **settings)
    moved = [fp.Client(c.x, c.y + 1, test=c.test) for c in new]
    with pytest.raises(CheckpointError, match="another comparison"):
        fp.compare([fp.FedAvg(linear_model())], known, newcomers=moved, **settings)


def test_what_a_method_could_not_do_is_told_beside_its_scores(tmp_path):
    known, new = data(10)[:8], data(10)[8:]
    known[2] = fp.Client(known[2].x[:0], known[2].y[:0], test=known[2].test)
    known[3] = fp.Client(1e30 * known[3].x, known[3].y, test=known[3].test)
    new[0] = fp.Client(new[0].x[:0], new[0].y[:0], test=new[0].test)
    fast = fp.LocalSGD(epochs=5, rate=0.01)
    head = fp.LocalSGD(rate=1e-3)
    model = linear_model()
    everyone = fp.FedAvg(model, local=fast)
    some = fp.FedPer(model, local=fp.LocalSGD(rate=1e-3), newcomer=head)
    result = fp.compare(
        [everyone, some], known, rounds=2, participation=Uniform(2), newcomers=new, out=tmp_path
    )
    drawn = {i for r in range(2) for i in drawn_of(Uniform(2), known, 0, r)}
    assert 2 not in drawn  # it has no data and took no part: nothing for it
    told = str(result)
    assert "FedPer: 1 client(s) for whom it has no model" in told
    assert "FedPer: 1 new client(s) for whom it has no model" in told
    assert "FedAvg: 1 client" not in told
    whole = fp.compare([everyone], known, rounds=2)
    assert "FedAvg: 2 update(s) that were not finite" in str(whole)


# --- fairness ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listed(Uniform):
    """Remembers whom it drew."""

    drawn: list = field(default_factory=list)

    def draw(self, roster, key):
        active = super().draw(roster, key)
        self.drawn.append((key.seed, key.round, tuple(active.ids.tolist())))
        return active


def test_the_same_clients_take_part_whatever_the_method():
    seen = {}
    for method in methods():
        rule = Listed(3)
        fp.compare([method], data(), rounds=5, seeds=[0, 4], participation=rule, last=0)
        seen[method.label] = rule.drawn
    assert len(set(map(str, seen.values()))) == 1
    assert len(seen["FedAvg"]) == 10
    for seed, round, ids in seen["FedAvg"]:
        assert tuple(drawn_of(Uniform(3), data(), seed, round)) == ids
    assert len({ids for _, _, ids in seen["FedAvg"]}) > 1


@dataclass(frozen=True, kw_only=True)
class Everybody(fp.FedAvg):
    name = "Everybody"
    participation = "full"


@dataclass(frozen=True, kw_only=True)
class Relay(fp.FedAvg):
    name = "Relay"
    participation = "one"


def test_methods_with_a_rule_of_their_own_keep_it_and_the_table_says_so():
    model = linear_model()
    result = fp.compare(
        [fp.FedAvg(model), Everybody(model), Relay(model)], data(), rounds=2, participation=3, last=0
    )
    who = {line.split()[0]: line.split()[2] for line in str(result).splitlines()[1:]}
    assert who == {"FedAvg": "3", "Everybody": "all", "Relay": "1"}
    passes = {m: result.mean(m, "backbone_passes", "cost") for m in result.methods}
    assert passes == {"FedAvg": 2 * 3 * 5, "Everybody": 2 * 8 * 5, "Relay": 2 * 5}


@dataclass(frozen=True, kw_only=True)
class Coin(fp.FedAvg):
    """Works in every other round only."""

    name = "Coin"

    def local_round(self, round, cohort, local):
        answer = super().local_round(round, cohort, local)
        return replace(answer, cost={**answer.cost, "backbone_passes": 0.0}) if round.number % 2 else answer


def test_a_budget_of_passes_is_spent_and_not_exceeded():
    model = linear_model()
    sizes = (3, 9, 4, 6, 2, 8, 5, 7)
    g = generator(0)
    clients = []
    for n in sizes:
        x, y = torch.randn(n, 3, generator=g), torch.randn(n, generator=g)
        clients.append(fp.Client(x, y, test=(x, y)))
    three = {
        "one": fp.FedAvg(model),
        "three": fp.FedAvg(model, local=fp.LocalSGD(epochs=3)),
        "rep": fp.FedRep(model, heads="exact"),
        "soul": fp.FedSOUL(model),
    }
    budget = 400
    result = fp.compare(three, clients, passes=budget, participation=3, last=0, every=1000)
    for name, price in {"one": 1, "three": 3, "rep": 4 / 3, "soul": 1}.items():
        spent, rounds = (result.mean(name, n, "cost") for n in ("backbone_passes", "rounds"))
        assert spent <= budget * (1 + 1e-9)
        # The next round would have been too much.
        next_one = sum(sizes[i] for i in drawn_of(Uniform(3), clients, 0, int(rounds)))
        assert spent + price * next_one > budget
    assert result.mean("three", "rounds", "cost") < result.mean("one", "rounds", "cost")


def test_rounds_that_differ_in_price_are_counted():
    federation = fp.Federation.of(data())
    method = Coin(linear_model())
    # Every other round costs 8 * 5 passes: rounds 0, 2, ..., 48, and then 49 for nothing.
    assert rounds_within(method, federation, 1000, 0, fp.participation.Everyone()) == 50
    result = fp.compare([method], data(), passes=1000, last=0)
    assert result.mean("Coin", "backbone_passes", "cost") == 1000


@pytest.mark.parametrize("p", [0.2, 0.5])
def test_l2gd_spends_its_budget_whatever_its_first_coins(p, tmp_path):
    # Three coins that agree must not be taken for all of them; and the last rounds are the last rounds.
    method = fp.L2GD(linear_model(), p=p)
    result = fp.compare([method], data(), passes=200, seeds=5, every=1000, last=3, out=tmp_path)
    coins = set()
    for r in result.records:
        assert r["cost"]["backbone_passes"] == 200
        rounds = int(r["cost"]["rounds"])
        points = result.details["L2GD", r["seed"]]["points"]
        assert [q["round"] for q in points] == [rounds - 2, rounds - 1, rounds]
        coins.add(rounds)
    assert len(coins) > 1


def test_batches_that_are_not_the_same_share_of_everyone_are_counted():
    g = generator(0)
    clients = []
    for n in (2, 2, 2, 2, 40):
        x, y = torch.randn(n, 3, generator=g), torch.randn(n, generator=g)
        clients.append(fp.Client(x, y, test=(x, y)))
    for method in (
        fp.QLSD(linear_model(), batch=2, step=1e-4),
        fp.FedSOUL(
            linear_model(),
            phi_step=fp.steps.PhiStep(batch=2),
            chain=fp.chains.Chain(rao_blackwell=False),
            start="random",
        ),
    ):
        for seed in range(2):
            rounds = rounds_within(method, fp.Federation.of(clients), 100, seed, Uniform(1))
            spent = [
                method.fit(clients, rounds=r, seed=seed, participation=Uniform(1)).totals["backbone_passes"]
                for r in (rounds, rounds + 1)
            ]
            assert spent[0] <= 100 < spent[1]


def test_budgets_that_buy_nothing_are_refused():
    model = linear_model()
    with pytest.raises(SettingsError, match="does not pay for one round of FedAvg, which takes 40"):
        fp.compare([fp.FedAvg(model)], data(), passes=39)
    frozen = fp.Composition(None, nn.Linear(3, 1), fp.likelihoods.Normal(1.0))
    with pytest.raises(SettingsError, match="give the budget in rounds"):
        fp.compare([fp.FedSOUL(frozen)], data(), passes=100)
    with pytest.raises(SettingsError, match="not both"):
        Terms(rounds=1, passes=1)


def test_new_clients_are_in_no_message_and_no_cohort(compared, monkeypatch):
    seen = set()
    inner = fp.FedAvg.local_round

    def spy(self, round, cohort, local):
        seen.update(map(tuple, cohort.x.tolist()))
        return inner(self, round, cohort, local)

    monkeypatch.setattr(fp.FedAvg, "local_round", spy)
    known, new = data(10)[:8], data(10)[8:]
    fp.compare([fp.FedAvg(linear_model())], known, rounds=2, newcomers=new, last=0)
    assert len(seen) == 8 * 5
    held = [c.test[0] for c in (*new, *known)] + [c.x for c in new]  # nor are test examples
    assert not any(tuple(row) in seen for row in torch.cat(held).tolist())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda: ([fp.FedAvg(linear_model())] * 2, data()), "two methods are called FedAvg"),
        (lambda: ([], data()), "no method to compare"),
        (lambda: (["FedAvg"], data()), "not 'FedAvg'"),
        (lambda: (methods(), population_data(4, 5, 3, 2, 0.1)[0]), "hold_out"),
    ],
)
def test_comparisons_that_cannot_be_made(given, told):
    with pytest.raises((SettingsError, DataError), match=told):
        fp.compare(*given(), rounds=1)


def test_examples_set_aside_are_each_clients_own_and_drawn_by_the_seed():
    clients = {f"c{n}": (torch.arange(n * 2.0).view(n, 2) + 100 * n, torch.ones(n)) for n in (1, 2, 10)}
    one, two = (fp.hold_out(clients, test=0.3, validation=0.2, seed=s) for s in (0, 1))
    again = fp.hold_out(clients, test=0.3, validation=0.2, seed=0)
    assert one.fingerprint() == again.fingerprint() != two.fingerprint()
    assert {s: p.sizes.tolist() for s, p in one.splits.items()} == {
        "train": [1, 1, 5], "validation": [0, 0, 2], "test": [0, 1, 3]
    }  # fmt: skip
    rows = torch.cat([p.x for p in one.splits.values()])
    assert sorted(rows[:, 0].tolist()) == sorted(torch.cat([x for x, _ in clients.values()])[:, 0].tolist())
    with pytest.raises(DataError, match="already have"):
        fp.hold_out(one)
