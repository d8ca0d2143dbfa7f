"""Implementations of expert parallelism by name; yours too.

Legend as in :mod:`fsdp_symm.experts.routing`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.experts import ops
from fsdp_symm.experts.config import PAYLOAD_DTYPES, EpConfig, refuse
from fsdp_symm.experts.context import EpContext, Routing, shared_context

Weighting = Literal["combine", "experts"]

Experts = Callable[..., torch.Tensor]
"""``experts(rows [M, H], counts int64 [L]) -> [M, H]``: rows are expert-major, the first ``counts[0]`` belong to the
first local expert; rows behind ``counts.sum()`` need no answer. With ``weighting="experts"`` a third argument, fp32
``[M]``, holds the router weight of each row, and the answer is expected to contain it."""


class EPImplementation(ABC):
    """Takes a batch to its experts and back. A subclass defines :meth:`__call__` and may keep state between calls.

    Args:
        experts: this rank's experts, see :data:`Experts`.
        group: the ranks that share the experts.
        config: sizes and policies, equal on all ranks.
        shared_batch: every rank of the group holds the same tokens and computes the same loss.
        weighting: who multiplies by the router weights.

    Raises:
        SymmMemConfigError: the class needs a shared batch and has none, or ``weighting`` is unknown.
    """

    needs_shared_batch: ClassVar[bool] = False

    def __init__(
        self,
        experts: Experts,
        group: dist.ProcessGroup,
        config: EpConfig,
        *,
        shared_batch: bool = False,
        weighting: Weighting = "combine",
    ) -> None:
        if self.needs_shared_batch and not shared_batch:
            refuse(
                f"{type(self).__name__} sends no tokens",
                found="ranks that hold different batches (shared_batch=False)",
                expected=f"the same tokens on all ranks {list(compat.group_ranks(group))} of the expert group",
                fix='use "all_to_all" or "copy_engine", or pass shared_batch=True if the batch is shared (as with '
                "tensor parallelism over the same ranks)",
            )
        if weighting not in ("combine", "experts"):
            refuse(
                "expert parallelism: weighting",
                found=repr(weighting),
                expected=["combine", "experts"],
                fix='"experts" hands the weights to the experts, "combine" applies them to what they return',
            )
        self.experts = experts
        self.group = group
        self.config = config
        self.shared_batch = shared_batch
        self.weighting = weighting

    @abstractmethod
    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """``[T, H]`` tokens, int32 or int64 ``[T, K]`` global expert ids (negative: masked) and fp32 ``[T, K]`` weights
        -> ``[T, H]``, the weighted answer of all experts to this rank's tokens."""


class ContextEP(EPImplementation):
    """Common part of the built-in implementations: prepare, dispatch, experts, combine in an :class:`EpContext`."""

    transport: ClassVar[str]

    def _context(self) -> EpContext:
        return shared_context(self.group, self.config, self.transport)

    def _run(self, context: EpContext, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        check_batch(hidden, ids, weights, self.config, self.config.payload_dtype)
        key = context.key
        routing = Routing(*ops.prepare(ids, key, self.config.alignment, self.config.recv_capacity_per_rank))
        path = routing.home, routing.table, routing.source, routing.slots
        rows, row_weights = ops.dispatch(hidden, weights, *path, key)
        if self.weighting == "experts":
            answers, scale = self.experts(rows, routing.counts, row_weights), None
        else:
            answers, scale = self.experts(rows, routing.counts), row_weights
        check_answers(answers, rows, rows.device)
        return ops.combine(answers, scale, None, *path, key)[0]


class TokenExchangeEP(ContextEP):
    """Sends tokens to their experts. Ranks that share a batch send a slice of it each, and sum their answers."""

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See :meth:`EPImplementation.__call__`."""
        context = self._context()
        if not self.shared_batch:
            return self._run(context, hidden_states, top_k_index, top_k_weights)
        size = -(-hidden_states.shape[0] // self.group.size())
        first = min(size * self.group.rank(), hidden_states.shape[0])
        mine = slice(first, min(first + size, hidden_states.shape[0]))
        hidden = ops.sum_gradients(hidden_states, context.key)[mine]
        weights = ops.sum_gradients(top_k_weights, context.key)[mine]
        part = self._run(context, hidden, top_k_index[mine], weights)
        padding = (0, 0, mine.start, hidden_states.shape[0] - mine.stop)
        return ops.sum_outputs(torch.nn.functional.pad(part, padding), context.key)


class EPImplementationInterface:
    """The known implementations. Registration is explicit: defining a subclass registers nothing."""

    _known: ClassVar[dict[str, type[EPImplementation]]] = {}

    @classmethod
    def register(cls, name: str, implementation: type[EPImplementation]) -> None:
        """Make an implementation known; a known name is replaced.

        Raises:
            SymmMemConfigError: not a subclass of :class:`EPImplementation`, or no name.
        """
        if not (isinstance(implementation, type) and issubclass(implementation, EPImplementation)):
            refuse(
                f"EPImplementationInterface.register({name!r})",
                found=implementation,
                expected="a subclass of EPImplementation",
                fix="subclass it and define __call__(hidden_states, top_k_index, top_k_weights)",
            )
        if not isinstance(name, str) or not name:
            refuse("EPImplementationInterface.register", found=repr(name), expected="a name", fix="pass a string")
        cls._known[name] = implementation

    @classmethod
    def get(cls, name: str) -> type[EPImplementation]:
        """The implementation of a name.

        Raises:
            SymmMemConfigError: lists the known names.
        """
        if name not in cls._known:
            refuse(
                "expert parallelism: unknown implementation",
                found=repr(name),
                expected=cls.names(),
                fix="pick one, or EPImplementationInterface.register(name, cls)",
            )
        return cls._known[name]

    @classmethod
    def names(cls) -> list[str]:
        """Known names, sorted."""
        return sorted(cls._known)


def check_batch(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, config: EpConfig, dtype: torch.dtype
) -> None:
    """Refuse tensors of the wrong shape or type before anything is sent.

    Raises:
        SymmMemConfigError: names the tensor.
    """
    check_tensor("tokens", hidden)
    if hidden.dim() != 2 or hidden.shape[1] != config.hidden_dim:
        refuse(
            "expert parallelism: tokens",
            found=f"shape {list(hidden.shape)}",
            expected=f"[tokens, {config.hidden_dim}] (hidden_dim)",
            fix="flatten the leading dimensions",
        )
    if hidden.dtype != dtype:
        refuse(
            "expert parallelism: tokens",
            found=hidden.dtype,
            expected=f"{dtype} (payload_dtype)",
            fix="cast the tokens"
            + (f", or set payload_dtype={hidden.dtype}" if hidden.dtype in PAYLOAD_DTYPES else ""),
        )
    check_ids(ids, config, hidden.shape[0])
    _check_device("topk_idx", ids, hidden.device)
    if weights is None:
        return
    check_tensor("topk_weights", weights)
    _check_device("topk_weights", weights, hidden.device)
    if weights.shape != ids.shape:
        refuse(
            "expert parallelism: topk_weights",
            found=f"shape {list(weights.shape)}",
            expected=f"{list(ids.shape)}, as topk_idx",
            fix="pass the weights that belong to the ids",
        )
    if weights.dtype != torch.float32:
        refuse(
            "expert parallelism: topk_weights",
            found=weights.dtype,
            expected=torch.float32,
            fix="topk_weights.float(); the cast is differentiable",
        )


def check_tensor(name: str, value: object) -> None:
    """Refuse what is no tensor.

    Raises:
        SymmMemConfigError: names the argument.
    """
    if not isinstance(value, torch.Tensor):
        refuse(
            f"expert parallelism: {name}",
            found=f"{type(value).__name__} {value!r:.60}",
            expected="a tensor",
            fix="pass a torch.Tensor",
        )


def _check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        refuse(
            f"expert parallelism: {name}",
            found=f"a tensor on {tensor.device}",
            expected=f"one on {device}, where the tokens are",
            fix=f"move it there: .to({str(device)!r})",
        )


def check_ids(ids: torch.Tensor, config: EpConfig, num_tokens: int | None = None) -> None:
    """Refuse expert ids of the wrong shape or type.

    Raises:
        SymmMemConfigError: says what was found.
    """
    check_tensor("topk_idx", ids)
    if ids.dtype not in (torch.int32, torch.int64):
        refuse(
            "expert parallelism: topk_idx",
            found=ids.dtype,
            expected="torch.int32 or torch.int64",
            fix="topk_idx.long()",
        )
    rows = "tokens" if num_tokens is None else num_tokens
    if ids.dim() != 2 or ids.shape[1] != config.num_topk or (num_tokens is not None and ids.shape[0] != num_tokens):
        refuse(
            "expert parallelism: topk_idx",
            found=f"shape {list(ids.shape)}",
            expected=f"[{rows}, {config.num_topk}] (num_topk)",
            fix="one row of expert ids a token",
        )


def check_answers(answers: torch.Tensor, rows: torch.Tensor, device: torch.device) -> None:
    """Refuse what experts must not return.

    Args:
        answers: what they returned.
        rows: of the shape and type that they were given.
        device: where the rows are.

    Raises:
        SymmMemConfigError: no tensor, or another shape, type or device than the rows'.
    """
    check_tensor("what the experts returned", answers)
    _check_device("what the experts returned", answers, device)
    if answers.shape != rows.shape or answers.dtype != rows.dtype:
        refuse(
            "expert parallelism: what the experts returned",
            found=f"{answers.dtype} {list(answers.shape)}",
            expected=f"{rows.dtype} {list(rows.shape)}, one answer for each row",
            fix="keep rows in order and cast the answer to the type of the rows",
        )
