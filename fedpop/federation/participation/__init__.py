"""Who takes part in a round: rules that draw it, or a record of who was there."""

from fedpop.federation.participation.availability import Availability
from fedpop.federation.participation.rules import (
    Active,
    Bernoulli,
    Everyone,
    Participation,
    Roster,
    Said,
    Uniform,
    resolve,
)

__all__ = [
    "Active",
    "Availability",
    "Bernoulli",
    "Everyone",
    "Participation",
    "Roster",
    "Said",
    "Uniform",
    "resolve",
]
