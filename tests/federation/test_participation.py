"""Who takes part: rules, rates and weights."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.federation.participation import rules as participation
from fedpop.federation.participation.rules import Participation, Roster, resolve
from fedpop.keys import Key, units_of

ROUNDS = 400


def joined(rule: Participation, clients: int) -> torch.Tensor:
    """``[rounds, clients]``: who was there."""
    out = torch.zeros(ROUNDS, clients)
    for k in range(ROUNDS):
        out[k, rule.draw(Roster.numbered(clients), Key(0).at(round=k)).ids] = 1
    return out


def test_everyone() -> None:
    active = fp.participation.Everyone().draw(Roster.numbered(4), Key(0))
    assert active.ids.tolist() == [0, 1, 2, 3]
    assert active.weights.tolist() == [1.0] * 4
    assert active.ratio


@pytest.mark.parametrize("p", [0.3, (0.1, 0.5, 0.9, 1.0)])
def test_bernoulli_rates_and_independence(p: float | tuple[float, ...]) -> None:
    """Rates within five binomial standard errors; pairs join together at the product of their rates."""
    there = joined(fp.participation.Bernoulli(p), 4)
    rate = torch.as_tensor(p).expand(4)
    assert bool(((there.mean(0) - rate).abs() <= 5 * (rate * (1 - rate) / ROUNDS).sqrt() + 1e-9).all())
    both = (there[:, 0] * there[:, 1]).mean()
    product = rate[0] * rate[1]
    assert abs(both - product) < 5 * (product * (1 - product) / ROUNDS).sqrt()


def test_bernoulli_weights() -> None:
    one = fp.participation.Bernoulli(0.5).draw(Roster.numbered(6), Key(1))
    assert one.ratio
    assert set(one.weights.tolist()) == {1.0}
    p = (0.2, 0.5, 1.0)
    each = fp.participation.Bernoulli(p).draw(Roster.numbered(3), Key(1))
    assert not each.ratio
    torch.testing.assert_close(each.weights, 1 / torch.tensor(p)[each.ids])
    inverse = fp.participation.Bernoulli(0.5, weights="inverse").draw(Roster.numbered(6), Key(1))
    assert set(inverse.weights.tolist()) == {2.0}


def test_uniform_draws_have_a_fixed_size_and_equal_rates() -> None:
    there = joined(fp.participation.Uniform(2), 5)
    assert bool((there.sum(1) == 2).all())
    assert bool(((there.mean(0) - 0.4).abs() < 5 * (0.4 * 0.6 / ROUNDS) ** 0.5).all())


def test_draws_are_keyed() -> None:
    rule = fp.participation.Uniform(3)
    assert torch.equal(rule.draw(Roster.numbered(50), Key(0)).ids, rule.draw(Roster.numbered(50), Key(0)).ids)
    assert not torch.equal(
        rule.draw(Roster.numbered(50), Key(0)).ids, rule.draw(Roster.numbered(50), Key(1)).ids
    )
    assert not torch.equal(
        rule.draw(Roster.numbered(50), Key(0)).ids, rule.draw(Roster.numbered(50), Key(0).at(round=1)).ids
    )


def test_short_forms() -> None:
    assert resolve(None) == fp.participation.Everyone()
    assert resolve(3) == fp.participation.Uniform(3)
    assert resolve(0.3) == fp.participation.Bernoulli(0.3)
    assert resolve(fp.participation.Uniform(2)) == fp.participation.Uniform(2)
    with pytest.raises(SettingsError, match="truth value"):
        resolve(True)


@pytest.mark.parametrize("p", [0, 0.0, -0.1, 1.1, float("nan"), (0.5, 0.0), (0.5, 2.0)])
def test_impossible_probabilities_are_refused(p: float | tuple[float, ...]) -> None:
    with pytest.raises(SettingsError, match=r"p.* must be a number in \(0, 1\]"):
        fp.participation.Bernoulli(p)


def test_b_over_a_weights_with_unequal_probabilities_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"biased.*inverse"):
        fp.participation.Bernoulli((0.2, 0.4), weights="ratio")
    with pytest.raises(SettingsError, match="inverse, ratio"):
        fp.participation.Bernoulli(0.2, weights="other")


def test_rules_that_do_not_fit_the_federation_are_refused() -> None:
    with pytest.raises(SettingsError, match="3 participation probabilities for 4 clients"):
        fp.participation.Bernoulli((0.1, 0.2, 0.3)).check(Roster.numbered(4))
    with pytest.raises(SettingsError, match="5 active clients asked for, but there are only 4"):
        fp.participation.Uniform(5).check(Roster.numbered(4))
    with pytest.raises(SettingsError, match="size must be a whole number, 1 or more"):
        fp.participation.Uniform(0)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (None, fp.participation.Everyone()),
        (0.5, fp.participation.Bernoulli(0.5)),
        (1.0, fp.participation.Bernoulli(1.0)),
        (np.float32(0.5), fp.participation.Bernoulli(0.5)),
        (3, fp.participation.Uniform(3)),
        (np.int64(3), fp.participation.Uniform(3)),
        ([0.5, 1.0], fp.participation.Bernoulli((0.5, 1.0))),
        (fp.participation.Uniform(1), fp.participation.Uniform(1)),
    ],
    ids=["none", "fraction", "one point zero", "numpy fraction", "number", "numpy number", "list", "rule"],
)
def test_what_a_bare_number_means(said: object, meant: Participation) -> None:
    assert resolve(said) == meant  # type: ignore[arg-type]


def test_a_probability_of_one_is_everyone() -> None:
    """The same clients under the same weights, in every round."""
    for k in range(20):
        one, all_ = (
            rule.draw(Roster.numbered(5), Key(0).at(round=k))
            for rule in (resolve(1.0), fp.participation.Everyone())
        )
        assert torch.equal(one.ids, all_.ids)
        assert torch.equal(one.weights, all_.weights)
        assert one.ratio == all_.ratio


# --- a few of very many ------------------------------------------------------------------------


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(participation, "LARGEST_DRAWN_EACH", 10)


RATES = torch.cat((torch.full((20,), 0.02), torch.full((20,), 0.1)))


@pytest.mark.parametrize("p", [0.05, tuple(RATES.tolist())], ids=["one", "each"])
def test_sparse_bernoulli_rates_and_independence(few_are_many: None, p: float | tuple[float, ...]) -> None:
    """Rates, and pairs of neighbours, within six binomial standard errors: a chance of 2e-9 each."""
    rounds, clients = 1000, 40
    there = torch.zeros(rounds, clients)
    for k in range(rounds):
        active = fp.participation.Bernoulli(p).draw(Roster.numbered(clients), Key(0).at(round=k))
        assert active.ids.tolist() == sorted(set(active.ids.tolist()))
        there[k, active.ids] = 1
        if isinstance(p, tuple):
            torch.testing.assert_close(active.weights, 1 / RATES[active.ids])
    rate = torch.as_tensor(p).expand(clients)
    assert bool(((there.mean(0) - rate).abs() <= 6 * (rate * (1 - rate) / rounds).sqrt()).all())
    for lag in (1, 2, 7):  # the pairs of a lag together
        both = (there[:, lag:] * there[:, :-lag]).sum(1)
        expected = float((rate[lag:] * rate[:-lag]).sum())
        assert abs(float(both.mean()) - expected) < 6 * float(both.std()) / rounds**0.5
    size = there.sum(1)
    variance = float((rate * (1 - rate)).sum())
    assert float(size.var()) == pytest.approx(variance, rel=6 * (2 / rounds) ** 0.5 * 1.5)


def test_sparse_uniform_draws_all_pairs_equally_often(few_are_many: None) -> None:
    rounds, clients = 1500, 10
    pairs = torch.zeros(clients, clients)
    for k in range(rounds):
        a, b = fp.participation.Uniform(2).draw(Roster.numbered(clients), Key(0).at(round=k)).ids.tolist()
        assert a < b
        pairs[a, b] += 1
    counts = pairs[torch.triu_indices(clients, clients, 1).unbind()]
    p = 1 / len(counts)
    assert bool(((counts / rounds - p).abs() < 6 * (p * (1 - p) / rounds) ** 0.5).all())


@pytest.mark.parametrize("size", [1, 2, 900, 12_500])
def test_sparse_draws_are_distinct_and_keyed(size: int) -> None:
    clients = 100_000
    ids = fp.participation.Uniform(size).draw(Roster.numbered(clients), Key(3)).ids
    assert len(torch.unique(ids)) == size
    assert int(ids.min()) >= 0
    assert int(ids.max()) < clients
    assert torch.equal(ids, fp.participation.Uniform(size).draw(Roster.numbered(clients), Key(3)).ids)
    assert not torch.equal(
        ids, fp.participation.Uniform(size).draw(Roster.numbered(clients), Key(3, round=1)).ids
    )


def test_a_draw_for_very_many_asks_only_for_as_many_numbers_as_take_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = []
    bits = Key.bits

    def counted(self: Key, clients: torch.Tensor, count: int, start: int = 0) -> torch.Tensor:
        drawn.append(len(clients) * count)
        return bits(self, clients, count, start)

    monkeypatch.setattr(Key, "bits", counted)
    for rule in (fp.participation.Uniform(1000), fp.participation.Bernoulli(0.001)):
        drawn.clear()
        assert 800 < len(rule.draw(Roster.numbered(1_000_000), Key(0)).ids) < 1200
        assert sum(drawn) < 10_000


def test_rules_describe_themselves() -> None:
    assert fp.participation.Uniform(3).describe() == {"kind": "Uniform", "size": 3}
    rule = fp.participation.Bernoulli((0.5, 0.25))
    rule.draw(Roster.numbered(2), Key(0))
    assert json.loads(json.dumps(rule.describe())) == {
        "kind": "Bernoulli",
        "p": [0.5, 0.25],
        "weights": None,
    }


# --- probabilities by name -----------------------------------------------------------------------


def test_probabilities_by_name_are_those_by_position() -> None:
    """In whatever order they are told; sparse draws of very many included."""
    names = [f"client {i}" for i in range(60)]
    each = [0.1 + 0.01 * i for i in range(60)]
    roster = fp.Federation.of({n: ([[1.0]], [0.0]) for n in names}).roster
    told = dict(reversed(list(zip(names, each, strict=True))))
    by_name, by_place = fp.participation.Bernoulli(told), fp.participation.Bernoulli(each)
    assert by_name.expected(roster) == pytest.approx(sum(each))
    by_name.check(roster)
    for k in range(5):
        one, other = (r.draw(roster, Key(3, round=k)) for r in (by_name, by_place))
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.weights, other.weights)
        assert not one.ratio
    assert resolve(told) == by_name


def test_a_sites_name_stands_for_its_units() -> None:
    names = ["a/1", "a/2", "b/1"]
    roster = Roster(units_of(names), names, units_of(["a", "a", "b"]))
    rule = fp.participation.Bernoulli({"a": 0.25, "b": 0.5, "a/2": 1.0})
    assert rule.probabilities(roster).tolist() == [0.25, 1.0, 0.5]
    rule.check(roster)


def test_names_that_do_not_fit_are_refused() -> None:
    roster = fp.Federation.of({n: ([[1.0]], [0.0]) for n in ("anna", "ben")}).roster
    with pytest.raises(SettingsError, match="no probability for client 'ben'"):
        fp.participation.Bernoulli({"anna": 0.5}).check(roster)
    with pytest.raises(SettingsError, match="there is no client 'cleo'"):
        fp.participation.Bernoulli({"anna": 0.5, "ben": 0.5, "cleo": 0.5}).check(roster)
    fp.participation.Bernoulli({"anna": 0.5, "ben": 0.5, "cleo": 0.5}).check(replace(roster, growing=True))
    with pytest.raises(SettingsError, match=r"p\['ben'\] must be a number in \(0, 1\]"):
        fp.participation.Bernoulli({"anna": 0.5, "ben": 0.0})
    with pytest.raises(SettingsError, match="p is empty"):
        fp.participation.Bernoulli({})
    with pytest.raises(SettingsError, match="biased"):
        fp.participation.Bernoulli({"anna": 0.5, "ben": 0.4}, weights="ratio")
