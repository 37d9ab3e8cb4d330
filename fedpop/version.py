"""The version, alone: what needs it need not import the rest."""

__version__ = "0.2.0"
