"""A device that is not here, emulated: tensors that say they are on it, and refuse what a real one refuses.

An operation that mixes it with the CPU is an error, but for numbers without axes, which devices take; so is
double precision where the device has none. Its numbers are held by tensors of the CPU, so that results can
be compared. It goes by the name of ``meta``, the one device that torch knows everywhere and that needs no
driver; nothing here makes a real meta tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from fedpop import devices

DEVICE = torch.device("meta")
COPIES = ("aten::_to_copy", "aten::copy_")
READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
DOUBLE = (torch.float64, torch.complex128)


class There(Tensor):
    """A tensor on the device."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> There:
        made: There = Tensor._make_wrapper_subclass(
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            device=DEVICE,
        )
        made.elem = elem.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("outside of the emulation")


def held(value: Any) -> Any:
    return value.elem if isinstance(value, There) else value


class Dispatch(TorchDispatchMode):
    """Carries operations out on what tensors hold, and refuses."""

    def __init__(self, double: bool) -> None:
        super().__init__()
        self.double, self.count = double, 0

    def placed(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, There):
            return value
        if not self.double and value.dtype in DOUBLE:
            raise TypeError("this device has no float64")
        self.count += 1
        return There(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, asked = func._schema.name, kwargs.get("device")
        tensors = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, Tensor)]
        there = any(isinstance(v, There) for v in tensors)
        if name not in COPIES and name not in READS and there:
            mixed = [v for v in tensors if not isinstance(v, There) and v.dim() > 0]
            assert not mixed, f"{name} mixes devices: {[tuple(v.shape) for v in mixed]} are on the CPU"
        assert all(isinstance(v, There) or v.device != DEVICE for v in tensors), f"{name} of a real one"
        if asked is not None:
            there = torch.device(asked) == DEVICE
            kwargs = kwargs | {"device": torch.device("cpu")}
        out = func(*tree_map(held, args), **tree_map(held, kwargs))
        if torch.Tag.inplace_view in func.tags and there:
            with no_dispatch():  # its shape changes, too
                func(*args, **kwargs)
        if func._schema.is_mutable:
            outs = [a.name for a in func._schema.arguments if a.is_out]
            written = [kwargs[n] for n in outs] or list(args[:1])
            for v in written:
                if isinstance(v, There) and v.shape != v.elem.shape:
                    with no_dispatch():
                        v.resize_(v.elem.shape)
            return written[0] if len(written) == 1 else tuple(written) or out
        return tree_map(self.placed, out) if there else out


class Functions(TorchFunctionMode):
    """What is done in Python before an operation is dispatched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy) and isinstance(args[0], There):
            assert func is Tensor.tolist, "a tensor on a device has no numpy()"
            return args[0].elem.tolist()
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == DEVICE:
            # It would make a real one, below what can be watched.
            return func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)
        if func is Tensor.new_tensor and isinstance(args[0], There):
            return torch.tensor(args[1], **{"dtype": args[0].dtype} | kwargs).to(DEVICE)
        return func(*args, **kwargs)


@contextmanager
def emulated(patch: pytest.MonkeyPatch, double: bool = True) -> Iterator[Dispatch]:
    """The device is there, inside."""
    patch.setattr(devices, "refuse_meta", lambda device: None)
    with Functions(), Dispatch(double) as mode:
        yield mode
