"""The step benchmark: its arithmetic, what it reads from traces, and a run over gloo and shared memory."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest

from fsdp_symm import compat, compat_unshard
from fsdp_symm.bench import fsdp_step, schema, step_host, tables, way_tables
from fsdp_symm.bench.fsdp_step import Plain, StepBench, groups_of, taxes, wrong_losses
from fsdp_symm.bench.launch import World, run_ranks
from fsdp_symm.bench.step_model import build
from fsdp_symm.bench.step_trace import read_steps

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests/trace/fixtures"
PLAIN, SYMM, DIRECT = (
    FIXTURES / f"h200_fsdp_{name}.json.gz" for name in ("plain_w2_fp32", "symm_w2_fp32", "direct_w2")
)


def test_taxes_are_taken_round_by_round() -> None:
    samples = {"native": [110.0, 230.0, 121.0], "direct": [106.0, 215.0, 112.0], "floor": [100.0, 200.0, 100.0]}
    found = taxes(samples)
    assert found["native"] == {"tax_us": 21.0, "tax_min_us": 10.0, "tax_max_us": 30.0, "tax_vs_native": 1.0}
    assert found["direct"] == {"tax_us": 12.0, "tax_min_us": 6.0, "tax_max_us": 15.0, "tax_vs_native": 0.571}
    assert found["floor"]["tax_us"] == 0.0
    del samples["native"]
    assert taxes(samples)["direct"]["tax_vs_native"] == ""


def test_losses_are_held_to_what_plain_repeats() -> None:
    plain = [1.0, 0.5]
    losses = {"plain": plain, "native": [1.0, 0.5 + 1e-12], "direct": [1.0, 0.5 + 1e-12], "floor": [9.0, 9.0]}
    assert wrong_losses(losses, plain, every_digit=False) is None
    text = wrong_losses(losses, plain, every_digit=True) or ""  # torch's own switch is held to less
    assert "direct, step 1: loss 0.500000000001 against 0.5, expected the same every digit" in text
    losses["native"] = [1.001, 0.5]
    text = wrong_losses(losses, plain, every_digit=False) or ""
    assert "native, step 0: loss 1.001 against 1.0, expected the same within 0.0001" in text
    losses["native"] = [float("nan"), 0.5]
    assert "native, step 0" in (wrong_losses(losses, plain, every_digit=False) or "")


def test_the_rule_of_losses() -> None:
    same = Plain([1.0, 0.5], [1.0, 0.5], True)
    assert same.rule(2) == (True, "every digit")
    assert same.rule(4) == (False, "0.0001: a sum over 4 ranks has no fixed order")
    other = Plain([1.0, 0.5], [1.0, 0.25], False)
    assert other.rule(2) == (False, "0.0001: plain FSDP2 does not repeat its own (1.0; 0.25 again)")


ALL = ("plain", "native", "staged", "direct", "direct+pulls", "floor")


@pytest.mark.parametrize("alive", [1, 3, 4, 5, 6, 9])
@pytest.mark.parametrize("variants", [ALL, tuple(v for v in ALL if v != "native")])
def test_groups_hold_the_floor_and_what_is_compared_with(alive: int, variants: tuple[str, ...]) -> None:
    groups = groups_of(variants, alive)
    assert groups[0][0] == "plain"
    for group in groups:
        assert len(group) <= max(alive, 3)
        assert {v for v in ("native", "floor") if v in variants} <= set(group)
        assert list(group) == [v for v in variants if v in group]
    others = [v for group in groups for v in group if v not in ("native", "floor")]
    assert others == [v for v in variants if v not in ("native", "floor")]
    if alive >= 6:
        assert groups == [variants]


def test_figures_of_a_trace() -> None:
    direct, symm, plain = (read_steps(path, 1).figures for path in (DIRECT, SYMM, PLAIN))
    assert (direct["gathers"], direct["gather_kernels"], direct["copy_outs"], direct["copy_out_us"]) == (8, 0, 0, 0.0)
    assert (symm["copy_engine_gathers"], symm["gather_kernels"], symm["copy_outs"]) == (8, 0, 8)
    assert (plain["copy_engine_gathers"], plain["gather_kernels"], plain["copy_outs"]) == (0, 8, 8)
    assert symm["copy_out_us"] > 1000
    for figures in (direct, symm, plain):
        assert (figures["reduces"], figures["reduce_kernels"], figures["local_sums"]) == (4, 4, 0)
        assert figures["gemm_us"] > figures["all_gather_us"] / 10


def test_figures_are_a_step_s() -> None:
    one, two = read_steps(SYMM, 1).figures, read_steps(SYMM, 2).figures
    assert two["all_gather_us"] == pytest.approx(one["all_gather_us"] / 2, abs=0.1)
    assert two["gathers"] == 4
    assert read_steps(SYMM, 3).figures["gathers"] == 2.67


def test_products_are_compared_with_the_floor_s() -> None:
    trace = read_steps(PLAIN, 1)
    twice = {key: us / 2 for key, us in trace.medians.items()}
    floor = read_steps(PLAIN, 1)
    floor.medians.update(twice)
    found = trace.against(floor)
    assert found["gemm_alone_us"] == pytest.approx(trace.against(trace)["gemm_alone_us"] / 2, abs=0.1)
    assert found["gemm_overlapped_us"] == trace.against(trace)["gemm_overlapped_us"]
    assert found["gemms_beside"] == sum(map(len, trace.products.values())) > 0
    floor.medians.clear()
    assert trace.against(floor) == {
        "gemm_overlapped_us": 0.0, "gemm_alone_us": 0.0, "gemm_slowdown_pct": "", "gemms_beside": 0
    }  # fmt: skip


def test_a_run_without_a_gpu(tmp_path: Path) -> None:
    bench = StepBench(2, ((128, 2),), 64, 2, tmp_path / "traces", 2, 3, "cpu")
    lines = fsdp_step.measure(bench, "the command")
    first, second = ["plain", "staged", "floor"], ["direct", "direct+pulls", "floor"]
    assert [(x["variant"], x["group"]) for x in lines] == [(v, 1) for v in first] + [(v, 2) for v in second]
    for x in lines:
        assert (tmp_path / f"traces/fsdp_step_{x['variant']}_w2_d128.json.gz").is_file()
        assert x["profiled_steps"] == 2
        floor = x["variant"] == "floor"
        assert (x["gathers"], x["reduces"]) == ((0, 0) if floor else (4, 2))
        assert (x["losses"] == lines[0]["losses"]) == (not floor)
        assert x["losses_within"] == "every digit"
        assert all(x[f"host_{part}_us"] > 0 for part in ("unshard", "wait", "reduce"))
        assert (x["symmetric_bytes"] > 0) == (x["variant"] in fsdp_step.OURS)
        assert (x["tax_us"] == x["tax_max_us"] == 0.0) == floor
    path = tmp_path / "step.csv"
    schema.write_lines(path, lines)
    make = tables.TABLES["fsdp_step_w2"][1]
    text = make(path)
    assert text == way_tables.step_table(lines)
    assert "| d128_l2, group 2 | direct+pulls |" in text
    assert "never compare two groups" in text
    assert "all variants the same in every digit. Ours were held to every digit." in text
    one_group = [dict(x, group=1) for x in lines]
    assert "| d128_l2 | direct+pulls |" in way_tables.step_table(one_group)


def _host_calls(world: World, variants: list[str]) -> list[tuple[int, int, int]]:
    """How many calls are timed in two steps of each variant; afterwards FSDP2's functions are its own again."""
    found = []
    for variant in variants:
        program = build(variant, 128, 3, 64, world.device)
        program.run(1)
        natives = [group.native for group in compat.param_groups(program.model)]
        before = compat_unshard._groups.foreach_reduce
        with step_host.host_times(program.model) as times:
            program.run(2)
        assert compat_unshard._groups.foreach_reduce is before
        assert not any({"unshard", "wait_for_unshard"} & set(vars(native)) for native in natives)
        counts = len(times.unshard), len(times.wait), len(times.reduce)
        program.run(1)
        assert counts == (len(times.unshard), len(times.wait), len(times.reduce))
        found.append(counts)
        if program.handle is not None:
            program.handle.close()
    return found


def test_host_times_are_of_the_same_calls_in_every_variant() -> None:
    variants = ["plain", "staged", "direct", "direct+pulls", "floor"]
    counts = run_ranks(_host_calls, variants, ranks=2, device_type="cpu", what="test")
    # three blocks, forward and backward, two steps
    assert counts == [(12, 12, 6)] * len(variants)


def test_without_a_sample_there_is_no_host_time() -> None:
    assert step_host.HostTimes([3.0, 1.0, 2.0], [], [5.04]).columns() == {
        "host_unshard_us": 2.0, "host_wait_us": "", "host_reduce_us": 5.0
    }  # fmt: skip


def _released(world: World, variants: list[str]) -> list[bool]:
    """Whether programs are gone once they are released."""
    bench = StepBench(2, ((128, 1),), 64, 1, device_type="cpu")
    programs, _ = fsdp_step._start(world, bench, 128, 1, variants)
    alive = [weakref.ref(parameter) for p in programs.values() for parameter in p.model.parameters()]
    assert all(ref() is not None for ref in alive)
    fsdp_step._release(world, programs)
    return [ref() is None for ref in alive]


def test_a_group_is_gone_before_the_next_one_comes() -> None:
    gone = run_ranks(_released, ["plain", "staged", "direct", "floor"], ranks=2, device_type="cpu", what="test")
    assert len(gone) == 4 * 7
    assert all(gone)


def test_the_table_says_whose_losses_differ(tmp_path: Path) -> None:
    columns = ("all_gather_us", "gather_kernels", "reduce_scatter_us", "reduce_kernels", "local_sums", "copy_outs")
    columns += ("copy_out_us", "gemm_overlapped_us", "gemm_alone_us", "sm_us", "host_unshard_us", "host_wait_us")
    columns += ("host_reduce_us", "peak_bytes", "symmetric_bytes", "median_us", "min_us", "max_us", "ranks", "group")
    line = dict.fromkeys(columns, 1000) | {"name": "fsdp_step_d8_l1", "hardware": "h", "versions": "v", "command": "c"}
    line |= {"tax_us": 6000.0, "tax_min_us": -500.0, "tax_max_us": 7000.0, "tax_vs_native": 0.5714}
    line |= {"losses_within": "0.0001: plain FSDP2 does not repeat its own (1.0; 0.6 again)"}
    losses = {"plain": "1.0; 0.5", "direct": "1.0; 0.51", "floor": "3.0; 3.0"}
    text = way_tables.step_table([line | {"variant": v, "losses": some} for v, some in losses.items()])
    assert "| d8_l1 | direct | 1.0 (1.0-1.0) | 6.0 (-0.5 to 7.0) | 0.57 |" in text
    assert "| d8_l1 | floor | 1.0 (1.0-1.0) | - | - |" in text
    assert "| 0 + 0 | - |" in text, "a file that is older than a column"
    measured = line | {"variant": "plain", "losses": "1.0", "peak_bytes": 5 << 20, "symmetric_bytes": 2 << 20}
    assert "| 5 + 2 | 7 + 2 |" in way_tables.step_table([measured | {"reserved_bytes": 7 << 20}])
    assert (
        "Losses of d8_l1: plain 1.0; 0.5; other losses: direct 1.0; 0.51. Ours were held to 0.0001: plain FSDP2" in text
    )
