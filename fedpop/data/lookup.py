"""Where a set's files are: the folder given, FEDPOP_DATA, the user's cache, a system's package."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fedpop.data.catalogue import Dataset, Form
from fedpop.files import cache_folder

VARIABLE = "FEDPOP_DATA"


@dataclass(frozen=True)
class Root:
    """A folder of data, and why it is looked into."""

    folder: Path
    why: str


@dataclass(frozen=True)
class Found:
    """The files of a split, and what reads them."""

    form: Form
    files: tuple[Path, ...]
    root: Path


def roots(given: str | Path | None) -> list[Root]:
    """Folders that may hold a sub-folder for each set, in the order in which they are tried."""
    out = [] if given is None else [Root(Path(given).expanduser(), "the folder given")]
    if os.environ.get(VARIABLE):
        out.append(Root(Path(os.environ[VARIABLE]).expanduser(), VARIABLE))
    own = downloads()
    return out if own is None else [*out, Root(own, "the user's cache")]


def downloads() -> Path | None:
    """The folder into which files are fetched."""
    cache = cache_folder()
    return None if cache is None else cache / "data"


def find(about: Dataset, split: str, given: str | Path | None) -> Found | None:
    """The first place that has every file of a form; None where there is none."""
    for root in roots(given):
        for form in about.forms[split]:
            for below in form.folders:
                files = tuple(root.folder / below / name for name in form.files)
                if all(file.is_file() for file in files):
                    return Found(form, files, root.folder)
    for folder in map(Path, about.system):
        for form in about.forms[split]:
            files = tuple(folder / name for name in form.files)
            if all(file.is_file() for file in files):
                return Found(form, files, folder)
    return None


def looked(about: Dataset, split: str, given: str | Path | None) -> str:
    """Which files were looked for, and where, for the error."""
    wanted = " or ".join(dict.fromkeys(_told(form.files) for form in about.forms[split]))
    places = [f"{root.folder / about.name} ({root.why})" for root in roots(given)]
    if not os.environ.get(VARIABLE):
        places.append(f"{VARIABLE} (not set)")
    return f"looked for {wanted} in {', '.join([*places, *about.system])}"


def _told(files: tuple[str, ...]) -> str:
    return (
        files[0]
        if len(files) == 1
        else f"{files[0]} to {files[-1]}"
        if len(files) > 2
        else " and ".join(files)
    )
