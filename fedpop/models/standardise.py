"""Images are stored as bytes; this layer, the first of a network, makes standardised numbers of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedpop.errors import DataError, SettingsError


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
