"""What ``fedpop methods`` counted on live clients, by the methods' names: a test counts again."""

COUNTED: dict[str, tuple[int, int]] = {
    "FedSOUL": (36, 0),
    "FedSOUK": (36, 5),
    "Marginal-ML": (36, 0),
    "Local": (24, 24),
    "FedAvg": (24, 0),
    "FedAvg-FT": (24, 0),
    "FedProx": (24, 0),
    "SCAFFOLD": (24, 24),
    "FedPer": (24, 3),
    "FedRep": (24, 3),
    "LG-FedAvg": (24, 21),
    "FedBABU": (24, 0),
    "FedDBE": (27, 3),
    "pFedFDA": (29, 0),
    "pFedVEM": (36, 6),
    "Ditto": (24, 24),
    "APFL": (24, 49),
    "Per-FedAvg": (24, 0),
    "pFedMe": (24, 0),
    "L2GD": (24, 24),
    "QLSD": (120, 0),
    "FSGLD": (120, 600),
    "FedBE": (120, 0),
    "DG-LMC": (120, 25),
}
"""Numbers that a client's predictions read, and those that it holds between rounds."""
