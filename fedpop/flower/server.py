"""The ServerApp: the run of a federation's folder, from where it stopped."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedpop.errors import FedpopError, SettingsError
from fedpop.files import write_json
from fedpop.flower.deployment import run_deployment
from fedpop.flower.logs import log_to
from fedpop.flower.present import PRESENT, Present
from fedpop.flower.processes import die_with_parent
from fedpop.flower.server_folder import ServerFolder
from fedpop.flower.site_state import locked
from fedpop.flower.transport import Transport

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
    folder.run.mkdir(exist_ok=True)
    log_to(folder.run / "server.log")
    status = folder.run / "status.json"
    with locked(
        folder.run / "run"
    ):  # an earlier process may not have ended yet; it shows that this one lives
        write_json(status, {"state": "running"})
        transport = Transport(grid)
        transport.on_wait = Present(folder.run / PRESENT)
        try:
            population = run_deployment(folder.deployment(), transport, folder.run)
        except FedpopError as error:
            logging.getLogger("fedpop.server").error("%s", error)
            write_json(status, {"state": "failed", "why": str(error)})
            raise
        except Exception as error:  # the SuperLink went away, or the model's code is wrong: more than one try
            logging.getLogger("fedpop.server").exception("the run broke")
            write_json(status, {"state": "broken", "why": f"{type(error).__name__}: {error}"})
            raise
        write_json(status, {"state": "finished", "rounds": population.rounds})
