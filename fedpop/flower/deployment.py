"""A run across sites, from the first greeting of sites to the theta that everyone gets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedpop.federation.inputs import Example
from fedpop.files import read_sealed, read_tensors, writable_folder, write_json, write_sealed, write_tensors
from fedpop.flower.final_questions import answers
from fedpop.flower.outcome import FEDERATION, warnings, write_outcome
from fedpop.flower.remote import RemoteMembers, RoundTerms, site_records_of
from fedpop.flower.secure_sums import SecureTerms
from fedpop.flower.server_folder import AFTERWARDS, SCALES
from fedpop.flower.site import keep_hello, keep_theta
from fedpop.flower.site_records import SiteRecord
from fedpop.flower.transport import Transport
from fedpop.methods.base import Algorithm, chosen
from fedpop.population import Population
from fedpop.questions.forms import agreed, example_from, plain_example, scales_of
from fedpop.questions.scales import median_powers, plain_scales
from fedpop.run import checkpoint as checkpoints
from fedpop.run.callbacks import Callback
from fedpop.run.private import private_method
from fedpop.run.run import Run
from fedpop.run.settings import Settings
from fedpop.site.study import Survey, Training, values_of, with_values

AGREED = "agreed.json"
log = logging.getLogger("fedpop.server")


@dataclass(frozen=True)
class Deployment:
    """What is run across sites: the same method and settings as in the simulator, and when rounds close."""

    experiment: str
    """The name under which sites store their states: another one is another run."""
    method: Callable[[Example], Algorithm]
    """The method for examples of this form; before that is agreed on, a model may not know its inputs."""
    settings: Settings
    terms: RoundTerms = field(default_factory=RoundTerms)
    schema: Mapping[str, Any] = field(default_factory=dict)
    """What sites' data must look like."""
    entry: str = ""
    """``module:name`` that makes the model, where it is not made of torch's layers alone."""
    callbacks: Sequence[Callback] = ()
    afterwards: Sequence[str] = ()
    """What everyone is asked once theta is there."""
    name: str = ""
    """What the federation is called."""
    secure: SecureTerms | None = None
    """Sums are secure, between these sites."""

    def __post_init__(self) -> None:
        if self.secure is not None:
            self.secure.check_quorum(self.terms.quorum)
        if self.secure is not None and self.settings.secure != self.secure.form:
            settings = replace(self.settings, secure=self.secure.form)
            object.__setattr__(self, "settings", settings)

    def prepared(self, example: Example) -> Algorithm:
        """The method for examples of this kind. What a site computes in does not depend on its processor."""
        method = self.method(example)
        if method.model.precision == "auto":
            method = method.replace(model=method.model.asking_for("float32"))
        return method.prepared(example)

    def run(self, transport: Transport, folder: Path) -> int:
        """Run it, or go on with it; gives the number of rounds."""
        return run_deployment(self, transport, folder).rounds

    def training(self, method: Algorithm, example: Example, form: Mapping[str, Any]) -> Training:
        """What sites receive of the method once it is known what examples look like."""
        method = method if self.settings.privacy is None else private_method(method)
        runs = chosen(method, self.settings.participation, self.terms.waits).method
        return Training(runs, example, form, self.entry)


def run_deployment(deployment: Deployment, transport: Transport, folder: Path | None = None) -> Population:
    """Run it, or go on with it; at the end every site has theta."""
    saved = None if folder is None else checkpoints.read(folder / "checkpoints")
    before = None if saved is None else site_records_of(saved.tensors)
    members, method = enrolled_members(deployment, transport, folder, before)
    run = Run(method, members, deployment.settings, folder, deployment.callbacks)
    if folder is not None:
        write_json(folder / FEDERATION, {"name": deployment.name or deployment.experiment})
    population = run.execute(resume=saved is not None, progress=False)
    found: dict[str, dict[str, Any]] = {}
    if folder is not None and deployment.afterwards:
        found, population = answers(population, deployment.afterwards)
        write_json(folder / AFTERWARDS, found)
    if folder is not None:
        write_outcome(folder, population, read_sealed(folder / AGREED, "what sites agreed on")["form"], found)
        for words in warnings(population, found):
            log.warning("%s", words)
    have = members.finish(population.published, population.rounds, population.how)
    log.info("theta after %d rounds is at %s", population.rounds, ", ".join(have) or "no site")
    if folder is not None:
        population.public().save(folder / "population")
        theta = writable_folder(folder / "theta")  # for sites that come later
        keep_hello(theta, transport.hello)
        keep_theta(theta, population.published)
    return population


def enrolled_members(
    deployment: Deployment,
    transport: Transport,
    folder: Path | None = None,
    before: Mapping[str, SiteRecord] | None = None,
) -> tuple[RemoteMembers, Algorithm]:
    """The sites that are there, once they are enough, and the method as it was given: they receive what
    runs.

    What was agreed on, and where the model starts, is stored in the folder: a run that goes on has the same.
    """
    file = None if folder is None else writable_folder(folder) / AGREED
    settings = (deployment.experiment, deployment.terms, deployment.settings)
    if file is not None and file.exists():
        stored = read_sealed(file, "what sites agreed on")
        form, example = stored["form"], example_from(stored["example"])
        method = deployment.prepared(example)
        with_values(method.model, read_tensors(file.with_name("model.safetensors"), stored["digest"]))
        members = RemoteMembers(
            deployment.training(method, example, form),
            transport,
            *settings,
            before=before,
            secure=deployment.secure,
            folder=folder,
        )
        members.wait()
        return members, method
    members = RemoteMembers(
        Survey(deployment.schema), transport, *settings, secure=deployment.secure, folder=folder
    )
    if "x" in deployment.schema:
        method, form, example = _agreed_about_tables(deployment, members, file)
    else:
        form, example = agreed(deployment.schema, members.asks)
        method = deployment.prepared(example)
        members.update_study(deployment.training(method, example, form))
    if file is not None:
        digest = write_tensors(file.with_name("model.safetensors"), values_of(method.model))
        write_sealed(file, {"form": form, "example": plain_example(example), "digest": digest})
    return members, method


def _agreed_about_tables(
    deployment: Deployment, members: RemoteMembers, file: Path | None
) -> tuple[Algorithm, dict[str, Any], Example]:
    """What sites agree on of their tables, and who fits; everyone has the study when it is done.

    First how large columns are: whoever is out of all proportion stops before any moment is asked. Then
    levels and moments. Who does not fit what came of that, a model that cannot take its y, say, is taken
    out of it: it is agreed on again without that site.
    """
    scales = scales_of(deployment.schema)
    private = deployment.settings.privacy is not None  # sizes of columns are data
    histograms = members.asks(scales, {}) if scales.columns and not private else {}
    medians = {column: median_powers(histogram) for column, histogram in histograms.items()}
    schema, without, stopped = dict(deployment.schema) | {"medians": medians}, set[str](), dict[str, str]()
    while True:
        if medians or without:
            members.update_study(Survey(schema), without)
        stopped |= members.refused
        form, example = agreed(schema, members.asks)
        counted, method = set(members.names), deployment.prepared(example)
        members.update_study(deployment.training(method, example, form))
        unfit = counted & members.refused.keys()
        if not unfit:
            break
        for name in sorted(unfit):
            log.warning(
                "%s does not fit what was agreed on with it, which is agreed on again without it: %s",
                name,
                members.refused[name],
            )
        without |= unfit
    if file is not None:
        write_json(
            file.with_name(SCALES),
            {"columns": plain_scales(histograms), "stopped": stopped | members.refused},
        )
    return method, form, example
