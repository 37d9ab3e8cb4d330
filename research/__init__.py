"""The paper's experiments, by name; ``python -m research`` runs them.

Each has a folder of its own here, a package of the experiment's name (with an underscore for a hyphen) that
has an ``EXPERIMENT``, with its settings, its records and its page beside the code.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from research.experiment import Experiment

EXPERIMENTS: dict[str, str] = {
    "synthetic": "All the paper's synthetic settings: distance to the truth and to the exact optimum.",
    "theory": "The paper's theorem, measured: bias in gamma, noise of participation and compression, "
    "local steps.",
    "full-data": "All of CIFAR-10 and CIFAR-100 over 100 clients with some classes each: the main table.",
    "small-data": "CIFAR clients with 5, 10 or 25 images each: the paper's figure on small data.",
    "leaderboard": "All methods on the same small clients, new clients included; yours joins with a file.",
    "calibration": "Reliability and calibration errors of the full-data runs, and of Bayesian rivals.",
    "ood": "Images of another kind: whether predictive entropy tells them from a client's own.",
    "new-clients": "Clients that took no part in training, with 0 to 100 labelled images of their own.",
    "compression": "Accuracy against bytes sent up: quantised, sparse and natural gradients.",
    "stateless": "Clients that keep nothing between rounds, by steps of a chain and participation.",
    "defaults": "Why the defaults for networks are what they are: small image clients, one setting changed "
    "at a time.",
    "drift": "Where theta settles with local epochs on phi, against the exact optimum and the plain round.",
    "restarts": "The synthetic seeds that missed the optimum without annealing, now and with restarts.",
    "clusters": "A population with two clusters: Normal, mixture and energy priors on clients never seen.",
    "privacy": "What differential privacy costs: the learned subspace, and accuracy on images, against "
    "epsilon.",
    "hostile": "Clients who mean harm, against sums and against centres of messages.",
    "mixed": "Mixed models against R's: agreement, by chains and with few taking part; coverage; pooling.",
}
"""This is the place to add one."""


def listed() -> str:
    """Every experiment with its sentence, a line each."""
    width = max(map(len, EXPERIMENTS))
    return "\n".join(f"  {name:<{width}}  {sentence}" for name, sentence in EXPERIMENTS.items())


def experiment_named(name: str) -> Experiment:
    """Imported when it is asked for: all of them together would take long."""
    found: Experiment = import_module(f"research.{name.replace('-', '_')}").EXPERIMENT
    return found
