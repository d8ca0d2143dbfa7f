"""Every error this package raises on purpose: what failed, what was found, what was expected, and the fix."""

from __future__ import annotations


class SymmMemError(RuntimeError):
    """Base of the package's run-time errors."""


class SymmMemConfigError(SymmMemError, ValueError):
    """The switch was asked for something that this model, group or machine cannot do."""


class SymmMemMemoryError(SymmMemError):
    """Symmetric memory could not be had on one rank; raised on every rank of the group."""


class SymmMemUnavailableError(SymmMemError):
    """The group has no symmetric memory; the same on all its ranks, which take the plain path unless ``strict``."""


class PlanMismatchError(SymmMemError):
    """The ranks of a group planned different communication."""


class SlotShortageError(SymmMemError):
    """A ring's next slot is still referenced: the plan was made for fewer buffers alive at once."""


class SymmMemTimeoutError(SymmMemError, TimeoutError):
    """Ranks did not arrive at a call in time; the message names the call and the ranks."""


class SymmMemPeerError(SymmMemError):
    """Another rank died, failed, or issued a different call."""


def told(error: BaseException) -> str:
    """An error as its peers will read it: our own as they are, others with their class."""
    return str(error) if isinstance(error, SymmMemError) else repr(error)


def problem(what: str, *, found: object, expected: object, fix: str) -> str:
    """The one shape of our error texts.

    Args:
        what: what failed, with the module or group it concerns.
        found: the value that was met.
        expected: what would have been accepted.
        fix: the line that repairs it.
    """
    return f"{what}\n  found: {found}\n  expected: {expected}\n  fix: {fix}"
