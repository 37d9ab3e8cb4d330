"""What a settings file names as ``module:name``: found beside the file, or among what is installed.

Whatever goes wrong in code that is not ours is one error that says in which line of which file.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from fedpop.errors import FedpopError, SettingsError


def entry_named(entry: str, folder: str | Path | None = None) -> Any:
    """The object ``module:name``; modules in ``folder`` come first.

    >>> entry_named("math:sqrt")(4.0)
    2.0
    >>> entry_named("math:sqroot")
    Traceback (most recent call last):
    fedpop.errors.SettingsError: 'math:sqroot': module math has no 'sqroot'
    """
    module, colon, name = entry.partition(":") if isinstance(entry, str) else ("", "", "")
    if not (module and colon and name):
        raise SettingsError(f"{entry!r} is not a module and a name in it, such as 'mydata:clients'")
    found = module_named(module, folder, entry)
    if not hasattr(found, name):
        raise SettingsError(f"{entry!r}: module {module} has no {name!r}")
    return getattr(found, name)


def module_named(module: str, folder: str | Path | None = None, entry: str = "") -> ModuleType:
    """A module; those in ``folder`` come first. ``entry`` is what errors call it.

    >>> module_named("math").__name__
    'math'
    """
    entry = entry or module
    if folder is not None:
        _look_first(Path(folder), module)
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            where = f" in {folder}, nor is one installed" if folder is not None else ""
            raise SettingsError(f"{entry!r}: there is no module {error.name}{where}") from error
        raise SettingsError(f"{entry!r}: {_told(error)}") from error
    except (Exception, SystemExit) as error:  # whatever the user's module does
        raise SettingsError(f"{entry!r}: module {module} cannot be imported: {_told(error)}") from error


def called(entry: str, function: Any, argument: Any, seed: int = 0) -> Any:
    """What the function that an entry names returns; one that takes an argument is given this one. The seed
    decides what it draws from torch's own generator, which is afterwards where it was.

    >>> called("math:sqrt", entry_named("math:sqrt"), 4.0)
    2.0
    >>> called("math:sqrt", entry_named("math:sqrt"), -1.0)
    Traceback (most recent call last):
    fedpop.errors.SettingsError: math:sqrt failed: ValueError: ...
    """
    if not callable(function):
        raise SettingsError(f"{entry} is not a function but {type(function).__name__}")
    torch = import_module("torch")
    try:
        takes = len(inspect.signature(function).parameters) > 0
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed % 2**63)
            return function(argument) if takes else function()
    except FedpopError:  # in our words already
        raise
    except (Exception, SystemExit) as error:
        raise SettingsError(f"{entry} failed: {_told(error)}") from error


def _look_first(folder: Path, module: str) -> None:
    """Put a folder before all others, unless another module of this name has been loaded already."""
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.insert(0, place)
    head = module.split(".")[0]
    own = [p for p in (folder / f"{head}.py", folder / head / "__init__.py") if p.exists()]
    if head not in sys.modules or not own:
        return
    try:
        spec = find_spec(head)
    except ValueError:  # a module that was made by hand
        spec = None
    if spec is None or spec.origin is None or not own[0].samefile(spec.origin):
        raise SettingsError(
            f"{own[0]}: another module called {head} is loaded already; give yours another name"
        )


def _told(error: BaseException) -> str:
    """An error of somebody else's code in one line, with the place where it was raised."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError) and error.filename:
        return words
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    own = [f for f in frames if Path(f.filename) != Path(__file__)]
    return f"{words} ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else words
