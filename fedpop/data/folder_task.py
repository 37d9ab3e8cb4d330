"""User images in a folder, with a sub-folder for each class, dealt out to clients.

Whose an image is may be said by sub-folders above the classes, by a table that names files, or by a partition
(``fedpop.federation.partitions``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from fedpop.checked import Checked, Factor, OneOf, Range, Whole, require
from fedpop.data.byte_cache import cached, known_digests
from fedpop.data.download import digest_of_file
from fedpop.data.formats.decoded import Bytes, Decoded
from fedpop.data.user_data import OwnData
from fedpop.errors import DataError, SettingsError
from fedpop.federation.clients import Federation, Packed, usual_names
from fedpop.federation.partitions import IID, ByClass, ByKey, Dirichlet, Scheme, Shards
from fedpop.federation.reading import IMAGES, image_files, read_columns, read_image
from fedpop.models.composition import Composition
from fedpop.models.image_layers import CropFlip, Standardise
from fedpop.models.networks import NETWORKS, build

FOLDERS = "folders"
SCHEMES: dict[str, Any] = {scheme.__name__: scheme for scheme in (IID, ByClass, Dirichlet, Shards)}
Side = Annotated[int, Range(least=1, most=4096)]


@dataclass(frozen=True)
class FolderTask(Checked, OwnData):
    """Images in class sub-folders as clients' examples.

    Args:
        folder: Where they are: ``folder/CLASS/image.png``, or ``folder/CLIENT/CLASS/image.png``.
        clients: Whose an image is. "folders": the sub-folders above the classes say it. A table with
            ``kind``: a partition, ``{kind = "Dirichlet", b = 20, alpha = 0.3}``, or ``IID``, ``Shards`` or
            ``ByClass``. A table with ``file``: a CSV or Parquet file with a column of file names below the
            folder and one of clients, ``{file = "who.csv", path = "image", client = "photographer"}``; by
            default the columns are called path and client.
        size: Height and width that images are scaled to; None (the default) takes them as they are,
            all alike.
        channels: 3 for colours (the default), 1 for grey.
        network: The backbone: "cnn-cifar10" (the default), "cnn-cifar100", "cnn-mnist", "lenet" or "mlp".
        shift: The largest shift of an image in training, in pixels; 0 (the default) for none.
        flip: Whether images are mirrored at random in training (default: False).
        test: The share of each client's images that it is judged on (default: 0.2).
        validation: The share that settings are chosen by (default: 0.2).

    >>> FolderTask("photos", clients={"kind": "IID", "b": 10}).channels
    3
    """

    folder: str
    clients: str | Mapping[str, Any]
    size: tuple[Side, Side] | None = None
    channels: Annotated[int, Range(least=1, most=3)] = 3
    network: Annotated[str, OneOf(*NETWORKS)] = "cnn-cifar10"
    shift: Whole = 0
    flip: bool = False
    test: Factor = 0.2
    validation: Factor = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channels == 2:
            raise SettingsError("channels are 1 for grey or 3 for colours, not 2")
        by = self.clients
        if isinstance(by, Mapping) and "kind" in by:
            self._scheme(by)
        elif isinstance(by, Mapping) and isinstance(by.get("file"), str):
            for name, value in by.items():
                if name not in ("file", "path", "client"):
                    raise SettingsError(f"clients: unknown setting {name!r}; known are file, path, client")
                require(str, **{f"clients.{name}": value})
        elif by != FOLDERS:
            raise SettingsError(
                f'clients is "{FOLDERS}", a partition {{kind = ...}} or a table {{file = ...}}, not {by!r}'
            )

    @staticmethod
    def _scheme(table: Mapping[str, Any]) -> Scheme:
        """The partition that a table of settings names."""
        cls = SCHEMES.get(table["kind"]) if isinstance(table["kind"], str) else None
        if cls is None:
            raise SettingsError(f"clients: kind is one of {', '.join(SCHEMES)}, not {table['kind']!r}")
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items() if k != "kind"}
        known = [f.name for f in fields(cls)]
        strange = [name for name in given if name not in known]
        if strange:
            raise SettingsError(
                f"clients: unknown setting {strange[0]!r} of {cls.__name__}; known are {', '.join(known)}"
            )
        scheme: Scheme = cls(**given)
        return scheme

    # --- what lies where -----------------------------------------------------------------------

    def files(self) -> tuple[list[Path], list[str], list[str]]:
        """Every image, its class, and whose it is where sub-folders say so ("" where they do not)."""
        root = Path(self.folder)
        if not root.is_dir():
            raise DataError(f"there is no folder {root}")
        found: tuple[list[Path], list[str], list[str]] = ([], [], [])
        for owner in _folders(root) if self.clients == FOLDERS else [root]:
            for sub in _folders(owner):
                inside = image_files(sub)
                if not inside:
                    raise DataError(
                        f"{sub} holds no image ({', '.join(IMAGES)}); is it a class? {self._form}"
                    )
                found[0].extend(inside)
                found[1].extend([sub.name] * len(inside))
                found[2].extend(["" if owner is root else owner.name] * len(inside))
        return found

    @property
    def _form(self) -> str:
        more = "CLIENT/" if self.clients == FOLDERS else ""
        return f"Images lie in {self.folder}/{more}CLASS/"

    def _pixels(self, files: Sequence[Path]) -> Bytes:
        """All images as bytes; decoded once, then cached."""
        first = read_image(files[0], self.channels, self.size)
        channels, height, width = first.shape

        def decode() -> Decoded:
            out = np.empty((len(files), *first.shape), dtype=np.uint8)
            for i, file in enumerate(files):
                pixels = read_image(file, self.channels, self.size)
                if pixels.shape != first.shape:
                    theirs, other = (" x ".join(map(str, p.shape[1:])) for p in (pixels, first))
                    raise DataError(
                        f"{file} has {theirs} pixels, {files[0].name} {other}: give size = [height, width], "
                        "to which all are scaled"
                    )
                out[i] = pixels
            return Decoded(out, np.zeros(len(files), dtype=np.int64))

        # Scaled ones are other images than those that have this size themselves.
        label = f"folder-{'' if self.size is None else 'to-'}{channels}x{height}x{width}"
        return cached(label, known_digests(files), (channels, height, width), decode).images

    def federation(self, seed: int) -> Federation:
        files, classes, owners = self.files()
        names = sorted(set(classes))
        place = {name: k for k, name in enumerate(names)}
        y = torch.tensor([place[c] for c in classes])
        by = self.clients
        if isinstance(by, Mapping) and "kind" in by:
            scheme = self._scheme(by)
        else:
            scheme = ByKey(owners if isinstance(by, str) else self._owners(files, by))
        rows = scheme.deal(y, seed).rows
        called = scheme.names if isinstance(scheme, ByKey) else usual_names(len(rows))
        order, sizes = torch.cat(list(rows)), torch.tensor([len(r) for r in rows])
        x = torch.from_numpy(self._pixels(files))[order]
        train = Packed(x, y[order], torch.cumsum(sizes, 0) - sizes, sizes)
        return Federation(list(called), {"train": train}, labels=tuple(names))

    def _owners(self, files: Sequence[Path], by: Mapping[str, Any]) -> list[str]:
        """Whose each image is, by the table."""
        path, client = by.get("path", "path"), by.get("client", "client")
        columns = read_columns(Path(by["file"]), [path, client])
        owner: dict[str, str] = {}
        for i, (name, who) in enumerate(zip(columns[path], columns[client], strict=True)):
            name = Path(name).as_posix()
            if not who:
                raise DataError(f"{columns.who}, {columns.rows[i]}: no client for {name}")
            if owner.setdefault(name, who) != who:
                raise columns.wrong(path, i, "", f"which belongs to {owner[name]} in a row above")
        there = [f.relative_to(self.folder).as_posix() for f in files]
        known = set(there)
        for i, name in enumerate(columns[path]):
            if Path(name).as_posix() not in known:
                raise columns.wrong(path, i, "", f"which is no image in {self.folder}")
        missing = [name for name in there if name not in owner]
        if missing:
            raise DataError(f"{columns.who} does not say whose {missing[0]} is ({len(missing)} in all)")
        return [owner[name] for name in there]

    def contents(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for file in self.files()[0]:
            digest.update(f"{file.relative_to(self.folder).as_posix()} {digest_of_file(file)}\n".encode())
        contents: dict[str, Any] = {
            "folder": Path(self.folder).name,
            "digest": f"sha256:{digest.hexdigest()}",
        }
        by = self.clients
        if isinstance(by, Mapping) and "file" in by:
            file = Path(by["file"])
            contents["clients"] = dict(by) | {"file": file.name, "digest": digest_of_file(file)}
        return contents

    def model(self, seed: int, clients: Federation) -> Composition:
        """The network that was asked for, on pixels standardised by those that clients train on."""
        x = clients.train.x
        assert isinstance(x, torch.Tensor)
        mean, sd = [], []
        values = torch.arange(256, dtype=torch.float64) / 255
        for channel in x.unbind(1):
            share = torch.bincount(channel.flatten().int(), minlength=256) / channel.numel()
            mean.append(float(share.double() @ values))
            sd.append(float((share.double() @ (values - mean[-1]).square()).sqrt()) or 1.0)
        first: list[torch.nn.Module] = [Standardise(mean, sd)]
        first += [CropFlip(self.shift, self.flip)] if self.shift or self.flip else []
        _, channels, height, width = x.shape
        return build(self.network, (channels, height, width), max(len(clients.labels), 2), seed, first)


def _folders(root: Path) -> list[Path]:
    """Sub-folders in order; images that lie beside them would be nobody's."""
    found = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    stray = image_files(root)
    if stray:
        raise DataError(f"{stray[0]} lies beside the folders of classes; put it into one of them")
    if not found:
        raise DataError(f"{root} has no sub-folders: images lie in folders that are called by their classes")
    return found
