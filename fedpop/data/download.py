"""Published files fetched whole or not at all: into a partial file, resumed, and named only when its digest
is right."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from fedpop.data.catalogue import Remote
from fedpop.data.formats.decoded import Watch, unwatched
from fedpop.errors import CheckpointError, DataError
from fedpop.files import writable_folder
from fedpop.run.lock import locked_folder
from fedpop.version import __version__

LONGEST_SILENCE = 30.0
"""Seconds of silence after which a server is given up."""


def digest_of_file(path: Path, kind: str = "sha256") -> str:
    """``kind:`` and the digest of a file in hexadecimal digits."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    return f"{kind}:{found.hexdigest()}"


def fetch(remote: Remote, folder: Path, watch: Watch = unwatched) -> Path:
    """The file in this folder, fetched from the first of its homes that has it, unless it is there whole.

    Processes that want files of one folder take turns, so that later ones find what the first has fetched.
    """
    target = folder / remote.file
    if _whole(target, remote):
        return target
    for path in (target, _part(target)):
        if path.is_dir():
            raise DataError(f"{path} is a folder, where a file should be; remove it")
    writable_folder(folder)
    failures = []
    with _turn(folder, watch):
        if _whole(target, remote):
            return target
        for home in remote.homes:
            try:
                return _from(home + remote.file, target, remote, watch)
            except DataError as error:
                failures.append(str(error))
    raise DataError("; ".join(failures))


def _whole(target: Path, remote: Remote) -> bool:
    return target.is_file() and digest_of_file(target, remote.kind) == remote.digest


def _part(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


@contextmanager
def _turn(folder: Path, watch: Watch) -> Iterator[None]:
    """The folder is this process's alone, once others have done with it."""
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked_folder(folder))
                break
            except CheckpointError as error:
                if isinstance(error.__cause__, OSError):  # the lock itself cannot be written
                    raise DataError(str(error)) from error
            watch(f"waiting for another process that fetches into {folder}", 0, 0)
            time.sleep(0.2)
        yield


def _from(url: str, target: Path, remote: Remote, watch: Watch) -> Path:
    part = _part(target)
    try:
        resumed = part.is_file() and part.stat().st_size > 0
        _receive(url, part, watch)
        if digest_of_file(part, remote.kind) != remote.digest and resumed:
            part.unlink()  # the beginning may have been another file's: once more from the start
            _receive(url, part, watch)
        if digest_of_file(part, remote.kind) != remote.digest:
            part.unlink()
            raise DataError(f"{url} is not the published file: its {remote.kind} is another one")
        os.replace(part, target)
    except OSError as error:
        raise DataError(f"cannot write {target}: {error.strerror or error}") from error
    return target


class _OtherPart(Exception):
    """The server's answer begins elsewhere than where it was asked to."""


def _receive(url: str, part: Path, watch: Watch) -> None:
    """Bytes of a file after those that are there; what came stays, so that the next try goes on."""
    try:
        _ask(url, part, watch)
    except _OtherPart:
        part.unlink()  # this server cannot go on from there: from the start
        try:
            _ask(url, part, watch)
        except _OtherPart as error:
            raise DataError(f"{url} sent another part of the file than the whole") from error


def _ask(url: str, part: Path, watch: Watch) -> None:
    have = part.stat().st_size if part.is_file() else 0
    asked = {"User-Agent": f"fedpop/{__version__}"} | ({"Range": f"bytes={have}-"} if have else {})
    request = urllib.request.Request(url, headers=asked)
    try:
        with urllib.request.urlopen(request, timeout=LONGEST_SILENCE) as answer:
            start, total = _span(answer.status, answer.headers, have)
            with part.open("ab" if start else "wb") as file:
                got = start + _copy(
                    answer, file, target=part.name[1:-5], start=start, total=total, watch=watch
                )
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # all of it is there already, or it is not this file
            return
        raise DataError(f"{url} answered {error.code} {_one_line(error.reason)}".rstrip()) from error
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"{url} could not be fetched ({_reason(error)})") from error
    if total and got != total:
        raise DataError(f"{url} broke off after {got} of {total} bytes; the next try goes on from there")


def _span(status: int, headers: http.client.HTTPMessage, have: int) -> tuple[int, int]:
    """Where the answer begins, and how long the whole file is (0: not said)."""
    if status == 206:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", "").strip())
        if not match or int(match[1]) != have:
            raise _OtherPart
        return have, 0 if match[2] == "*" else int(match[2])
    length = headers.get("Content-Length", "").strip()
    return 0, int(length) if re.fullmatch("[0-9]+", length) else 0


def _copy(
    answer: http.client.HTTPResponse, file: BinaryIO, *, target: str, start: int, total: int, watch: Watch
) -> int:
    got = 0
    while block := answer.read(1 << 20):
        file.write(block)
        got += len(block)
        watch(f"fetching {target}", start + got, total)
    return got


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", None)
    return _one_line(inner or error) or type(error).__name__


def _one_line(words: object) -> str:
    return " ".join(str(words).split())
