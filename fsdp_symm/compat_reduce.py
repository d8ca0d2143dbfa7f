"""Private torch behind reduce-scatters on a narrow wire; the companion of :mod:`fsdp_symm.compat`, under the same rule.

With ``reduce_dtype=torch.float32`` FSDP2 casts bf16 gradients to fp32, and it is fp32 that travels. A wire that sums
by itself can send the gradients as they are and add them in fp32: the same numbers from half of the bytes. FSDP2 tells
its comm only the type of the sum. That of the gradients follows from the parameters' and from whether a backward pass
without a reduction has accumulated them in the type of the sum; both are the same on every rank, what a rank's own
gradients look like is not (a module may be unused on some). From 2.15 on FSDP2 leaves gradients in the type in which
autograd makes them, for each parameter its own: there what is reduced in fp32 travels in fp32. Read in 2.13.0, 2.14.1
and 2.15.0.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_symm.compat import ParamGroup
from fsdp_symm.compat_sizes import param_dtype
from fsdp_symm.errors import SymmMemError, problem


def gradient_dtype(native: Any) -> torch.dtype | None:
    """The type that autograd gives to the gradients of a native param group, that of the unsharded parameters.

    ``None`` if it is unknown, or several. Known before the first step too, when FSDP2 has not worked it out yet.
    """
    trainable = [p for p in native.fsdp_params if p.sharded_param.requires_grad]
    if any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in trainable):
        return None  # an extension makes parameters of whatever type it likes
    if hasattr(native, "_fsdp_params_with_wider_grad_dtype"):
        return None  # 2.15: a gradient stays as autograd made it, fp32 for some operators (rms_norm on the CPU)
    kinds = {_unsharded_dtype(p) for p in trainable}
    return kinds.pop() if len(kinds) == 1 else None


def _unsharded_dtype(param: Any) -> torch.dtype:
    if hasattr(param, "orig_dtype"):  # FSDP2's lazy init has worked it out
        return param.param_dtype or param.orig_dtype
    return param_dtype(param)


def narrower(gradients: torch.dtype | None, sum_dtype: torch.dtype) -> torch.dtype | None:
    """The type in which gradients may travel to a wire that adds them up in ``sum_dtype``, if it is a narrower one."""
    may = sum_dtype == torch.float32 and gradients in (torch.bfloat16, torch.float16)
    return gradients if may else None


class GradientTypes:
    """Knows the type in which the gradients of a param group may travel.

    Args:
        group: whose ``post_backward`` is watched, from :meth:`install` on.
    """

    def __init__(self, group: ParamGroup) -> None:
        self._native: Any = group.native
        self._label = group.label
        self._inner: Any = None
        self._accumulated = False
        self.dtype: torch.dtype | None = None  # of the coming reduction; None: unknown, or several types

    def install(self) -> None:
        """FSDP2 looks the method up on the instance at every call."""
        # What a group that was unsharded before has kept for later is not known; the answer is the same on every rank.
        self._accumulated = any(p.all_gather_outputs for p in self._native.fsdp_params)
        self._inner = self._native.post_backward
        self._native.post_backward = self._post_backward

    def uninstall(self) -> None:
        """Undo :meth:`install`; a later one of these goes on without this one, anybody else's wrapper stays."""
        outer = getattr(self._native.__dict__.get("post_backward"), "__self__", None)
        while isinstance(outer, GradientTypes) and outer is not self:
            if outer._inner == self._post_backward:
                outer._inner = self._inner
                return
            outer = getattr(outer._inner, "__self__", None)
        if self._native.__dict__.get("post_backward") != self._post_backward:
            return
        del self._native.post_backward
        if self._native.post_backward != self._inner:  # an earlier wrapper was there
            self._native.post_backward = self._inner

    def _post_backward(self, *unused: Any) -> Any:
        if not self._native.reduce_grads:
            self._accumulated = True  # FSDP2 casts what it keeps for later to the type of the sum
            return self._inner(*unused)
        self.dtype = None if self._accumulated else self._parameters_dtype()
        self._accumulated = False
        return self._inner(*unused)

    def _parameters_dtype(self) -> torch.dtype | None:
        """The type of the unsharded parameters, which autograd gives to their gradients.

        Raises:
            SymmMemError: a gradient has a wider one, and would lose digits on its way.
        """
        kind = gradient_dtype(self._native)
        trainable = [p for p in self._native.fsdp_params if p.sharded_param.requires_grad]
        found = {p._unsharded_param.grad.dtype for p in trainable if _has_gradient(p)}
        if kind is not None and any(one.itemsize > kind.itemsize for one in found):
            raise SymmMemError(
                problem(
                    f"reduce_scatter of {self._label!r}: gradients of a wider type than their parameters",
                    found=found,
                    expected={kind},
                    fix="reduce_scatter=False leaves this group's reductions to FSDP2",
                )
            )
        return kind


def _has_gradient(param: Any) -> bool:
    return hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None
