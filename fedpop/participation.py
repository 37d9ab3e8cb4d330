"""Who takes part in a round."""

from fedpop.federation.participation import Availability, Bernoulli, Everyone, Participation, Uniform

__all__ = ["Availability", "Bernoulli", "Everyone", "Participation", "Uniform"]
