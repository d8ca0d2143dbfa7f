"""The kernels of expert parallelism, compiled for a GPU that is not there: what the interpreter does not see."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels import compiled

pytest.importorskip("triton")

from fsdp_symm.experts import device_arrange, device_parts, device_routes, device_rows

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WIDE = (".v2.b64", ".v4.b32")  # 16 bytes at once


def _wide(ptx: str) -> bool:
    return all(any(f"{access}.global{form}" in ptx for form in WIDE) for access in ("ld", "st"))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize(("hidden", "divisor"), [(2048, 6), (6, 1), (1, 1)])
def test_gather(monkeypatch: Any, dtype: torch.dtype, hidden: int, divisor: int) -> None:
    rows, index = torch.empty(40, hidden, dtype=dtype), torch.empty(100, dtype=torch.int64)
    out = torch.empty(100, hidden, dtype=dtype)
    (kernel,) = compiled(monkeypatch, device_rows, lambda: device_rows.gather_rows(rows, index, 0, out, divisor))
    assert _wide(kernel.ptx) == (hidden * dtype.itemsize % 16 == 0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("hidden", [2048, 6])
def test_gather_with_weights(monkeypatch: Any, dtype: torch.dtype, hidden: int) -> None:
    tokens, weights = torch.empty(40, hidden, dtype=dtype), torch.empty(40, 6)
    source, out = torch.empty(100, dtype=torch.int64), torch.empty(100, hidden, dtype=dtype)
    (kernel,) = compiled(monkeypatch, device_rows, lambda: device_rows.gather_routes(tokens, weights, source, out))
    assert _wide(kernel.ptx) == (hidden * dtype.itemsize % 16 == 0)


def test_gather_of_rows_off_the_grid(monkeypatch: Any) -> None:
    """Addresses that are no multiple of 16 bytes must not be taken for one."""
    rows, index = torch.empty(40 * 64 + 1).narrow(0, 1, 40 * 64).view(40, 64), torch.empty(100, dtype=torch.int64)
    out = torch.empty(100, 64)
    (kernel,) = compiled(monkeypatch, device_rows, lambda: device_rows.gather_rows(rows, index, -1, out, 1))
    assert not _wide(kernel.ptx)


@pytest.mark.parametrize("units", [(16,), (16, 8), (4, 16), (2, 1)])
def test_parts(monkeypatch: Any, units: tuple[int, ...]) -> None:
    place = torch.empty(1 << 16, dtype=torch.uint8).data_ptr()
    parts = [device_parts.Placing(place, place, place, unit * 301, unit * 701) for unit in units]
    (kernel,) = compiled(monkeypatch, device_parts, lambda: device_parts.copy_parts(parts, -1))
    assert _wide(kernel.ptx) == (16 in units)
    for size, form in ((8, "b64"), (4, "b32"), (2, "b16"), (1, "b8")):
        assert size not in units or f"st.global.{form}" in kernel.ptx
    if units == (16,):
        assert "st.global.b" not in kernel.ptx, "no access is narrower"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("hidden", "terms"), [(2048, 6), (7, 2), (64, 40)])
def test_sum(monkeypatch: Any, dtype: torch.dtype, scaled: bool, hidden: int, terms: int) -> None:
    rows, index = torch.empty(40, hidden, dtype=dtype), torch.empty((30, terms), dtype=torch.int64)
    out, scale = torch.empty(30, hidden, dtype=dtype), torch.empty(40) if scaled else None
    (kernel,) = compiled(monkeypatch, device_rows, lambda: device_rows.sum_rows(rows, index, scale, out))
    assert "fma" not in kernel.ptx, "products are rounded before they are added"
    assert ".ftz" not in kernel.ptx
    assert ("mul.rn.f" in kernel.ptx or "mul.f" in kernel.ptx) == scaled
    assert _wide(kernel.ptx) == (hidden != 7)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dots", [False, True])
def test_weigh(monkeypatch: Any, dtype: torch.dtype, dots: bool) -> None:
    grads, rows = torch.empty(40, 2048, dtype=dtype), torch.empty(40, 2048, dtype=dtype)
    scale, source = torch.empty(40), torch.empty(40, dtype=torch.int64)
    (kernel,) = compiled(monkeypatch, device_rows, lambda: device_rows.weigh_rows(grads, rows, scale, source, dots))
    assert "fma" not in kernel.ptx
    assert _wide(kernel.ptx)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("experts", "ranks", "topk"), [(64, 2, 6), (256, 8, 8), (4, 1, 1)])
def test_route(monkeypatch: Any, dtype: torch.dtype, experts: int, ranks: int, topk: int) -> None:
    ids = torch.empty((topk, 300), dtype=dtype).t()
    for rows_per_rank, by_token in ((100, True), (100, False), (None, False), (None, True), (2**40, False)):
        kernels = compiled(
            monkeypatch,
            device_routes,
            lambda rows=rows_per_rank, by_token=by_token: device_routes.route(
                ids, num_experts=experts, num_ranks=ranks, rows_per_rank=rows, by_token=by_token
            ),
        )
        assert [kernel.name for kernel in kernels] == ["_count_kernel", "_home_kernel"]


def test_invert(monkeypatch: Any) -> None:
    home = torch.empty((300, 2), dtype=torch.int64)
    kernels = compiled(monkeypatch, device_routes, lambda: device_routes.invert(home, 500, 2))
    assert [kernel.name for kernel in kernels] == ["_invert_kernel"]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("local", "topk", "alignment"), [(32, 6, 1), (256, 8, 128), (1, 1, 8), (3, 2, 1)])
def test_arrange(monkeypatch: Any, dtype: torch.dtype, local: int, topk: int, alignment: int) -> None:
    ids, table = torch.empty((900, topk), dtype=dtype), torch.empty((2, 3 + 2 * local), dtype=torch.int64)
    for wanted in (None, table[:, 2 : 2 + local]):
        kernels = compiled(
            monkeypatch,
            device_arrange,
            lambda wanted=wanted: device_arrange.arrange(
                ids, first_expert=local, num_local=local, alignment=alignment, capacity=700, wanted=wanted
            ),
        )
        assert [kernel.name for kernel in kernels] == ["_count_kernel", "_scan_kernel", "_place_kernel"]


def test_nothing_is_launched_for_nothing(monkeypatch: Any) -> None:
    """A grid of zero programs is an error on a GPU; the recorder refuses one."""
    ids = torch.empty((0, 6), dtype=torch.int64)
    none = torch.empty(0, dtype=torch.int64)
    kernels = compiled(
        monkeypatch,
        device_routes,
        lambda: (
            device_routes.route(ids, num_experts=8, num_ranks=2, rows_per_rank=4, by_token=False),
            device_routes.invert(ids, 9, 2),
            device_routes.invert(torch.empty((3, 2), dtype=torch.int64), 0, 2),
        ),
    )
    assert [kernel.name for kernel in kernels] == ["_home_kernel"], "which writes the facts"
    kernels = compiled(
        monkeypatch,
        device_arrange,
        lambda: device_arrange.arrange(ids, first_expert=0, num_local=4, alignment=8, capacity=0, wanted=None),
    )
    assert [kernel.name for kernel in kernels] == ["_scan_kernel", "_place_kernel"], "which write the counts"
    empty, rows = torch.empty(0, 5), torch.empty(3, 5)
    assert not compiled(
        monkeypatch,
        device_rows,
        lambda: (
            device_rows.gather_rows(rows, none, 0, empty, 1),
            device_rows.gather_rows(empty, torch.full((3,), -1), 0, rows, 1),
            device_rows.sum_rows(empty, torch.full((3, 2), -1), None, rows),
            device_rows.sum_rows(rows, none.view(0, 2), None, empty),
            device_rows.weigh_rows(empty, empty, torch.empty(0), none, True),
        ),
    )
    assert not rows.any()
