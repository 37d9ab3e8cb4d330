"""What methods are compared on, as a settings file says it: ``[task]`` with a kind, and ``[model]``.

Kinds are tasks that fedpop knows by name (synthetic, images, full-images) and data of one's own (table,
folder, function). ``[model]`` names a function that makes the model, in place of the task's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from fedpop.checked import Range, require
from fedpop.comparison.terms import Source, Subject
from fedpop.data.folder_task import FolderTask
from fedpop.data.image_task import FullImageTask, ImageTask
from fedpop.data.synthetic import SyntheticTask
from fedpop.data.table_task import TableTask
from fedpop.data.user_data import FunctionTask, OwnData
from fedpop.errors import FedpopError, SettingsError
from fedpop.federation.clients import Client, Federation
from fedpop.models.base import Model
from fedpop.models.spec import model_named

KINDS: dict[str, Any] = {
    "synthetic": SyntheticTask,
    "images": ImageTask,
    "full-images": FullImageTask,
    "table": TableTask,
    "folder": FolderTask,
    "function": FunctionTask,
}
SAME = {"csv": "table"}
"""Earlier names."""
MORE: dict[str, dict[str, Any]] = {
    "synthetic": {"validation": 20, "new_clients": 0},
    "images": {"data": None, "new_clients": 0},
    "full-images": {"data": None, "new_clients": 0},
    "table": {"new_clients": 0},
    "folder": {"new_clients": 0},
    "function": {"new_clients": 0},
}
"""Settings beside those of the task's class, with their defaults."""
NoneOrFew = Annotated[int, Range(least=0, most=1_000_000)]
MODEL = ("entry", "path")


@dataclass(frozen=True)
class Task(Source):
    """A task by name; the seed draws its data and the model's start."""

    kind: str
    task: Any
    more: Mapping[str, Any]
    entry: str = ""
    """``module:name`` of the model, where the task's own is not meant."""
    path: str = "."
    """Where that module is looked for first."""

    def make(self, seed: int) -> Subject:
        clients, newcomers = self._clients(seed)
        return Subject(clients, newcomers, self.model(seed, clients))

    def _clients(self, seed: int) -> tuple[Federation, list[Client]]:
        new = self.more["new_clients"]
        if self.kind == "synthetic":
            clients = self.task.make(seed, self.more["validation"]).clients
            return Federation.of(clients), self.task.newcomers(seed, new) if new else []
        where = (self.more["data"],) if "data" in self.more else ()
        found: tuple[Federation, list[Client]] = self.task.split(*where, seed, new)
        return found

    def model(self, seed: int, clients: Federation) -> Model:
        """The one that is named, or the task's own."""
        if self.entry:
            return model_named(self.entry, clients.example, self.path, seed)
        own: Model = self.task.model(*((seed, clients) if isinstance(self.task, OwnData) else (seed,)))
        return own

    def describe(self) -> dict[str, Any]:
        own = self.task.contents() if isinstance(self.task, OwnData) else {}
        more = {k: v for k, v in self.more.items() if k != "data"} | own
        more |= {"model": self.entry} if self.entry else {}
        described = {"kind": self.kind} | asdict(self.task) | more
        plain: dict[str, Any] = json.loads(json.dumps({k: v for k, v in described.items() if k != "path"}))
        return plain  # without places: a folder may move

    def places(self) -> dict[str, dict[str, Any]]:
        """Settings that hold places, with these in full: for a file that lies elsewhere."""
        out: dict[str, dict[str, Any]] = {"task": {}, "model": {}}
        for name in ("data", "file", "folder", "path"):
            given = self.more.get(name) or getattr(self.task, name, None)
            if given:
                out["task"][name] = str(Path(given).resolve())
        by = getattr(self.task, "clients", None)
        if isinstance(by, Mapping) and "file" in by:
            out["task"]["clients"] = dict(by) | {"file": str(Path(by["file"]).resolve())}
        if self.entry:
            out["model"]["path"] = str(Path(self.path).resolve())
        return out


def task_from(raw: Mapping[str, Any], path: Path, data: str | Path | None) -> Task:
    """``[task]`` and ``[model]`` of a settings file; images are in ``data`` rather than where it says."""
    where = f"{path}, [task]"
    table = raw.get("task")
    given = table.get("kind") if isinstance(table, Mapping) else None
    kind = SAME.get(given, given) if isinstance(given, str) else None
    if not isinstance(table, Mapping) or kind not in KINDS:
        raise SettingsError(f"{where}: kind is one of {', '.join(KINDS)}, not {given!r}")
    own = {f.name for f in fields(KINDS[kind])}
    only(table, ("kind", *sorted(own), *MORE[kind]), where)
    more = {k: table.get(k, default) for k, default in MORE[kind].items()}
    settings = {k: v for k, v in table.items() if k in own}
    if data is not None and "data" in more:
        more["data"] = str(data)
    elif data is not None and kind == "folder":
        settings["folder"] = str(data)
    for name in ("data", "file", "folder"):
        place = more if name in more else settings
        if isinstance(place.get(name), str) and data is None:
            place[name] = str(_beside(path, place[name]))
    by = settings.get("clients")
    if isinstance(by, Mapping) and isinstance(by.get("file"), str):
        settings["clients"] = dict(by) | {"file": str(_beside(path, by["file"]))}
    if "path" in own:
        settings["path"] = _folder(path, table, where)
    for name in ("new_clients", "validation"):
        if name in more:
            with naming(where):
                require(NoneOrFew, **{name: more[name]})
    entry = _model(raw, path, kind)
    with naming(where):
        return Task(kind, KINDS[kind](**settings), more, **entry)


def _model(raw: Mapping[str, Any], path: Path, kind: str) -> dict[str, str]:
    where, table = f"{path}, [model]", raw.get("model")
    if table is None:
        if kind == "function":
            raise SettingsError(
                f'{path}, [task]: a task of kind "function" needs a [model] with entry = "module:function"'
            )
        return {}
    if not isinstance(table, Mapping) or not isinstance(table.get("entry"), str):
        raise SettingsError(f'{where}: entry is the model\'s function, "module:function"')
    only(table, MODEL, where)
    return {"entry": table["entry"], "path": _folder(path, table, where)}


def _folder(path: Path, table: Mapping[str, Any], where: str) -> str:
    """The folder of modules: beside the settings file by default."""
    given = table.get("path", ".")
    if not isinstance(given, str):
        raise SettingsError(f"{where}: path is a folder, not {given!r}")
    return str(path.parent / given)


def _beside(path: Path, given: str) -> Path:
    """Beside the settings file, unless there is no such place but one from here."""
    beside = path.parent / given
    return beside if os.path.exists(beside) else Path(given)  # a name that is too long exists nowhere


def only(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Raise at a setting that is not known."""
    for key in table:
        if key not in known:
            raise SettingsError(f"{where}: unknown setting {key!r}; known are {', '.join(known)}")


class naming:
    """Errors inside begin with where they were made."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        known = FedpopError | TypeError | ValueError | AttributeError | LookupError | ArithmeticError
        if isinstance(error, known):
            raise SettingsError(f"{self.where}: {error}") from error
