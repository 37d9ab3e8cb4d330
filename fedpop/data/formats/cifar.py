"""CIFAR's binary version: records of labels and 3072 pixels, in files or in the archive they came in."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedpop.data.formats.decoded import Bytes, Decoded
from fedpop.errors import DataError

SHAPE = (3, 32, 32)


def read_records(parts: Iterable[tuple[str, bytes]], labels: int) -> Decoded:
    """Files of records with so many bytes of labels each, of which the last is the finest."""
    record = labels + int(np.prod(SHAPE))
    tables: list[Bytes] = []
    for name, raw in parts:
        if not raw or len(raw) % record:
            raise DataError(f"{name} has {len(raw)} bytes, which is no whole number of records of {record}")
        tables.append(np.frombuffer(raw, np.uint8).reshape(-1, record))
        if len(tables[-1]) != len(tables[0]):
            raise DataError(
                f"{name} has {len(tables[-1])} images, the first file {len(tables[0])}; all have equally "
                "many, so one of them is cut short"
            )
    table = np.concatenate(tables)
    return Decoded(table[:, labels:].reshape(-1, *SHAPE), table[:, labels - 1].astype(np.int64))


def read_files(paths: Iterable[Path], labels: int) -> Decoded:
    """Records in files of their own."""
    return read_records(((str(p), p.read_bytes()) for p in paths), labels)


def read_archive(path: Path, members: tuple[str, ...], labels: int) -> Decoded:
    """Records in members of a gzipped tar; nothing is unpacked to the disk."""
    found: dict[str, bytes] = {}
    try:
        with gzip.open(path) as raw, tarfile.open(fileobj=raw, mode="r|") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                if name in members and member.isfile():
                    file = archive.extractfile(member)
                    assert file is not None
                    found[name] = file.read()
            while raw.read(1 << 20):  # to the end, where the checksum is
                pass
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked: {error}") from error
    missing = [name for name in members if name not in found]
    if missing:
        raise DataError(f"{path} has no member {missing[0]}")
    return read_records(((f"{path}, {name}", found[name]) for name in members), labels)
