"""The one configuration object of the experts room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
import torch.distributed as dist

from fsdp_symm.errors import SymmMemConfigError, problem

Overflow = Literal["raise", "drop", "grow"]
PAYLOAD_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST = 2**40  # of any size: beyond all memory, and within 64-bit numbers
_MOST_ALIGNMENT = 2**20


def refuse(what: str, *, found: object, expected: object, fix: str) -> NoReturn:
    """Raise a configuration error in the package's shape.

    Raises:
        SymmMemConfigError: always.
    """
    raise SymmMemConfigError(problem(what, found=found, expected=expected, fix=fix))


@dataclass(frozen=True)
class EpConfig:
    """What all ranks of an expert group agree on.

    Attributes:
        num_experts: E, experts of the model; rank r of R owns the r-th block of E / R.
        num_topk: K, experts a token.
        hidden_dim: H, width of a token.
        payload_dtype: the widest element type of tokens; sizes the buffers.
        max_tokens_per_rank: the most tokens that a rank may bring to one call; ``None``: unknown, which needs
            ``overflow="grow"`` or an exact exchange.
        rows_per_peer: C, the most rows that one rank may send to another. ``None``: ``max_tokens_per_rank``, dropless.
        recv_capacity_per_rank: M, expert-major rows that a rank may receive. ``None``: as many as a call needs, which
            reads one number on the host.
        alignment: rows of an expert are padded to a multiple of it; a power of two.
        overflow: what happens when C or M is too small. ``"raise"``: an error on every rank. ``"drop"``: rows are
            dropped and counted on the device; nothing is read on the host. ``"grow"``: room is made, on every rank.
        timeout_s: seconds that any wait between ranks may last.
    """

    num_experts: int
    num_topk: int
    hidden_dim: int
    payload_dtype: torch.dtype = torch.bfloat16
    max_tokens_per_rank: int | None = None
    rows_per_peer: int | None = None
    recv_capacity_per_rank: int | None = None
    alignment: int = 1
    overflow: Overflow = "grow"
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        self._check_sizes()
        check_alignment(self.alignment)
        check_capacity(self.recv_capacity_per_rank, self.alignment)
        check_dtype(self.payload_dtype)
        if self.overflow not in ("raise", "drop", "grow"):
            refuse(
                "EpConfig.overflow: unknown policy",
                found=repr(self.overflow),
                expected=["raise", "drop", "grow"],
                fix='"raise" stops all ranks, "drop" counts and goes on, "grow" makes room',
            )

    def _check_sizes(self) -> None:
        for name in ("num_experts", "num_topk", "hidden_dim"):
            _check_positive(name, getattr(self, name))
        for name in ("max_tokens_per_rank", "rows_per_peer"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.num_topk > self.num_experts:
            refuse(
                "EpConfig.num_topk: a token cannot have more experts than there are",
                found=f"num_topk {self.num_topk}, num_experts {self.num_experts}",
                expected="1 <= num_topk <= num_experts",
                fix="correct one of the two",
            )
        if self.rows_per_peer is not None and self.max_tokens_per_rank is None:
            refuse(
                "EpConfig.rows_per_peer: a bound on rows needs a bound on tokens",
                found=f"rows_per_peer {self.rows_per_peer}, max_tokens_per_rank None",
                expected="both, or neither",
                fix="set max_tokens_per_rank",
            )
        number = isinstance(self.timeout_s, int | float) and not isinstance(self.timeout_s, bool)
        if not number or not 0 < self.timeout_s <= 1e6:
            refuse("EpConfig.timeout_s", found=repr(self.timeout_s), expected="seconds > 0", fix="leave it out for 60")

    def local_experts(self, group: dist.ProcessGroup) -> int:
        """L, experts of one rank.

        Raises:
            SymmMemConfigError: E is no multiple of R.
        """
        if self.num_experts % group.size():
            refuse(
                "expert parallelism: the experts do not divide among the ranks",
                found=f"{self.num_experts} experts over {group.size()} ranks",
                expected="a multiple of the number of ranks",
                fix=f"use a group whose size divides {self.num_experts}, or pad the experts",
            )
        return self.num_experts // group.size()


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        refuse(
            f"EpConfig.{name}",
            found=repr(value),
            expected=f"an integer >= 1 and at most {_MOST}",
            fix="pass the size as an int",
        )


def check_alignment(alignment: object) -> None:
    """Refuse what is no power of two.

    Raises:
        SymmMemConfigError: says what was found.
    """
    if not isinstance(alignment, int) or not 1 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
        refuse(
            "expert parallelism: alignment",
            found=repr(alignment),
            expected=f"a power of two up to {_MOST_ALIGNMENT}, 1 for no padding",
            fix="8 or 16 suits grouped GEMMs in 16-bit types, 128 block-scaled ones",
        )


def check_capacity(capacity: int | None, alignment: int) -> None:
    """Refuse a receive capacity that cuts the last expert's rows off their alignment.

    Raises:
        SymmMemConfigError: says what was found.
    """
    if capacity is None:
        return
    _check_positive("recv_capacity_per_rank", capacity)
    if capacity % alignment:
        refuse(
            "expert parallelism: recv_capacity_per_rank",
            found=f"{capacity} rows with an alignment of {alignment}",
            expected="a multiple of the alignment",
            fix=f"use {-(-capacity // alignment) * alignment}",
        )


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse payloads that are not served.

    Raises:
        SymmMemConfigError: lists the ones that are.
    """
    if dtype not in PAYLOAD_DTYPES:
        refuse(
            "expert parallelism: payload dtype",
            found=dtype,
            expected=list(PAYLOAD_DTYPES),
            fix="cast the tokens before they are dispatched; quantize inside the experts",
        )
