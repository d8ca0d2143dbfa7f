"""The experts benchmark: what is right, what travels, what the tables say, and a run on CPU ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_symm.bench import expert_cases, expert_tables, expert_ways, experts, schema, tables
from fsdp_symm.bench.expert_cases import TASKS, Layer, Reference, ScaleExperts, Traffic
from fsdp_symm.bench.expert_ways import Implementation, make_foreign, make_ours, run_step
from fsdp_symm.bench.experts import Cases, ExpertsBench, chosen_by_auto
from fsdp_symm.bench.launch import World, run_ranks
from fsdp_symm.errors import SymmMemError

CPU = torch.device("cpu")
LAYER = Layer(8, 3, 40, 16, "uniform")
HAS_TITAN = True
try:
    import torchtitan  # noqa: F401
except ImportError:
    HAS_TITAN = False


# --- cases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", expert_cases.ROUTINGS)
def test_routings(routing: str) -> None:
    layer = Layer(16, 4, 4000, 8, routing)
    ids = layer.ids(0)
    assert ids.shape == (4000, 4)
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert torch.equal(ids, layer.ids(0))
    assert not torch.equal(ids, layer.ids(1))
    load = torch.bincount(ids.flatten(), minlength=16) / 1000  # 1 each if even
    if routing == "uniform":
        assert load.min() > 0.9
        assert load.max() < 1.1
    else:
        assert load[0] > 2
        assert load[:8].sum() > 2.5 * load[8:].sum()


def _dense(layer: Layer, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and gradients by autograd in fp64, token by token."""
    batch, scales = layer.batch(rank, CPU), layer.scales(CPU).double()
    tokens, weights = batch.tokens.double().requires_grad_(), batch.weights.double().requires_grad_()
    rows = []
    for token, ids, factors in zip(tokens, batch.ids.tolist(), weights, strict=True):
        rows.append(torch.stack([f * scales[e] * token for e, f in zip(ids, factors, strict=True)]).sum(0))
    out = torch.stack(rows)
    grads = torch.autograd.grad(out, (tokens, weights), batch.grad.double())
    return out.detach(), *grads


def test_the_reference_is_what_autograd_says_and_finds_what_is_wrong() -> None:
    out, grad_tokens, grad_weights = (t.float() for t in _dense(LAYER, 1))
    reference = Reference(LAYER, 1, 2, CPU)
    assert reference.wrong_step(out.bfloat16(), (grad_tokens.bfloat16(), grad_weights)) is None
    assert reference.wrong_output(out.bfloat16()) is None

    lost = out.clone()  # one route of one token did not come home
    batch = LAYER.batch(1, CPU)
    lost[7] -= batch.weights[7, 1] * LAYER.scales(CPU)[batch.ids[7, 1]].float() * batch.tokens[7].float()
    assert "output: " in (reference.wrong_output(lost) or "")
    swapped = out.clone()
    swapped[[3, 4]] = out[[4, 3]]
    assert "output: " in (reference.wrong_step(swapped, (grad_tokens, grad_weights)) or "")
    # in the two other tokens the terms nearly cancel, and the limit follows their sizes
    assert "gradient of the tokens: 608 of 640" in (reference.wrong_step(out, (grad_tokens * 2, grad_weights)) or "")
    grad_weights[5, 2] = float("nan")
    assert "gradient of the weights: 1 of 120" in (reference.wrong_step(out, (grad_tokens, grad_weights)) or "")


def test_dispatched_rows_are_compared_in_every_bit() -> None:
    reference = Reference(LAYER, 1, 2, CPU)
    batches = [LAYER.batch(rank, CPU) for rank in range(2)]
    zones = [
        torch.cat([b.tokens[t].unsqueeze(0) for b in batches for t in range(40) if e in b.ids[t]]) for e in range(4, 8)
    ]
    counts, rows = torch.tensor([len(z) for z in zones]), torch.cat(zones)
    tail = torch.full((3, 16), float("nan"), dtype=rows.dtype)  # behind the zones anything may lie
    assert reference.wrong_rows(torch.cat([rows, tail]), counts) is None
    assert "1 of" in (reference.wrong_rows(rows.index_fill(0, torch.tensor([2]), 0.0), counts) or "")
    swapped = rows.clone()
    swapped[[0, 1]] = rows[[1, 0]]
    assert "2 of" in (reference.wrong_rows(swapped, counts) or "")
    counts[0] -= 1
    assert "rows of each expert" in (reference.wrong_rows(rows, counts) or "")


def test_experts_scale_by_zone() -> None:
    layer_experts, scales = ScaleExperts(LAYER, 1, 2, CPU), LAYER.scales(CPU)
    rows = torch.ones((9, 16), dtype=torch.bfloat16)
    answers = layer_experts(rows, torch.tensor([2, 0, 3, 1]))
    assert answers[:6, 0].tolist() == [scales[e].item() for e in (4, 4, 6, 6, 6, 7)]
    assert len({abs(s) for s in scales.tolist()}) == 8


def test_layers_are_every_combination() -> None:
    bench = ExpertsBench(2, ((8, 2), (64, 6)), (16, 32), (8,))
    layers = list(bench.layers())
    assert len(layers) == len(set(layers)) == 8
    assert layers[0] == Layer(8, 2, 16, 8, "uniform")
    assert layers[1].routing == "skewed"


# --- what travels ------------------------------------------------------------------------------------------


class _Meter:
    """Counts the bytes that this rank gets from others, where they arrive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from fsdp_symm.wire.host import HostWire

        self.nbytes = 0
        pull, exchange, gather = HostWire.pull, dist.all_to_all_single, dist.all_gather
        functional = torch.ops._c10d_functional.all_to_all_single

        def counted_pull(wire: Any, lease: Any, epoch: int, plan: Any, targets: Any, **more: Any) -> Any:
            self.nbytes += sum(block.packed_nbytes for block in plan.blocks)
            return pull(wire, lease, epoch, plan, targets, **more)

        def counted_exchange(output: Any, rows: Any, received: Any, sent: Any, group: Any) -> Any:
            here = group.rank()
            self.nbytes += sum(n for r, n in enumerate(received) if r != here) * output.shape[1] * output.element_size()
            return exchange(output, rows, received, sent, group=group)

        def counted_gather(parts: Any, mine: Any, group: Any) -> Any:
            self.nbytes += mine.nbytes * (group.size() - 1)
            return gather(parts, mine, group=group)

        def counted_functional(rows: Any, received: Any, sent: Any, name: str) -> Any:
            width = rows[0].nbytes if rows.shape[0] else rows[:0].new_empty(rows.shape[1:]).nbytes
            here = dist.get_rank()
            self.nbytes += sum(n for r, n in enumerate(received) if r != here) * width
            return functional(rows, received, sent, name)

        monkeypatch.setattr(HostWire, "pull", counted_pull)
        monkeypatch.setattr(dist, "all_to_all_single", counted_exchange)
        monkeypatch.setattr(dist, "all_gather", counted_gather)
        monkeypatch.setattr(torch.ops._c10d_functional, "all_to_all_single", counted_functional)


def _moved(world: World, layer: Layer) -> dict[tuple[str, str], tuple[int, int]]:
    """(variant, task) -> bytes by the formula, and as they arrived on the rank with the most."""
    cases, found = Cases(world, layer), {}
    made = make_ours(world, layer) + make_foreign(world, layer)
    with pytest.MonkeyPatch.context() as patch:
        meter = _Meter(patch)
        for one in made:
            for task in TASKS:
                calls = cases.calls(one, task)
                meter.nbytes = 0
                calls.run()
                arrived = [int(n) for (n,) in world.all_values([float(meter.nbytes)])]
                assert calls.wrong() is None
                found[one.name, task] = one.moved_bytes(task), max(arrived)
    for one in made:
        one.close()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_bytes_of_the_lines_are_the_bytes_that_arrive(ranks: int) -> None:
    found: Any = run_ranks(_moved, Layer(8, 3, 40, 16, "skewed"), ranks=ranks, device_type="cpu", what="test")
    variants = {variant for variant, _ in found}
    assert variants == {*expert_ways.OURS, *([expert_ways.TITAN] if HAS_TITAN else [])}
    for key, (formula, arrived) in found.items():
        assert formula == arrived > 0, key
    assert found["copy_engine_exact", "combine"] < found["copy_engine", "combine"]


def test_traffic() -> None:
    layer = Layer(8, 3, 40, 16, "uniform")
    traffic = Traffic.of(layer, 2)
    ids = layer.ids(1)
    assert traffic.rows[1, 0] == sum(any(e < 4 for e in row) for row in ids.tolist())
    assert traffic.routes[1, 0] == int((ids < 4).sum())
    assert int(traffic.routes.sum()) == 2 * 40 * 3
    got, back = traffic.peers(torch.tensor([[1, 2], [30, 4]]))
    assert (got.tolist(), back.tolist()) == ([30, 2], [2, 30])
    assert Traffic.padded(layer, 2).rows.tolist() == [[40, 40], [40, 40]]


# --- runs --------------------------------------------------------------------------------------------------


def test_a_run_on_cpu_ranks(tmp_path: Path) -> None:
    bench = ExpertsBench(2, ((8, 3),), (40,), (16,), "the command", tmp_path / "traces", 3, "cpu")
    lines = experts.measure(bench)
    variants = [*expert_ways.OURS, *([expert_ways.TITAN] if HAS_TITAN else [])]
    assert [(x["routing"], x["name"], x["variant"]) for x in lines] == [
        (routing, f"experts_{task}", variant)
        for routing in expert_cases.ROUTINGS
        for task in TASKS
        for variant in variants
    ]
    for x in lines:
        assert 0 < x["min_us"] <= x["median_us"] <= x["max_us"]
        assert (x["n"], x["bytes"], x["experts"], x["topk"]) == (3, 40 * 16 * 2, 8, 3)
        assert x["vs_copy_engine_min"] <= x["vs_copy_engine"] <= x["vs_copy_engine_max"]
        assert (x["symmetric_bytes"] > 0) == x["variant"].startswith("copy_engine")
        assert x["auto"] == (x["variant"] == "copy_engine")
        assert (x["peak_bytes"], x["host_reads"], x["sm_us"], x["under_gemm_us"]) == ("", "", "", "")
        stem = f"experts_w2_8x3_t40_h16_{x['routing']}_{x['name'].removeprefix('experts_')}"
        assert (tmp_path / f"traces/{stem}.json.gz").is_file()
    path = tmp_path / "e.csv"
    schema.write_lines(path, lines)
    assert len(schema.read(path)) == len(lines)
    assert tables.TABLES["experts_cpu_w2"][1](path) == expert_tables.experts_table(lines)
    assert tables.TABLES["expert_costs_w2"][1](path) == expert_tables.experts_costs_table(lines)


class _Broken(Implementation):
    """Somebody else's, wrapped: fails to be made, raises, or gives wrong answers on one rank."""

    name = "broken"
    waits = False
    closed: list[str] = []  # noqa: RUF012 - of this process

    def __init__(self, how: str, inner: Implementation, rank: int) -> None:
        self._how, self._inner, self._rank = how, inner, rank

    def dispatch(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        if self._how == "raises":
            raise RuntimeError("no [kernel] image")
        return self._inner.dispatch(tokens, ids, weights)

    def combine(self, answers: torch.Tensor, state: Any) -> torch.Tensor:
        out = self._inner.combine(answers, state)
        return out * 2 if self._how == "wrong on rank 1" and self._rank == 1 else out

    def moved_bytes(self, task: str) -> int:
        return 1

    def close(self) -> None:
        self.closed.append(self._how)
        self._inner.close()


def _without_broken(world: World, _: None) -> list[Any]:
    cases, found = Cases(world, LAYER), []
    for how in ("raises", "wrong on rank 1", "right"):
        inner = make_ours(world, LAYER)
        one = _Broken(how, inner.pop(), world.rank)
        right = experts.right_ones(world, LAYER, [one], cases)
        found.append((how, len(right), list(_Broken.closed)))
        for other in [*inner, *right]:
            other.close()

    class Unmade(expert_ways.TitanAllToAll):
        name = "unmade"

        def __init__(self, world: World, layer: Layer) -> None:
            if world.rank == 1:
                raise ImportError("torchtitan is not here")
            self._dispatcher = None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_ways, "TitanAllToAll", Unmade)
        found.append(("unmade", len(make_foreign(world, LAYER)), []))
    return found


def test_a_foreign_implementation_that_fails_is_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    found = run_ranks(_without_broken, None, ranks=2, device_type="cpu", what="test")
    assert found == [
        ("raises", 0, ["raises"]),
        ("wrong on rank 1", 0, ["raises", "wrong on rank 1"]),
        ("right", 1, ["raises", "wrong on rank 1"]),
        ("unmade", 0, []),
    ]
    said = capfd.readouterr().err
    assert "without broken: no [kernel] image" in said
    assert "without broken: experts, 8 experts, top 3" in said
    assert "without unmade: it failed on another rank" in said


def _wrong_ours(world: World, _: None) -> str:
    """A wrong result of the package's own is an error, before anything is timed."""
    made = make_ours(world, LAYER)
    cases = Cases(world, LAYER)
    broken = [_Broken("wrong on rank 1", one, world.rank) for one in made]
    broken[0].name = expert_ways.COPY_ENGINE
    bench = ExpertsBench(2, ((8, 3),), (40,), (16,), device_type="cpu")
    with pytest.raises(SymmMemError) as error:
        experts._measure_task(world, None, bench, LAYER, "combine", broken, cases)  # type: ignore[arg-type]
    for one in made:
        one.close()
    return str(error.value)


def test_a_wrong_result_of_ours_is_an_error() -> None:
    text = run_ranks(_wrong_ours, None, ranks=2, device_type="cpu", what="test")
    assert "a wrong result on ranks [1]; nothing was timed" in text


def _calls_that_do_nothing(world: World, _: None) -> list[str | None]:
    one, *rest = make_ours(world, LAYER)
    cases, found = Cases(world, LAYER), []
    for task in TASKS:
        way = cases.calls(one, task).way()
        way.run()
        found.append(way.wrong())
        way.poison()
        found.append(way.wrong())
        found.append(str(way.waits))
    for other in [one, *rest]:
        other.close()
    return found


def test_a_call_that_does_nothing_is_found_out() -> None:
    found: Any = run_ranks(_calls_that_do_nothing, None, ranks=2, device_type="cpu", what="test")
    assert found[0::3] == [None] * 3
    assert found[1::3] == ["no result"] * 3
    assert found[2::3] == ["True", "False", "True"]  # a combine reads nothing on the host


def _auto(world: World, _: None) -> list[str]:
    return [chosen_by_auto(world, Layer(8, topk, 8, 16, "uniform")) for topk in (1, 2)]


def test_what_auto_takes_is_asked() -> None:
    assert run_ranks(_auto, None, ranks=4, device_type="cpu", what="test") == ["all_to_all", "copy_engine"]


def _static(world: World, _: None) -> list[int]:
    """Rows that each implementation hands its experts."""
    cases, found = Cases(world, LAYER), []
    batch = LAYER.batch(world.rank, world.device)
    made = make_ours(world, LAYER)
    for one in made:
        rows: list[int] = []

        def counting(x: torch.Tensor, counts: torch.Tensor, rows: list[int] = rows) -> torch.Tensor:
            rows.append(x.shape[0])
            return ScaleExperts(LAYER, world.rank, world.size, world.device)(x, counts)

        run_step(one, counting, batch)
        found += rows
    for one in made:
        one.close()
    del cases
    return found


def test_only_static_rows_are_padded() -> None:
    found = run_ranks(_static, None, ranks=2, device_type="cpu", what="test")
    exact = int(Traffic.of(LAYER, 2).routes[:, 0].sum())
    assert found == [exact, 2 * 40 * 3, exact, exact]
