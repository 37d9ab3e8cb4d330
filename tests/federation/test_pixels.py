"""Images of all depths as bytes: scaled where their range is known, refused where it is not."""

import io
from pathlib import Path

import numpy as np
import pytest

from fedpop.errors import DataError
from fedpop.federation.pixels import image_bytes
from fedpop.federation.reading import read_data, read_image

image = pytest.importorskip("PIL.Image")

SHADES = np.arange(256, dtype=np.uint16).reshape(16, 16)


@pytest.mark.parametrize("ending", ["png", "tif"])
@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bits_keep_their_shades(tmp_path: Path, ending: str, channels: int) -> None:
    file = tmp_path / f"a.{ending}"
    image.fromarray(SHADES * 257).save(file)
    found = read_image(file, channels)
    assert found.shape == (channels, 16, 16)
    assert all(np.array_equal(one, SHADES) for one in found)


def test_sixteen_bits_of_the_other_byte_order(tmp_path: Path) -> None:
    file = tmp_path / "a.tif"
    image.frombytes("I;16B", (16, 16), (SHADES * 257).astype(">u2").tobytes()).save(file)
    assert np.array_equal(read_image(file, 1)[0], SHADES)


def test_a_site_has_the_same_shades(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    image.fromarray(SHADES * 257).save(tmp_path / "cat" / "1.png")
    found = read_data(str(tmp_path), {"size": [1, 16, 16], "classes": ["cat"]}, "north").train.x
    assert np.allclose(found[0, 0].numpy() * 255, SHADES)


@pytest.mark.parametrize(("kind", "told"), [(np.int32, "32 bits"), (np.float32, "fractions")])
def test_what_has_no_range_is_refused(tmp_path: Path, kind: type, told: str) -> None:
    file = tmp_path / "a.tif"
    image.fromarray(SHADES.astype(kind)).save(file)
    with pytest.raises(
        DataError, match=rf"cannot read the image .*a\.tif: its pixels are .*{told}.* 8 or 16"
    ):
        read_image(file, 1)


def test_grey_stays_grey_unless_told_and_colours_stay_colours() -> None:
    def encoded(array: np.ndarray, mode: str | None = None) -> bytes:
        out = io.BytesIO()
        made = image.fromarray(array)
        (made.convert(mode) if mode else made).save(out, "PNG")
        return out.getvalue()

    grey = SHADES.astype(np.uint8)
    assert image_bytes(encoded(grey), "here").shape == (16, 16, 1)
    assert image_bytes(encoded(SHADES * 257), "here").shape == (16, 16, 1)
    for mode in ("RGB", "RGBA", "P"):
        assert image_bytes(encoded(grey, mode), "here").shape == (16, 16, 3)


def test_what_is_no_image_is_told_without_an_address_in_memory() -> None:
    for junk in (b"", b"junk"):
        with pytest.raises(DataError, match=r"^here: it is no image of a known kind$"):
            image_bytes(junk, "here")


def test_an_image_too_large_to_be_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    image.new("L", (30, 30)).save(out, "PNG")
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match=r"^here: Image size \(900 pixels\)"):
        image_bytes(out.getvalue(), "here")
