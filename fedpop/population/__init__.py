"""What ``fit`` returns: a population that answers questions about every client, old or new."""

from fedpop.population.evaluate import NewClients, evaluate, evaluate_few, evaluate_new
from fedpop.population.loading import load
from fedpop.population.population import Population
from fedpop.population.posterior import Newcomer, Posterior

__all__ = [
    "NewClients",
    "Newcomer",
    "Population",
    "Posterior",
    "evaluate",
    "evaluate_few",
    "evaluate_new",
    "load",
]
