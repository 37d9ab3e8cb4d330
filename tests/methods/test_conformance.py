"""What every method promises, asked of each one in ``METHODS``: to register a method is to test it here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import DataError, SettingsError
from fedpop.methods import METHODS
from fedpop.methods.base import check_participation, usual_participation
from tests.apart import Apart
from tests.helpers import FRAME, generator, seeded
from tests.methods.conformance import (
    EVERYONE,
    MODELS,
    NAMES,
    SETTINGS,
    WIDE,
    Stage,
    able,
    clients,
    every,
    fit,
    fitted,
    joined,
    made,
    same,
)

# --- messages ----------------------------------------------------------------------------------


@every("linear", "softmax", participation=("any", "full"))
def test_two_halves_send_what_the_whole_cohort_sends(name: str, kind: str) -> None:
    method = made(name, kind)
    stage = Stage(method, kind)
    weights = torch.tensor(
        [1.0, 2.0, 0.5, 1.5, 1.0, 3.0, 0.7] if method.participation == "any" else [1.0] * 7
    )
    for _ in range(2):
        whole = stage.work(EVERYONE, weights)
        halves = [stage.work(EVERYONE[s], weights[s]) for s in (slice(0, 1), slice(1, None))]
        assert sum(h.total.count for h in halves) == whole.total.count == len(NAMES)
        for which in ("weighted", "plain", "named"):
            sums = [getattr(h.total, which) for h in halves]
            whole_sums = getattr(whole.total, which)
            same({n: sum(s[n] for s in sums) for n in whole_sums}, whole_sums)
        same(joined([stage.after(h) for h in halves]), stage.after(whole))
        assert whole.bytes_up == sum(h.bytes_up for h in halves)
        stage.run.train_round()


@every("softmax")
def test_bytes_up_are_those_of_the_messages(name: str, kind: str) -> None:
    method = made(name, kind)
    stage = Stage(method, kind)
    ids = EVERYONE[:1] if method.participation == "one" else EVERYONE
    for _ in range(3):
        done = stage.work(ids)
        vectors = done.total.weighted.values()
        assert done.bytes_up == len(ids) * sum(FRAME + v.numel() * v.element_size() for v in vectors)
        before = stage.run.totals["bytes_up"]
        stage.run.train_round()
        assert stage.run.totals["bytes_up"] - before == done.bytes_up


def holds(vector: Tensor, secret: Tensor) -> bool:
    """Whether the secret's numbers, or a multiple of them, are in the vector one after the other."""
    v, s = vector.flatten().double(), secret.flatten().double()
    if len(s) > len(v) or not bool(s.any()):
        return False
    windows = v.unfold(0, len(s), 1)
    if len(s) == 1:  # any number is a multiple of any other
        return bool(torch.isclose(windows, s, rtol=1e-9, atol=0).any())
    sizes = windows.norm(dim=1) * s.norm()
    return bool(((windows @ s).abs() >= (1 - 1e-12) * sizes)[sizes > 0].any())


def test_holds_can_tell() -> None:
    vector, secret = torch.tensor([0.0, 1.0, -2.0, 3.0]), torch.tensor([[1.0, -2.0]])
    assert holds(vector, secret)
    assert holds(vector, -0.3 * secret)
    assert holds(vector, torch.tensor([3.0]))
    assert not holds(vector, secret + torch.tensor([[0.0, 1e-4]]))
    assert not holds(vector, torch.tensor([2.9]))
    assert not holds(torch.zeros(4), secret)


@every("linear", "softmax", "curved", "network")
def test_private_state_is_in_no_encoded_message(name: str, kind: str) -> None:
    """Neither as it was before a round nor as it is after it, nor a multiple; questions before the rounds
    included."""
    apart = Apart(made(name, kind), clients(kind))
    seen: set[str] = set()
    for _ in range(2):
        before = {n: apart.state(n) for n in NAMES}
        apart.train_round()
        for site, _, _, vector in apart.traffic:
            for state in (before[site], apart.state(site)):
                for secret in set(apart.method.private) & set(state):
                    seen.add(secret)
                    rows = state[secret].reshape(-1, state[secret].shape[-1])
                    assert not holds(vector, state[secret])
                    assert not any(holds(vector, row) for row in rows)
    local = set().union(*(apart.state(n) for n in NAMES))
    assert seen == set(apart.method.private) & local or not apart.traffic


@pytest.mark.parametrize("name", METHODS)
def test_what_is_called_private_exists(name: str) -> None:
    seen: set[str] = set()
    for kind in able(name, *MODELS):
        stage = Stage(made(name, kind), kind, rounds=0)
        seen |= set(stage.after(stage.work(EVERYONE[:1])))
    assert set(METHODS[name].private) <= seen


# --- predictions -------------------------------------------------------------------------------


def mean_of(predictive: Any, kind: str) -> Tensor:
    out: Tensor = predictive.mean if kind == "linear" else predictive.probs
    return out


def predicts(predictive: Any, kind: str) -> bool:
    return bool(torch.isfinite(mean_of(predictive, kind)).all())


@every("linear", "softmax")
def test_everyone_can_predict(name: str, kind: str) -> None:
    """After one round in which most were absent, where that is allowed: with what is published alone."""
    population = fitted(name, kind, rounds=1)
    label = population.algorithm.label
    x = torch.randn(5, 3, generator=generator(9), dtype=WIDE)
    assert population.published["phi"].shape == (population.model.phi_layout.size,)
    for client in NAMES:
        assert predicts(population.predict(client, x), kind)
    own = clients(kind, seed=5)["cem"]
    assert predicts(population.new_client(*own).predict(x), kind)
    said = ""
    try:
        nobody = population.new_client().predict(x)
    except DataError as error:
        said = str(error)
    # It predicts, or says in a sentence which method has nothing to offer.
    assert (label in said and len(said.split()) > 5) if said else predicts(nobody, kind)


@every("softmax")
def test_a_saved_population_predicts_the_same(name: str, kind: str, tmp_path: Path) -> None:
    population = fitted(name, kind)
    again = fp.load(population.save(tmp_path))
    x = torch.randn(5, 3, generator=generator(9), dtype=WIDE)
    assert type(again.algorithm) is METHODS[name]
    assert again.algorithm.describe() == population.algorithm.describe()
    for client in NAMES:
        one, other = (mean_of(p.predict(client, x), kind) for p in (population, again))
        assert torch.equal(one, other)
    own = clients(kind, seed=5)["cem"]
    one, other = (mean_of(p.new_client(*own).predict(x), kind) for p in (population, again))
    assert torch.equal(one, other)


# --- rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_the_rule_of_participation_is_enforced(name: str) -> None:
    kind = able(name, "linear", "softmax")[0]
    allowed = METHODS[name].participation
    assert allowed in ("any", "full", "one")
    assert usual_participation(METHODS[name]) == (
        fp.participation.Uniform(1) if allowed == "one" else fp.participation.Everyone()
    )
    for rule, fits in (
        (fp.participation.Everyone(), allowed in ("any", "full")),
        (fp.participation.Uniform(2), allowed == "any"),
        (fp.participation.Bernoulli(0.5), allowed == "any"),
        (fp.participation.Uniform(1), allowed in ("any", "one")),
    ):
        if fits:
            check_participation(made(name, kind), rule)
        else:
            with pytest.raises(SettingsError, match="participation="):
                fit(name, kind, participation=rule)


@pytest.mark.parametrize("name", METHODS)
def test_passes_are_counted_only_through_a_backbone_that_learns(name: str) -> None:
    """Features of a frozen one are computed once, for every method alike."""
    kind = able(name, "linear", "softmax")[0]
    given = clients(kind)
    assert fit(name, kind, participation=None, rounds=4).totals["backbone_passes"] > 0
    heads = {
        "linear": (nn.Linear(3, 1, bias=False), fp.likelihoods.Normal(0.5)),
        "softmax": (nn.Linear(3, 3), "categorical"),
    }
    head, likelihood = heads[kind]
    frozen = fp.Composition(None, seeded(head.to(WIDE), 2), likelihood)
    method = METHODS[name](frozen, **SETTINGS.get(name, {}))
    totals = method.fit(given, rounds=4, progress=False).totals
    assert totals["backbone_passes"] == 0
    assert totals["head_steps"] > 0


@pytest.mark.parametrize("name", METHODS)
def test_a_compressor_works_or_is_refused(name: str) -> None:
    if not METHODS[name].compressed:
        with pytest.raises(SettingsError, match=r"compress"):
            made(name, "softmax", compressor="natural")
        return
    stage, plain = (Stage(made(name, "softmax", **c), "softmax") for c in ({"compressor": "natural"}, {}))
    seen = set()
    for _ in range(3):
        done, whole = (s.work(EVERYONE[:1]).total.plain for s in (stage, plain))
        for n in set(METHODS[name].compressed) & set(done):
            # Powers of two is what the natural compressor rounds to.
            powers = torch.log2(done[n].abs()[done[n] != 0])
            assert torch.equal(powers, powers.round())
            assert done[n].shape == whole[n].shape
            seen.add(n)
        stage.run.train_round()
        plain.run.train_round()
    assert seen
    assert all(bool(torch.isfinite(t).all()) for t in stage.run.server.values() if t.is_floating_point())


@every("softmax")
def test_clients_with_one_class_only_are_clients_like_any_other(name: str, kind: str) -> None:
    data = {n: (x, torch.full_like(y, i % 3)) for i, (n, (x, y)) in enumerate(clients(kind).items())}
    population = made(name, kind).fit(data, rounds=3, progress=False)
    assert all(not metrics["left_out"] for metrics in population.history)
    for client, (x, _) in data.items():
        if len(x):
            probs = population.predict(client, x).probs
            torch.testing.assert_close(probs.sum(-1), torch.ones_like(probs[:, 0]))
