"""Files that are either whole or not there: temporary name, fsync, rename. Never pickle."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from fedpop.errors import CheckpointError, SettingsError


def writable_folder(path: str | Path) -> Path:
    """Create a folder and prove that it can be written to, before any work is done."""
    folder = Path(path)
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise SettingsError(f"cannot write to {folder}: {error.strerror or error}") from error
    return folder


def write_bytes(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a whole file or none; what a full disk cut short is removed. ``mode`` is who may read it."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write tensors as safetensors; gives the digest of the file."""
    own: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory, as an unchanged state and its copy do.
        own[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    data = safetensors.torch.save(own)
    write_bytes(path, data)
    return hashlib.sha256(data).hexdigest()


def read_tensors(path: Path, digest: str | None = None) -> dict[str, Tensor]:
    """Read tensors; a truncated or edited file is refused."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise CheckpointError(f"{path} was truncated or edited: its digest does not match")
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({error})") from error


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not readable JSON ({error})") from error
