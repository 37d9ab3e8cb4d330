"""Errors for people: what was wrong, where, and what to do about it."""


class FedpopError(Exception):
    """Base class of every error that fedpop raises on purpose."""


class DataError(FedpopError, ValueError):
    """Client data cannot be used: names the client and the row."""


class SchemaError(DataError):
    """Data at a site do not have the form that the federation agreed on. Its words hold names of columns and
    levels that everyone knows, and numbers of lines, never values: the server may see them."""


class ModelError(FedpopError, ValueError):
    """A model, head or likelihood does not fit together."""


class SettingsError(FedpopError, ValueError):
    """A setting is impossible, or two settings contradict each other."""


class CheckpointError(FedpopError):
    """A checkpoint or a saved population cannot be used."""


class PayloadError(FedpopError, ValueError):
    """A vector cannot be encoded, or an encoded one cannot be read."""


class TrainingError(FedpopError):
    """Training broke down: nobody could be heard, or theta is not finite; names the round and the client."""


class EstimateError(FedpopError):
    """A quantity cannot be estimated reliably from what is available."""


class ExtraError(FedpopError, ImportError):
    """Something needs an optional package: says which, and how it is installed."""


class FedpopWarning(UserWarning):
    """A result that should be read with care."""
