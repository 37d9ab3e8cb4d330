"""How much is worked on at once, wherever a plan of memory does not say it.

More takes memory and gains no time. Values are the same to the rounding of sums, whatever these are.
"""

from __future__ import annotations

CLIENTS_AT_ONCE = 256
"""Clients whose models, or likelihoods, are computed together."""
ROWS_AT_ONCE = 2**14
"""Examples of one client that are processed together; those of a client with more come in blocks, since a
plan can cut a cohort between clients but not within one."""
ENTRIES_AT_ONCE = 2**22
"""Numbers in a tensor that is made on the way to a score or an integral."""
