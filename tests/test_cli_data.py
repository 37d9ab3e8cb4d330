"""fedpop data: get, list and show, as typed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedpop.cli import main
from fedpop.report.holdings import draw_holdings
from tests.data.files import labels, mat, mnist, pixels


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["data", *words])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_get_says_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "get", "mnist", "--data-dir", str(mnist(tmp_path))])
    assert capsys.readouterr().out.splitlines() == [
        "MNIST: handwritten digits",
        f"train: 40 images (the release has 60,000) from {tmp_path / 'mnist'}",
        f"test: 20 images (the release has 10,000) from {tmp_path / 'mnist'}",
    ]


def test_what_cannot_be_got_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "get", "cifar10", "--data-dir", str(tmp_path))
    assert told.startswith("fedpop: there are no train images of cifar10: searched for")
    assert told.count("\n") == 1
    assert "known are cifar10" in refused(capsys, "get", "imagenet")


def test_list_says_where_each_split_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mnist(tmp_path)
    mat(tmp_path / "svhn" / "test_32x32.mat", pixels(2), labels(2))
    main(["data", "list", "--data", str(tmp_path)])  # the short word
    lines = capsys.readouterr().out.splitlines()

    def told(name: str) -> list[str]:
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{name} "))
        return [line.split(maxsplit=1)[1] for line in lines[at + 1 : at + 3]]

    missing = "not here; `fedpop data get {}` fetches it"
    assert told("mnist") == [str(tmp_path / "mnist")] * 2
    assert told("svhn") == [missing.format("svhn"), str(tmp_path / "svhn")]
    assert told("cifar100") == [missing.format("cifar100")] * 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--b", "4"), "10 images and 5 classes per client, 0 images left over"),
        (("--partition", "iid", "--b", "8"), "5 images and"),
        (("--partition", "dirichlet", "--b", "3", "--alpha", "2"), "0 images left over"),
        (
            ("--partition", "small", "--b", "4", "--classes", "2", "--n-small", "2", "--n-large", "4"),
            "2 to 4 images and 2 classes per client, 28 images left over",
        ),
        (
            ("--partition", "small", "--b", "2", "--n-small", "2", "--n-large", "5"),
            "few images of at most 5 classes, seed 0: 2 to 5 images and 2 to 5 classes per client",
        ),
    ],
)
def test_show_draws_who_has_what(
    words: tuple[str, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "who.png"
    main(["data", "show", "mnist", *words, "--data-dir", str(mnist(tmp_path)), "--out", str(out)])
    shown = capsys.readouterr().out
    assert told in shown
    assert shown.endswith(f"{out}\n")
    with Image.open(out) as image:
        assert min(image.size) > 400
        assert len(np.unique(np.asarray(image.convert("L")))) > 10  # shades, not a blank page


@pytest.mark.parametrize("b", [3, 300, 20_000])
def test_pictures_of_few_and_of_very_many_clients(b: int, tmp_path: Path) -> None:
    """Bars of one size are one stripe of blue where there is no room for gaps between them."""
    draw_holdings(torch.ones(b, 10, dtype=torch.int64), list("abcdefghij"), "alike", tmp_path / "who.png")
    with Image.open(tmp_path / "who.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    blue = (pixels[..., 2] - pixels[..., 0] > 100)[: len(pixels) // 4]
    there = np.flatnonzero(max(blue, key=lambda row: int(row.sum())))
    assert len(there) > 200
    assert (np.diff(there).max() == 1) == (b > 120)


@pytest.mark.parametrize(("ending", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_ending_says_the_form_and_the_same_deal_gives_the_same_file(
    ending: str, start: bytes, tmp_path: Path
) -> None:
    folder = str(mnist(tmp_path))
    for name in ("a", "b"):
        out = str(tmp_path / f"{name}.{ending}")
        main(["data", "show", "mnist", "--b", "4", "--data-dir", folder, "--out", out])
    a, b = (Path(tmp_path / f"{name}.{ending}").read_bytes() for name in "ab")
    assert a.startswith(start)
    assert a == b


def test_deals_that_cannot_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--data-dir", str(mnist(tmp_path)), "--out", str(tmp_path / "x.png"))
    assert "only 10" in refused(capsys, "show", "mnist", "--classes", "11", *where)
    assert "too few" in refused(capsys, "show", "mnist", "--partition", "iid", "--b", "41", *where)
    wrong = refused(capsys, "show", "mnist", "--b", "4", *where[:2], "--out", str(tmp_path / "x.jpeg"))
    assert "ends in .png, .svg, .pdf, not 'x.jpeg'" in wrong
    assert not (tmp_path / "x.png").exists()
    (tmp_path / "folder.png").mkdir()
    for folder in (tmp_path, tmp_path / "folder.png"):
        into = refused(capsys, "show", "mnist", "--b", "4", *where[:2], "--out", str(folder))
        assert "is a folder; name a file in it" in into
    (tmp_path / "file").write_text("")
    nowhere = str(tmp_path / "file" / "x.png")
    assert "cannot write to" in refused(capsys, "show", "mnist", "--b", "4", *where[:2], "--out", nowhere)
