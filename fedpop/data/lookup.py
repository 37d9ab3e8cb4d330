"""Where a set's files are: the folder given, FEDPOP_DATA, the user's cache, a system's package."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedpop.data.catalogue import Dataset, Form
from fedpop.errors import DataError
from fedpop.files import cache_folder

VARIABLE = "FEDPOP_DATA"


@dataclass(frozen=True)
class Root:
    """A folder of data, and why it is searched."""

    folder: Path
    why: str


@dataclass(frozen=True)
class Found:
    """The files of a split, and what reads them."""

    form: Form
    files: tuple[Path, ...]
    root: Path

    @property
    def names(self) -> str:
        """The files in a few words."""
        return ", ".join(map(str, self.files[:2])) + (", ..." if len(self.files) > 2 else "")


def roots(given: str | Path | None) -> list[Root]:
    """Folders that may have a sub-folder for each set, in the order in which they are tried."""
    out = [] if given is None else [Root(_home(given, "the folder given"), "the folder given")]
    if os.environ.get(VARIABLE):
        out.append(Root(_home(os.environ[VARIABLE], VARIABLE), VARIABLE))
    own = downloads()
    return out if own is None else [*out, Root(own, "the user's cache")]


def _home(folder: str | Path, why: str) -> Path:
    """A path in which ~ is somebody's home."""
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"{folder} ({why}): there is no home folder of such a user; write the path in full"
        ) from error


def downloads() -> Path | None:
    """The folder into which files are fetched."""
    cache = cache_folder()
    return None if cache is None else cache / "data"


def find(about: Dataset, split: str, given: str | Path | None) -> Found | None:
    """The first place that has every file of a form; None where there is none."""
    for found in _places(about, split, given):
        if all(_is_file(file) for file in found.files):
            return found
    return None


def published(about: Dataset, split: str) -> Found | None:
    """Where the files of a split lie, or would lie, when they are fetched; None where there is no home."""
    own, files = downloads(), tuple(remote.file for remote in about.remotes[split])
    form = next((form for form in about.forms[split] if form.files == files), None)
    if own is None or form is None:
        return None
    return Found(form, tuple(own / about.name / name for name in files), own)


def searched(about: Dataset, split: str, given: str | Path | None) -> str:
    """Which files were searched for, where, and what else was there instead, for the error."""
    wanted = " or ".join(dict.fromkeys(_listed(form.files) for form in about.forms[split]))
    places = [f"{root.folder / about.name} ({root.why})" for root in roots(given)]
    if not os.environ.get(VARIABLE):
        places.append(f"{VARIABLE} (not set)")
    odd = [
        f"{file} is {'a folder' if file.is_dir() else 'a link to nothing, or no plain file'}"
        for found in _places(about, split, given)
        for file in found.files
        if os.path.lexists(file) and not _is_file(file)
    ]
    words = f"searched for {wanted} in {', '.join([*places, *about.system])}"
    return f"{words} ({', '.join(odd)})" if odd else words


def _places(about: Dataset, split: str, given: str | Path | None) -> Iterator[Found]:
    """Every form in every place, in the order in which they are tried."""
    for root in roots(given):
        for form in about.forms[split]:
            for below in form.folders:
                yield Found(form, tuple(root.folder / below / name for name in form.files), root.folder)
    for folder in map(Path, about.system):
        for form in about.forms[split]:
            yield Found(form, tuple(folder / name for name in form.files), folder)


def _is_file(path: Path) -> bool:
    """Whether it is there; a folder that one may not look into does not say so."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        raise DataError(
            f"cannot look for {path}: {error.strerror or error}; make it readable, or name another folder "
            "with --data-dir or FEDPOP_DATA"
        ) from error


def _listed(files: tuple[str, ...]) -> str:
    return (
        files[0]
        if len(files) == 1
        else f"{files[0]} to {files[-1]}"
        if len(files) > 2
        else " and ".join(files)
    )
