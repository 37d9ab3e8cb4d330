"""The spectral start: unbiased cross products, exact eigenvectors, nothing from small clients."""

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import FedpopWarning, ModelError, SettingsError
from fedpop.evaluation.subspace import principal_angle
from fedpop.keys import Key
from fedpop.message import Total
from fedpop.methods.base import Facts
from fedpop.questions import Question
from fedpop.questions.spectral import CrossProducts, SecondMoments, Spectral, applies
from tests.helpers import FRAME, asked, cohort_of, generator, linear_model, population_data, run_of, seeded

WIDE = torch.float64
EYE = {"whitener": torch.eye(3, dtype=WIDE)}
KEY = Key(0, purpose="test")


def question(name: str, minimum: int = 2, model: fp.Composition | None = None) -> Question[dict[str, Tensor]]:
    if name == "moments":
        return SecondMoments(minimum)
    return CrossProducts(linear_model() if model is None else model, minimum)


def sums(name: str, clients: list[tuple[Tensor, Tensor]], minimum: int = 2) -> dict[str, Tensor]:
    """What the server gets of these clients; x counts as white."""
    _, done = asked(question(name, minimum), cohort_of(linear_model(), clients), EYE, KEY)
    return done.total.plain


def seen(**sums: Tensor) -> Total:
    """As if clients had sent these sums; all alike in the size of y, by default."""
    if "cross" in sums:
        sums = {"even": sums["cross"]} | sums
    plain = {n: s.reshape(-1) for n, s in sums.items()}
    return Total(plain, plain, {}, 5, 5.0, 5, ratio=False)


def test_cross_products_are_unbiased_for_the_signal_alone() -> None:
    """One client redrawn 4000 times: S / (N (N - 1)) averages to phi z z' phi', noise or no noise."""
    g, n, replicates = generator(0), 4, 4000
    a = torch.tensor([1.0, -0.5, 0.3])  # phi z
    each = []
    for _ in range(replicates):
        x = torch.randn(n, 3, generator=g)
        y = x @ a + 1.5 * torch.randn(n, generator=g)
        v = x.T @ y
        each.append((torch.outer(v, v) - (x * y.square()[:, None]).T @ x) / (n * (n - 1)))
    # The same through the package, in one message.
    g = generator(0)
    clients = []
    for _ in range(replicates):
        x = torch.randn(n, 3, generator=g)
        clients.append((x, x @ a + 1.5 * torch.randn(n, generator=g)))
    message = sums("spectral", clients)
    mean = message["cross"].reshape(3, 3) / message["pairs"]
    values = torch.stack(each)
    torch.testing.assert_close(mean, values.mean(0), rtol=1e-4, atol=1e-4)
    error = values.std(0) / replicates**0.5
    assert bool(((mean - torch.outer(a, a)).abs() < 5 * error).all())


def phi_of(total: Total, known: dict[str, Tensor]) -> Tensor:
    """phi in double precision from sums of cross products, a backbone from three inputs to two features."""
    model = fp.Composition(
        seeded(nn.Linear(3, 2, bias=False).to(WIDE)),
        nn.Linear(2, 1, bias=False).to(WIDE),
        fp.likelihoods.Normal(0.5),
    )
    return question("spectral", model=model).finish(known, total)["phi"]


def test_exact_moments_give_back_phi_exactly() -> None:
    """Up to rotation: phi_hat' phi_hat = phi E[z z'] phi', in the coordinates of x."""
    g = generator(1)
    phi = torch.randn(2, 3, generator=g, dtype=WIDE)
    z = torch.randn(50, 2, generator=g, dtype=WIDE)
    second = z.T @ z / 50
    root = torch.randn(3, 3, generator=g, dtype=WIDE)
    cov = root @ root.T + torch.eye(3, dtype=WIDE)  # of x
    known = SecondMoments(2).finish({}, seen(second=30 * cov, count=torch.tensor([30.0])))
    whitener = known["whitener"]
    torch.testing.assert_close(whitener @ cov @ whitener, torch.eye(3, dtype=WIDE))
    # In whitened coordinates y = (C^-1/2 x)' (C^1/2 phi' z).
    white = phi @ torch.linalg.inv(whitener)
    cross = white.T @ second @ white
    found = phi_of(seen(cross=7 * cross, pairs=torch.tensor([7.0])), known).reshape(2, 3)
    torch.testing.assert_close(found.T @ found, phi.T @ second @ phi)


@pytest.mark.parametrize("whitened", [True, False])
def test_correlated_inputs_are_whitened_first(whitened: bool) -> None:
    """With many examples the start is at the true subspace; without whitening it is not."""
    clients, phi, _ = population_data(150, 40, 4, 2, 0.1)
    mix = torch.tensor(
        [[3.0, 0.0, 0.0, 0.0], [2.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.0, 0.3]]
    )
    moved = [(x @ mix.T, y) for x, y in clients]  # y = x_new' mix^-T phi z
    truth = torch.linalg.inv(mix).T @ phi
    model = linear_model(4, 2, 0.1)
    cohort, known = cohort_of(model, moved), {}
    for one in fp.FedSOUL(model).questions(Facts(150, 1), KEY):
        if isinstance(one, CrossProducts) and not whitened:
            known = {"whitener": torch.eye(4, dtype=WIDE)}
        known = known | asked(one, cohort, known, KEY)[0]
    angle = principal_angle(known["phi"].reshape(2, 4).T, truth)
    assert (angle < 0.1) is whitened


@pytest.mark.parametrize("phase", ["moments", "spectral"])
def test_clients_below_the_minimum_add_nothing(phase: str) -> None:
    clients, _, _ = population_data(6, 5, 3, 2, 0.1)
    small = [(x[:3], y[:3]) for x, y in clients]
    alone = sums(phase, clients, minimum=4)
    both = sums(phase, clients + small, minimum=4)
    for name, value in alone.items():
        torch.testing.assert_close(both[name], value)
    assert all(not bool(v.any()) for v in sums(phase, small, minimum=4).values())


def test_one_example_makes_no_pair_whatever_the_minimum() -> None:
    clients, _, _ = population_data(6, 1, 3, 2, 0.1)
    cohort, model = cohort_of(linear_model(), clients), linear_model()
    known, done = asked(question("spectral", minimum=1), cohort, EYE, KEY)
    assert float(done.total.plain["pairs"]) == 0
    assert torch.equal(known["phi"], model.initial_phi())
    with pytest.raises(SettingsError, match="minimum must be a whole number, 2 or more"):
        Spectral(minimum=1)


def test_directions_come_from_even_weights_and_sizes_from_plain_ones() -> None:
    """Ninety clients share a plane that ten with a hundredfold y do not lie in: the span is the plane, and
    phi' phi the part of the plain moments within it."""
    plane = torch.diag(torch.tensor([3.0, 2.0, 0.0], dtype=WIDE))
    loud = torch.tensor([0.1, 0.0, 5.0], dtype=WIDE)
    cross = 90 * plane + 10 * torch.outer(loud, loud)
    total = seen(cross=cross, even=plane, pairs=torch.tensor([100.0], dtype=WIDE))
    found = phi_of(total, EYE).reshape(2, 3)
    keep = torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=WIDE))
    torch.testing.assert_close(found.T @ found, keep @ (cross / 100) @ keep)


def test_even_weights_do_not_see_the_size_of_y() -> None:
    """A client whose y is a thousandfold: the same even sums, within single precision."""
    clients, _, _ = population_data(6, 5, 3, 2, 0.1)
    louder = [(x, y * (1000.0 if i == 2 else 1.0)) for i, (x, y) in enumerate(clients)]
    plain, loud = sums("spectral", clients), sums("spectral", louder)
    torch.testing.assert_close(loud["even"], plain["even"], rtol=1e-4, atol=1e-4)
    assert float(loud["cross"].abs().max()) > 1e4 * float(plain["cross"].abs().max())
    silent = [(x, 0.0 * y) for x, y in clients]
    assert not bool(sums("spectral", silent)["even"].any())


def test_negative_eigenvalues_are_clipped() -> None:
    cross = torch.diag(torch.tensor([2.0, -1.0, -3.0], dtype=WIDE))
    phi = phi_of(seen(cross=cross, pairs=torch.ones(1, dtype=WIDE)), EYE).reshape(2, 3)
    assert bool(torch.isfinite(phi).all())
    torch.testing.assert_close(phi[0].square().sum(), torch.tensor(2.0, dtype=WIDE))
    assert 0 < float(phi[1].norm()) < 0.5


def test_the_start_leaves_the_rest_of_phi_alone() -> None:
    clients, _, _ = population_data(6, 5, 3, 2, 0.1)
    method = fp.FedSOUL(linear_model(variance="learned"), phi_step=fp.steps.SGD(1e-30))
    population = method.replace(anneal=fp.steps.Anneal(0)).fit(clients, rounds=1)
    x, y = (torch.cat(parts) for parts in zip(*clients, strict=True))
    features = x @ population.phi["backbone.weight"].T
    left = (y - features @ torch.linalg.lstsq(features, y[:, None]).solution[:, 0]).square().mean()
    # What says how large the noise is starts in the units of the data: half of what a pooled fit leaves.
    torch.testing.assert_close(population.phi["likelihood.log_variance"], (left / 2).log(), atol=1e-4, rtol=0)


def test_logistic_targets_are_linearised() -> None:
    model = fp.Composition(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False), "bernoulli")
    response = model.likelihood.working_response(torch.tensor([[0.0], [1.0]]))
    torch.testing.assert_close(response, torch.tensor([[-2.0], [2.0]]))
    assert applies(model)


@pytest.mark.parametrize(
    "model",
    [
        fp.Composition(nn.Linear(3, 2), nn.Linear(2, 1, bias=False), "normal"),
        fp.Composition(nn.Linear(3, 2, bias=False), nn.Linear(2, 1), "normal"),
        fp.Composition(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False), "normal"),
        fp.Composition(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), nn.Linear(2, 1, bias=False), "normal"),
        fp.Split(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), "1.*", "normal"),
    ],
    ids=["backbone bias", "head bias", "two outputs", "network", "split"],
)
def test_models_without_a_spectral_start_begin_at_random_and_say_so(model: fp.Composition) -> None:
    assert not applies(model)
    names = [q.name for q in fp.FedSOUL(model).questions(Facts(3, 1), KEY)]
    assert names == ["least squares", "target size"]
    for method in (fp.FedSOUL, fp.FedRep):
        with pytest.raises(SettingsError, match="spectral start needs"):
            method(model, start="spectral")
    with pytest.raises(SettingsError, match="start must be one of auto, spectral, random"):
        fp.FedSOUL(model, start="warm")


def test_a_restart_begins_at_random_in_the_units_of_the_data() -> None:
    method = fp.FedSOUL(linear_model())
    assert [q.name for q in method.questions(Facts(3, 1), KEY)] == ["second moments", "cross products"]
    assert [q.name for q in method.restarted().questions(Facts(3, 1, 1), KEY)] == ["least squares"]
    assert [q.name for q in method.replace(start="random").questions(Facts(3, 1), KEY)] == ["feature scale"]


def test_what_it_costs_before_the_first_round() -> None:
    """Everyone sends a sum of each question, in single precision, and receives the whitener in double; and
    a count and a sum of squares of y in double."""
    clients, _, _ = population_data(6, 5, 3, 2, 0.1)
    run = run_of(fp.FedSOUL(linear_model(), engine="sampled"), clients)
    assert run.totals["bytes_up"] == 6 * (6 * FRAME + 4 * ((9 + 1) + (9 + 9 + 1)) + 8 * 2)
    assert run.totals["bytes_down"] == 6 * 8 * 9


def test_the_setting_reaches_the_questions() -> None:
    method = fp.FedSOUL(linear_model(), start=fp.steps.Spectral(minimum=3))
    assert [q.minimum for q in method.questions(Facts(3, 1), KEY)] == [3, 3]


@pytest.mark.parametrize("phase", ["moments", "spectral"])
def test_a_client_whose_products_overflow_adds_nothing(phase: str) -> None:
    clients, _, _ = population_data(6, 5, 3, 2, 0.1)
    huge = (torch.full((5, 3), 1e25), torch.full((5,), 1e25))
    alone, both = sums(phase, clients), sums(phase, [*clients, huge])
    for name, value in alone.items():
        torch.testing.assert_close(both[name], value)


def test_cohorts_do_not_matter() -> None:
    clients, _, _ = population_data(9, 5, 3, 2, 0.1)
    phis = [
        fp.FedSOUL(linear_model()).fit(clients, rounds=1, memory=m).published["phi"] for m in ("1GiB", "1KiB")
    ]
    torch.testing.assert_close(*phis)


def test_x_in_several_parts_is_refused() -> None:
    x, y = torch.zeros(4, 3), torch.zeros(4)
    cohort = fp.Federation.of([((x, x), y)]).cohort(torch.arange(1), torch.device("cpu"))
    with pytest.raises(ModelError, match="x as one tensor"):
        asked(question("moments"), cohort, {}, KEY)


def test_one_long_client_is_none_that_is_out_of_proportion() -> None:
    """Sums over pairs grow with the square of rows: who has 4,000 times more of them stays in, and weighs."""
    g = generator(3)
    a = torch.tensor([1.0, -0.5, 0.3])
    long = torch.randn(20_000, 3, generator=g)
    clients = [(long, long @ a)]
    for _ in range(9):
        x = torch.randn(5, 3, generator=g)
        clients.append((x, x @ a))
    population = fp.FedSOUL(linear_model()).fit(clients, rounds=1)
    assert not [d for d in population.decisions if d.what == "left out before the rounds"]
    clients[3] = (clients[3][0], 1e7 * clients[3][1])
    with pytest.warns(FedpopWarning, match="client-3 takes no part"):
        population = fp.FedSOUL(linear_model()).fit(clients, rounds=1)
    assert [d.chosen for d in population.decisions if d.what == "left out before the rounds"] == ["client-3"]


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    g = generator(4)
    clients = [(torch.randn(n, 3, generator=g), torch.randn(n, generator=g)) for n in (7, 1, 4, 9)]
    whole = {name: sums(name, clients) for name in ("moments", "spectral")}
    monkeypatch.setattr("fedpop.questions.spectral.ROWS_AT_ONCE", 2)
    for name, expected in whole.items():
        torch.testing.assert_close(sums(name, clients), expected)
