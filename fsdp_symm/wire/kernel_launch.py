"""Launches of triton's kernels, without what triton does again for every call.

``kernel[grid](...)`` binds, classifies and looks up every argument in Python, 25 to 30 us a launch, to find the
compiled kernel that it found the last time. Here the first call of a kind goes that way, and later ones go to the
compiled kernel that it has returned. Kinds are at least as fine as what triton compiles apart.

Read in triton 3.5.0, 3.6.0, 3.8.0 and 3.9.0: ``JITFunction.run`` returns the ``CompiledKernel`` that it has launched
(the interpreter's returns ``None``), whose ``__getitem__`` takes a grid of three and all arguments in the order of the
signature, constexprs too, and calls the launch hooks that profilers set; a pointer may be an integer. Arguments are
told apart by type; tensors by their address modulo 16; integers by whether they are 1, multiples of 16, and fit in
int32, int64 or uint64. What goes unnoticed after the first call of a kind: ``pre_run_hooks``, a changed global of a
kernel, and changed ``knobs`` of the compiler.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fsdp_symm.errors import problem

_KINDS = 2048  # kept; more only come up where sizes that are compiled in change all the time
_INT32, _INT64 = 2**31, 2**63


class _Known(NamedTuple):
    kernel: Any  # kept alive, so that its id stays its own
    compiled: Any
    constants: int  # so many keywords are arguments of the kernel; the others are launch options


_known: dict[tuple[object, ...], _Known] = {}


def launch(kernel: Any, grid: tuple[int, ...], device: int, *arguments: torch.Tensor | int, **constants: Any) -> None:
    """``kernel[grid](*arguments, **constants)`` on the current stream of a device.

    Args:
        kernel: of ``triton.jit``.
        grid: programs, in one to three dimensions.
        device: where the tensors are, as ``Tensor.get_device()`` says; -1: not on a GPU.
        arguments: tensors and integers, in the order of the signature.
        constants: constexprs in the order of the signature, which they end; then launch options.

    Raises:
        TypeError: constexprs that are not in that order.
    """
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch(kernel, grid, device, arguments, constants)
    else:
        _launch(kernel, grid, device, arguments, constants)


def _launch(
    kernel: Any,
    grid: tuple[int, ...],
    device: int,
    arguments: tuple[torch.Tensor | int, ...],
    constants: dict[str, Any],
) -> None:
    words: list[int] = []
    kind: list[object] = [id(kernel), device, *constants, *constants.values()]
    for argument in arguments:
        if type(argument) is int:
            word = argument
            width = 0 if -_INT32 <= word < _INT32 else 1 if word < _INT64 else 2
            kind.append(width if word & 15 == 0 else 3 + width if word != 1 else 6)
        else:
            word = argument.data_ptr()  # type: ignore[union-attr]  # a tensor: there are no other integers
            kind += (argument.dtype, word & 15 == 0)  # type: ignore[union-attr]
        words.append(word)
    key = tuple(kind)
    known = _known.get(key)
    if known is None:
        compiled = kernel[grid](*arguments, **constants)
        if hasattr(type(compiled), "__getitem__"):  # not the interpreter's None, not what compiles asynchronously
            _remember(key, kernel, compiled, len(arguments), constants)
        return
    known.compiled[(*grid, 1, 1)[:3]](*words, *list(constants.values())[: known.constants])


def _remember(
    key: tuple[object, ...], kernel: Any, compiled: Any, num_arguments: int, constants: dict[str, Any]
) -> None:
    names = kernel.arg_names[num_arguments:]
    if list(constants)[: len(names)] != names:
        raise TypeError(
            problem(
                f"{kernel.__name__}: constexprs are not in the signature's order",
                found=list(constants),
                expected=names,
                fix="pass constexprs in that order, launch options behind them",
            )
        )
    if len(_known) >= _KINDS:
        _known.clear()
    _known[key] = _Known(kernel, compiled, len(names))
