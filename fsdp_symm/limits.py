"""Bounds of arguments that the switch, the TOML sections and the doctor share; without torch, for ``--help``."""

SHORTEST_TIMEOUT_S = 0.01
LONGEST_TIMEOUT_S = 1_000_000.0
MAX_SLOTS = 4096  # of one ring
