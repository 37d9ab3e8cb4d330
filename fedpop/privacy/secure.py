"""Secure sums: a server learns the sum of what sites send and nothing about one of them.

Bonawitz et al. (CCS 2017) with double masks, as pure functions on bytes and explicit states.

    site    offer      a session's X25519 key, signed with the key that the site enrolled with
    server  Attempt    who is to send, what was broadcast, its number and mode
    site    send       words + sum over others of +- mask(pair key) [+ mask(self secret)], and shares of the
                       self secret, each sealed for one other site
    server  names who was heard and who was lost                                       (mode drop-out only)
    site    unmask     shares of the self secrets of the heard, pair keys with the lost; never both for a
                       site, never by two lists, never for too few
    server  opened     the sum

All keys of an attempt derive (HKDF-SHA256) from the pair's X25519 secret and the attempt's digest, which has
the run, the round, the number, the mode, the digest of what was broadcast and the cohort with its keys: what
is repeated with anything else shares no mask with it. Masks are ChaCha20 keystreams. Self secrets are shared
by Shamir's scheme over GF(2^128) with threshold t > (n + c) / 2, n sites of which c may collude with the
server: two different lists would need 2 t - c > n sites that answer once each, so at most one can be opened,
whatever the server says to whom. In mode *everyone* there is no self mask and no second trip; nobody ever
reveals a key of such an attempt.

A site writes its ``Memory`` to disk before bytes leave it. A repetition sends the stored bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpop.errors import SecureSumError
from fedpop.extras import library

log = logging.getLogger("fedpop.secure")

Layout = tuple[tuple[int, int], ...]
"""Bytes of a word, and how many such words, one after the other: arithmetic is modulo 2^(8 bytes)."""
Entropy = Callable[[int], bytes]
"""So many random bytes, from the operating system."""
WIDTHS = (2, 4, 24)
SECRET = 16
"""Bytes of a self secret: a field element of GF(2^128)."""
NONCE = 12
_WHAT = "secure sums"


class Mode(StrEnum):
    """Whether a sum can be opened without some of the cohort."""

    EVERYONE = "everyone"
    DROP_OUT = "drop-out"


# --- who is who ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """A site's public key for a session, with its signature."""

    site: str
    key: bytes
    signature: bytes

    def plain(self) -> list[str]:
        return [self.site, self.key.hex(), self.signature.hex()]

    @classmethod
    def of(cls, plain: Sequence[str]) -> Offer:
        site, key, signature = plain
        return cls(str(site), bytes.fromhex(key), bytes.fromhex(signature))


@dataclass(frozen=True)
class Session:
    """A site's secrets of one session of one run. In no backup."""

    run: str
    site: str
    secret: bytes = field(repr=False)
    offer: Offer

    @classmethod
    def begin(cls, run: str, site: str, identity: bytes, entropy: Entropy = os.urandom) -> Session:
        """A new session, its key signed with the site's ``identity``, the number that is its key's secret."""
        secret = entropy(32)
        public = _x25519().X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
        signature = _identity(identity).sign(_signed(run, site, public), _ecdsa())
        return cls(run, site, secret, Offer(site, public, signature))

    def packed(self) -> bytes:
        return _packed({"run": self.run, "offer": self.offer.plain()}, self.secret)

    @classmethod
    def unpacked(cls, data: bytes) -> Session:
        header, (secret,) = _unpacked(data)
        offer = Offer.of(header["offer"])
        return cls(header["run"], offer.site, secret, offer)


def public_key(identity: bytes) -> bytes:
    """What others know a site's key by: a point of P-384, compressed."""
    return point_of(_identity(identity).public_key())


def point_of(key: Any) -> bytes:
    """The same of a public key."""
    form = library("cryptography.hazmat.primitives.serialization", "flower", _WHAT)
    point: bytes = key.public_bytes(form.Encoding.X962, form.PublicFormat.CompressedPoint)
    return point


def fingerprint(admitted: Mapping[str, bytes]) -> str:
    """Of the list of admitted sites and their public keys, for people to compare.

    >>> fingerprint({"a": bytes(32), "b": bytes(32)})
    '1dca 1055 c232 a48b ef5f 3233 303f 5363'
    """
    text = _plain({name: key.hex() for name, key in admitted.items()})
    digest = hashlib.sha256(b"fedpop sites\0" + text).hexdigest()[:32]
    return " ".join(digest[i : i + 4] for i in range(0, len(digest), 4))


def _signed(run: str, site: str, key: bytes) -> bytes:
    return b"fedpop session key\0" + _plain([run, site, key.hex()])


def _verified(offer: Offer, run: str, admitted: Mapping[str, bytes]) -> None:
    if offer.site not in admitted:
        raise SecureSumError(f"{offer.site!r} is not on this site's list of admitted sites")
    _require_signed(offer, run, admitted[offer.site])


@lru_cache(maxsize=4096)
def _require_signed(offer: Offer, run: str, admitted: bytes) -> None:
    """Once a session: the same offer comes with every attempt."""
    curves = _curves()
    try:
        key = curves.EllipticCurvePublicKey.from_encoded_point(curves.SECP384R1(), admitted)
        key.verify(offer.signature, _signed(run, offer.site, offer.key), _ecdsa())
    except ValueError as error:
        raise SecureSumError(f"the admitted key of {offer.site!r} is none") from error
    except library("cryptography.exceptions", "flower", _WHAT).InvalidSignature as error:
        raise SecureSumError(f"the session key of {offer.site!r} is not signed by {offer.site!r}") from error


# --- an attempt ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """A site's own terms; a server can ask for more, never for less."""

    minimum_sites: int = 3
    """A sum of fewer is not opened."""
    colluding: float = 1 / 3
    """The share of the cohort that may collude with the server, less than 1."""

    def __post_init__(self) -> None:
        if self.minimum_sites < 2:
            raise SecureSumError(f"a sum hides a site among others: minimum_sites is at least 2, not "
                                 f"{self.minimum_sites}")  # fmt: skip
        if not 0 <= self.colluding < 1:
            raise SecureSumError(f"colluding is a share of the sites, 0 or more and below 1, not "
                                 f"{self.colluding}")  # fmt: skip

    def colluders(self, sites: int) -> int:
        """How many of so many sites that is."""
        return int(self.colluding * sites + 1e-9)


def threshold(sites: int, colluders: int) -> int:
    """Shares that join to a secret: the least whole number above (n + c) / 2.

    >>> [threshold(n, Policy().colluders(n)) for n in (2, 3, 4, 10, 100)]
    [2, 3, 3, 7, 67]
    """
    return (sites + colluders) // 2 + 1


@dataclass(frozen=True)
class Attempt:
    """One try at one sum: all that a mask depends on beside the pair's secret."""

    run: str
    kind: str
    """Of what: rounds, or a question."""
    index: int
    """Which round; it only grows in mode drop-out."""
    number: int
    """Of all attempts of the session; it only grows."""
    mode: Mode
    broadcast: bytes
    """Digest of all that was sent to the sites."""
    offers: tuple[Offer, ...]
    """The cohort, in the order of names."""
    colluders: int
    minimum: int
    """A sum of fewer sites is not to be opened; where sites add noise this counts those it is shared by."""

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(offer.site for offer in self.offers)

    @property
    def threshold(self) -> int:
        return threshold(len(self.offers), self.colluders)

    @property
    def least(self) -> int:
        """Sites that must be heard."""
        if self.mode is Mode.EVERYONE:
            return len(self.offers)
        return max(self.threshold, self.minimum)

    def plain(self) -> dict[str, Any]:
        """As it travels."""
        return {
            "run": self.run, "kind": self.kind, "index": self.index, "number": self.number,
            "mode": str(self.mode), "broadcast": self.broadcast.hex(),
            "offers": [offer.plain() for offer in self.offers],
            "colluders": self.colluders, "minimum": self.minimum,
        }  # fmt: skip

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Attempt:
        try:
            return cls(
                str(plain["run"]), str(plain["kind"]), int(plain["index"]), int(plain["number"]),
                Mode(plain["mode"]), bytes.fromhex(plain["broadcast"]),
                tuple(Offer.of(offer) for offer in plain["offers"]),
                int(plain["colluders"]), int(plain["minimum"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise SecureSumError(f"an attempt at a sum cannot be read: {error}") from error

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(b"fedpop attempt\0" + _plain(self.plain())).digest()


@dataclass(frozen=True)
class Memory:
    """What a site must know of what it sent, on disk before the bytes leave. In no backup."""

    number: int = -1
    """Of the last attempt that it answered."""
    attempt: bytes = b""
    """Digest of it."""
    indices: Mapping[str, int] = field(default_factory=dict)
    """By kind, the last round answered in mode drop-out."""
    reply: bytes = b""
    secret: bytes = field(default=b"", repr=False)
    """The site's own share of its self secret."""
    opened: bytes = b""
    """Digest of the list by which it unmasked."""
    answer: bytes = b""
    plains: Mapping[str, bytes] = field(default_factory=dict)
    """In mode everyone, by round: the words, which a further attempt of the same round masks anew."""

    def packed(self) -> bytes:
        header = {"number": self.number, "indices": dict(self.indices), "plains": list(self.plains)}
        return _packed(
            header, self.attempt, self.reply, self.secret, self.opened, self.answer, *self.plains.values()
        )

    @classmethod
    def unpacked(cls, data: bytes) -> Memory:
        header, (attempt, reply, secret, opened_by, answer, *words) = _unpacked(data)
        plains = dict(zip(header["plains"], words, strict=True))
        return cls(header["number"], attempt, header["indices"], reply, secret, opened_by, answer, plains)


# --- at a site -------------------------------------------------------------------------------


def admissible(attempt: Attempt, session: Session, policy: Policy, admitted: Mapping[str, bytes]) -> None:
    """Raise unless this site may take part in an attempt."""
    sites = attempt.sites
    if attempt.run != session.run:
        raise SecureSumError(f"the attempt is of run {attempt.run!r}, the session of {session.run!r}")
    if list(sites) != sorted(set(sites)) or len({offer.key for offer in attempt.offers}) != len(sites):
        raise SecureSumError("the cohort has a site or a key twice, or is not in the order of names")
    if (session.site, session.offer.key) not in [(offer.site, offer.key) for offer in attempt.offers]:
        raise SecureSumError("this site is not in the cohort with the key of its session")
    for offer in attempt.offers:
        _verified(offer, attempt.run, admitted)
    if attempt.minimum < policy.minimum_sites:
        raise SecureSumError(
            f"the server would open a sum of {attempt.minimum} sites; this site's minimum_sites is "
            f"{policy.minimum_sites}"
        )
    if len(sites) < attempt.minimum:
        raise SecureSumError(f"the cohort has {len(sites)} sites, and a sum needs {attempt.minimum}")
    if not policy.colluders(len(sites)) <= attempt.colluders < len(sites):
        raise SecureSumError(
            f"the server assumes {attempt.colluders} colluding sites of {len(sites)}; this site assumes "
            f"{policy.colluders(len(sites))}"
        )


def stored(attempt: Attempt, memory: Memory) -> bytes | None:
    """The reply that was made for this attempt, if it was; raises where no reply may be made."""
    if attempt.number == memory.number:
        if attempt.digest != memory.attempt:
            raise SecureSumError(f"attempt {attempt.number} is another one here: take a new number")
        if not memory.reply:
            raise SecureSumError(f"the reply to attempt {attempt.number} is lost: take a new number")
        return memory.reply
    if attempt.number < memory.number:
        raise SecureSumError(f"attempt {attempt.number} is over, {memory.number} was: take a new number")
    if attempt.mode is Mode.DROP_OUT and attempt.index <= memory.indices.get(attempt.kind, -1):
        raise SecureSumError(f"{attempt.kind} {attempt.index} was answered in another attempt")
    return None


def send(
    attempt: Attempt,
    words: bytes,
    layout: Layout,
    session: Session,
    memory: Memory,
    policy: Policy,
    admitted: Mapping[str, bytes],
    *,
    entropy: Entropy = os.urandom,
    about: Any = None,
) -> tuple[Memory, bytes]:
    """A site's words, masked; ``memory`` is to be on disk before the reply leaves. ``about`` is what
    everybody may know of them, such as what they are called."""
    admissible(attempt, session, policy, admitted)
    reply = stored(attempt, memory)
    if reply is not None:
        return memory, reply
    others = [offer for offer in attempt.offers if offer.site != session.site]
    name = f"{attempt.kind}/{attempt.index}"
    if attempt.mode is Mode.EVERYONE:
        words = memory.plains.get(name, words)
    total = _Words(layout, words)
    for offer in others:
        total.add(_stream(_pair_key(session, offer, attempt), len(words)), _sign(session.site, offer.site))
    header: dict[str, Any] = {
        "site": session.site, "attempt": attempt.digest.hex(), "layout": [list(part) for part in layout],
        "about": about,
    }  # fmt: skip
    shares, own, indices, plains = list[bytes](), b"", dict(memory.indices), dict[str, bytes]()
    if attempt.mode is Mode.DROP_OUT:
        secret = entropy(SECRET)
        total.add(_stream(_self_key(secret, attempt), len(words)), 1)
        header["proof"] = _proof(secret, attempt).hex()
        parts = dict(_shamir().split(attempt.threshold, len(attempt.offers), secret))
        for position, offer in enumerate(attempt.offers, 1):
            if offer.site == session.site:
                own = parts[position]
                shares.append(b"")
                continue
            nonce = entropy(NONCE)
            sealed = _aes(_share_key(session, offer, attempt)).encrypt(
                nonce, parts[position], _bound(attempt, session.site, offer.site)
            )
            shares.append(nonce + sealed)
        indices[attempt.kind] = attempt.index
    else:
        plains[name] = words
    reply = _packed(header, total.data, *shares)
    return Memory(attempt.number, attempt.digest, indices, reply, own, plains=plains), reply


def unmask(
    attempt: Attempt,
    heard: Sequence[str],
    shares: Mapping[str, bytes],
    session: Session,
    memory: Memory,
) -> tuple[Memory, bytes]:
    """What opens the sum over ``heard``, as far as this site has it: its shares of their self secrets, of
    which the server relays the sealed ones, and the attempt's pair keys with the lost. ``memory`` is to be on
    disk before the answer leaves."""
    if attempt.digest != memory.attempt or attempt.number != memory.number or not memory.reply:
        raise SecureSumError(f"attempt {attempt.number} is not the one that this site answered last")
    if attempt.mode is not Mode.DROP_OUT:
        raise SecureSumError("no key of an attempt in which everyone must be heard is revealed")
    named = list(heard)
    if named != sorted(set(named)) or not set(named) <= set(attempt.sites):
        raise SecureSumError("the list of the heard has a site twice, or one that is not in the cohort")
    if session.site not in named:
        raise SecureSumError("this site is on the list of the lost, and has nothing to open")
    if len(named) < attempt.least:
        raise SecureSumError(f"the list has {len(named)} sites, and {attempt.least} must be heard")
    listed = _list_digest(attempt, named)
    if memory.opened:
        if memory.opened != listed:
            raise SecureSumError(f"attempt {attempt.number} was unmasked by another list here")
        return memory, memory.answer
    by_site = {offer.site: offer for offer in attempt.offers}
    opened_shares, keys = list[bytes](), list[bytes]()
    for site in named:
        if site == session.site:
            opened_shares.append(memory.secret)
            continue
        sealed = shares.get(site, b"")
        try:
            opened_shares.append(
                _aes(_share_key(session, by_site[site], attempt)).decrypt(
                    sealed[:NONCE], sealed[NONCE:], _bound(attempt, site, session.site)
                )
            )
        except (ValueError, library("cryptography.exceptions", "flower", _WHAT).InvalidTag) as error:
            raise SecureSumError(
                f"the share from {site!r} is not one of this attempt for this site"
            ) from error
    for site in attempt.sites:
        if site not in named:
            keys.append(_pair_key(session, by_site[site], attempt))
    header = {"site": session.site, "attempt": attempt.digest.hex(), "list": listed.hex(),
              "shares": len(opened_shares)}  # fmt: skip
    answer = _packed(header, *opened_shares, *keys)
    return replace(memory, opened=listed, answer=answer), answer


def require_apart(sites: Sequence[str], past: Iterable[Sequence[str]], minimum: int) -> None:
    """Raise where a sum over these sites, subtracted from one over a ``past`` cohort, would be one over fewer
    than ``minimum``: for sums that do not depend on theta, and would differ by nothing else."""
    for earlier in past:
        both = (set(sites) - set(earlier), set(earlier) - set(sites))
        names = sorted(both[0] | both[1])
        if names and any(0 < len(side) < minimum for side in both):
            raise SecureSumError(
                f"the same was summed over a cohort that differs by {', '.join(names)} only: the difference "
                f"of two sums would be theirs; sites join or leave such sums {minimum} at a time"
            )


# --- at the server ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Masked:
    """A site's reply as the server reads it."""

    site: str
    layout: Layout
    words: bytes = field(repr=False)
    proof: bytes
    shares: Mapping[str, bytes] = field(repr=False)
    """By receiver."""
    about: Any = None


def read(reply: bytes, attempt: Attempt, site: str) -> Masked:
    """A reply to an attempt from this site; raises where it is none."""
    header, blobs = _unpacked(reply)
    try:
        if header["site"] != site or header["attempt"] != attempt.digest.hex():
            raise SecureSumError(f"the reply from {site!r} is to another attempt, or from somebody else")
        layout = tuple((int(width), int(count)) for width, count in header["layout"])
        proof = bytes.fromhex(header.get("proof", ""))
    except (KeyError, TypeError, ValueError) as error:
        raise SecureSumError(f"the reply from {site!r} cannot be read: {error}") from error
    words, *shares = blobs or [b""]
    dropping = attempt.mode is Mode.DROP_OUT
    fits = all(width in WIDTHS and count >= 0 for width, count in layout)
    if not fits or len(words) != size_of(layout) or len(shares) != dropping * len(attempt.offers):
        raise SecureSumError(f"the reply from {site!r} has not the form that it says")
    return Masked(site, layout, words, proof, dict(zip(attempt.sites, shares, strict=False)),
                  header.get("about"))  # fmt: skip


def shares_for(site: str, replies: Mapping[str, Masked]) -> dict[str, bytes]:
    """What the heard sealed for this site."""
    return {name: masked.shares[site] for name, masked in sorted(replies.items()) if name != site}


def opened(
    attempt: Attempt, replies: Mapping[str, Masked], answers: Mapping[str, bytes] | None = None
) -> bytes:
    """The sum of the words of all whose ``replies`` these are, by what they answered to that list."""
    heard = sorted(replies)
    layouts = {masked.layout for masked in replies.values()}
    if len(layouts) != 1:
        raise SecureSumError("sites sent words of different forms")
    if not set(heard) <= set(attempt.sites) or len(heard) < attempt.least:
        raise SecureSumError(f"{len(heard)} sites were heard, and {attempt.least} must be")
    (layout,) = layouts
    size = size_of(layout)
    total = _Words(layout, bytes(size))
    for site in heard:
        total.add(replies[site].words, 1)
    if attempt.mode is Mode.EVERYONE:
        return total.data
    read_answers = _answers(attempt, heard, answers or {})
    lost = [site for site in attempt.sites if site not in replies]
    missing = sorted(set(heard) - set(read_answers))
    if lost and missing:
        raise SecureSumError(f"{', '.join(missing)} did not unmask, and {', '.join(lost)} was lost: "
                             "the sum cannot be opened")  # fmt: skip
    if len(read_answers) < attempt.threshold:
        raise SecureSumError(f"{len(read_answers)} sites unmasked, and {attempt.threshold} must")
    place = {site: position for position, site in enumerate(attempt.sites, 1)}
    for i, site in enumerate(heard):
        shares = [(place[by], found[0][i]) for by, found in sorted(read_answers.items())]
        secret = _joined(shares, attempt, replies[site].proof)
        if secret is None:
            raise SecureSumError(f"the shares of {site!r}'s secret do not join")
        total.add(_stream(_self_key(secret, attempt), size), -1)
    for site, (_, keys) in read_answers.items():
        for other, key in zip(lost, keys, strict=True):
            total.add(_stream(key, size), -_sign(site, other))
    return total.data


def _answers(
    attempt: Attempt, heard: Sequence[str], answers: Mapping[str, bytes]
) -> dict[str, tuple[list[bytes], list[bytes]]]:
    """By site its shares and pair keys; one that answers something else is as one that does not answer."""
    out, listed = {}, _list_digest(attempt, heard).hex()
    lost = len(attempt.offers) - len(heard)
    for site, answer in answers.items():
        try:
            header, blobs = _unpacked(answer)
            shares, keys = blobs[: len(heard)], blobs[len(heard) :]
            right = header["site"] == site and header["list"] == listed and site in heard
        except (SecureSumError, KeyError, TypeError):
            right, shares, keys = False, [], []
        fits = len(shares) == len(heard) and len(keys) == lost
        if not right or not fits or {*map(len, shares)} != {SECRET} or not {*map(len, keys)} <= {32}:
            log.warning("what %s answered does not unmask attempt %d", site, attempt.number)
            continue
        out[site] = (shares, keys)
    return out


def _joined(shares: Sequence[tuple[int, bytes]], attempt: Attempt, proof: bytes) -> bytes | None:
    """The secret of these shares. A false one among them is found by leaving out each in turn."""
    t = attempt.threshold
    windows = [shares[:t]] + [[*shares[:i], *shares[i + 1 : t + 1]] for i in range(t) if len(shares) > t]
    for some in windows:
        secret: bytes = _shamir().combine(list(some))
        if _proof(secret, attempt) == proof:
            return secret
    return None


# --- keys and masks --------------------------------------------------------------------------


def _pair_key(session: Session, other: Offer, attempt: Attempt) -> bytes:
    return _derived(_agreed(session.secret, other.key), b"mask", attempt.digest)


def _share_key(session: Session, other: Offer, attempt: Attempt) -> bytes:
    return _derived(_agreed(session.secret, other.key), b"share", attempt.digest)


def _self_key(secret: bytes, attempt: Attempt) -> bytes:
    return _derived(secret, b"self", attempt.digest)


def _proof(secret: bytes, attempt: Attempt) -> bytes:
    """By which the secret of a site is known again."""
    return _derived(secret, b"proof", attempt.digest)


def _bound(attempt: Attempt, sender: str, receiver: str) -> bytes:
    """What a sealed share is bound to."""
    return _plain([attempt.digest.hex(), attempt.run, attempt.kind, attempt.index, attempt.number, sender,
                   receiver])  # fmt: skip


def _list_digest(attempt: Attempt, heard: Iterable[str]) -> bytes:
    return hashlib.sha256(b"fedpop heard\0" + attempt.digest + _plain(list(heard))).digest()


@lru_cache(maxsize=4096)
def _agreed(secret: bytes, public: bytes) -> bytes:
    """The X25519 secret of a pair: once a session."""
    x25519 = _x25519()
    try:
        shared: bytes = x25519.X25519PrivateKey.from_private_bytes(secret).exchange(
            x25519.X25519PublicKey.from_public_bytes(public)
        )
    except ValueError as error:
        raise SecureSumError("a session key is no X25519 key") from error
    return shared


def _derived(secret: bytes, purpose: bytes, digest: bytes) -> bytes:
    hkdf = library("cryptography.hazmat.primitives.kdf.hkdf", "flower", _WHAT).HKDF
    hashes = library("cryptography.hazmat.primitives.hashes", "flower", _WHAT)
    info = b"fedpop secure sum\0" + purpose + b"\0" + digest
    key: bytes = hkdf(algorithm=hashes.SHA256(), length=32, salt=None, info=info).derive(secret)
    return key


def _stream(key: bytes, size: int) -> bytes:
    """A mask: ChaCha20's keystream. Each key makes one mask, so the nonce is zero."""
    ciphers = library("cryptography.hazmat.primitives.ciphers", "flower", _WHAT)
    cipher = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, bytes(16)), mode=None)
    stream: bytes = cipher.encryptor().update(bytes(size))
    return stream


def _sign(site: str, other: str) -> int:
    """Of two sites one adds their mask and one subtracts it."""
    return 1 if site < other else -1


def _aes(key: bytes) -> Any:
    return library("cryptography.hazmat.primitives.ciphers.aead", "flower", _WHAT).AESGCM(key)


def _x25519() -> Any:
    return library("cryptography.hazmat.primitives.asymmetric.x25519", "flower", _WHAT)


def _curves() -> Any:
    return library("cryptography.hazmat.primitives.asymmetric.ec", "flower", _WHAT)


def _ecdsa() -> Any:
    hashes = library("cryptography.hazmat.primitives.hashes", "flower", _WHAT)
    return _curves().ECDSA(hashes.SHA384())


def _identity(secret: bytes) -> Any:
    curves = _curves()
    return curves.derive_private_key(int.from_bytes(secret, "big"), curves.SECP384R1())


def _shamir() -> Any:
    return library("Crypto.Protocol.SecretSharing", "flower", _WHAT).Shamir


# --- words -----------------------------------------------------------------------------------


def size_of(layout: Layout) -> int:
    """Bytes of words."""
    return sum(width * count for width, count in layout)


class _Words:
    """A running sum of words, each modulo its own power of two; little-endian."""

    def __init__(self, layout: Layout, data: bytes) -> None:
        if len(data) != size_of(layout):
            raise SecureSumError(f"{len(data)} bytes are not words of the form {layout}")
        self._layout, self._data = layout, np.frombuffer(data, dtype=np.uint8).copy()

    @property
    def data(self) -> bytes:
        return self._data.tobytes()

    def add(self, more: bytes, sign: int) -> None:
        added, start = np.frombuffer(more, dtype=np.uint8), 0
        for width, count in self._layout:
            piece = slice(start, start + width * count)
            start = piece.stop
            if width == 24:
                ours = self._data[piece].view("<u8").reshape(-1, 3)
                _add_wide(ours, added[piece].view("<u8").reshape(-1, 3), sign)
                continue
            ours, theirs = (a[piece].view(f"<u{width}") for a in (self._data, added))
            (np.add if sign > 0 else np.subtract)(ours, theirs, out=ours)


def _add_wide(ours: npt.NDArray[np.uint64], theirs: npt.NDArray[np.uint64], sign: int) -> None:
    """Add numbers of three limbs, or subtract them, modulo 2^192."""
    carry = np.zeros(len(ours), dtype=np.uint64)
    for limb in range(3):
        a, b = ours[:, limb].copy(), theirs[:, limb]
        first = a + b if sign > 0 else a - b
        over = first < a if sign > 0 else first > a
        both = first + carry if sign > 0 else first - carry
        carry = (over | ((both < first) if sign > 0 else (both > first))).astype(np.uint64)
        ours[:, limb] = both


# --- bytes -----------------------------------------------------------------------------------


def _plain(value: Any) -> bytes:
    """The one text of a plain value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _packed(header: Mapping[str, Any], *blobs: bytes) -> bytes:
    text = _plain(dict(header) | {"sizes": [len(blob) for blob in blobs]})
    return struct.pack("<I", len(text)) + text + b"".join(blobs)


def _unpacked(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    try:
        (size,) = struct.unpack_from("<I", data)
        header, start, blobs = json.loads(data[4 : 4 + size]), 4 + size, []
        for each in header.pop("sizes"):
            blobs.append(data[start : start + each])
            start += each
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SecureSumError(f"bytes of a secure sum cannot be read: {error}") from error
    if start != len(data):
        raise SecureSumError("bytes of a secure sum are cut short, or followed by others")
    return header, blobs
