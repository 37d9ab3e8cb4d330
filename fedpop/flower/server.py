"""The server's process: the run of a federation's folder, from where it stopped, and the door to it.

``python -m fedpop.flower.server DIR`` is what ``fedpop server run`` starts. ``app`` is the same run as an app
of Flower's, for those who run Flower's own processes.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedpop.errors import FedpopError, SettingsError
from fedpop.files import write_json
from fedpop.flower.admission import Admission
from fedpop.flower.link import FleetGrid
from fedpop.flower.logs import log_to
from fedpop.flower.present import PRESENT, Present
from fedpop.flower.processes import FAILED_CODE, Stopped, die_with_parent, locked, stop_on_signals
from fedpop.flower.server_folder import ServerFolder
from fedpop.flower.server_settings import deployment
from fedpop.flower.stock import signed
from fedpop.flower.transport import Transport

log = logging.getLogger("fedpop.server")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run, or go on; ``folder`` in the run's configuration is the federation's."""
    where = str(context.run_config.get("folder", ""))
    if not where or not Path(where).is_dir():
        raise SettingsError(f"there is no federation's folder {where!r} here: flwr run . -c 'folder=\"...\"'")
    # Flower's processes outlive the SuperLink for a while; what is written is whole at any moment.
    die_with_parent(signal.SIGKILL)
    folder = ServerFolder(Path(where))
    admission = None if folder.insecure else Admission(folder.admitted)
    run_in(folder, partial(Transport, grid, admits=partial(_admits, admission)))


def _admits(admission: Admission | None, node: Any) -> bool:
    return admission is None or admission.name_of(node.public_key) == node.name


def run_in(folder: ServerFolder, transport: Callable[[], Transport]) -> None:
    """The run of a folder; ``status.json`` says how it stands."""
    folder.run.mkdir(mode=0o700, exist_ok=True)
    log_to(folder.run / "server.log")
    status = folder.run / "status.json"
    with locked(
        folder.run / "run"
    ):  # an earlier process may not have ended yet; it shows that this one lives
        write_json(status, {"state": "running"})
        reached = transport()
        reached.on_wait = Present(folder.run / PRESENT)
        try:
            rounds = deployment(folder).run(reached, folder.run)
        except FedpopError as error:
            log.error("%s", error)
            write_json(status, {"state": "failed", "why": str(error)})
            raise
        except Exception as error:  # the model's code is wrong, or memory is: more than one try
            log.exception("the run broke")
            write_json(status, {"state": "broken", "why": f"{type(error).__name__}: {error}"})
            raise
        write_json(status, {"state": "finished", "rounds": rounds})


def serve(folder: ServerFolder, insecure: bool, stock: bool) -> None:
    """Open the door, run, and close it."""
    log_to(folder.run / "server.log")
    tls, admitted = (None, None) if insecure else (folder.tls, folder.admitted)
    with FleetGrid(folder.listen, tls, admitted, signed(folder.app, folder.tls) if stock else None) as link:
        log.info("the door is open at %s", folder.listen)
        run_in(folder, partial(Transport, link, sleep=link.sleep, admits=link.admits))


def process(arguments: list[str]) -> int:
    """What the server's process does, and its exit code."""
    parser = argparse.ArgumentParser(prog="fedpop.flower.server")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--fit", default="")
    given = parser.parse_args(arguments)
    stop_on_signals()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    folder = ServerFolder(given.folder, given.fit)
    try:
        serve(folder, given.insecure, given.stock)
    except Stopped:
        return 130
    except FedpopError as error:
        write_json(folder.run / "status.json", {"state": "failed", "why": str(error)})
        return FAILED_CODE
    return 0


if __name__ == "__main__":
    raise SystemExit(process(sys.argv[1:]))
