"""What a module must be like: no batch statistics, no global randomness, dropout by key."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import ModelError
from fedpop.keys import Key
from fedpop.models.modules import KeyedDropout, RowKeys, dropout_rows, federated
from tests.helpers import cohort_of, generator, ragged, seeded, train_key

NORMAL = fp.likelihoods.Normal(0.5)


def images(n: int = 4) -> list[tuple[Tensor, Tensor]]:
    g = generator(0)
    return [(torch.randn(n, 1, 4, 4, generator=g), torch.randn(n, generator=g)) for _ in range(2)]


def convolution(norm: nn.Module) -> nn.Sequential:
    return seeded(nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Flatten()), 1)


# --- normalisation layers ----------------------------------------------------------------------


def test_batchnorm_in_training_mode_is_refused_with_a_way_out() -> None:
    with pytest.raises(ModelError, match=r"1 \(BatchNorm2d\).*replace_batchnorm.*\.eval\(\)"):
        fp.Composition(convolution(nn.BatchNorm2d(4)), nn.Linear(16, 1), NORMAL)
    with pytest.raises(ModelError, match="BatchNorm1d"):
        fp.Split(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)), "2.*", NORMAL)


def test_batchnorm_without_running_statistics_is_refused_even_when_frozen() -> None:
    norm = nn.BatchNorm2d(4, track_running_stats=False).eval()
    with pytest.raises(ModelError, match="BatchNorm2d"):
        fp.Composition(convolution(norm), nn.Linear(16, 1), NORMAL)


def test_frozen_batchnorm_uses_and_keeps_its_statistics() -> None:
    backbone = convolution(nn.BatchNorm2d(4))
    backbone[1].running_mean += 0.3
    backbone[1].running_var *= 2.0
    backbone.eval()
    model = fp.Composition(backbone, nn.Linear(16, 1), NORMAL, precision="float32")
    x = images()[0][0]
    torch.testing.assert_close(model.embed(model.initial_phi(), x), backbone(x))
    fp.FedSOUL(model).fit(images(), rounds=2)
    assert torch.equal(model.backbone[1].running_mean, backbone[1].running_mean)


def test_a_frozen_batchnorm_may_stand_inside_a_split() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
    population = fp.FedSOUL(fp.Split(net, "0.bias", NORMAL), local_steps=1).fit(ragged(), rounds=2)
    assert bool(torch.isfinite(population.published["phi"]).all())


def test_replace_batchnorm_gives_groupnorm_with_the_same_affine_map() -> None:
    old = nn.BatchNorm2d(12)
    with torch.no_grad():
        old.weight.copy_(torch.linspace(1, 2, 12))
        old.bias.copy_(torch.linspace(-1, 1, 12))
    module = nn.Sequential(nn.Conv2d(1, 12, 1), nn.Sequential(old))
    new = fp.layers.replace_batchnorm(module)
    norm = new[1][0]
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == 4  # the largest divisor of both 8 and 12
    assert torch.equal(norm.weight, old.weight)
    assert torch.equal(norm.bias, old.bias)
    assert isinstance(module[1][0], nn.BatchNorm2d)  # the user's own module is left alone
    assert isinstance(fp.layers.replace_batchnorm(nn.BatchNorm1d(4)), nn.GroupNorm)


def test_groupnorm_works_and_examples_do_not_mix() -> None:
    backbone = fp.layers.replace_batchnorm(convolution(nn.BatchNorm2d(4)))
    model = fp.Composition(backbone, nn.Linear(16, 1), NORMAL, precision="float32")
    x, phi = images()[0][0], model.initial_phi()
    torch.testing.assert_close(model.embed(phi, x)[:1], model.embed(phi, x[:1]))
    population = fp.FedSOUL(model, local_steps=2).fit(images(), rounds=2)
    assert not torch.equal(population.published["phi"], phi)


# --- dropout -----------------------------------------------------------------------------------


def dropout_model(p: float = 0.5) -> fp.Composition:
    backbone = nn.Sequential(nn.Linear(3, 8), nn.Dropout(p))
    return fp.Composition(seeded(backbone, 2), seeded(nn.Linear(8, 1), 3), NORMAL)


def rows(key: Key, clients: list[int], positions: list[int]) -> RowKeys:
    return RowKeys(key, torch.tensor(clients), torch.tensor(positions))


def mask(key: Key, client: int, position: int, width: int = 64) -> Tensor:
    layer = KeyedDropout(0.5, "a")
    with dropout_rows(layer, rows(key, [client], [position])):
        return layer(torch.ones(1, width))[0]


def test_a_mask_belongs_to_one_seed_round_client_and_example() -> None:
    key = train_key()
    here = mask(key, 1, 2)
    assert torch.equal(here, mask(key, 1, 2))
    elsewhere = [
        mask(key, 1, 3),
        mask(key, 2, 2),
        mask(train_key(round=1), 1, 2),
        mask(train_key(seed=1), 1, 2),
    ]
    assert not any(torch.equal(here, other) for other in elsewhere)


def test_masks_do_not_depend_on_the_batch_they_are_drawn_in() -> None:
    key, layer = train_key(), KeyedDropout(0.5, "a")
    with dropout_rows(layer, rows(key, [0, 1, 1, 5], [0, 0, 2, 1])):
        batch = layer(torch.ones(4, 64))
    assert torch.equal(batch[2], mask(key, 1, 2))


def test_two_layers_have_masks_of_their_own() -> None:
    model = fp.Composition(
        nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.Dropout(0.5)),
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)),
        NORMAL,
    )
    labels = [m.label for part in model.modules() for m in part.modules() if isinstance(m, KeyedDropout)]
    assert len(set(labels)) == 3


def test_the_share_that_is_kept() -> None:
    """Binomial: five standard errors of sqrt(p (1 - p) / n); the mean is kept by rescaling."""
    layer = KeyedDropout(0.2, "a")
    n = 50_000
    with dropout_rows(layer, rows(train_key(), [0], [0])):
        out = layer(torch.ones(1, n))[0]
    kept = float((out > 0).float().mean())
    assert abs(kept - 0.8) < 5 * (0.2 * 0.8 / n) ** 0.5
    assert float(out.max()) == pytest.approx(1 / 0.8)


def test_channels_are_dropped_whole() -> None:
    layer = federated(nn.Dropout2d(0.5))[0]
    with dropout_rows(layer, rows(train_key(), [0], [0])):
        out = layer(torch.ones(1, 32, 3, 3))[0].flatten(1)
    assert bool((out == out[:, :1]).all())
    assert 0 < int((out[:, 0] > 0).sum()) < 32


def test_dropout_changes_training_and_is_the_same_for_the_same_seed() -> None:
    clients = ragged()
    runs = [fp.FedSOUL(dropout_model()).fit(clients, rounds=4, seed=s).published["phi"] for s in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    without = fp.FedSOUL(dropout_model(0.0)).fit(clients, rounds=4).published["phi"]
    assert not torch.equal(runs[0], without)


def test_one_gradient_sees_exactly_the_keyed_masks() -> None:
    """J of a round against autograd through a backbone with the masks written out."""
    model = dropout_model()
    clients = ragged((3, 2))
    cohort = cohort_of(model, clients)
    key = train_key()
    keys = model.row_keys(cohort, key)
    phi = model.initial_phi().requires_grad_()
    with dropout_rows(model.backbone, keys):
        masks = model.backbone[1](torch.ones(5, 8))
    weight, bias = model.phi_layout.views(phi).values()
    expected = torch.cat([x for x, _ in clients]) @ weight.T + bias
    torch.testing.assert_close(model.features(phi, cohort, keys), expected * masks)
    torch.testing.assert_close(model.features(phi, cohort), expected)  # off in prediction


def test_dropout_inside_a_private_head_is_honoured() -> None:
    head = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    model = fp.Composition(None, seeded(head, 4), NORMAL)
    cohort = cohort_of(model, ragged((3, 2)))
    phi, z = model.initial_phi(), model.initial_z().expand(2, 1, -1)
    keys = model.row_keys(cohort, train_key())
    off = model.bind(phi, cohort.x, cohort).value(z)
    on = model.bind(phi, cohort.x, cohort, keys).value(z)
    assert torch.equal(on, model.bind(phi, cohort.x, cohort, keys).value(z))
    assert not torch.allclose(on, off)


class Functional(nn.Module):
    """Dropout from torch's global generator, hidden in a forward."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 4), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.first(x), 0.5, self.training))


@pytest.mark.parametrize(
    "model",
    [
        fp.Composition(Functional(3, 2), nn.Linear(2, 1), NORMAL),
        fp.Composition(nn.Linear(3, 2), Functional(2, 1), NORMAL),
        fp.Split(Functional(3, 1), "first.*", NORMAL),
    ],
    ids=["backbone", "head", "split"],
)
def test_functional_dropout_is_refused(model: fp.Composition) -> None:
    with pytest.raises(ModelError, match="global generator"):
        fp.FedSOUL(model).fit(ragged(), rounds=1)


def test_functional_dropout_that_is_off_is_accepted() -> None:
    fp.FedSOUL(fp.Composition(Functional(3, 2).eval(), nn.Linear(2, 1), NORMAL)).fit(ragged(), rounds=1)


@pytest.mark.parametrize("layer", [nn.AlphaDropout(0.1), nn.RReLU()])
def test_layers_that_cannot_be_keyed_are_refused(layer: nn.Module) -> None:
    with pytest.raises(ModelError, match="global generator"):
        fp.Composition(nn.Sequential(nn.Linear(3, 2), layer), nn.Linear(2, 1), NORMAL)


def test_heads_that_cannot_be_personal_are_refused() -> None:
    with pytest.raises(ModelError, match="no trainable parameter"):
        fp.Composition(nn.Linear(3, 2), nn.Linear(2, 1).requires_grad_(False), NORMAL)
    partly = nn.Linear(2, 1)
    partly.bias.requires_grad_(False)
    with pytest.raises(ModelError, match="Split"):
        fp.Composition(nn.Linear(3, 2), partly, NORMAL)
