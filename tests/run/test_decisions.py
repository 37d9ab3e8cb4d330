"""A run says what it decided where a setting was left open, and why: in Python, in files, in a line."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop import precision
from fedpop.decisions import Decision, decided, in_a_line
from fedpop.precision import ProbeVerdict
from fedpop.run import stages
from tests.helpers import linear_model, ragged

Clients = list[tuple[Tensor, Tensor]]


def classes(b: int = 6) -> Clients:
    return [(x, (x[:, 0] > 0).long()) for x, _ in ragged((5,) * b)]


def head(*layers: nn.Module, backbone: nn.Module | None = None) -> fp.Composition:
    return fp.Composition(backbone, nn.Sequential(*layers) if len(layers) > 1 else layers[0], "categorical")


def of(method: Any, clients: Clients, rounds: int | None = 2, **settings: Any) -> dict[str, Decision]:
    population = method.fit(clients, rounds=rounds, progress=False, **settings)
    return {decision.what: decision for decision in population.decisions}


@dataclass(frozen=True, kw_only=True)
class Decided(fp.FedSOUL):
    """A method that decides something, and has a word of its own about its kernel."""

    name = "Decided"

    def decisions(self) -> Sequence[Decision]:
        return (Decision("pace", "slow", "it is dark"), Decision("kernel", "HMC", "as every day"))


def test_whatever_decides_is_asked_and_all_else_is_passed_over() -> None:
    method = Decided(head(nn.Linear(3, 2)))
    assert [d.what for d in decided(None, method, "text", method.model)] == ["pace", "kernel"]


def test_a_methods_own_decisions_come_first_and_each_thing_is_said_once() -> None:
    found = of(Decided(head(nn.Linear(3, 2))), classes())
    assert list(found)[:3] == ["engine", "pace", "kernel"]
    assert str(found["kernel"]) == "kernel: HMC (as every day)"


def test_what_was_given_is_no_decision() -> None:
    model = head(nn.Linear(3, 2))
    given = fp.FedSOUL(
        model,
        prior=fp.priors.Normal(),
        kernel="mala",
        start="random",
        final=fp.chains.Final(draws=20),
        guard=None,
    )
    found = of(given, classes())
    assert not {"prior covariance", "kernel", "start", "final pass", "guard", "rounds"} & found.keys()
    assert found["mass matrix"].chosen == "curvature"  # of any kernel that learns one


@pytest.mark.parametrize(
    ("model", "prior", "kernel"),
    [
        (linear_model(), "normal", "Exponential(h=1.0)"),
        (linear_model(), "mixture", "MixtureDraw()"),
        (head(nn.Linear(3, 2)), "normal", "HMC(leapfrog=5)"),
        (head(nn.Linear(3, 2)), "mixture", "JumpHMC(leapfrog=5)"),
    ],
)
def test_the_kernel_goes_by_head_and_prior(model: fp.Composition, prior: str, kernel: str) -> None:
    clients = ragged((5,) * 6) if model.outputs == 1 else classes()
    found = of(fp.FedSOUL(model, prior=prior, engine="sampled"), clients)["kernel"]
    assert found.chosen == kernel
    assert ("closed-form" in found.because) == ("HMC" in kernel)


@pytest.mark.parametrize(("width", "matrix"), [(2, "dense"), (3, "diagonal")])
def test_the_mass_matrix_goes_by_the_size_of_z(width: int, matrix: str) -> None:
    model = head(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 4))  # z of 20 and of 28
    found = of(fp.FedSOUL(model), classes())["mass matrix"]
    assert found.chosen == matrix
    assert f"{model.z_layout.size} dimensions" in found.because


@pytest.mark.parametrize(
    ("model", "start"),
    [
        (linear_model(), "spectral"),
        (fp.Composition(nn.Linear(3, 2), nn.Linear(2, 1), "normal"), "least squares"),
        (head(nn.Linear(2, 2), backbone=nn.Linear(3, 2)), "scale of the features"),
        (head(nn.Linear(3, 2)), "scale of the features"),
    ],
)
def test_the_start_is_what_everyone_was_asked_for(model: fp.Composition, start: str) -> None:
    clients = ragged((5,) * 6) if model.outputs == 1 else classes()
    assert of(fp.FedSOUL(model, engine="sampled"), clients)["start"].chosen == start


def test_a_scale_that_was_given_is_where_the_prior_starts() -> None:
    found = of(fp.FedSOUL(head(nn.Linear(3, 2)), prior=fp.priors.Normal(scale=0.5)), classes())["start"]
    assert (found.chosen, found.because) == ("as given", "the prior has its scale")


def test_shapes_of_a_prior_with_a_scale_in_each_direction() -> None:
    found = of(fp.FedSOUL(head(nn.Linear(3, 2)), prior="diagonal"), classes())
    assert found["start"].chosen == "moments of the features"
    assert "prior covariance" not in found


def test_a_function_starts_at_a_pooled_fit_with_scales_for_its_parameters() -> None:
    model = fp.CustomModel(
        outputs=lambda phi, z, x: z["a"] * x[:, 0] + z["b"], likelihood="normal", z={"a": 1.0, "b": 0.0}
    )
    found = of(fp.FedSOUL(model), ragged((5,) * 6))
    assert found["start"].chosen == "pooled least squares"
    assert found["prior covariance"].chosen == "diagonal"
    assert found["mass matrix"].chosen == "dense"


def test_few_weights_on_columns_have_a_full_covariance() -> None:
    model = fp.Composition(None, nn.Linear(3, 1), "normal")
    assert of(fp.FedSOUL(model), ragged((5,) * 6))["prior covariance"].chosen == "full"


@pytest.mark.parametrize(
    ("b", "settings", "chosen"),
    [
        (5, {}, "at 1000 times the median"),
        (4, {}, "off"),
        (6, {"participation": 4}, "off"),
        (6, {"sites": {"north": ("0", "1", "2"), "south": ("3", "4", "5")}}, "off"),
    ],
)
def test_too_few_messages_switch_the_guard_off(b: int, settings: dict[str, Any], chosen: str) -> None:
    clients = dict(zip("012345", classes(b), strict=False))
    population = fp.FedSOUL(head(nn.Linear(3, 2))).fit(clients, rounds=2, progress=False, **settings)
    (found,) = (d for d in population.decisions if d.what == "guard")
    assert found.chosen == chosen
    assert found.unusual == (chosen == "off") == ("  decided  guard: off (" in str(population))


def test_methods_without_a_prior_say_what_holds_for_them() -> None:
    found = of(fp.FedAvg(head(nn.Linear(3, 2))), classes(), rounds=100)
    assert list(found) == ["guard", "verdict", "threads"]
    assert found["verdict"].chosen == "by the training loss"


def test_rounding_is_unusual_and_says_how_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    network = nn.Sequential(nn.Unflatten(1, (1, 1, 3)), nn.Conv2d(1, 2, 1), nn.Flatten(), nn.ReLU())
    model = head(nn.Linear(6, 2), backbone=network)
    kept = of(fp.FedAvg(model), classes())["precision"]
    assert kept == Decision("precision", "float32", "not asked in tests")
    assert "precision" not in of(fp.FedAvg(model), classes(), precision="float32")
    small = head(nn.Linear(2, 2), backbone=nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    because = of(fp.FedAvg(small), classes())["precision"].because
    assert because == "nothing is large enough to be worth rounding"
    # Not run: some processors die of it.
    monkeypatch.setattr(precision, "probed", lambda: ProbeVerdict(True, "it agrees and is faster"))
    (found,) = model.at_precision(model.chosen_precision()).decisions()
    assert found == Decision("precision", "bfloat16", "it agrees and is faster", unusual=True)
    (resumed,) = model.at_precision("float32").decisions()
    assert resumed.because == "as when the run began"


@pytest.mark.filterwarnings("ignore::fedpop.errors.ConvergenceWarning")
def test_how_theta_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, sampled = fp.FedSOUL(linear_model(), engine="sampled"), fp.FedSOUL(head(nn.Linear(3, 2)))
    assert of(exact, ragged((5,) * 6), 19)["verdict"].chosen == "none"
    assert of(exact, ragged((5,) * 6), 20)["verdict"].chosen == "in nats, exact"
    assert of(sampled, classes(), 99)["verdict"].chosen == "none"
    monkeypatch.setattr(stages, "JUDGED_FROM", {True: 1, False: 1})
    assert of(sampled, classes())["verdict"].chosen == "in nats, from draws"
    energy = of(sampled.replace(prior="energy"), classes())["verdict"]
    assert (energy.chosen, "constant of Energy" in energy.because) == ("by the training loss", True)
    wide = of(fp.FedSOUL(head(nn.Linear(70, 3))), [(torch.ones(3, 70), torch.arange(3))] * 6)["verdict"]
    assert wide.because == "theta has 214 parameters, more than 200"
    monkeypatch.setattr(stages, "MOST_JUDGED_CLIENTS", 5)
    many = of(sampled, classes())["verdict"]
    assert (many.chosen, many.unusual) == ("by the training loss", True)


def test_noise_that_falls_and_rounds_that_were_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    method = fp.FedSOUL(linear_model(), engine="sampled")
    noise = of(method, ragged((5,) * 6), 10)["noise variance"]
    assert "over the first 5 rounds" in noise.chosen
    assert "noise variance" not in of(method.replace(anneal=fp.steps.Anneal(rounds=0)), ragged((5,) * 6))
    monkeypatch.setattr(stages, "FIRST_STAGE", 4)
    monkeypatch.setattr(stages, "LONGEST_RUN", 8)
    with pytest.warns(fp.errors.ConvergenceWarning):
        found = of(fp.FedSOUL(head(nn.Linear(3, 2))), classes(), rounds=None)["rounds"]
    assert found.chosen == "4, 4, 8, ... until converged, 8 at most"


def test_the_final_pass_goes_by_the_size_of_z() -> None:
    wide = [(torch.ones(3, 60), torch.tensor([0, 1, 0]))] * 6
    assert of(fp.FedSOUL(head(nn.Linear(60, 2))), wide)["final pass"].chosen == "4 chains of 140 draws"
    assert of(fp.FedSOUL(head(nn.Linear(3, 2))), classes())["final pass"].chosen == "4 chains of 250 draws"


def test_files_have_them_and_a_population_that_was_saved(tmp_path: Path) -> None:
    method = fp.FedSOUL(head(nn.Linear(3, 2)))
    population = method.fit(classes(3), rounds=2, out=tmp_path / "run", progress=False)
    plain = json.loads((tmp_path / "run" / "config.json").read_text())["decisions"]
    assert [Decision.read(p) for p in plain] == list(population.decisions)
    assert len(plain) > 5
    again = fp.load(population.save(tmp_path / "saved"))
    assert list(again.decisions) == list(population.decisions)
    assert str(again).count("decided") == 1
    assert again.public().decisions == again.decisions


def test_a_run_that_is_resumed_says_them_again(tmp_path: Path) -> None:
    method = fp.FedSOUL(head(nn.Linear(3, 2)))
    first = method.fit(classes(), rounds=2, out=tmp_path, progress=False)
    again = method.fit(classes(), rounds=2, out=tmp_path, resume=True)
    assert again.decisions[:-1] == first.decisions[:-1]
    threads = again.decisions[-1]
    assert (threads.what, threads.chosen) == ("threads", first.decisions[-1].chosen)
    assert threads.because == "as when the run began"
    more = method.fit(classes(), rounds=3, out=tmp_path, resume=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rounds"] == 3
    assert [Decision.read(p) for p in config["decisions"]] == list(more.decisions)


def test_a_line_for_what_is_unusual_alone() -> None:
    usual = Decision("kernel", "HMC", "no closed form")
    assert in_a_line([usual]) == ""
    odd = [Decision(what, "off", "so", unusual=True) for what in ("guard", "verdict")]
    assert in_a_line([usual, *odd]) == "guard: off (so); verdict: off (so)"


def test_steps_and_the_form_of_i_are_said_where_they_were_left_open() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    found = of(fp.FedSOUL(head(nn.Linear(4, 2), backbone=network)), classes())
    assert found["step on phi"].chosen == "NetworkAdam, rate 0.03"
    assert found["step on the prior"].chosen == "EM"
    assert found["form of I"].chosen == "mixed"
    found = of(fp.FedSOUL(head(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), classes())
    assert found["step on the prior"].chosen == "EMAdam"
    assert found["form of I"].chosen == "left"
    steps = {"phi_step": fp.steps.Adam(0.01), "beta_step": fp.steps.BetaStep(fp.steps.EM(), form="left")}
    given = fp.FedSOUL(head(nn.Linear(4, 2), backbone=network), **steps)
    assert not {"step on phi", "step on the prior", "form of I"} & of(given, classes()).keys()
