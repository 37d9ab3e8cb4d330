"""What a population of a ``CustomModel`` tells: names in natural units, predictions, files."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedpop as fp
from fedpop.errors import CheckpointError, ModelError, SettingsError
from fedpop.keys import Key
from tests.crash import Crash, CrashAt
from tests.helpers import cohort_of, ragged
from tests.models.custom_models import (
    FACTS,
    QUICK,
    WIDE,
    Named,
    composition,
    growth,
    growth_data,
    growth_model,
    positive,
    unit,
)

# --- what comes out ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def population() -> fp.Population:
    return fp.FedSOUL(growth_model(), **QUICK).fit(growth_data((4, 3, 5)), rounds=3)


def test_names_come_back_on_the_natural_scale(population: fp.Population) -> None:
    phi, beta = population.published["phi"], population.published["beta"]
    assert float(population.phi["rate"]) == pytest.approx(float(phi[0].exp()))
    assert float(population.phi["level"]) == float(phi[1])
    assert float(population.typical["share"]) == pytest.approx(float(beta[0].sigmoid()))
    torch.testing.assert_close(population.typical["slope"], beta[1:3].exp())
    posterior = population.posterior(1)
    named = posterior.named()
    torch.testing.assert_close(named["slope"], posterior.flat[:, 1:].exp())
    mean = population.personal(1)
    torch.testing.assert_close(mean["share"], posterior.flat[:, 0].sigmoid().mean())  # not that of the mean


def test_the_prior_starts_at_the_initial_values_with_a_scale_for_each() -> None:
    model = growth_model()
    method = fp.FedSOUL(model)
    assert method.hierarchy.prior == fp.priors.Normal("diagonal")
    assert {q.name for q in method.questions(FACTS, Key(0))} == {"pooled fit", "target size"}
    assert method.sampler.kernel == fp.kernels.HMC()
    server = method.init(FACTS, Key(0), {})
    torch.testing.assert_close(method.hierarchy.prior.mu(server["beta"]), model.initial_z())
    assert fp.FedSOUL(model, prior="normal").hierarchy.prior == fp.priors.Normal("diagonal")
    assert fp.FedSOUL(model, prior="isotropic").hierarchy.prior == fp.priors.Normal("isotropic")
    shifted = fp.FedSOUL(model, prior=fp.priors.Normal("diagonal", mean=0.5)).init(FACTS, Key(0), {})
    torch.testing.assert_close(shifted["beta"][:3], model.initial_z() + 0.5)


def test_print_says_what_was_learned_in_natural_units(population: fp.Population) -> None:
    lines = {line.split()[0]: line for line in str(population).splitlines()}
    assert "CustomModel(growth, phi: rate (positive), level (real), z: share (unit)" in lines["model"]
    assert "slope[2] (positive), likelihood: normal)" in lines["model"]
    assert f"rate {float(population.phi['rate']):.4g}, level" in lines["phi"]
    assert f"share {float(population.typical['share']):.4g}, slope [" in lines["typical"]
    assert f"logit share {float(population.prior_sd[0]):.4g}, log slope [" in lines["spread"]


def test_predictions_average_the_curve_over_the_draws(population: fp.Population) -> None:
    x = growth_data((6,))[0][0]
    curves = torch.stack(
        [
            growth(population.phi, {"share": u, "slope": v}, x)
            for u, v in zip(*population.posterior(2).named().values(), strict=True)
        ]
    )
    p = population.predict(2, x)
    torch.testing.assert_close(p.mean, curves.mean(0))
    torch.testing.assert_close(p.sd, (curves.var(0, correction=0) + 0.5).sqrt())
    assert bool(torch.isfinite(population.new_client().predict(x).mean).all())
    given = growth_data((4,))[0]
    assert bool(torch.isfinite(population.new_client(*given).predict(x).interval()[0]).all())


def given_model(outputs: Any = None) -> fp.CustomModel:
    def log_likelihood(phi: Named, z: Named, x: Named, y: Tensor) -> Tensor:
        sd = phi["sigma"] * growth(phi, z, x).abs().clamp(min=0.1)  # proportional error
        return torch.distributions.Normal(growth(phi, z, x), sd, validate_args=False).log_prob(y)

    return fp.CustomModel(
        log_likelihood,
        phi={"rate": positive(0.7), "level": 0.2, "sigma": positive(0.5)},
        z={"share": unit(0.3), "slope": positive([0.5, 1.5])},
        outputs=outputs,
    )


def test_a_log_likelihood_alone_does_not_predict_but_is_learned_and_measured() -> None:
    population = fp.FedSOUL(given_model(), **QUICK).fit(growth_data((4, 3)), rounds=2)
    x = growth_data((6,))[0][0]
    with pytest.raises(ModelError, match=r"log-likelihood only.*outputs="):
        population.predict(0, x)
    with pytest.raises(ModelError, match="log-likelihood only"):
        population.new_client().predict(x)
    assert all(math.isfinite(line["loss"]) for line in population.history)
    assert "gradient over its Monte-Carlo error: phi" in str(population.diagnostics())


def test_with_a_mean_beside_it_there_are_means_and_no_more() -> None:
    population = fp.FedSOUL(given_model(growth), **QUICK).fit(growth_data((4,)), rounds=2)
    p = population.predict(0, growth_data((6,))[0][0])
    low, high = p.interval()
    assert p.mean.shape == low.shape == (6,)
    assert bool((low < high).all())
    with pytest.raises(SettingsError, match="of='mean'"):
        p.interval(of="y")
    for question in (lambda: p.sd, lambda: p.samples, lambda: p.entropy, lambda: p.log_prob(torch.zeros(6))):
        with pytest.raises(ModelError, match="only means"):
            question()


def test_classes_and_counts_through_outputs() -> None:
    def logits(phi: Named, z: Named, x: Tensor) -> Tensor:
        return x @ z["w"]

    model = fp.CustomModel(outputs=logits, likelihood="categorical", z={"w": torch.zeros(3, 4)})
    clients = [(x, torch.arange(len(x)) % 4) for x, _ in ragged((5, 3))]
    population = fp.FedSOUL(model, **QUICK).fit(clients, rounds=2)
    assert population.model.outputs == 4
    assert population.predict(0, clients[0][0]).probs.shape == (5, 4)
    assert population.phi == {}


def test_y_is_handed_over_as_it_was_given() -> None:
    """Whole numbers stay whole, columns stay columns."""
    seen: list[tuple[torch.Size, torch.dtype]] = []

    def log_likelihood(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
        seen.append((y.shape, y.dtype))
        return -((y - z["m"]) ** 2).reshape(len(y), -1).sum(1)

    for y in (torch.arange(4), torch.zeros(4, 2, 3)):
        fp.FedAvg(fp.CustomModel(log_likelihood, z={"m": 0.0})).fit([(torch.zeros(4, 1), y)], rounds=1)
        assert seen[-1] == (y.shape, y.dtype if y.dtype == torch.int64 else WIDE)


def test_mini_batches_weigh_whole_numbers_as_others() -> None:
    def log_likelihood(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
        return y * z["m"]

    model = fp.CustomModel(log_likelihood, z={"m": 0.0})
    cohort = cohort_of(model, [(torch.zeros(3, 1), torch.tensor([1, 2, 4]))])
    local = model.bind(model.initial_phi(), cohort.x, cohort)
    half = local.subset(2, lambda n: torch.tensor([[0.5, 0.1, 0.2]]))
    assert float(half.value(torch.ones(1, 1, 1, dtype=WIDE))) == pytest.approx(1.5 * (2 + 4))


def test_early_stopping_scores_a_log_likelihood() -> None:
    held = [
        fp.Client(*a, validation=b) for a, b in zip(growth_data((4, 3)), growth_data((2, 2)), strict=True)
    ]
    stop = fp.callbacks.EarlyStop(every=1, patience=1)
    population = fp.FedSOUL(given_model(), **QUICK).fit(held, rounds=3, callbacks=[stop])
    assert all("validation_log_likelihood" in line for line in population.history)


def test_precision_and_device_are_the_users_choice() -> None:
    model = growth_model(dtype=torch.float32, device="cpu")
    assert model.initial_phi().dtype == torch.float32
    population = fp.FedSOUL(model, local_steps=1, chain=fp.chains.Chain(burn_in=0)).fit(
        growth_data((3,)), rounds=1
    )
    assert population.published["phi"].dtype == torch.float32


# --- files ---------------------------------------------------------------------------------------


def test_a_function_is_given_again_when_a_population_is_read(
    population: fp.Population, tmp_path: Path
) -> None:
    population.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"a function.*rate \(positive\).*share \(unit\).*model="):
        fp.load(tmp_path)
    again = fp.load(tmp_path, model=growth_model())
    x = growth_data((6,))[0][0]
    assert torch.equal(again.predict(1, x).mean, population.predict(1, x).mean)
    assert torch.equal(again.new_client().predict(x).mean, population.new_client().predict(x).mean)
    with pytest.raises(
        CheckpointError, match=r"z is not the saved one: share \(unit\) now, share \(unit\), sl"
    ):
        fp.load(tmp_path, model=fp.CustomModel(
            outputs=growth, likelihood=fp.likelihoods.Normal(0.5), z={"share": unit(0.5)},
            phi={"rate": positive(0.7), "level": 0.2},
        ))  # fmt: skip
    with pytest.raises(CheckpointError, match=r"phi is not the saved one.*rate \(real\)"):
        fp.load(tmp_path, model=fp.CustomModel(
            outputs=growth, likelihood=fp.likelihoods.Normal(0.5),
            z={"share": unit(0.5), "slope": positive([1.0, 1.0])}, phi={"rate": 0.7, "level": 0.2},
        ))  # fmt: skip
    with pytest.raises(CheckpointError, match="learned with a CustomModel"):
        fp.load(tmp_path, model=composition(True))


def test_a_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    method = fp.FedSOUL(growth_model(), **QUICK)
    clients = growth_data((4, 3))
    whole = method.fit(clients, rounds=6, out=tmp_path / "whole", participation=0.7)

    with pytest.raises(Crash):
        method.fit(clients, rounds=6, out=tmp_path / "cut", participation=0.7, checkpoint_every=1, callbacks=[CrashAt(3)])  # fmt: skip # noqa: E501
    again = method.fit(clients, rounds=6, out=tmp_path / "cut", participation=0.7, checkpoint_every=1, resume=True)  # fmt: skip # noqa: E501
    for name, value in whole.published.items():
        assert torch.equal(value, again.published[name])
