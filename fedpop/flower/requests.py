"""What goes between the server and a site: requests down, messages up, refusals by code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedpop.errors import PayloadError, SettingsError
from fedpop.keys import unit_of
from fedpop.message import Message, Tensors
from fedpop.message.declared import HEADER
from fedpop.site.refusal import Code
from fedpop.version import __version__

TRIAL = ".trial-"
"""Between an experiment's name and the number of trial rounds that are run before it."""
PROTOCOL = 1
"""What requests, messages and descriptions of studies mean: raised with every change after which the two
sides would not understand each other, and never by a patch version."""
SITE_HEADER, PROTOCOL_HEADER, VERSION_HEADER, PROCESS_HEADER = (
    f"fedpop-{name}" for name in ("site", "protocol", "version", "process")
)
"""HTTP headers in which a site's node says its name, its protocol, its version, and which process it is."""
THE_SERVER, THE_SITE = "the server", "the site"
KINDS = ("hello", "train", "ask", "unmask", "finish")
SHARED = ("round", "active", "private", "seed", "question", "description", "key", "models")
"""What all who are asked at once receive alike, beside tensors."""


@dataclass(frozen=True)
class Request:
    """From the server to a site: what is to be done, in plain values, and tensors (theta, say)."""

    kind: str
    header: Mapping[str, Any]
    tensors: Tensors = field(default_factory=dict)


def headed(header: Mapping[str, Any], message: Message | None = None) -> Message:
    """A message with this header, or nothing but that; every key of it is declared."""
    unknown = header.keys() - HEADER.keys()
    if unknown:
        raise SettingsError(f"a header's {sorted(unknown)[0]!r} is not declared in fedpop.message.declared")
    if message is None:
        message = Message(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    return replace(message, header=versions() | dict(header))


def versions() -> dict[str, Any]:
    """What every request and every message says of the program that it comes from."""
    return {"version": __version__, "protocol": PROTOCOL}


def why_not_understood(header: Mapping[str, Any], whose: str) -> str | None:
    """Why the two sides would not understand each other, and who has to do what; None where they do. The
    words are read on both sides; the header is the server's or the site's."""
    theirs, version = header.get("protocol", 0), header.get("version") or "of an unknown version"
    ours = THE_SITE if whose == THE_SERVER else THE_SERVER
    if theirs == PROTOCOL:
        return None
    if not isinstance(theirs, int) or theirs > PROTOCOL:
        todo = f"install fedpop {version} at {ours}, or {__version__} at {whose}"
    else:
        todo = f"install fedpop {__version__} at {whose}"
    both = f"{whose} has fedpop {version} and speaks protocol {theirs}, {ours} has {__version__} and speaks"
    return f"{both} {PROTOCOL}: {todo}"


def refusal(why: str, code: Code = Code.FAILED, **header: Any) -> Message:
    return headed({"refused": [str(code), why]} | header)


def code_of(message: Message) -> Code:
    """Why a message is a refusal, by its code."""
    found = message.header.get("refused")
    try:
        return Code(found[0]) if isinstance(found, list) else Code.FAILED
    except (ValueError, IndexError):
        return Code.FAILED


def require_answer(message: Message, request: Request, site: str) -> Message:
    """The message, as one of this site; a PayloadError where it does not answer this request."""
    header = message.header
    if (why := why_not_understood(header, THE_SITE)) is not None:
        raise PayloadError(why)
    for key in ("experiment", "round", "digest", "question"):
        if header.get(key) != request.header.get(key):
            raise PayloadError(f"it answers another request ({key} {header.get(key)!r})")
    return replace(message, sites=torch.tensor([unit_of(site)]))


def digest_of(tensors: Tensors) -> str:
    """A fingerprint of names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).numpy().tobytes())
    return digest.hexdigest()[:32]


def digest_for(digest: str, units: Sequence[int] | None) -> str:
    """The digest of a round's broadcast for a site of which these units take part; None: all of them."""
    return digest if units is None else hashlib.sha256(f"{digest}{list(units)}".encode()).hexdigest()[:32]


def digest_for_all(request: Request) -> bytes:
    """Of all that a request tells everyone: whoever was told anything else masks with other keys."""
    about: dict[str, Any] = {name: request.header[name] for name in SHARED if name in request.header}
    about["terms"] = {n: v for n, v in request.header.get("secure", {}).items() if n != "attempt"}
    text = json.dumps([request.kind, about, digest_of(request.tensors)], sort_keys=True)
    return hashlib.sha256(text.encode()).digest()
