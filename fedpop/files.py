"""Files that are either whole or not there: temporary name, fsync, rename. Never pickle.

What is read back was written by this module and says so itself: every file has a digest, stored in a JSON
file that is sealed. Whatever else is found is one CheckpointError that names the file.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from safetensors import SafetensorError

from fedpop.errors import CheckpointError, DataError, ExtraError, FedpopError, SettingsError

if TYPE_CHECKING:
    from torch import Tensor

DAMAGED = "put the whole folder back from a copy, or make it again"
"""What can be done about a file that is not what it was."""
SAVE_AS = "save the file as UTF-8"


# --- writing ---------------------------------------------------------------------------------


def folder_named(path: str | Path) -> Path:
    """A path as it was given; an empty one, which pathlib takes for the current folder, is nobody's wish."""
    if not isinstance(path, str | os.PathLike) or path == "":
        raise SettingsError(f"a folder is given by its path, not by {path!r}")
    return Path(path)


def writable_folder(path: str | Path) -> Path:
    """Create a folder and prove that it can be written to, before any work is done."""
    folder = folder_named(path)
    probe = folder / f".writable-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(_new_file(probe, 0o666))
        probe.unlink()
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot write to {folder}: {_reason(error)}") from error
    return folder


def cache_folder() -> Path | None:
    """The user's folder for what can be found out again; None where there is no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "fedpop"
    try:
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "fedpop"
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "fedpop"
        return Path.home() / ".cache" / "fedpop"
    except RuntimeError:
        return None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk, and the like, as one error that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {_reason(error)}; what was saved before is still there, so make room (or "
            "choose another folder) and go on from it"
        ) from error


def append(file: BinaryIO, data: bytes, path: Path) -> None:
    """Write all of this to a file that has no buffer, or say why not."""
    rest = memoryview(data)
    with writing(path):
        while rest:
            rest = rest[file.write(rest) :]


def write_bytes(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a whole file or none. ``mode`` is who may read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            with open(_new_file(temporary, mode), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _new_file(path: Path, mode: int) -> int:
    """A new file of this name, opened for writing: where a link or an old file has it, that goes first, and
    what a link leads to is not touched."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        return os.open(path, flags, mode)
    except FileExistsError:
        path.unlink()
        return os.open(path, flags, mode)


def remove_temporary(folder: Path) -> None:
    """What a process that was killed while it wrote has left in a folder that is this one's alone."""
    for path in folder.glob(".*.tmp"):
        if re.fullmatch(r"\..+\.[0-9]+\.tmp", path.name):
            with suppress(OSError):
                path.unlink()


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def write_sealed(path: Path, plain: Mapping[str, Any]) -> None:
    """Write plain values with a digest of themselves; that of tensors' files is among them."""
    own = json.loads(json.dumps(dict(plain)))
    write_json(path, own | {"seal": _seal(own)})


def _safetensors() -> Any:
    """Imported with torch by who has tensors: a settings file is read without it."""
    return import_module("safetensors.torch")


def tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as a safetensors file."""
    own: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory, as an unchanged state and its copy do.
        own[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return _safetensors().save(own)  # type: ignore[no-any-return]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors as safetensors; gives the digest of the file."""
    data = tensor_bytes(tensors)
    write_bytes(path, data)
    return digest_of_bytes(data)


class NewFiles:
    """Files whose names end in their digests, so that none replaces another: a set of them counts once a
    file that names them is in its place, and until then the set before it does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.digests: dict[str, str] = {}
        self._fresh: list[Path] = []

    def add(self, stem: str, suffix: str, data: bytes) -> str:
        """Write a file; gives its name."""
        digest = digest_of_bytes(data)
        path = self.folder / f"{stem}.{digest[:16]}.{suffix}"
        if path.is_symlink() or not path.is_file() or path.read_bytes() != data:
            self._fresh.append(path)
            write_bytes(path, data)
        self.digests[path.name] = digest
        return path.name

    def forget(self) -> None:
        """Take back what was written, of a set that is not to be."""
        for path in self._fresh:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def tidy(self, stems: str) -> None:
        """Remove files of earlier sets, and what a process that died has left; ``stems`` is a pattern."""
        name = re.compile(rf"\.?({stems})\.[0-9a-f]{{16}}\.[a-z]+(\.[0-9]+\.tmp)?")
        for path in self.folder.iterdir():
            if path.name not in self.digests and name.fullmatch(path.name):
                with suppress(OSError):
                    path.unlink()


# --- reading ---------------------------------------------------------------------------------


def digest_of_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _seal(plain: Mapping[str, Any]) -> str:
    return digest_of_bytes(json.dumps(plain, sort_keys=True).encode())


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


WRONG_CONTENT = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError,
    ValueError, OSError,
)  # fmt: skip
"""What comes of taking something for what it is not."""


def cannot_go_on(path: Path, error: BaseException) -> CheckpointError:
    """What this file holds was used, and an error came that says nothing by itself."""
    return CheckpointError(
        f"cannot go on from {path} ({_detail(error)}): what it holds does not fit this run, or the run's own "
        "code failed; go on from a copy of the folder, or start again in another one"
    )


def _detail(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


@contextmanager
def reading(path: Path, what: str, remedy: str = DAMAGED) -> Iterator[None]:
    """Whatever goes wrong while this file is made sense of, as one error that names it.

    Only for what depends on nothing but the file: every error in here is the file's.
    """
    try:
        yield
    except ExtraError:
        raise
    except CheckpointError as error:
        if str(path) in str(error):
            raise
        raise CheckpointError(f"{path}: {error}") from error
    except (FedpopError, *WRONG_CONTENT) as error:
        raise CheckpointError(f"{path} is not {what} of this version ({_detail(error)}); {remedy}") from error


def opened(path: Path) -> BinaryIO:
    """A file to read from; what is none, such as a pipe or a device, would never end, or never begin."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "it is not a file, but a pipe, a device or a folder")
    return open(handle, "rb")


def whole_file(path: Path) -> bytes:
    """All of a file."""
    with opened(path) as file:
        return file.read()


def read_bytes(path: Path, digest: str | None = None) -> bytes:
    """A file as it was written; a truncated or edited one is refused."""
    try:
        data = whole_file(path)
    except (OSError, MemoryError) as error:
        raise CheckpointError(f"cannot read {path}: {_reason(error)}; {DAMAGED}") from error
    if digest is not None and digest_of_bytes(data) != digest:
        raise CheckpointError(f"{path} was truncated or edited: its digest does not match; {DAMAGED}")
    return data


def read_tensors(path: Path, digest: str | None = None) -> dict[str, Tensor]:
    """Read tensors; a truncated or edited file is refused."""
    data = read_bytes(path, digest)
    try:
        return _safetensors().load(data)  # type: ignore[no-any-return]
    except (SafetensorError, ValueError, RuntimeError, TypeError, KeyError, MemoryError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({error}); {DAMAGED}") from error


def read_json(path: Path) -> Any:
    return _parsed(read_bytes(path), path, DAMAGED)


def _parsed(data: bytes, where: Path | str, remedy: str) -> Any:
    try:
        return json.loads(data.decode("utf-8"))
    except RecursionError as error:
        raise CheckpointError(f"{where} is not readable JSON (nested too deeply); {remedy}") from error
    except ValueError as error:
        raise CheckpointError(f"{where} is not readable JSON ({error}); {remedy}") from error


def read_sealed(path: Path, what: str) -> dict[str, Any]:
    """Plain values that ``write_sealed`` wrote, unchanged since."""
    plain = read_json(path)
    if not isinstance(plain, dict) or not isinstance(plain.get("seal"), str):
        raise CheckpointError(f"{path} is not {what} of this version: it has no seal; {DAMAGED}")
    seal = plain.pop("seal")
    if _seal(plain) != seal:
        raise CheckpointError(f"{path} was edited: its seal does not match; {DAMAGED}")
    return plain


@contextmanager
def csv_text(path: Path, encoding: str = "utf-8-sig", remedy: str = SAVE_AS) -> Iterator[TextIO]:
    """The text of somebody's CSV file; what cannot be read is a DataError that names file and line."""
    try:
        data = whole_file(path)
    except (OSError, ValueError, MemoryError) as error:
        raise DataError(f"cannot read {path}: {_reason(error)}") from error
    try:
        text = data.decode(encoding)
    except UnicodeError as error:
        start = error.start if isinstance(error, UnicodeDecodeError) else 0
        what = "UTF-8" if encoding.lower().startswith("utf-8") else encoding
        words = f"byte 0x{data[start]:02x}" if start < len(data) else "its end"
        raise DataError(
            f"{path}, line {data.count(bytes([10]), 0, start) + 1}: {words} is not {what} text; {remedy}"
        ) from error
    try:
        yield io.StringIO(text, newline="")
    except csv.Error as error:
        raise DataError(
            f"{path} is not readable CSV: {error}; look for a quote that is not closed"
        ) from error


def json_lines(data: bytes, path: Path) -> list[dict[str, Any]]:
    """A JSON object from each line."""
    out = []
    for number, line in enumerate(data.splitlines(), 1):
        value = _parsed(line, f"{path}, line {number},", DAMAGED)
        if not isinstance(value, dict):
            raise CheckpointError(
                f"{path}, line {number}, is not a JSON object but {type(value).__name__}; {DAMAGED}"
            )
        out.append(value)
    return out


_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_bytes(text: str | int) -> int:
    """``"512MiB"`` to a number of bytes.

    >>> parse_bytes("1.5KiB")
    1536
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(KiB|MiB|GiB|)\s*", str(text))
    if match is None or float(match[1]) <= 0:
        raise SettingsError(f"a memory budget is a positive size such as '1GiB', not {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])
