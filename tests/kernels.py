"""Kernels on machines without a GPU: compiled for one without being launched, or run by triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class Compiled(NamedTuple):
    """A kernel as a launch would have had it."""

    name: str
    ptx: str


class _Recorder:
    """Stands for a kernel: a launch compiles it for what it was given, as triton would on a GPU."""

    def __init__(self, kernel: Any, found: list[Compiled]) -> None:
        self._kernel = kernel
        self._found = found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(0 < size < limit for size, limit in zip(grid, (2**31, 2**16, 2**16), strict=False)), grid
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        from triton import compile as compile_kernel
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        signature, constants, attributes = {}, {}, {}
        names = self._kernel.arg_names
        given = dict(zip(names, args, strict=False)) | kwargs
        assert set(given) == set(names)
        for at, parameter in enumerate(self._kernel.params):
            value = given[parameter.name]
            signature[parameter.name] = kind = _kind(parameter, value)
            if kind == "constexpr":
                constants[parameter.name] = value
            elif not parameter.do_not_specialize and _number(value) % 16 == 0:
                attributes[(at,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=self._kernel, signature=signature, constexprs=constants, attrs=attributes)
        result = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)
        self._found.append(Compiled(self._kernel.__name__, result.asm["ptx"]))


def _number(value: Any) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def _kind(parameter: Any, value: Any) -> str:
    if parameter.is_constexpr:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if value == 1 and not parameter.do_not_specialize:
        return "constexpr"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compiled(monkeypatch: Any, module: ModuleType, call: Callable[[], object]) -> list[Compiled]:
    """The kernels of a module that ``call`` launches, compiled for an H100; none runs, so results are undefined."""
    found: list[Compiled] = []
    with monkeypatch.context() as patch:
        for name, value in vars(module).items():
            if name.endswith("_kernel"):
                patch.setattr(module, name, _Recorder(value, found))
        call()
    return found


def interpret(code: str, *args: object) -> None:
    """Run a program with triton's interpreter; it has to end by printing "done"."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr
