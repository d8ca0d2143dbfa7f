"""The launcher: what goes to triton, what to a compiled kernel, and which calls are taken for the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_symm.wire import kernel_launch
from fsdp_symm.wire.kernel_launch import launch


class _Compiled:
    """Stands for triton's ``CompiledKernel``."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.calls.append((grid, *arguments))


class _Kernel:
    """Stands for ``triton.jit``'s. Compiles whatever comes; the interpreter's answers with ``None``."""

    def __init__(self, compile_: Callable[[], Any] = _Compiled) -> None:
        self.__name__ = "_stand_in_kernel"
        self.arg_names = ["values", "numel", "BLOCK", "WIDE"]
        self.calls: list[Any] = []
        self.compiled: list[Any] = []
        self._compile = compile_

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **constants: Any) -> Any:
            self.calls.append((grid, arguments, constants))
            self.compiled.append(self._compile())
            return self.compiled[-1]

        return run


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    kernel_launch._known.clear()
    yield
    kernel_launch._known.clear()


def _tensor(dtype: torch.dtype = torch.float32, *, first: int = 0) -> torch.Tensor:
    """One that starts on 16 bytes, or ``first`` elements behind."""
    return torch.empty(64, dtype=dtype)[first:]


def test_a_call_that_comes_again_goes_to_the_compiled_kernel() -> None:
    kernel, values, others = _Kernel(), _tensor(), _tensor()
    launch(kernel, (7,), -1, values, 33, BLOCK=128, WIDE=True, num_warps=4)
    assert kernel.calls == [((7,), (values, 33), {"BLOCK": 128, "WIDE": True, "num_warps": 4})]
    assert kernel.compiled[0].calls == [], "the first call was triton's own"
    launch(kernel, (9, 2), -1, others, 35, BLOCK=128, WIDE=True, num_warps=4)
    launch(kernel, (1, 2, 3), -1, values, 33, BLOCK=128, WIDE=True, num_warps=4)
    assert len(kernel.calls) == 1
    assert kernel.compiled[0].calls == [
        ((9, 2, 1), others.data_ptr(), 35, 128, True),
        ((1, 2, 3), values.data_ptr(), 33, 128, True),
    ], "all arguments in the signature's order, no launch options"


def test_what_cannot_be_launched_by_its_grid_stays_with_triton() -> None:
    """The interpreter's answer, and the future of a kernel that is compiled meanwhile."""
    for answer in (None, SimpleNamespace(launch=1)):
        kernel = _Kernel(lambda answer=answer: answer)  # type: ignore[misc]
        for _ in range(3):
            launch(kernel, (1,), -1, _tensor(), 33, BLOCK=128, WIDE=True)
        assert len(kernel.calls) == 3


OTHERS: dict[str, dict[str, Any]] = {
    "type": {"values": torch.float16},
    "address": {"first": 1},
    "one": {"numel": 1},
    "multiple of 16": {"numel": 32},
    "none": {"numel": 0},
    "int64": {"numel": 2**31 + 1},
    "smallest int32": {"numel": -(2**31)},
    "below int32": {"numel": -(2**31) - 16},
    "uint64": {"numel": 2**63 + 1},
    "constexpr": {"BLOCK": 256},
    "flag": {"WIDE": False},
    "option": {"num_warps": 8},
    "another option": {"num_stages": 4},
}


def _call(
    kernel: _Kernel, *, values: torch.dtype = torch.float32, first: int = 0, numel: int = 33, **more: Any
) -> None:
    constants = {"BLOCK": 128, "WIDE": True, "num_warps": 4, **more}
    launch(kernel, (1,), -1, _tensor(values, first=first), numel, **constants)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_what_triton_compiles_apart_is_kept_apart(other: dict[str, Any]) -> None:
    kernel = _Kernel()
    for change in ({}, other, {}, other):
        _call(kernel, **change)
    assert len(kernel.calls) == 2
    assert [len(compiled.calls) for compiled in kernel.compiled] == [1, 1]


def test_integers_of_different_width_are_kept_apart() -> None:
    kernel = _Kernel()
    for numel in (3, 2**31 - 1, -(2**31) + 1, 2**31 + 1, 2**62 + 1, -(2**31) - 1, 2**63 + 1, 2**64 - 1):
        _call(kernel, numel=numel)
    assert [call[1][1] for call in kernel.calls] == [3, 2**31 + 1, 2**63 + 1]


def test_kernels_and_devices_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    class _Entered:
        def __init__(self, device: int) -> None:
            entered.append(device)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", _Entered)
    first, second = _Kernel(), _Kernel()
    for _ in range(2):
        for kernel, device in ((first, 0), (first, 1), (second, 0)):
            launch(kernel, (1,), device, _tensor(), 33, BLOCK=128, WIDE=True)
    assert (len(first.calls), len(second.calls)) == (2, 1)
    assert entered == [1, 1], "only another device than the current one is entered"


def test_without_a_compiled_kernel_every_call_is_triton_s() -> None:
    kernel = _Kernel(lambda: None)
    for _ in range(3):
        _call(kernel)
    assert len(kernel.calls) == 3
    assert not kernel_launch._known


def test_no_more_than_so_many_kinds_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_launch, "_KINDS", 3)
    kernel = _Kernel()
    for block in (1, 2, 4, 8, 8):
        _call(kernel, BLOCK=block)
        assert len(kernel_launch._known) <= 3
    assert len(kernel.calls) == 4
    assert len(kernel.compiled[-1].calls) == 1, "the newest is kept"


def test_constexprs_out_of_order_are_refused() -> None:
    with pytest.raises(TypeError, match="_stand_in_kernel: constexprs are not in the signature's order") as error:
        launch(_Kernel(), (1,), -1, _tensor(), 33, WIDE=True, BLOCK=128)
    assert "found: ['WIDE', 'BLOCK']\n  expected: ['BLOCK', 'WIDE']\n  fix: pass constexprs" in str(error.value)


def test_the_kinds_are_those_of_the_installed_triton() -> None:
    """Whatever triton's own classification tells apart, the key does."""
    pytest.importorskip("triton")
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    numbers = [
        0,
        1,
        2,
        15,
        16,
        17,
        -1,
        -16,
        *(s * 2**n + d for n in (31, 32, 62, 63) for d in (-1, 0, 1) for s in (1, -1)),
    ]
    kernel, seen = _Kernel(), {}
    for number in (n for n in numbers if -(2**63) <= n < 2**64):
        before = len(kernel.calls)
        _call(kernel, numel=number)
        if len(kernel.calls) == before:
            continue
        seen[number] = native_specialize_impl(CUDABackend, number, False, True, True)
    for number in (n for n in numbers if -(2**63) <= n < 2**64):
        calls = [len(c.calls) for c in kernel.compiled]
        _call(kernel, numel=number)
        found = [i for i, (c, n) in enumerate(zip(kernel.compiled, calls, strict=True)) if len(c.calls) > n]
        representative = kernel.calls[found[0]][1][1]
        assert native_specialize_impl(CUDABackend, number, False, True, True) == seen[representative], number


def test_a_compiled_kernel_takes_a_grid_of_three_and_everything_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed triton's own class, its driver aside."""
    pytest.importorskip("triton")
    from triton import knobs
    from triton.compiler import compiler

    given: list[tuple[Any, ...]] = []

    class _Own(compiler.CompiledKernel):
        def __init__(self) -> None:
            self.name, self.src, self.module = "a kernel", None, None
            self.function, self.packed_metadata = "a function", "its metadata"
            self._run = lambda *arguments: given.append(arguments)

        def _init_handles(self) -> None: ...

    active = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: 100 + device)
    monkeypatch.setattr(compiler, "driver", SimpleNamespace(active=active))
    kernel, values = _Kernel(_Own), _tensor()
    for _ in range(2):
        launch(kernel, (7, 2), -1, values, 33, BLOCK=128, WIDE=True, num_warps=4)
    ((*where, _, enter, leave, pointer, numel, block, wide),) = given
    assert where == [7, 2, 1, 103, "a function", "its metadata"]
    assert (enter, leave) == (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    assert (pointer, numel, block, wide) == (values.data_ptr(), 33, 128, True)
