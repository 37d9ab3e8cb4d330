"""Logs: lines with times and levels, for people or as JSON, in files that are rotated."""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from fedpop.errors import FedpopError
from fedpop.files import writable_folder

LOG_BYTES, OLD_LOGS = 10_000_000, 5
"""A log is put aside at this size; as many old ones stay, ``.1`` the youngest."""
LINE = "%(asctime)s %(levelname)s %(message)s"
LINE_PARTS = re.compile(r"([-\d]+ [:,\d]+) ([A-Z]+) (.*)")
"""Such a line again."""


class LogLine(str):
    """A line for the log that is no mere information."""

    level: int

    def __new__(cls, text: str, level: int = logging.WARNING) -> LogLine:
        made = super().__new__(cls, text)
        made.level = level
        return made


class JSONLines(logging.Formatter):
    """A JSON object a line: time (UTC), level, logger, message, and an error's traceback.

    >>> record = logging.LogRecord("fedpop", logging.INFO, "", 0, "round %d", (3,), None)
    >>> record.created = 0.25
    >>> JSONLines().format(record)
    '{"time": "1970-01-01T00:00:00.250Z", "level": "INFO", "logger": "fedpop", "message": "round 3"}'
    """

    def format(self, record: logging.LogRecord) -> str:
        when = dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds")
        plain = {"time": when.replace("+00:00", "Z"), "level": record.levelname, "logger": record.name}
        plain["message"] = record.getMessage()
        if record.exc_info:
            plain["error"] = self.formatException(record.exc_info)
        return json.dumps(plain)


class CommandLog:
    """What a command says: on the terminal, and in a log file."""

    def __init__(self, file: Path, plain: bool) -> None:
        form: logging.Formatter = JSONLines() if plain else logging.Formatter(LINE)
        self._log = logging.Logger("fedpop.command")  # by itself: several may be in a process
        self._handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout), rotating(file)]
        for handler in self._handlers:
            handler.setFormatter(form)
            self._log.addHandler(handler)

    def __call__(self, words: str) -> None:
        self._log.log(words.level if isinstance(words, LogLine) else logging.INFO, "%s", words)

    def failed(self, error: FedpopError) -> None:
        """What ended the command, in the file alone: the terminal is told of it as of any error."""
        self._handlers[1].handle(
            self._log.makeRecord(self._log.name, logging.ERROR, "", 0, "%s", (error,), None)
        )

    def close(self) -> None:
        for handler in self._handlers:
            handler.close()


@contextmanager
def command_log(file: Path, plain: bool) -> Iterator[CommandLog]:
    """The log of a command that runs for long; its file's folder is made."""
    writable_folder(file.parent)
    log = CommandLog(file, plain)
    try:
        yield log
    except FedpopError as error:
        log.failed(error)
        raise
    finally:
        log.close()


def rotating(file: Path) -> RotatingFileHandler:
    return RotatingFileHandler(file, maxBytes=LOG_BYTES, backupCount=OLD_LOGS, encoding="utf-8")


def log_to(file: Path) -> None:
    """fedpop's log, in this file alone: Flower's log has other things in it, and a process of
    its simulation serves one site after the other."""
    log = logging.getLogger("fedpop")
    ours = [h for h in log.handlers if isinstance(h, logging.FileHandler)]
    if any(h.baseFilename == str(file.absolute()) for h in ours):
        return
    for other in ours:
        log.removeHandler(other)
        other.close()
    handler = rotating(file)
    handler.setFormatter(logging.Formatter(LINE))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def put_aside(file: Path, largest: int = LOG_BYTES) -> None:
    """Rotate a log that another process has open for appending: its content is copied and the file emptied,
    so that the process goes on in it."""
    with suppress(OSError):  # a full disk must not stop what it is the log of
        if file.stat().st_size < largest:
            return
        for number in range(OLD_LOGS - 1, 0, -1):
            older = file.with_name(f"{file.name}.{number}")
            if older.exists():
                os.replace(older, file.with_name(f"{file.name}.{number + 1}"))
        shutil.copyfile(file, file.with_name(f"{file.name}.1"))
        os.truncate(file, 0)
