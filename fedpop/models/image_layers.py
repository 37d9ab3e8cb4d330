"""Layers for images: augmentation, on while training, keyed by example and off in prediction; and numbers
from the bytes that images are stored as."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fedpop.checked import Whole, checked
from fedpop.errors import DataError, ModelError, SettingsError
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
        words = self.words(3, x.device)
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


class Standardise(nn.Module):
    """``(byte / 255 - mean) / sd`` of each channel, as the first layer of a network.

    Bytes take a quarter of the memory of floats until they are needed. Numbers come out in the network's
    own type. Augmentation belongs after it, so that what ``CropFlip`` pads with is the mean pixel.

    Args:
        mean: Of pixels between 0 and 1, one number for each channel; ``DATASETS[name].mean`` has those
            of a known set.
        sd: The standard deviation of the same, positive, one for each channel.

    >>> import torch
    >>> layer = Standardise(mean=(0.5,), sd=(0.25,))
    >>> layer(torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1)).flatten()
    tensor([-2.,  2.])
    """

    def __init__(self, mean: Sequence[float], sd: Sequence[float]) -> None:
        super().__init__()
        self.mean, self.sd = tuple(map(float, mean)), tuple(map(float, sd))
        if not self.mean or len(self.mean) != len(self.sd) or not min(self.sd) > 0:
            raise SettingsError("give a mean and a positive standard deviation for each channel")
        scale = 1 / (255 * torch.tensor(self.sd, dtype=torch.float64))
        shift = -torch.tensor(self.mean, dtype=torch.float64) * 255 * scale
        dtype = torch.get_default_dtype()
        self.register_buffer("scale", scale.to(dtype).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("shift", shift.to(dtype).view(1, -1, 1, 1), persistent=False)

    def extra_repr(self) -> str:
        return f"mean={self.mean}, sd={self.sd}"

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.get_buffer("scale"), self.get_buffer("shift")
        if x.dtype != torch.uint8:
            raise DataError(
                f"this network standardises images itself: it takes bytes (torch.uint8), not {x.dtype}"
            )
        if x.dim() != 4 or x.shape[1] != len(self.mean):
            raise DataError(
                f"this network takes images [n, {len(self.mean)}, height, width], not {tuple(x.shape)}"
            )
        return x.to(scale.dtype).mul_(scale).add_(shift)
