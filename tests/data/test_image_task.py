"""Images as clients: the same for the same seed, held as bytes, every client its sets."""

import hashlib

import pytest
import torch

import fedpop as fp
from fedpop.data import FullImageTask, ImageTask, open_images
from fedpop.errors import SettingsError
from tests.data.files import mnist, real


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def test_a_task_gives_every_client_its_three_sets() -> None:
    task = ImageTask("mnist", classes=2, small=2, large=1, n_small=3, n_large=6, validation=4, test=8)
    federation = task.make(real("mnist"), seed=1)
    assert federation.names == ["client-0", "client-1", "client-2"]
    assert {s: p.sizes.tolist() for s, p in federation.splits.items()} == {
        "train": [3, 3, 6],
        "validation": [4, 4, 4],
        "test": [8, 8, 8],
    }
    for i in range(3):
        held = [
            set(p.y[int(p.starts[i]) : int(p.starts[i] + p.sizes[i])].tolist())
            for p in federation.splits.values()
        ]
        assert held[0] == held[1] == held[2]
        assert len(held[0]) == 2
    assert all(p.x.dtype == torch.uint8 for p in federation.splits.values())
    assert federation.fingerprint() == task.make(real("mnist"), seed=1).fingerprint()
    assert federation.fingerprint() != task.make(real("mnist"), seed=2).fingerprint()


def test_clients_and_starts_are_those_of_the_recorded_results() -> None:
    """Digests of labels and weights as they were when results/defaults was made."""
    task = ImageTask("mnist")
    splits = task.make(real("mnist"), 3).splits
    assert [digest(splits[s].y) for s in ("train", "test", "validation")] == [
        "80bcb0b203fb8493",
        "c56b6b445f997a35",
        "e203e974345b9fb9",
    ]
    assert digest(task.model(3).initial_phi()) == "112d56dfd43fcf45"
    assert digest(ImageTask("cifar10").model(3).initial_phi()) == "cde89841f8a2b107"


def test_every_image_goes_to_one_client_training_and_test_alike(tmp_path) -> None:
    folder = mnist(tmp_path)  # 40 and 20 images of ten classes
    task = FullImageTask("mnist", classes=5, b=4)
    federation = task.make(folder, 0)
    assert federation.splits["train"].sizes.tolist() == [10] * 4
    assert federation.splits["test"].sizes.tolist() == [5] * 4
    source = open_images("mnist", folder, download=False)
    for split, images in (("train", source.train), ("test", source.test)):
        found = sorted(map(tuple, federation.splits[split].x.flatten(1).tolist()))
        assert found == sorted(map(tuple, images.x.flatten(1).tolist()))


def test_a_share_is_held_out_and_clients_are_kept_apart(tmp_path) -> None:
    folder = mnist(tmp_path)
    whole = FullImageTask("mnist", classes=5, b=4).make(folder, 0)
    task = FullImageTask("mnist", classes=5, b=4, validation=0.2)
    known, new = task.split(folder, 0, new=1)
    assert known.splits["train"].sizes.tolist() == [8] * 3
    assert known.splits["validation"].sizes.tolist() == [2] * 3
    (apart,) = new
    assert (len(apart.y), len(apart.validation[1]), len(apart.test[1])) == (8, 2, 5)
    both = torch.cat((known.splits["train"].x[:8], known.splits["validation"].x[:2])).flatten(1)
    assert sorted(both.tolist()) == sorted(whole.train.x[:10].flatten(1).tolist())
    assert sorted(apart.test[0].flatten(1).tolist()) == sorted(
        whole.splits["test"].x[15:].flatten(1).tolist()
    )
    with pytest.raises(SettingsError, match="4 new clients asked for, but there are 4"):
        task.split(folder, 0, new=4)


def test_the_papers_full_data() -> None:
    federation = FullImageTask("mnist", classes=2).make(real("mnist"), 0)
    assert len(federation) == 100
    # MNIST's classes are of unequal sizes: shards of each are equal, clients' sums are not.
    assert int(federation.train.sizes.sum()) == 60_000
    assert int(federation.splits["test"].sizes.sum()) == 10_000


@pytest.mark.parametrize("images", ["cifar10", "cifar100", "mnist", "fashionmnist", "svhn"])
def test_the_model_of_every_set_takes_its_bytes(images: str) -> None:
    task = FullImageTask(images, classes=2)
    about = fp.data.DATASETS[images]
    model = task.model(0)
    x = torch.zeros(2, *about.shape, dtype=torch.uint8)
    assert model.outputs_at(model.initial_phi(), model.initial_z()[None], x).shape == (
        1,
        2,
        len(about.classes),
    )
    assert task.model(0, network="mlp").phi_layout.size != model.phi_layout.size
    still = task.model(0, shift=False)
    assert torch.equal(still.initial_phi(), model.initial_phi())
    assert not any(isinstance(m, fp.layers.CropFlip) for m in still.backbone.modules())


def test_a_fit_on_bytes(tmp_path) -> None:
    federation = FullImageTask("mnist", classes=5, b=4).make(mnist(tmp_path), 0)
    population = fp.FedSOUL(FullImageTask("mnist").model(0)).fit(federation, rounds=2, progress=False)
    assert 0 <= fp.evaluate(population, "test").scores["accuracy"].mean() <= 1


def test_tasks_that_cannot_be(tmp_path) -> None:
    with pytest.raises(SettingsError, match="images must be one of cifar10"):
        ImageTask("imagenet")
    for wrong in (1.0, -0.1, "a", None, float("nan")):
        with pytest.raises(SettingsError, match="FullImageTask: validation must be"):
            FullImageTask(validation=wrong)
    with pytest.raises(SettingsError, match="FullImageTask has no setting 'nope'"):
        FullImageTask(nope=1)
    with pytest.raises(SettingsError, match="only 10"):
        FullImageTask("mnist", classes=11).make(mnist(tmp_path), 0)
    with pytest.raises(SettingsError, match=r"class \d has 4 examples, fewer than its clients ask for"):
        ImageTask("mnist", classes=1, small=0, large=20, n_large=5, validation=0).make(tmp_path, 0)
