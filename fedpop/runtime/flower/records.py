"""Letters and replies as Flower's records: plain values as JSON, tensors as flat arrays of bytes."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedpop.channel import Payload
from fedpop.errors import PayloadError
from fedpop.runtime.flower.letters import KINDS, Letter, Reply

_KINDS = {name: getattr(torch, name) for name in ("float32", "float64", "int64", "int32", "uint8", "bool")}


def letter_to_record(letter: Letter) -> RecordDict:
    arrays = {name: _array(tensor) for name, tensor in letter.tensors.items()}
    return _record({"kind": letter.kind, "about": dict(letter.about)}, arrays)


def letter_from_record(record: RecordDict) -> Letter:
    plain, arrays = _parts(record)
    if plain.get("kind") not in KINDS or not isinstance(plain.get("about"), dict):
        raise PayloadError("this is not a letter of fedpop's")
    return Letter(plain["kind"], plain["about"], {n: _tensor(n, a) for n, a in arrays.items()})


def reply_to_record(reply: Reply) -> RecordDict:
    """Vectors as the bytes that encode them, with the codec's name."""
    arrays = {}
    for name, payload in reply.payloads.items():
        arrays[name] = Array(
            dtype="uint8",
            shape=(len(payload.data),),
            stype=f"fedpop.{payload.codec}",
            data=payload.data,
        )
    lengths = {name: payload.length for name, payload in reply.payloads.items()}
    return _record({"about": dict(reply.about), "lengths": lengths}, arrays)


def reply_from_record(record: RecordDict) -> Reply:
    plain, arrays = _parts(record)
    about, lengths = plain.get("about"), plain.get("lengths", {})
    if not isinstance(about, dict) or not isinstance(lengths, dict) or lengths.keys() != arrays.keys():
        raise PayloadError("this is not a reply of fedpop's")
    payloads = {}
    for name, array in arrays.items():
        if not array.stype.startswith("fedpop.") or not isinstance(lengths[name], int) or lengths[name] < 0:
            raise PayloadError(f"{name} came in a form that is not known ({array.stype!r})")
        payloads[name] = Payload(array.stype.removeprefix("fedpop."), lengths[name], array.data)
    return Reply(about, payloads)


def _record(plain: dict[str, Any], arrays: dict[str, Array]) -> RecordDict:
    return RecordDict({"fedpop": ConfigRecord({"json": json.dumps(plain)}), "arrays": ArrayRecord(arrays)})


def _parts(record: RecordDict) -> tuple[dict[str, Any], dict[str, Array]]:
    try:
        plain = json.loads(str(record.config_records["fedpop"]["json"]))
        arrays = dict(record.array_records["arrays"].items())
    except (KeyError, ValueError) as error:
        raise PayloadError(f"this is not a record of fedpop's ({type(error).__name__})") from error
    if not isinstance(plain, dict):
        raise PayloadError("this is not a record of fedpop's")
    return plain, arrays


def _array(tensor: Tensor) -> Array:
    tensor = tensor.detach().cpu().contiguous()
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in _KINDS:
        raise PayloadError(f"tensors travel as {', '.join(_KINDS)}, not {kind}")
    data = tensor.reshape(-1).numpy().tobytes()
    return Array(dtype=kind, shape=tuple(tensor.shape), stype="fedpop.tensor", data=data)


def _tensor(name: str, array: Array) -> Tensor:
    kind = _KINDS.get(array.dtype)
    if kind is None or len(array.data) != math.prod(array.shape) * kind.itemsize:
        raise PayloadError(f"{name}: {len(array.data)} bytes are not {array.dtype} of shape {array.shape}")
    if not array.data:
        return torch.zeros(array.shape, dtype=kind)
    return torch.frombuffer(bytearray(array.data), dtype=kind).reshape(array.shape)
