"""What goes between the server and a site: letters, and replies to them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedpop.algorithms.base import Algorithm
from fedpop.channel import Message, Payload, Tensors
from fedpop.errors import FedpopError, PayloadError
from fedpop.models.base import Model
from fedpop.models.spec import model_spec
from fedpop.version import __version__

TRIAL = ".trial-"
"""Between an experiment's name and the number of trial rounds that are run before it."""
KINDS = ("hello", "train", "ask", "finish")


class Refusal(FedpopError):
    """A site cannot do what it is asked, for a reason that the server may know: it holds nothing of the
    site's data. Any other error stays at the site, in its log."""


@dataclass(frozen=True)
class Letter:
    """From the server to a site: what is to be done, in plain values, and tensors (theta, say)."""

    kind: str
    about: Mapping[str, Any]
    tensors: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """From a site to the server: plain values and encoded vectors; nothing else ever leaves."""

    about: Mapping[str, Any]
    payloads: Mapping[str, Payload] = field(default_factory=dict)

    @property
    def refused(self) -> str | None:
        """Why nothing came of it, where nothing did."""
        return self.about.get("refused")


def refusal(reason: str, **about: Any) -> Reply:
    return Reply({"version": __version__, "refused": reason} | about)


def reply_of(message: Message, about: Mapping[str, Any]) -> Reply:
    """A message on its way."""
    told = {"version": __version__, "units": message.units, "cost": dict(message.cost)}
    return Reply({**about, **told, "named": {n: list(v) for n, v in message.named.items()}}, message.payloads)


def message_in(reply: Reply, letter: Letter) -> Message:
    """The message that a reply to this letter holds; a PayloadError where it is not one."""
    about = reply.about
    if about.get("version") != __version__:
        raise PayloadError(f"it came from fedpop {about.get('version')}, this is {__version__}")
    for word in ("experiment", "round", "digest", "question"):
        if about.get(word) != letter.about.get(word):
            raise PayloadError(f"it answers another letter ({word} {about.get(word)!r})")
    try:
        named = {str(n): (str(of), float(c)) for n, (of, c) in about["named"].items()}
        cost = {str(n): float(v) for n, v in about["cost"].items()}
        units = int(about["units"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PayloadError(f"it is not readable ({type(error).__name__})") from error
    if units < 0:
        raise PayloadError(f"it speaks for {units} units")
    return Message(reply.payloads, units, named, cost)


def digest_of(tensors: Tensors) -> str:
    """A fingerprint of names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).numpy().tobytes())
    return digest.hexdigest()[:32]


def digest_for(digest: str, units: Sequence[int] | None) -> str:
    """That of a round's broadcast, for a site of which these units take part; None: all of them."""
    return digest if units is None else hashlib.sha256(f"{digest}{list(units)}".encode()).hexdigest()[:32]


# --- the method, told to a site ---------------------------------------------------------------


def method_told(method: Algorithm, precision: str, entry: str) -> dict[str, Any]:
    """A method in plain values; ``entry`` (module:name) makes its model where a description cannot."""
    spec = model_spec(method.model)
    known = spec is not None and spec["kind"] != "CustomModel"
    return {
        "class": type(method).__name__,
        "algorithm": method.describe(),
        "model": spec,
        "known": method.model.known(),
        "precision": precision,
        "entry": "" if known else entry,
    }


def values_of(model: Model) -> Tensors:
    """What a model's modules hold: where phi and z start, and weights that do not learn."""
    return {
        f"{i}.{name}": value.detach()
        for i, module in enumerate(model.modules())
        for name, value in module.state_dict().items()
    }


def with_values(model: Model, values: Tensors) -> Model:
    """Set what the modules hold; raises a Refusal where they are not the modules that the server has."""
    for i, module in enumerate(model.modules()):
        own = {n.removeprefix(f"{i}."): t for n, t in values.items() if n.startswith(f"{i}.")}
        here = {n: tuple(t.shape) for n, t in module.state_dict().items()}
        if here != {n: tuple(t.shape) for n, t in own.items()}:
            raise Refusal("the site's model is not the server's: its parameters have other names or shapes")
        module.load_state_dict(own)
    return model
