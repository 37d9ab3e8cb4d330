"""What every reader gives: all images of a split as bytes, with their labels, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpop.errors import DataError

Bytes = npt.NDArray[np.uint8]
Watch = Callable[[str, int, int], None]
"""``watch(what, done, total)``: how far a long piece of work is."""


def unwatched(what: str, done: int, total: int) -> None:
    """Nobody looks on."""


@dataclass(frozen=True)
class Decoded:
    """Images ``[n, channels, height, width]`` and their labels ``[n]``."""

    images: Bytes
    labels: npt.NDArray[np.int64]

    def checked(self, where: str, shape: tuple[int, int, int], classes: int) -> Decoded:
        """Itself, or the error that says what about these images cannot be."""
        if self.images.shape[1:] != shape:
            shape_found = " x ".join(map(str, self.images.shape[1:]))
            raise DataError(
                f"{where}: images of {shape_found} bytes, where {' x '.join(map(str, shape))} belong"
            )
        if len(self.images) != len(self.labels):
            raise DataError(f"{where}: {len(self.images)} images but {len(self.labels)} labels")
        if not len(self.labels):
            raise DataError(f"{where}: there are no images in it")
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= classes))
        if len(wrong):
            raise DataError(
                f"{where}, row {wrong[0]}: label {self.labels[wrong[0]]} is outside the classes 0 to "
                f"{classes - 1}"
            )
        return self
