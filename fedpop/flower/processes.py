"""Flower's processes: started, watched, started again after any exit, and stopped with all their children."""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from fedpop.errors import ExtraError, SettingsError
from fedpop.flower.logs import LINE_PARTS, LogLine, put_aside
from fedpop.version import __version__

RESTART_SECONDS = (1.0, 30.0)
"""Seconds before a process that ended is started again: the first time, and at most."""
STEADY_SECONDS = 60.0
"""A process that ran as long as this had started well."""
TESTED = ("1.41",)
"""Flower's versions with which all tests were run."""
MODULES = (
    "app/message",
    "common/config",
    "common/serde",
    "proto/fleet_pb2",
    "server/superlink/linkstate",
    "supercore/error/catalog",
    "supercore/fab",
    "supercore/heartbeat",
    "supercore/inflatable/inflatable_object",
    "supercore/inflatable/inflatable_protobuf_utils",
    "supercore/inflatable/inflatable_utils",
    "supercore/interceptors/http/runtime_version",
    "supercore/object_store",
    "supercore/primitives/asymmetric",
    "supercore/task_identity",
    "superlink/federation",
    "superlink/servicer/fleet/fleet_handlers",
    "supernode/fleet_http_client",
    "supernode/node_auth_http_interceptor",
)
"""What is used of Flower beside what it documents."""
FAILED_CODE = 2
"""The exit code of a process that says itself what is wrong: starting it again would not help."""


INSECURE = (
    "warning: without TLS and keys anybody on the network can read all messages, and take part as any site. "
    "Use it on one machine only."
)


def environment(home: Path, *near: str) -> dict[str, str]:
    """Flower in a separate home, offline and quiet; this machine, and hosts that are near, are reached
    without a proxy, whatever is set for others."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    direct = ",".join(filter(None, [os.environ.get("no_proxy", ""), "127.0.0.1", "localhost", *near]))
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_HOME": str(home.absolute()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": os.environ.get("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.5"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
        "no_proxy": direct,
        "NO_PROXY": direct,
    }


def program(name: str) -> str:
    """One of Flower's commands, from the same environment as this one."""
    found = Path(sys.executable).parent / name
    if not found.exists():
        raise ExtraError(f"there is no {name} beside {sys.executable}: pip install 'fedpop[flower]'")
    return str(found)


def require_flower() -> None:
    """Raise where Flower is not there, is no version that was tested, or has moved what is used of it."""
    try:
        version = importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError as error:
        raise ExtraError("Flower is not installed: pip install 'fedpop[flower]'") from error
    found = find_spec("flwr")
    root = Path(found.origin).parent if found is not None and found.origin else Path()
    moved = [m for m in MODULES if not any((root / f"{m}{end}").exists() for end in (".py", "/__init__.py"))]
    if moved or version.rpartition(".")[0] not in TESTED:
        why = f" (there is no flwr/{moved[0]}.py)" if moved else ""
        raise SettingsError(
            f"flwr {version} is installed{why}, and fedpop {__version__} was tested with "
            f"{', '.join(TESTED)}: pip install 'flwr~={TESTED[-1]}.0'"
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def require_free(host: str, port: int, where: str = "address under [server] in federation.toml") -> None:
    """Raise where another process listens there, or nobody can."""
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                raise SettingsError(
                    f"{host} is not an address of this machine ({error.strerror}): where sites reach it "
                    'through another one\'s, say listen = "0.0.0.0:8000" under [server] in federation.toml'
                ) from error
            raise SettingsError(
                f"port {port} of {host} cannot be had ({error.strerror}): stop what uses it, or change "
                f"{where}"
            ) from error


def healthy(address: str, ca: Path | None) -> bool:
    """Whether a SuperLink answers there."""
    context = None if ca is None else ssl.create_default_context(cafile=str(ca))
    url = f"http{'' if ca is None else 's'}://{address}/health"
    direct = urllib.request.ProxyHandler({})
    opener = urllib.request.build_opener(direct, urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def die_with_parent(how: signal.Signals = signal.SIGTERM) -> None:
    """On Linux this process is sent a signal when the one that started it ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, how)


@contextmanager
def alone(path: Path, words: str) -> Iterator[None]:
    """Nobody else does what this lock stands for; a SettingsError with these words where somebody does."""
    with open(path.with_suffix(".lock"), "w", opener=private_opener) as file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError as error:
            raise SettingsError(words) from error
        yield


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time: a repeated message may come while the first is still being worked on."""
    with open(path.with_suffix(".lock"), "w") as file:
        flock(file, LOCK_EX)
        yield


def is_locked(path: Path) -> bool:
    """Whether a living process has locked it; the lock of a killed one is gone with it."""
    lock = path.with_suffix(".lock")
    if not lock.exists():
        return False
    with open(lock) as file:  # whoever only checks writes nothing
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            return True
    return False


def private_opener(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def make_private(folder: Path, say: Callable[[str], None]) -> None:
    """Files in a server's or a site's folder are its owner's to read, and nobody else's."""
    open_to_others = [p for p in [folder, *folder.rglob("*")] if not p.is_symlink() and _others(p)]
    for path in open_to_others:
        try:
            path.chmod(0o700 if path.is_dir() else 0o600)
        except OSError as error:
            raise SettingsError(
                f"other users can read {path}, and this one cannot change that ({error.strerror}): run as "
                "its owner"
            ) from error
    if open_to_others:
        shown = ", ".join(str(p) for p in open_to_others[:3])
        more = f" and {len(open_to_others) - 3} more" if len(open_to_others) > 3 else ""
        say(f"other users could read {shown}{more}: now they cannot")


def _others(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o077)


class Supervised:
    """A process under supervision: started again after any exit, whatever its code."""

    def __init__(
        self,
        arguments: Callable[[], Sequence[str]],
        environment: Mapping[str, str],
        log: Path,
        say: Callable[[str], None],
    ) -> None:
        self._arguments, self._environment, self._log, self._say = arguments, dict(environment), log, say
        self._child: subprocess.Popen[bytes] | None = None
        self._started, self._wait, self._due = 0.0, RESTART_SECONDS[0], 0.0
        self.starts = 0

    def __enter__(self) -> Supervised:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def _start(self) -> None:
        with open(self._log, "ab", opener=private_opener) as file:
            self._child = subprocess.Popen(
                list(self._arguments()),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
                umask=0o077,
            )
        self._started, self.starts = time.monotonic(), self.starts + 1

    def check(self) -> bool:
        """Whether it runs; starts it again where it does not, with a pause that grows while it fails."""
        assert self._child is not None
        code = self._child.poll()
        if code is None:
            put_aside(self._log)
            return True
        now = time.monotonic()
        if not self._due:
            ran = now - self._started
            self._wait = (
                RESTART_SECONDS[0] if ran > STEADY_SECONDS else min(2 * self._wait, RESTART_SECONDS[1])
            )
            self._due = now + self._wait
            self._say(LogLine(f"it ended with code {code} after {ran:.0f} s; it is started again"))
            self._end_group()
        elif now >= self._due:
            self._due = 0.0
            self._start()
            return True
        return False

    def stop(self, seconds: float = 10.0) -> None:
        """End it and all that it started."""
        if self._child is None:
            return
        if self._child.poll() is None:
            self._child.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(seconds)
        self._end_group()
        self._child.wait()

    def _end_group(self) -> None:
        assert self._child is not None
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)  # a session of its own: nobody else is in it


class LogTail:
    """What is new in a log of fedpop's, line by line, without its times and tracebacks."""

    def __init__(self, file: Path, levels: Sequence[str]) -> None:
        self._file, self._levels = file, levels
        self._at, self._node = (file.stat().st_size, file.stat().st_ino) if file.exists() else (0, 0)

    def new(self) -> list[LogLine]:
        if not self._file.exists():
            return []
        rotated = self._file.with_name(f"{self._file.name}.1")
        lines = []
        if self._node and self._file.stat().st_ino != self._node:
            if rotated.exists() and rotated.stat().st_ino == self._node:
                lines = self._read(rotated)
            self._at = 0
        self._node = self._file.stat().st_ino
        found = map(LINE_PARTS.fullmatch, [*lines, *self._read(self._file)])
        levels = logging.getLevelNamesMapping()
        return [LogLine(match[3], levels[match[2]]) for match in found if match and match[2] in self._levels]

    def _read(self, file: Path) -> list[str]:
        with file.open("rb") as log:
            log.seek(self._at)
            data = log.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return whole.decode(errors="replace").splitlines()


class Stopped(Exception):
    """Somebody asked the command to end."""


def stop_on_signals() -> None:
    """SIGTERM ends a command as Ctrl-C does, so that it stops what it started."""

    def stop(number: int, frame: object) -> None:
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
