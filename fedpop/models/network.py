"""How a network is run over many examples: in which type and memory format, and how many at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedpop.errors import ModelError
from fedpop.federation.inputs import Inputs, leaves, map_inputs, rows_of
from fedpop.models.modules import RowKeys, dropout_rows, is_convolutional
from fedpop.precision import check, choose, reason

IMAGES_PER_THREAD = 50
"""Images that go through a convolutional network at a time on a CPU, for each of its threads: the buffers of
a larger batch are handed back to the operating system after every use, and page faults cost up to a quarter
of the time; of a smaller one threads have too little each."""
LEAST_ROUNDED = 100_000
"""Parameters from which a network without convolutions is worth rounding."""


@dataclass(frozen=True)
class NetworkPass:
    """A forward pass of one module, the same for every model that is made of one."""

    module: nn.Module
    convolutional: bool
    worth: bool
    """Large enough to be worth rounding: 8 bits of a few statistical parameters buy nothing."""
    precision: str = "auto"
    """What it runs in; the parameters' own type unless this is ``bfloat16``, so also before ``auto`` was
    decided."""

    @classmethod
    def of(cls, module: nn.Module, size: int, dtype: torch.dtype, precision: str) -> NetworkPass:
        """``size``: how many shared parameters of type ``dtype`` there are."""
        check(precision)
        convolutional = is_convolutional(module)
        # torch leaves double precision as it is.
        worth = (convolutional or size > LEAST_ROUNDED) and dtype == torch.float32
        return cls(module, convolutional, worth, precision)

    @property
    def autocast(self) -> torch.dtype | None:
        """bfloat16, or None to compute in the parameters' own type."""
        return torch.bfloat16 if self.precision == "bfloat16" else None

    def chosen(self, device: torch.device) -> str:
        """``float32`` or ``bfloat16``, found out where it was left open."""
        return choose(self.precision, device, self.worth)

    def because(self, device: torch.device) -> str:
        """Why it runs in what it runs in, where that was left open."""
        same = choose("auto", device, self.worth) == self.precision
        return reason(device, self.worth) if same else "as when the run began"

    def at(self, precision: str) -> NetworkPass:
        check(precision)
        return replace(self, precision=precision)

    def __call__(self, forward: Callable[[Inputs], Tensor], x: Inputs, rows: RowKeys | None) -> Tensor:
        """``forward(x)`` block by block; dropout is on when ``rows`` name the examples."""
        count = rows_of(x)
        cuts = self.convolutional and leaves(x)[0].device.type == "cpu"
        block = IMAGES_PER_THREAD * torch.get_num_threads() if cuts else max(count, 1)
        if count <= block:
            return self._block(forward, x, rows)
        parts = []
        for start in range(0, count, block):
            cut = slice(start, start + block)
            keys = rows and RowKeys(rows.key, rows.clients[cut], rows.positions[cut])
            parts.append(self._block(forward, map_inputs(lambda v, c=cut: v[c], x), keys))
        return torch.cat(parts)

    def _block(self, forward: Callable[[Inputs], Tensor], x: Inputs, rows: RowKeys | None) -> Tensor:
        if self.convolutional:
            x = map_inputs(_channels_last, x)
        with dropout_rows(self.module, rows):
            if self.autocast is None:
                features = forward(x)
            else:
                with torch.autocast(leaves(x)[0].device.type, self.autocast):
                    features = forward(x)
        if not isinstance(features, Tensor):
            raise ModelError("the backbone must give one tensor of features per batch")
        return features


def _channels_last(leaf: Tensor) -> Tensor:
    return leaf.contiguous(memory_format=torch.channels_last) if leaf.dim() == 4 else leaf
