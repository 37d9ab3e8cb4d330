"""Encoded images as bytes: whatever a file holds becomes grey or colours between 0 and 255, or is refused.

Where Pillow makes bytes of larger numbers it cuts them off at 255: images of 16 bits would be white but for
their darkest shades. They are scaled here. What has no known range (32 bits, fractions) is refused.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpop.errors import DataError
from fedpop.extras import library

Bytes = npt.NDArray[np.uint8]


def image_bytes(
    source: Path | bytes, where: str, channels: int | None = None, size: tuple[int, int] | None = None
) -> Bytes:
    """An encoded image as bytes, ``[height, width, channels]``.

    ``where`` is what errors call it. ``channels`` are 1 for grey and 3 for colours; None takes grey for grey.
    It is scaled to ``size`` (height, width) where one is given.
    """
    pillow = library("PIL.Image", "data", "images")
    try:
        with pillow.open(source if isinstance(source, Path) else io.BytesIO(source)) as image:
            plain = _eight_bits(pillow, image, where)
            grey = plain.mode == "L" if channels is None else channels == 1
            plain = plain.convert("L" if grey else "RGB")
            if size is not None and plain.size != size[::-1]:
                plain = plain.resize(size[::-1], pillow.Resampling.BILINEAR)
            pixels: Bytes = np.asarray(plain, dtype=np.uint8)
    except DataError:
        raise
    except pillow.UnidentifiedImageError as error:  # its words hold the address of an object in memory
        raise DataError(f"{where}: it is no image of a known kind") from error
    except (
        OSError, SyntaxError, TypeError, ValueError, EOFError, MemoryError, pillow.DecompressionBombError,
    ) as error:  # fmt: skip
        detail = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
        raise DataError(f"{where}: {detail.rstrip('.') or type(error).__name__}") from error
    return pixels.reshape(*pixels.shape[:2], -1)


def _eight_bits(pillow: Any, image: Any, where: str) -> Any:
    """The image itself, or its 16 bits as 8."""
    # Older versions of Pillow call grey PNGs of 16 bits "I", which elsewhere are whole numbers of 32.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return pillow.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        kind = "whole numbers of 32 bits" if image.mode == "I" else "fractions"
        raise DataError(
            f"{where}: its pixels are {kind}, whose black and white nobody knows; save it with 8 or 16 bits"
        )
    return image
