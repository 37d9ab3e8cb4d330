"""Runs that break down, and messages out of all proportion: named, with the round, and never NaN."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import FedpopError, FedpopWarning, SettingsError, TrainingError
from fedpop.federation.cohort import Cohort
from fedpop.keys import unit_of
from fedpop.message import Answer, Tensors
from fedpop.methods import METHODS
from fedpop.methods.base import Algorithm, Round, guard_for
from fedpop.questions import Question
from fedpop.questions.features import FeatureScale
from fedpop.questions.least_squares import LeastSquares
from tests.crash import Crash, CrashAt
from tests.helpers import seeded

CLIENTS, ROWS = 20, 10
CULPRIT = "c07"
ABLE = sorted(n for n, c in METHODS.items() if c.guarded and not c.sends_states and not c.of_classes)
"""Methods that send moves or gradients, of numbers."""


def data(scale: float = 1.0, seed: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    """Clients of one linear law; one of them may have a column in another unit."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for i in range(CLIENTS):
        x = torch.randn(ROWS, 3, generator=g)
        y = x @ torch.tensor([1.0, 2.0, 3.0]) + 0.1 * torch.randn(ROWS, generator=g)
        if f"c{i:02d}" == CULPRIT:
            x = x * torch.tensor([1.0, scale, 1.0])
        out[f"c{i:02d}"] = (x, y)
    return out


def model() -> fp.Composition:
    return fp.Composition(seeded(nn.Linear(3, 2), 1), seeded(nn.Linear(2, 1), 2), fp.likelihoods.Normal(1.0))


def method_of(name: str, **settings: Any) -> Algorithm:
    more: dict[str, Any] = {"engine": "sampled"} if issubclass(METHODS[name], fp.FedSOUL) else {}
    if name == "PFedMe":  # whose local epochs are twenty
        more = {"local": fp.LocalSGD(epochs=4, rate=0.005)}
    return METHODS[name](model(), **(more | settings))


def theta(population: fp.Population) -> Tensor:
    return torch.cat([v.flatten().double() for v in population.published.values() if v.is_floating_point()])


def disturbed(method: Algorithm, change: Any) -> Algorithm:
    """The same method, of which some units send something else: ``change(name, vectors, units)``."""
    base = type(method)

    class Disturbed(base):  # type: ignore[misc, valid-type]
        def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Any:
            done = super().local_round(replace(round, coefficients=None), cohort, local)
            for answer in [done] if isinstance(done, Answer) else done:
                units = cohort.units if answer.rows is None else cohort.units[answer.rows]
                names = [n for n in self.guarded if n in answer.vectors]
                changed = {n: change(n, answer.vectors[n], units) for n in names}
                yield replace(answer, vectors=answer.vectors | changed)

    values = {f.name: getattr(method, f.name) for f in fields(method)}
    return dataclass(frozen=True, kw_only=True)(Disturbed)(**values)  # type: ignore[no-any-return]


def among(units: Tensor, share: float) -> Tensor:
    """The first so many of the clients, by name, among these units."""
    bad = {unit_of(f"c{i:02d}") for i in range(max(1, round(share * CLIENTS)))}
    return torch.tensor([u in bad for u in units.tolist()])


# --- one absurd client -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in ABLE if n not in ("FedSOUK", "FedSOUL", "PFedBayes")])
@pytest.mark.parametrize("scale", [1e6, 1e18])
def test_a_column_in_another_unit_is_named_and_does_not_count(name: str, scale: float) -> None:
    population = method_of(name).fit(data(scale), rounds=3)
    assert [m["left_out"] for m in population.history] == [[CULPRIT]] * 3
    usual = theta(method_of(name).fit(data(), rounds=3))
    assert float(theta(population).norm()) < 10 * float(usual.norm())


def test_steps_of_adam_are_no_longer_in_another_unit() -> None:
    """So that nothing of them is out of proportion, and nobody is moved far."""
    found, usual = (theta(method_of("PFedBayes").fit(data(scale), rounds=3)) for scale in (1e6, 1.0))
    assert float(found.norm()) < 2 * float(usual.norm())


@pytest.mark.parametrize("name", ABLE)
def test_a_message_of_1e30_is_left_out_named_and_counted(tmp_path: Path, name: str) -> None:
    def huge(_: str, v: Tensor, units: Tensor) -> Tensor:
        return torch.where((units == unit_of(CULPRIT)).unsqueeze(1), torch.full_like(v, 1e30), v)

    population = disturbed(method_of(name), huge).fit(data(), rounds=4, out=tmp_path)
    for metrics in population.history:
        assert metrics["left_out"] == metrics["out_of_proportion"] == [CULPRIT]
        assert metrics["unbiased"] is False
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(line["out_of_proportion"] == [CULPRIT] for line in lines)
    assert population.totals["out_of_proportion"] == 4
    plain = theta(method_of(name).fit(data(), rounds=4))
    assert float(theta(population).norm()) < 10 * float(plain.norm())


def test_without_the_guard_it_moves_everyone() -> None:
    """So that the tests above can fail."""
    found = method_of("FedAvg", guard=None).fit(data(1e6), rounds=1)
    assert float(theta(found).norm()) > 1e5


@pytest.mark.parametrize("name", ABLE)
def test_usual_clients_are_never_left_out(name: str) -> None:
    """Of very unequal sizes, too."""
    sizes = [2, 2, 5, 2000, 3, 8, 2, 2, 50, 400]
    g = torch.Generator().manual_seed(1)
    clients = [(x := torch.randn(n, 3, generator=g), x.sum(1)) for n in sizes]
    population = method_of(name).fit(clients, rounds=12, participation=0.7)
    assert all("out_of_proportion" not in m for m in population.history)


@pytest.mark.parametrize("rate", [0.3])
def test_a_run_that_converges_does_not_become_suspicious(rate: float) -> None:
    """Moves shrink to rounding errors; one client differs from all others, and counts as long as it does."""
    g = torch.Generator().manual_seed(2)
    clients = [(x := torch.randn(30, 3, generator=g), x.sum(1)) for _ in range(9)]
    odd = (clients[0][0], 2 * clients[0][1])
    flat = fp.Composition(None, seeded(nn.Linear(3, 1, bias=False)), fp.likelihoods.Normal(1.0))
    method = fp.SCAFFOLD(flat, local=fp.LocalSGD(rate=rate, epochs=5))
    population = method.fit([*clients, odd], rounds=150)
    assert all("out_of_proportion" not in m for m in population.history)


def test_not_below_five_messages_nor_in_the_paper() -> None:
    four = dict(list(data(1e6).items())[4:8])
    assert CULPRIT in four
    assert "out_of_proportion" not in method_of("FedAvg").fit(four, rounds=1).history[0]
    assert fp.FedSOUL.paper(model()).guard is None
    assert guard_for(fp.FSGLD(model()), {}, 100) is None  # a relay


SEEN = {"scaled": True, "sign-flipped": False, "random": False, "repeated": False}
"""Whether a norm can see it, as the documentation says."""


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("how", SEEN)
def test_what_a_norm_can_see_and_what_it_cannot(how: str, share: float) -> None:
    g = torch.Generator().manual_seed(3)

    def change(_: str, v: Tensor, units: Tensor) -> Tensor:
        noise = torch.randn(v.shape, generator=g, dtype=v.dtype)
        noise = noise / noise.norm(dim=1, keepdim=True) * v.norm(dim=1, keepdim=True)
        other = {"scaled": 1e6 * v, "sign-flipped": -v, "random": noise, "repeated": 2 * v}[how]
        return torch.where(among(units, share).unsqueeze(1), other, v)

    population = disturbed(method_of("FedAvg"), change).fit(data(), rounds=3)
    bad = [f"c{i:02d}" for i in range(max(1, round(share * CLIENTS)))]
    for metrics in population.history:
        assert metrics.get("out_of_proportion", []) == (bad if SEEN[how] else [])


def test_what_is_usual_survives_a_kill(tmp_path: Path) -> None:
    """The guard goes by earlier rounds; those are in the checkpoint."""
    whole = method_of("FedAvg").fit(data(1e6), rounds=6)
    with pytest.raises(Crash):
        method_of("FedAvg").fit(data(1e6), rounds=6, out=tmp_path, checkpoint_every=1, callbacks=[CrashAt(3)])
    again = method_of("FedAvg").fit(data(1e6), rounds=6, out=tmp_path, checkpoint_every=1, resume=True)
    assert torch.equal(theta(whole), theta(again))


def test_a_site_judges_each_of_its_clients() -> None:
    """Of two clients nobody knows what is usual in the first round, in which the site's sum is judged; then
    the median over clients everywhere tells which of them it is, and the other one counts."""
    names = list(data())
    sites = {f"s{k}": names[2 * k : 2 * k + 2] for k in range(CLIENTS // 2)}
    population = method_of("FedAvg").fit(data(1e6), rounds=3, sites=sites)
    assert [m["out_of_proportion"] for m in population.history] == [["c06", "c07"], ["c07"], ["c07"]]
    large = {"a": names[:10], "b": names[10:]}  # one of which knows by itself
    population = method_of("FedAvg").fit(data(1e6), rounds=2, sites=large)
    assert [m["out_of_proportion"] for m in population.history] == [["c07"], ["c07"]]
    alone = method_of("FedAvg").fit({n: d for n, d in data().items() if n != CULPRIT}, rounds=2)
    torch.testing.assert_close(theta(population), theta(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["L2GD", "DGLMC"])
def test_a_state_out_of_all_proportion_is_named_and_does_not_count(name: str) -> None:
    """Whenever states are sent, which L2GD's are in some of the rounds."""

    def far(_: str, v: Tensor, units: Tensor) -> Tensor:
        return torch.where((units == unit_of(CULPRIT)).unsqueeze(1), 1e6 * v, v)

    population = disturbed(method_of(name), far).fit(data(), rounds=12)
    named = [m["out_of_proportion"] for m in population.history if "out_of_proportion" in m]
    assert named
    assert all(names == [CULPRIT] for names in named)
    usual = method_of(name).fit(data(), rounds=12)
    assert all("out_of_proportion" not in m for m in usual.history)
    assert float(theta(population).norm()) < 10 * float(theta(usual).norm())


def test_the_exact_engine_leaves_out_a_client_in_another_unit_and_names_it(tmp_path: Path) -> None:
    def clients(scale: float) -> dict[str, tuple[Tensor, Tensor]]:
        g = torch.Generator().manual_seed(5)
        found = {}
        for i in range(CLIENTS):
            x, slope = torch.randn(ROWS, 1, generator=g), 2 + 0.3 * torch.randn(1, generator=g)
            y = (slope * x + 0.1 * torch.randn(ROWS, 1, generator=g))[:, 0]
            found[f"c{i:02d}"] = (x, y * (scale if f"c{i:02d}" == CULPRIT else 1))
        return found

    def fitted(data: dict[str, tuple[Tensor, Tensor]], guard: float | None = 1e3, **more: Any) -> Any:
        line = fp.Composition(None, seeded(nn.Linear(1, 1), 1), fp.likelihoods.Normal())
        return fp.FedSOUL(line, guard=guard).fit(data, progress=False, **more)

    without = fitted({n: d for n, d in clients(1.0).items() if n != CULPRIT})
    with pytest.warns(FedpopWarning, match=f"{CULPRIT} takes no part: its answer to 'contributions'"):
        found = fitted(clients(1e4))
    assert found.engine.startswith("exact")
    # Without hyperprior and by full sums: to the digit what the others alone lead to.
    torch.testing.assert_close(theta(found), theta(without), atol=1e-4, rtol=1e-4)
    assert found.convergence is not None
    assert found.convergence.converged
    decided = [d for d in found.decisions if d.what == "left out before the rounds"]
    assert [(d.chosen, d.unusual) for d in decided] == [(CULPRIT, True)]
    assert CULPRIT in str(found)
    assert bool(torch.isfinite(found.predict(CULPRIT, [[1.0]]).mean).all())  # it has a model of its own
    with pytest.warns(FedpopWarning, match=CULPRIT):  # a site of several finds its own
        at_sites = fitted(
            clients(1e4), sites={"a": [f"c{i:02d}" for i in range(10)], "b": [f"c{i}" for i in range(10, 20)]}
        )
    torch.testing.assert_close(theta(at_sites), theta(found), atol=1e-4, rtol=1e-4)
    moved = fitted(clients(1e4), guard=None)
    assert float((theta(moved) - theta(without)).abs().max()) > 1


@pytest.mark.parametrize("vector", ["moments", "size"])
def test_an_impossible_answer_to_a_start_question_is_left_out_and_named(
    vector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative sums of squares: they ended the run with a math domain error."""
    question: type[Question[Any]] = {"moments": LeastSquares, "size": FeatureScale}[vector]
    honest = question.answer

    def hostile(self: Any, asked: Tensors, units: Any, key: Any) -> Answer:
        answer = honest(self, asked, units, key)
        bad = (units.cohort.units == unit_of(CULPRIT)).unsqueeze(1)
        return replace(answer, vectors={vector: torch.where(bad, -40.0, answer.vectors[vector])})

    monkeypatch.setattr(question, "answer", hostile)
    clients = data()
    if vector == "size":
        clients = {n: (x, (y > 0).long()) for n, (x, y) in clients.items()}
        asked = fp.Composition(seeded(nn.Linear(3, 2), 1), seeded(nn.Linear(2, 2), 2), "categorical")
    else:
        asked = model()
    population = fp.FedSOUL(asked, engine="sampled").fit(clients, rounds=2, progress=False)
    assert bool(torch.isfinite(theta(population)).all())
    assert [d.chosen for d in population.decisions if d.what == "left out before the rounds"] == [CULPRIT]


# --- nobody left, and theta that is not finite -----------------------------------------------------------


def test_a_run_in_which_everybody_was_left_out(tmp_path: Path) -> None:
    far = [(torch.full((4, 3), 1e30), torch.full((4,), 1e30)) for _ in range(3)]
    with pytest.raises(
        TrainingError, match=r"everybody .* left out, 3 rounds in a row from round 1 on, client 'client-0'"
    ):
        method_of("FedAvg").fit(far, rounds=10)
    with pytest.raises(TrainingError, match=r"left out, round from round 1 on, client 'client-0'"):
        method_of("FedAvg").fit(far, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run" / "result.json").exists()


def test_one_silent_round_of_many_is_no_breakdown() -> None:
    g = torch.Generator().manual_seed(0)
    clients = [(torch.randn(4, 3, generator=g), torch.zeros(4)) for _ in range(4)]
    clients.append((torch.full((4, 3), 1e30), torch.zeros(4)))
    rule = fp.participation.Availability([[0, 1], [4], [2, 3]], clients=5)
    population = method_of("FedAvg").fit(clients, rounds=9, participation=rule)
    assert [m["round"] for m in population.history if m["left_out"]] == [2, 5, 8]


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("step", [1e3, 1e30])
def test_steps_without_measure_never_come_back_as_nan(name: str, step: float) -> None:
    """Whatever a method makes of steps far too long: finite numbers, or an error."""
    classes = METHODS[name].of_classes
    two = fp.Composition(seeded(nn.Linear(3, 2), 1), seeded(nn.Linear(2, 2), 2), "categorical")
    method = METHODS[name](two if classes else model())
    clients = {n: (x, (y > 0).long() if classes else y) for n, (x, y) in data().items()}
    trains = [f.name for f in fields(method) if isinstance(getattr(method, f.name), fp.LocalSGD)]
    if not trains:
        pytest.skip(f"{name} has no local steps to lengthen")
    try:
        population = method.replace(**{f: fp.LocalSGD(rate=step) for f in trains}).fit(clients, rounds=5)
    except FedpopError:
        return
    assert bool(torch.isfinite(theta(population)).all())


def test_theta_that_is_not_finite_names_the_round() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Breaks(fp.FedAvg):
        def server_round(self, server: Tensors, total: Any, facts: Any, key: Any) -> Tensors:
            out = super().server_round(server, total, facts, key)
            return {"w": out["w"] / 0} if key.round == 2 else out

    with pytest.raises(TrainingError, match="w became NaN or infinite in round 3"):
        Breaks(model()).fit(data(), rounds=10)
    with pytest.raises(TrainingError, match="became NaN or infinite in round 3"):
        Breaks(model()).fit(data(), rounds=3)


# --- rates out of all proportion --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FedAvg", "FedSOUL"])
def test_a_finite_theta_whose_outputs_overflow_predicts_nothing(name: str) -> None:
    """Near the end of float32: products are beyond it."""
    g = torch.Generator().manual_seed(0)
    data = [(x := torch.randn(6, 3, generator=g), x.sum(1)) for _ in range(5)]
    model = fp.Composition(nn.Linear(3, 2), nn.Linear(2, 1), fp.likelihoods.Normal(1.0))
    found = getattr(fp, name)(model).fit(data, rounds=2, progress=False)
    sound = found.predict(0, data[0][0])
    assert bool(torch.isfinite(sound.mean).all())
    huge = replace(found, published={n: 1e30 * t for n, t in found.published.items()}, _personal={})
    for predict in (lambda: huge.predict(0, data[0][0]), lambda: huge.new_client().predict(data[0][0])):
        with pytest.raises(TrainingError, match="are not finite: theta is, but outputs overflow"):
            predict()


def test_a_step_beyond_float32_is_refused() -> None:
    x = torch.ones(4, 3)
    model = fp.Composition(None, nn.Linear(3, 1), fp.likelihoods.Normal(1.0))
    with pytest.raises(SettingsError, match=r"a step of 1e\+39 is beyond"):
        fp.DGLMC(model, step=1e39).fit([(x, x[:, 0])] * 3, rounds=1, progress=False)
