"""Ditto: FedAvg's w to the bit; v between the client's own optimum and w, in closed form on quadratics."""

from typing import Any

import pytest
import torch

import fedpop as fp
from fedpop.client import local_sgd
from fedpop.errors import SettingsError
from fedpop.keys import Key
from tests.helpers import FRAME, cohort_of, linear_model, quadratics, ragged, states, train_key

WIDE = torch.float64
Q = quadratics()
X = Q.clients[0][0]
TO_THE_END = fp.LocalSGD(epochs=150, rate=0.2)
"""At curvatures of 1 to 4, to .8^150 < 1e-14 of the first error."""


def test_the_common_model_is_fedavgs_to_the_bit() -> None:
    local = fp.LocalSGD(epochs=2, rate=0.05, batch=2, momentum=0.5)
    data = ragged((4, 1, 0, 7))
    plain = fp.FedAvg(linear_model(), local=local).fit(data, rounds=3, progress=False)
    ditto = fp.Ditto(linear_model(), local=local, lam=0.7, personal=local).fit(data, rounds=3, progress=False)
    for name in ("phi", "z"):
        assert torch.equal(plain.published[name], ditto.published[name])
    assert ditto.totals["bytes_up"] == plain.totals["bytes_up"]
    assert ditto.totals["head_steps"] == 2 * plain.totals["head_steps"]


@pytest.mark.parametrize("largest", [local_sgd.LARGEST_BATCHED, 0])
@pytest.mark.parametrize("lam", [0.5, 3.0])
def test_personal_models_in_closed_form(lam: float, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """v_i = (H_i + lambda I)^-1 (H_i w_i* + lambda w), at the w that was received."""
    monkeypatch.setattr(local_sgd, "LARGEST_BATCHED", largest)
    local = fp.LocalSGD(rate=0.1)
    method = fp.Ditto(Q.model, lam=lam, local=local, personal=TO_THE_END)
    population = method.fit(Q.clients, rounds=3, progress=False)
    received = fp.FedAvg(Q.model, local=local).fit(Q.clients, rounds=2, progress=False).published["z"]
    assert (received - Q.start()).norm() > 0.1
    for i in range(3):
        expected = Q.proximal(i, lam, received)
        torch.testing.assert_close(states(population, "v", 3)[i], expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(population.predict(i, X).mean, X @ expected, rtol=1e-9, atol=1e-11)


def test_without_its_pull_v_is_trained_alone() -> None:
    sgd = fp.LocalSGD(epochs=3, rate=0.1, momentum=0.5)
    alone = fp.LocalOnly(Q.model, local=sgd).fit(Q.clients, rounds=4, progress=False)
    ditto = fp.Ditto(Q.model, lam=0.0, personal=sgd).fit(Q.clients, rounds=4, progress=False)
    torch.testing.assert_close(states(ditto, "v", 3), states(alone, "w", 3), rtol=1e-12, atol=1e-12)


def test_a_strong_pull_tends_to_fedavg() -> None:
    """v - w = (H + lambda I)^-1 H (w_i* - w), at most norm(H (w_i* - w)) / lambda."""
    far = []
    for lam in (1e2, 1e4):
        personal = fp.LocalSGD(epochs=40, rate=1 / lam)  # 1 - (lambda + 4) / lambda: nearly there at once
        method = fp.Ditto(Q.model, lam=lam, personal=personal, newcomer=personal)
        population = method.fit(Q.clients, rounds=1, progress=False)
        v = states(population, "v", 3)
        for i in range(3):
            torch.testing.assert_close(v[i], Q.proximal(i, lam, Q.start()), rtol=1e-10, atol=1e-12)
            assert (v[i] - Q.start()).norm() <= Q.gradient(i, Q.start()).norm() / lam
        far.append(float((v - Q.start()).norm()))
    assert 0 < far[1] < far[0] / 90


def test_unstable_pulls_are_refused() -> None:
    """The bound itself is checked with FedProx's, which has the same steps."""
    stable = fp.LocalSGD(rate=0.01)
    fp.Ditto(Q.model, lam=200.0)
    for settings in (
        {"personal": stable, "newcomer": fp.LocalSGD(rate=1e-3)},
        {"newcomer": stable, "personal": fp.LocalSGD(rate=1e-3)},
    ):
        with pytest.raises(SettingsError, match=r"rate 0.01 x lam 250 = 2.5: .* unstable above 2; .* 0.008"):
            fp.Ditto(Q.model, lam=250.0, **settings)
    lively = fp.LocalSGD(rate=0.01, momentum=0.5)  # stable up to 3
    fp.Ditto(Q.model, lam=250.0, personal=lively, newcomer=lively)


@pytest.mark.parametrize("lam", [-1.0, float("nan"), float("inf")])
def test_impossible_settings(lam: float) -> None:
    with pytest.raises(SettingsError, match="lam must be a finite number, 0 or more"):
        fp.Ditto(Q.model, lam=lam)


def test_newcomers() -> None:
    """With data: v from w under the same pull. Without: w."""
    method = fp.Ditto(Q.model, lam=0.8, local=fp.LocalSGD(rate=0.1), newcomer=TO_THE_END)
    population = method.fit(Q.clients, rounds=3, progress=False)
    w = population.published["z"]
    other = quadratics((9, 4), seed=7)
    for i, (x, y) in enumerate(other.clients):
        found = population.new_client(x, y).predict(X).mean
        torch.testing.assert_close(found, X @ other.proximal(i, 0.8, w), rtol=1e-9, atol=1e-10)
    assert torch.equal(population.new_client().predict(X).mean, fedavg(w))
    none = (torch.zeros(0, 3, dtype=WIDE), torch.zeros(0, dtype=WIDE))
    cohort = cohort_of(method.model, [other.clients[0], none])
    both = method.personalise(population.published, cohort, None, population.key)["z"]
    torch.testing.assert_close(both[0], other.proximal(0, 0.8, w), rtol=1e-9, atol=1e-10)
    assert torch.equal(both[1], w)


def fedavg(w: torch.Tensor) -> torch.Tensor:
    """Predictions of one common model."""
    published = {"phi": w[:0], "z": w}
    population = fp.Population(fp.FedAvg(Q.model), published, Key(0), None)
    return population.new_client().predict(X).mean


@pytest.mark.parametrize("which", ["local", "personal"])
def test_a_diverging_client_is_left_out_and_keeps_v(which: str) -> None:
    """Whichever of its two models diverges: stiff data, at a rate that the others bear."""
    stiff = (100 * Q.clients[1][0], Q.clients[1][1])
    data = {"a": Q.clients[0], "stiff": stiff, "c": Q.clients[2]}
    wild, tame = fp.LocalSGD(epochs=100, rate=0.2), fp.LocalSGD(rate=1e-6)
    method = fp.Ditto(Q.model, **{"local": tame, "personal": tame, which: wild})
    population = method.fit(data, rounds=2, progress=False)
    assert [m["left_out"] for m in population.history] == [["stiff"], ["stiff"]]
    assert torch.equal(states(population, "v", 3)[1], Q.start())
    others = method.fit({"a": data["a"], "c": data["c"]}, rounds=2, progress=False)
    torch.testing.assert_close(population.published["z"], others.published["z"], rtol=1e-12, atol=1e-12)


def test_v_is_not_in_the_message_which_may_be_compressed() -> None:
    assert fp.Ditto.private == ("v",)
    compressor = fp.compressors.RandK(k=1)
    method = fp.Ditto(Q.model, compressor=compressor)
    population = method.fit(Q.clients, rounds=2, progress=False)
    each = len(compressor.encode(torch.ones(3, dtype=WIDE), train_key())) + FRAME + 8  # and n
    assert population.totals["bytes_up"] == 2 * 3 * each


def test_saved_and_loaded(tmp_path: Any) -> None:
    population = fp.Ditto(Q.model, lam=0.3).fit(Q.clients, rounds=2, progress=False)
    again = fp.load(population.save(tmp_path))
    assert again.algorithm.lam == 0.3
    for i in range(3):
        assert torch.equal(again.predict(i, X).mean, population.predict(i, X).mean)
