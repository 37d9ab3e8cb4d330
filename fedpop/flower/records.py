"""Requests and messages as Flower's records: plain values as JSON, tensors as flat arrays of bytes."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedpop.errors import PayloadError
from fedpop.flower.requests import KINDS, Request
from fedpop.message import Message, Payload

_KINDS = {name: getattr(torch, name) for name in ("float32", "float64", "int64", "int32", "uint8", "bool")}


def request_to_record(request: Request) -> RecordDict:
    arrays = {name: _array(tensor) for name, tensor in request.tensors.items()}
    return _record({"kind": request.kind, "about": dict(request.header)}, arrays)


def request_from_record(record: RecordDict) -> Request:
    plain, arrays = _parts(record)
    if plain.get("kind") not in KINDS or not isinstance(plain.get("about"), dict):
        raise PayloadError("this is not a request of fedpop's")
    return Request(plain["kind"], plain["about"], {n: _tensor(n, a) for n, a in arrays.items()})


def message_to_record(message: Message) -> RecordDict:
    """Vectors as the bytes that encode them, with the codec's name; all else as plain values."""
    arrays = {}
    for name, payload in message.payloads.items():
        arrays[name] = Array(
            dtype="uint8",
            shape=(len(payload.data),),
            stype=f"fedpop.{payload.codec}",
            data=payload.data,
        )
    return RecordDict(
        {"fedpop": ConfigRecord({"json": message_text(message)}), "arrays": ArrayRecord(arrays)}
    )


def message_text(message: Message) -> str:
    """All of a message but its vectors, as it travels."""
    lengths = {name: payload.length for name, payload in message.payloads.items()}
    return json.dumps(plain_message(message) | {"lengths": lengths})


def entry_of(message: Message) -> dict[str, Any]:
    """What a site's ledger says of a message: names, sizes, and a digest of all that travels; no values."""
    text, digest = message_text(message).encode(), hashlib.sha256()
    digest.update(text)
    for name in sorted(message.payloads):
        digest.update(hashlib.sha256(message.payloads[name].data).digest())
    vectors = {
        name: {"codec": p.codec, "entries": p.length, "bytes": len(p.data)}
        for name, p in message.payloads.items()
    }
    header = message.header
    about = {key: header[key] for key in ("round", "question") if key in header}
    about |= {"refused": list(header["refused"])} if "refused" in header else {}
    return about | {
        "units": int(message.units.sum()),
        "vectors": vectors,
        "numbers": sorted(message.numbers),
        "header": sorted(header),
        "bytes": len(text) + sum(len(p.data) for p in message.payloads.values()),
        "digest": digest.hexdigest(),
    }


def message_from_record(record: RecordDict) -> Message:
    plain, arrays = _parts(record)
    lengths = plain.get("lengths", {})
    if not isinstance(lengths, dict) or lengths.keys() != arrays.keys():
        raise PayloadError("this is not a message of fedpop's")
    payloads = {}
    for name, array in arrays.items():
        if not array.stype.startswith("fedpop.") or not isinstance(lengths[name], int) or lengths[name] < 0:
            raise PayloadError(f"{name} came in a form that is not known ({array.stype!r})")
        payloads[name] = Payload(array.stype.removeprefix("fedpop."), lengths[name], array.data)
    return message_of_plain(plain, payloads)


def plain_message(message: Message) -> dict[str, Any]:
    """A site's message without its vectors, in plain values."""
    return {
        "header": dict(message.header),
        "units": int(message.units.sum()),
        "numbers": dict(message.numbers),
        "named": {name: [of, float(by)] for name, (of, by) in message.named.items()},
        "weighted": message.weighted,
        "withheld": message.withheld is not None and bool(message.withheld.any()),
    }


def message_of_plain(plain: dict[str, Any], payloads: dict[str, Payload]) -> Message:
    """A message of one row, whose site is not known yet; a PayloadError where it is none."""
    header = plain.get("header")
    if not isinstance(header, dict):
        raise PayloadError("this is not a message of fedpop's")
    try:
        numbers = {str(n): float(v) for n, v in plain["numbers"].items()}
        named = {
            str(n): (str(of), torch.tensor([float(by)], dtype=torch.float64))
            for n, (of, by) in plain["named"].items()
        }
        units, weighted, withheld = int(plain["units"]), bool(plain["weighted"]), bool(plain["withheld"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PayloadError(f"it is not readable ({type(error).__name__})") from error
    if units < 0:
        raise PayloadError(f"it speaks for {units} units")
    if any(not math.isfinite(v) for v in numbers.values()):
        raise PayloadError("a number beside its vectors is not finite")
    if any(of not in payloads for of, _ in named.values()) and units:
        raise PayloadError("it names a vector that it does not hold")
    return Message(
        torch.zeros(1, dtype=torch.int64),
        torch.tensor([units]),
        numbers=numbers,
        named=named,
        weighted=weighted,
        withheld=torch.tensor([withheld]),
        header=header,
        payloads=payloads,
    )


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
