"""Augmentation by key: off in prediction, a true shift or mirror image in training, repeatable."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedpop as fp
from fedpop.errors import ModelError, SettingsError
from fedpop.keys import Key
from fedpop.models.modules import RowKeys, dropout_rows, federated
from fedpop.models.spec import module_from, module_spec
from tests.helpers import cohort_of, generator, seeded, train_key


def rows(n: int, round: int = 0, client: int = 3) -> RowKeys:
    return RowKeys(Key(0).at(round=round), torch.full((n,), client), torch.arange(n))


def shifted(x: torch.Tensor, keys: RowKeys, padding: int = 2, flip: bool = True) -> torch.Tensor:
    layer = fp.layers.CropFlip(padding, flip)
    with dropout_rows(layer, keys):
        return layer(x)


def test_it_is_off_without_keys() -> None:
    x = torch.randn(3, 2, 5, 6, generator=generator(0))
    assert torch.equal(fp.layers.CropFlip(2)(x), x)


def test_every_image_is_a_window_of_itself_and_all_windows_come_up() -> None:
    n, padding = 3000, 1
    x = torch.randn(1, 2, 5, 4, generator=generator(0))
    out = shifted(x.expand(n, -1, -1, -1), rows(n), padding)
    wide = F.pad(x, (padding,) * 4)
    windows = [wide[0, :, i : i + 5, j : j + 4] for i in range(3) for j in range(3)]
    windows += [w.flip(-1) for w in windows]
    counts = torch.stack([(out == w).flatten(1).all(1).sum() for w in windows])
    assert int(counts.sum()) == n
    expected = n / 18
    # Each count is binomial; five standard deviations are a false alarm in a million.
    assert float((counts - expected).abs().max()) < 5 * (expected * 17 / 18) ** 0.5


def test_without_flip_nothing_is_mirrored() -> None:
    x = torch.arange(24.0).reshape(1, 1, 4, 6).expand(50, -1, -1, -1)
    assert torch.equal(shifted(x, rows(50), 0, flip=False), x)


def test_the_same_example_is_shifted_the_same_way_wherever_it_is_and_differently_each_round() -> None:
    x = torch.randn(6, 1, 8, 8, generator=generator(1))
    whole = shifted(x, rows(6))
    part = RowKeys(Key(0), torch.full((2,), 3), torch.tensor([2, 4]))
    assert torch.equal(shifted(x[[2, 4]], part), whole[[2, 4]])
    assert not torch.equal(shifted(x, rows(6, round=1)), whole)
    assert not torch.equal(shifted(x, rows(6, client=4)), whole)


def test_a_composition_augments_in_training_only() -> None:
    backbone = seeded(nn.Sequential(fp.layers.CropFlip(1), nn.Conv2d(1, 2, 3), nn.Flatten()), 1)
    model = fp.Composition(backbone, seeded(nn.Linear(18, 1), 2), fp.likelihoods.Normal(1.0))
    g = generator(0)
    clients = [(torch.randn(3, 1, 5, 5, generator=g), torch.randn(3, generator=g)) for _ in range(2)]
    cohort, phi = cohort_of(model, clients), model.initial_phi()
    keys = model.dropout_keys(cohort, train_key())
    assert keys is not None
    assert not torch.equal(model.features(phi, cohort, keys), model.features(phi, cohort))
    population = fp.FedSOUL(model).fit(clients, rounds=3, progress=False)
    x = clients[0][0]
    assert torch.equal(population.predict(0, x).mean, population.predict(0, x).mean)
    # Local training with a filter per client draws the same windows, side by side or one by one.
    fp.FedAvg(model, local=fp.LocalSGD(epochs=2, batch=2)).fit(clients, rounds=2, progress=False)


def test_it_survives_saving() -> None:
    spec = module_spec(federated(nn.Sequential(fp.layers.CropFlip(3, flip=False), nn.Conv2d(1, 2, 3))))
    assert spec is not None
    again = module_from(spec)[0]
    assert isinstance(again, fp.layers.CropFlip)
    assert (again.padding, again.flip) == (3, False)


def test_bad_input() -> None:
    with pytest.raises(SettingsError, match="padding"):
        fp.layers.CropFlip(-1)
    with pytest.raises(ModelError, match="images"):
        shifted(torch.zeros(2, 3), rows(2))
