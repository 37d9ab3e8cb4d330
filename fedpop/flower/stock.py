"""For sites that ask for Flower's stock node: the app that it runs, and the federation's signature on it."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from fedpop.errors import SettingsError
from fedpop.files import write_bytes

TRUSTED = "federation.yaml"
"""Whose apps a stock node runs, in Flower's form; the server's operator gives it to such sites."""
SIGNER = "fpk_fedpop"


def make_signature(tls: Path) -> ed25519.Ed25519PrivateKey:
    """The key that apps are signed with, made once, and what sites know it by."""
    private = tls / "app.key"
    if not private.exists():
        key = ed25519.Ed25519PrivateKey.generate()
        data = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_bytes(private, data, 0o600)
    try:
        found = serialization.load_pem_private_key(private.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{private} is not a readable key ({error})") from error
    if not isinstance(found, ed25519.Ed25519PrivateKey):
        raise SettingsError(f"{private} is not an Ed25519 key")
    public = found.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    write_bytes(tls / TRUSTED, f"{SIGNER}: '{public.decode()}'\n".encode(), 0o600)
    return found


def signed(app: Path, tls: Path) -> Any:
    """The app folder as Flower's bundle, with a signature that stock nodes check."""
    from flwr.cli.build import build_fab_from_disk
    from flwr.supercore.fab import Fab
    from flwr.supercore.primitives.asymmetric_ed25519 import create_message_to_sign

    key, content, now = make_signature(tls), build_fab_from_disk(app), int(time.time())
    signature = key.sign(create_message_to_sign(hashlib.sha256(content).digest(), now))
    entry = {"signed_at": now, "signature": _text(signature)}
    verifications = {"valid_license": "fedpop", SIGNER: json.dumps(entry)}
    return Fab(hashlib.sha256(content).hexdigest(), content, verifications)


def _text(data: bytes) -> str:
    from base64 import urlsafe_b64encode

    return urlsafe_b64encode(data).decode().rstrip("=")
