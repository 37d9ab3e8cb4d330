"""``CustomModel``: any function of (phi, z, data), against the same model written another way."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.algorithms.base import Facts
from fedpop.client.phi_gradient import PhiGradient
from fedpop.errors import CheckpointError, ModelError, SettingsError
from fedpop.kernels import Tuning
from fedpop.keys import Key
from tests.helpers import cohort_of, generator, population_data, ragged, seeded, train_key

WIDE = torch.float64
Named = dict[str, Tensor]
positive, unit = fp.links.positive, fp.links.unit
FACTS = Facts(clients=3, rounds=10)


SHORT = fp.chains.Final(draws=40, burn_in=20)  # how many draws users see does not matter here, only which
BURNT_IN = fp.chains.Chain(burn_in=20)
QUICK: dict[str, Any] = {"local_steps": 2, "chain": BURNT_IN, "final": SHORT}


# --- the linear Normal model, written twice -----------------------------------------------------

VARIANCE = 0.3


def linear_log_likelihood(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
    eta = x @ phi["w"].mT @ z["v"]
    return -0.5 * ((y - eta) ** 2 / VARIANCE + torch.log(torch.tensor(2 * torch.pi * VARIANCE)))


def linear_outputs(phi: Named, z: Named, x: Tensor) -> Tensor:
    return x @ phi["w"].mT @ z["v"]


def backbone() -> nn.Module:
    return seeded(nn.Linear(3, 2, bias=False).to(WIDE), 1)


def composition(nested: bool) -> fp.Composition:
    head: nn.Module = nn.Linear(2, 1, bias=False).to(WIDE)
    with torch.no_grad():
        head.weight.zero_()
    return fp.Composition(
        backbone(), nn.Sequential(head) if nested else head, fp.likelihoods.Normal(VARIANCE)
    )


def custom(whole: bool) -> fp.CustomModel:
    """``whole``: the function gives the log-likelihood itself, else the outputs of one."""
    phi, z = {"w": backbone().weight.detach()}, {"v": [0.0, 0.0]}
    if whole:
        return fp.CustomModel(linear_log_likelihood, phi=phi, z=z)
    return fp.CustomModel(outputs=linear_outputs, likelihood=fp.likelihoods.Normal(VARIANCE), phi=phi, z=z)


@pytest.mark.parametrize("whole", [True, False], ids=["log_likelihood", "outputs"])
def test_the_linear_model_has_the_same_likelihood_and_gradients(whole: bool) -> None:
    clients, results = ragged((3, 0, 5, 1)), []
    z = torch.randn(4, 3, 2, generator=generator(2), dtype=WIDE)
    for model in (composition(False), composition(True), custom(whole)):
        cohort = cohort_of(model, clients)
        phi = model.initial_phi().requires_grad_()
        features = model.features(phi, cohort)
        good = torch.ones(4, dtype=torch.bool)
        _, value, j = PhiGradient(model, None, z).fused(phi, features, cohort, None, good, torch.ones(4))
        local = model.bind(phi.detach(), model.features(phi.detach(), cohort), cohort)
        rows = model.log_prob(phi.detach(), z[0], *_one(model, phi, clients[2]))
        results.append((value, j, *local.value_and_grad(z), local.value(z), rows))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b)


def _one(model: Any, phi: Tensor, client: tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
    cohort = cohort_of(model, [client])
    return model.features(phi.detach(), cohort), cohort.y


@pytest.mark.parametrize("whole", [True, False], ids=["log_likelihood", "outputs"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chain": fp.chains.Chain(burn_in=20, stateful=False)},
        {"chain": fp.chains.Chain(2, burn_in=20), "prior": fp.priors.Normal("full", scale=1.0)},
        {"phi_step": fp.steps.PhiStep(batch=2)},
        {"phi_step": fp.steps.PhiStep(local=fp.LocalSGD(epochs=2, batch=2))},
        {"compressor": fp.compressors.RandK(k=2)},
        {"kernel": fp.kernels.SGLD(batch=3)},
        {"prior": fp.priors.Mixture(2, scale=1.0)},
    ],
    ids=["stateful", "stateless", "two chains", "minibatch", "epochs", "compressed", "SGLD", "mixture"],
)
def test_a_run_is_the_run_of_the_same_composition(whole: bool, options: dict[str, Any]) -> None:
    """The same keys draw the same chains, so theta agrees round by round, not only in the end."""
    clients, _, _ = population_data(6, 5, 3, 2, VARIANCE)
    settings = {
        "prior": fp.priors.Normal(scale=1.0),
        "local_steps": 3,
        "chain": BURNT_IN,
        "final": SHORT,
        "anneal": fp.steps.Anneal(0),
        "start": "random",
    } | options
    runs = [
        fp.FedSOUL(model, **settings).fit(clients, rounds=8, participation=0.7, seed=4)
        for model in (composition(True), custom(whole))
    ]
    torch.testing.assert_close(runs[0].published, runs[1].published)
    assert runs[0].history[-1]["loss"] == pytest.approx(runs[1].history[-1]["loss"])


def test_the_final_pass_is_that_of_the_same_composition() -> None:
    clients, _, _ = population_data(3, 5, 3, 2, VARIANCE)
    runs = [
        fp.FedSOUL(
            model, prior=fp.priors.Normal(scale=1.0), chain=fp.chains.Chain(burn_in=10), final=SHORT
        ).fit(clients, rounds=1)
        for model in (composition(True), custom(True), composition(False))
    ]
    runs[2].published = runs[1].published
    general, given, exact = (run.log_likelihood() for run in runs)
    assert general.value == pytest.approx(given.value)
    assert abs(given.value - exact.value) < 5 * given.error  # importance sampling against the closed form
    torch.testing.assert_close(runs[0].posterior(2).draws, runs[1].posterior(2).draws)


@pytest.mark.parametrize("method", [fp.FedAvg, fp.FedRep], ids=["FedAvg", "FedRep"])
def test_methods_with_a_point_estimate_learn_it_too(method: Any) -> None:
    clients, _, _ = population_data(6, 5, 3, 2, VARIANCE)
    runs = [method(m).fit(clients, rounds=5) for m in (composition(True), custom(True), custom(False))]
    for run in runs[1:]:
        torch.testing.assert_close(runs[0].published, run.published)
    x = torch.randn(4, 3, generator=generator(3))
    torch.testing.assert_close(runs[0].predict(0, x).mean, runs[2].predict(0, x).mean)


# --- a nonlinear one, by hand -------------------------------------------------------------------


def growth(phi: Named, z: Named, x: Named) -> Tensor:
    """A curve with a parameter of each kind; not defined at time zero, which padding with zeros would be."""
    rise = torch.log(x["time"]) * phi["rate"] / torch.sqrt(x["time"])
    return z["share"] * rise + (z["slope"] * x["dose"]).sum(-1) + phi["level"]


def growth_model(**options: Any) -> fp.CustomModel:
    return fp.CustomModel(
        outputs=growth,
        likelihood=options.pop("likelihood", fp.likelihoods.Normal(0.5)),
        phi={"rate": positive(0.7), "level": 0.2},
        z={"share": unit(0.3), "slope": positive([0.5, 1.5])},
        **options,
    )


def growth_data(sizes: tuple[int, ...] = (3, 0, 5, 1)) -> list[tuple[Named, Tensor]]:
    g = generator(8)
    return [
        (
            {
                "time": 0.5 + 3 * torch.rand(n, generator=g, dtype=WIDE),
                "dose": torch.randn(n, 2, generator=g, dtype=WIDE),
            },
            torch.randn(n, generator=g, dtype=WIDE),
        )
        for n in sizes
    ]


def test_links_enter_by_the_chain_rule() -> None:
    """Free values to natural ones by hand, differentiated by plain autograd, client by client."""
    model, clients = growth_model(), growth_data()
    cohort = cohort_of(model, clients)
    phi = model.initial_phi()
    torch.testing.assert_close(phi, torch.tensor([0.7, 1.0], dtype=WIDE).log() + torch.tensor([0, 0.2]))
    torch.testing.assert_close(model.initial_z(), torch.tensor([3 / 7, 0.5, 1.5], dtype=WIDE).log())
    z = torch.randn(4, 2, 3, generator=generator(9), dtype=WIDE)
    free_phi, free_z = phi.clone().requires_grad_(), z.clone().requires_grad_()
    expected = torch.zeros(4, 2, dtype=WIDE)
    for c, (x, y) in enumerate(clients):
        for k in range(2):
            share, slope = 1 / (1 + torch.exp(-free_z[c, k, 0])), torch.exp(free_z[c, k, 1:])
            named = ({"rate": torch.exp(free_phi[0]), "level": free_phi[1]}, {"share": share, "slope": slope})
            law = torch.distributions.Normal(growth(*named, x), 0.5**0.5)
            expected[c, k] = law.log_prob(y).sum()
    grad_phi, grad_z = torch.autograd.grad(expected.sum(), (free_phi, free_z))
    value, grad = model.bind(phi, cohort.x, cohort).value_and_grad(z)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(grad, grad_z)
    leaf = phi.clone().requires_grad_()
    good = torch.ones(4, dtype=torch.bool)
    _, _, j = PhiGradient(model, None, z).fused(leaf, cohort.x, cohort, None, good, torch.ones(4))
    torch.testing.assert_close(2 * j, grad_phi)


def test_what_a_client_gets_does_not_depend_on_its_cohort() -> None:
    """Others, longer or empty, only change the padding."""
    model = growth_model()
    cohort = cohort_of(model, growth_data((3, 0, 5, 1)))
    z = torch.randn(4, 1, 3, generator=generator(9), dtype=WIDE)
    phi = model.initial_phi()
    value, grad = model.bind(phi, cohort.x, cohort).value_and_grad(z)
    assert value[1] == 0
    assert bool((grad[1] == 0).all())
    for c in range(4):
        one = cohort.select(torch.tensor([c]))
        alone = model.bind(phi, one.x, one).value_and_grad(z[c : c + 1])
        torch.testing.assert_close((value[c : c + 1], grad[c : c + 1]), alone)


def test_an_empty_client_is_not_hurt_by_a_broken_one() -> None:
    """It borrows rows only for their shape: whatever they do, its own likelihood is one."""
    model = growth_model()
    clients = growth_data((2, 0, 3))
    cohort = cohort_of(model, clients)
    z = model.initial_z().expand(3, 1, -1).clone()
    z[0] = float("nan")
    value, grad = model.bind(model.initial_phi(), cohort.x, cohort).value_and_grad(z)
    assert float(value[1]) == 0.0
    assert bool((grad[1] == 0).all())
    assert bool(torch.isfinite(value[2]).all() & torch.isfinite(grad[2]).all())


def test_clients_that_only_have_a_prior() -> None:
    model = growth_model()
    population = fp.FedSOUL(model, **QUICK).fit(growth_data((0, 0, 3)), rounds=2, participation=0.5)
    assert bool(torch.isfinite(population.published["phi"]).all())


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

    class Stop(fp.callbacks.Callback):
        def after_round(self, run: Any, metrics: dict[str, Any]) -> bool:
            if run.round == 3:
                raise KeyboardInterrupt
            return False

    with pytest.raises(KeyboardInterrupt):
        method.fit(clients, rounds=6, out=tmp_path / "cut", participation=0.7, checkpoint_every=1, callbacks=[Stop()])  # fmt: skip # noqa: E501
    again = method.fit(clients, rounds=6, out=tmp_path / "cut", participation=0.7, checkpoint_every=1, resume=True)  # fmt: skip # noqa: E501
    for name, value in whole.published.items():
        assert torch.equal(value, again.published[name])


# --- errors --------------------------------------------------------------------------------------


def ones(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
    return z["a"] + 0 * y


MAKE: dict[str, tuple[dict[str, Any], str]] = {
    "no z": ({"log_likelihood": ones, "z": {}}, "z is empty.*at least one"),
    "clash": ({"log_likelihood": ones, "z": {"a": 0.0}, "phi": {"a": 1.0}}, "'a' is named in phi and in z"),
    "nothing": ({"z": {"a": 0.0}}, "needs log_likelihood, or outputs together with likelihood"),
    "outputs alone": ({"outputs": growth, "z": {"a": 0.0}}, "outputs together with likelihood"),
    "two likelihoods": (
        {"log_likelihood": ones, "outputs": growth, "likelihood": "normal", "z": {"a": 0.0}},
        "two likelihoods may disagree",
    ),
    "not a function": ({"log_likelihood": 3.0, "z": {"a": 0.0}}, r"function of \(phi, z, x, y\), not 3\.0"),
    "arguments": ({"log_likelihood": growth, "z": {"a": 0.0}}, r"log_likelihood\(phi, z, x, y\): too many"),
    "outside its range": ({"log_likelihood": ones, "z": {"a": float("inf")}}, r"z\['a'\]: real\(inf\)"),
    "no entries": ({"log_likelihood": ones, "z": {"a": []}}, r"z\['a'\] is empty"),
    "a reserved name": ({"log_likelihood": ones, "z": {"likelihood.a": 0.0}}, "cannot be the name"),
    "unknown likelihood": ({"outputs": growth, "likelihood": "beta", "z": {"a": 0.0}}, "unknown likelihood"),
}


@pytest.mark.parametrize("case", MAKE)
def test_models_that_make_no_sense(case: str) -> None:
    arguments, match = MAKE[case]
    with pytest.raises((ModelError, SettingsError), match=match):
        fp.CustomModel(**arguments)


def total(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
    return ((y - z["a"]) ** 2).sum()


def square(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
    return -((y.unsqueeze(1) - z["a"] * y) ** 2)


def number(phi: Named, z: Named, x: Tensor, y: Tensor) -> float:
    return 1.0


def branch(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
    return y * z["a"] if z["a"] > 0 else -y * z["a"]


def noisy(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
    return y * z["a"] + torch.randn(len(y))


def root(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
    return torch.sqrt(y - 2) * z["a"]


def steep(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
    return torch.sqrt(y.clamp(min=2) - 2 + 0 * z["a"]) + z["a"]


def steep_phi(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
    return torch.sqrt(y.clamp(min=2) - 2 + 0 * phi["b"]) + z["a"]


RUN: dict[str, tuple[Any, str]] = {
    "sum": (total, r"log_likelihood returned shape \(\) for 3 example.*shape \(3,\), not their sum"),
    "broadcast": (square, r"returned shape \(3, 3\) for 3"),
    "a number": (number, "must return a tensor of shape .*not float"),
    "a branch": (branch, "vmap.*torch.where"),
    "global noise": (noisy, "global generator"),
    "nan at the start": (root, r"client 'ben', row 1: the log-likelihood is nan at the initial values \(b 1"),
    "gradient in z": (steep, "client 'ben': the gradient in a is not finite"),
    "gradient in phi": (steep_phi, "client 'ben': the gradient in b is not finite"),
}


@pytest.mark.parametrize("case", RUN)
@pytest.mark.parametrize("method", [fp.FedSOUL, fp.FedAvg], ids=["FedSOUL", "FedAvg"])
def test_functions_that_cannot_be_used(case: str, method: Any, tmp_path: Path) -> None:
    function, match = RUN[case]
    model = fp.CustomModel(function, z={"a": 0.5}, phi={"b": positive(1.0)})
    x = torch.zeros(3, 1)
    clients = {
        "anna": (x, torch.tensor([3.0, 4.0, 5.0])),
        "none": (x[:0], torch.zeros(0)),
        "ben": (x, torch.tensor([3.0, 1.0, 5.0])),
    }
    with pytest.raises(ModelError, match=match):
        method(model).fit(clients, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_outputs_of_the_wrong_shape() -> None:
    model = fp.CustomModel(outputs=lambda phi, z, x: z["a"], likelihood="normal", z={"a": 0.5})
    with pytest.raises(ModelError, match=r"outputs returned shape \(\).*\(2,\) or \(2, outputs\)"):
        fp.FedSOUL(model).fit([(torch.zeros(2, 1), torch.zeros(2))], rounds=1)


def test_settings_that_need_a_linear_head_are_refused() -> None:
    model = growth_model()
    mixed, closed = fp.steps.BetaStep(form="mixed"), fp.chains.Chain(rao_blackwell=True)
    for options in ({"beta_step": mixed}, {"chain": closed}, {"start": "spectral"}):
        with pytest.raises(SettingsError):
            fp.FedSOUL(model, **options)
    with pytest.raises(SettingsError, match="exact heads"):
        fp.FedRep(model, heads="exact")


# --- burn-in -------------------------------------------------------------------------------------


def test_burn_in_is_for_a_clients_first_round_only() -> None:
    """Whoever was there before does not move by it, and its cost is counted."""
    method = fp.FedSOUL(growth_model(), local_steps=2, chain=fp.chains.Chain(burn_in=15))
    assert method.sampler.burn_in == 15
    assert fp.FedSOUL(growth_model()).sampler.burn_in == 100
    assert fp.FedSOUL(composition(False)).sampler.burn_in == 0
    assert fp.FedSOUL.paper(growth_model(), rate=0.1).sampler.burn_in == 0
    history = method.fit(growth_data((3, 4)), rounds=3).history
    evaluations = [line["gradient_evaluations"] for line in history]
    assert evaluations == [2 * ((1 + 10 * 5) + (1 + 5 * 5) + (1 + 2 * 5)), 2 * (1 + 2 * 5), 2 * (1 + 2 * 5)]
    with pytest.raises(SettingsError, match="burn_in must be a whole number, 0 or more"):
        fp.chains.Chain(burn_in=-1)


def test_burn_in_leaves_those_who_were_there_alone() -> None:
    method = fp.FedSOUL(growth_model(), local_steps=2, chain=fp.chains.Chain(burn_in=15))
    cohort, hierarchy = cohort_of(method.model, growth_data((3, 4))), method.hierarchy
    beta = method.init(FACTS, Key(0), {})["beta"]
    target = hierarchy.target(method.model.initial_phi(), beta, cohort.x, cohort)
    z = hierarchy.prior.draw(beta, cohort.units, train_key(), 1)
    tuning = Tuning(torch.full((2,), -3.0, dtype=WIDE), torch.tensor([0.0, 3.0], dtype=WIDE))
    burnt_in = method.sampler._burnt_in
    moved, tuned, _, _ = burnt_in(target, z, tuning, cohort, train_key())
    assert torch.equal(moved[1], z[1])
    assert not torch.equal(moved[0], z[0])
    assert tuned.updates.tolist() == [2.0, 3.0]
    alone = cohort.select(torch.tensor([0]))
    target = hierarchy.target(method.model.initial_phi(), beta, alone.x, alone)
    first = Tuning(tuning.log_step[:1], tuning.updates[:1])
    same, _, _, _ = burnt_in(target, z[:1], first, alone, train_key())
    torch.testing.assert_close(same[0], moved[0])
