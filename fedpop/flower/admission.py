"""Who may take part: the folder ``DIR/sites`` of a server. ``NAME.pub`` is the key of an admitted site, and
``revoked/`` has the keys that were admitted once. What holds is what is in the folder now."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from fedpop.errors import SettingsError
from fedpop.files import writable_folder, write_bytes
from fedpop.flower.certificates import check_name, check_public_key

ENDED = "revoked"
"""The folder below that of the admitted keys where those are that no longer are."""


class Reason(StrEnum):
    """Why a site is refused."""

    NOT_ADMITTED = "not admitted"
    REVOKED = "revoked"
    NAME = "wrong name"
    AUTHORITY = "other authority"
    CLOCK = "clock"
    VERSION = "version"
    ELSEWHERE = "taken over"
    """Another process takes part with the site's key."""
    FORGED = "forged"


@dataclass(frozen=True)
class Keys:
    """Public keys as nodes send them, and whose they are."""

    admitted: dict[bytes, str]
    ended: dict[bytes, str]


class Admission:
    """The keys of a folder, read again whenever a file in it is another one."""

    def __init__(self, folder: Path, warn: Callable[[str], None] = lambda words: None) -> None:
        self._folder, self._warn = folder, warn
        self._stamp: object = None
        self._keys = Keys({}, {})
        self._unreadable: set[Path] = set()

    @property
    def keys(self) -> Keys:
        stamp = _stamp(self._folder), _stamp(self._folder / ENDED)
        if stamp != self._stamp:
            admitted = {key: path.stem for path, key in self._read(self._folder)}
            ended = {key: ended_name(path) for path, key in self._read(self._folder / ENDED)}
            self._keys, self._stamp = Keys(admitted, ended), stamp
        return self._keys

    def name_of(self, key: bytes) -> str | None:
        """The site that was admitted with this key."""
        return self.keys.admitted.get(key)

    def why_not(self, key: bytes) -> tuple[Reason, str]:
        """Why a key that is not among the admitted ones is refused."""
        keys = self.keys
        if (name := keys.ended.get(key)) is None:
            return Reason.NOT_ADMITTED, (
                "this site's key is not admitted: its operator sends node.pub to the server's, who runs "
                "fedpop server admit DIR NAME node.pub"
            )
        if name in keys.admitted.values():
            return Reason.REVOKED, f"another key was admitted for site {name!r} in place of this one"
        return Reason.REVOKED, f"the admission of site {name!r} was revoked"

    def _read(self, folder: Path) -> list[tuple[Path, bytes]]:
        found = []
        for path in sorted(folder.glob("*.pub")):
            try:
                found.append((path, key_bytes(path)))
            except SettingsError as error:
                if path not in self._unreadable:
                    self._unreadable.add(path)
                    self._warn(str(error))
        return found


def key_bytes(path: Path) -> bytes:
    """A public key in the form in which Flower's nodes send it."""
    check_public_key(path)
    key = serialization.load_ssh_public_key(path.read_bytes().strip())
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def list_of_sites(folder: Path) -> dict[str, bytes]:
    """Admitted sites with their keys, as secure sums go by them."""
    found, point_of = {}, import_module("fedpop.privacy.secure").point_of  # which brings torch
    for path in sorted(folder.glob("*.pub")):
        check_public_key(path)
        found[path.stem] = point_of(serialization.load_ssh_public_key(path.read_bytes().strip()))
    return found


def fingerprint(key: bytes) -> str:
    """A few letters by which people tell keys apart."""
    return hashlib.sha256(key).hexdigest()[:16]


def admit_key(folder: Path, name: str, key: Path, replace: bool) -> None:
    """Take a site's key among those that may take part; another one's ends where it is replaced."""
    new, place = key_bytes(key), writable_folder(folder) / f"{name}.pub"
    for other in sorted(folder.glob("*.pub")):
        if other != place and key_bytes(other) == new:
            raise SettingsError(
                f"{key} is the key of site {other.stem!r}, which was admitted with it already"
            )
    if place.exists() and key_bytes(place) != new:
        if not replace:
            raise SettingsError(
                f"a site {name!r} was admitted with another key ({place}); --replace ends that one and "
                "admits this one in its place"
            )
        _end(folder, place)
    _ended(folder, name, new).unlink(missing_ok=True)
    write_bytes(place, key.read_bytes(), 0o600)


def end_key(folder: Path, name: str) -> None:
    """End a site's admission."""
    place = folder / f"{name}.pub"
    if not place.exists():
        names = ", ".join(sorted(p.stem for p in folder.glob("*.pub"))) or "nobody"
        raise SettingsError(f"no site {name!r} is admitted; admitted: {names}")
    _end(folder, place)


def ended_name(path: Path) -> str:
    """Whose key a file in the folder of ended keys is: ``NAME-FINGERPRINT.pub``."""
    return re.sub(r"-[0-9a-f]{16}$", "", path.stem)


def _end(folder: Path, place: Path) -> None:
    old = _ended(folder, place.stem, key_bytes(place))
    writable_folder(old.parent)
    os.replace(place, old)


def _ended(folder: Path, name: str, key: bytes) -> Path:
    return folder / ENDED / f"{name}-{fingerprint(key)}.pub"


def _stamp(folder: Path) -> list[tuple[str, int, int, int]]:
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                state = entry.stat()
                found.append((entry.name, state.st_mtime_ns, state.st_size, state.st_ino))
    return sorted(found)


# --- commands --------------------------------------------------------------------------------------

Say = Callable[[str], None]


def admit(root: Path, name: str, key: Path, say: Say, replace: bool = False) -> None:
    """Take a site's public key among those that may take part, from now on."""
    check_name(name)
    admit_key(_admitted(root), name, key, replace)
    say(f"site {name} is admitted")


def revoke(root: Path, name: str, say: Say) -> None:
    """End a site's admission, from now on."""
    check_name(name)
    end_key(_admitted(root), name)
    say(f"site {name} is no longer admitted; what it has sent before stays in theta")


def listed(root: Path, say: Say) -> None:
    """Who is admitted, and who no longer is."""
    keys = Admission(_admitted(root), lambda words: say(f"warning: {words}")).keys
    for key, name in sorted(keys.admitted.items(), key=lambda item: item[1]):
        say(f"{name}  admitted  {fingerprint(key)}")
    for key, name in sorted(keys.ended.items(), key=lambda item: item[1]):
        how = "replaced" if name in keys.admitted.values() else "revoked"
        say(f"{name}  {how}  {fingerprint(key)}")
    if not keys.admitted and not keys.ended:
        say("nobody is admitted yet")


def _admitted(root: Path) -> Path:
    if not (root / "version.json").exists():
        raise SettingsError(f"{root} is not a federation's folder; fedpop server init makes one")
    return root / "sites"
