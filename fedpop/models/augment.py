"""Image augmentation as a layer: on while training, keyed by example, off in prediction."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedpop.checked import Whole, checked
from fedpop.errors import ModelError
from fedpop.models.modules import KeyedLayer


class CropFlip(KeyedLayer):
    """A random shift of images and, if wanted, a random mirror image.

    Put it first in a backbone, or after ``Standardise``: what comes in from outside is zero, which there is
    the mean pixel. Like dropout it acts only in training rounds; the same example is shifted differently in
    every round, and the same way whenever a run is repeated or resumed.

    Args:
        padding: The largest shift in each direction, in pixels (default: 4).
        flip: Whether half of the images are mirrored, left to right (default: True). False for digits and
            letters.

    >>> import torch
    >>> from torch import nn
    >>> backbone = nn.Sequential(CropFlip(padding=4), nn.Conv2d(3, 8, 5))
    >>> backbone(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 8, 28, 28])
    """

    @checked
    def __init__(self, padding: Whole = 4, flip: bool = True) -> None:
        super().__init__("crop")
        self.padding, self.flip = padding, flip

    def extra_repr(self) -> str:
        return f"padding={self.padding}, flip={self.flip}"

    def forward(self, x: Tensor) -> Tensor:
        if self.rows is None:
            return x
        if x.dim() != 4:
            raise ModelError(f"CropFlip takes images [n, channels, height, width], not {tuple(x.shape)}")
        words = self.words(3)
        n, _, height, width = x.shape
        shift = words[:, :2] % (2 * self.padding + 1)
        rows = shift[:, :1] + torch.arange(height, device=x.device)
        columns = torch.arange(width, device=x.device).expand(n, -1)
        if self.flip:
            mirrored = (words[:, 2:] >= 2**31).expand_as(columns)
            columns = torch.where(mirrored, width - 1 - columns, columns)
        columns = columns + shift[:, 1:2]
        # Whole pixels are copied, in the order in which convolutions read memory on a CPU (channels last).
        wide = pad(x, (self.padding,) * 4).permute(0, 2, 3, 1)
        tall, broad = wide.shape[1:3]
        image = torch.arange(n, device=x.device)[:, None, None]
        pixel = (image * tall + rows[:, :, None]) * broad + columns[:, None, :]
        cut = wide.reshape(-1, wide.shape[3]).index_select(0, pixel.reshape(-1))
        return cut.reshape(n, height, width, -1).permute(0, 3, 1, 2)
