"""Private torch behind reduce-scatters on a narrow wire; the companion of :mod:`fsdp_symm.compat`, under the same rule.

With ``reduce_dtype=torch.float32`` FSDP2 casts bf16 gradients to fp32, and it is fp32 that travels. A wire that sums
by itself can send the gradients as they are and add them in fp32: the same numbers from half of the bytes. FSDP2 tells
its comm only the type of the sum, so the type of the gradients is noted when ``post_backward`` begins, the last moment
at which the parameters still hold them. Read in 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_symm.compat import ParamGroup


class GradientTypes:
    """Notes the type of the gradients that a param group is about to reduce.

    Args:
        group: whose ``post_backward`` is watched, from :meth:`install` on.
    """

    def __init__(self, group: ParamGroup) -> None:
        self._native: Any = group.native
        self._inner: Any = None
        self.dtype: torch.dtype | None = None  # of all of them; None: none, or several types

    def install(self) -> None:
        """FSDP2 looks the method up on the instance at every call."""
        self._inner = self._native.post_backward
        self._native.post_backward = self._post_backward

    def uninstall(self) -> None:
        """Undo :meth:`install`, unless somebody has wrapped the method again since."""
        if self._native.__dict__.get("post_backward") != self._post_backward:
            return
        del self._native.post_backward
        if self._native.post_backward != self._inner:  # an earlier wrapper was there
            self._native.post_backward = self._inner

    def _post_backward(self, *unused: Any) -> Any:
        kinds = {kind for param in self._native.fsdp_params if (kind := _gradient_dtype(param)) is not None}
        self.dtype = kinds.pop() if len(kinds) == 1 else None
        return self._inner(*unused)


def _gradient_dtype(param: Any) -> torch.dtype | None:
    """The type that ``FSDPParamGroup.post_backward`` will hand on for this parameter.

    Gradients that were accumulated without a reduction are in the type of the sum already. Those of unused parameters
    are made as zeros of the parameter's own type, so they change nothing.
    """
    if not hasattr(param, "_unsharded_param"):
        return None
    if param.unsharded_accumulated_grad is not None:
        return param.unsharded_accumulated_grad.dtype
    grad = param._unsharded_param.grad
    return None if grad is None else grad.dtype
