from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from fsdp_symm.cli import main
from fsdp_symm.doctor import SCHEMA_VERSION, machine, probe, view
from fsdp_symm.doctor.report import BackendRow, CollectiveRow, DoctorReport, FindingRow, Gpu, GroupRow, NvLink, Shm
from fsdp_symm.errors import SymmMemMemoryError, SymmMemTimeoutError
from fsdp_symm.guards import GroupFacts
from fsdp_symm.memory.shared_file import SHM_DIR_VARIABLE, reserve
from fsdp_symm.nvlink import active_nvlinks

DOCTOR = ["-m", "fsdp_symm.cli", "doctor"]
KEYS = [
    "schema_version", "status", "versions", "gpus", "peer_access", "nvlink", "environment", "nccl_libraries", "shm",
    "backends", "groups", "findings", "notes",
]  # fmt: skip


def spawn(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "COLUMNS")}
    settings = {**clean, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=90, env=settings)


def doctor(*args: str) -> tuple[int, str, str]:
    """Run in this process: exit status, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(["doctor", *args])
        except SystemExit as stop:
            status = int(stop.code or 0)
    return status, out.getvalue(), err.getvalue()


# --- as users run it ---------------------------------------------------------------------------------------


def test_alone_it_looks_and_says_how_to_probe():
    done = spawn(*DOCTOR, "--json", NCCL_CTA_POLICY="2")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert list(report) == KEYS
    assert report["schema_version"] == SCHEMA_VERSION
    assert report["status"] == "ok"
    assert report["environment"]["NCCL_CTA_POLICY"] == "2"
    assert [b["backend"] for b in report["backends"]] == ["host", "nccl", "cuda"]
    assert report["groups"] == []
    assert "torchrun" in report["notes"][0]


@pytest.fixture(scope="module")
def launched() -> subprocess.CompletedProcess[str]:
    return spawn("-m", "torch.distributed.run", "--nproc-per-node", "2", *DOCTOR, "--json", "--device", "cpu")


def test_under_torchrun_it_probes_the_group_once(launched):
    assert launched.returncode == 0, launched.stderr
    (group,) = json.loads(launched.stdout)["groups"]
    assert (group["ranks"], group["device"], group["backend"]) == ([0, 1], "cpu", "host")
    assert group["findings"] == []
    ways = [("all_gather", "staged"), ("all_gather", "direct"), ("all_to_all", ""), ("reduce_scatter", "")]
    assert [(c["kind"], c["way"]) for c in group["collectives"]] == ways
    for row in group["collectives"]:
        assert row["correct"] is True
        assert row["time_us"] > 0
        assert row["error"] == ""
    assert [c["engine"] for c in group["collectives"] if c["buffers"] == "arena"] == ["host"] * 3


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--timeout", "0"], "--timeout: found 0, expected seconds, 0 to 1000000, fix: --timeout 60"),
        (["--timeout", "nan"], "--timeout: found nan"),
        (["--timeout", "1e300"], "--timeout: found 1e+300"),
        (["--policy", "fast"], "invalid choice: 'fast'"),
        (["--what"], "unrecognized arguments: --what"),
    ],
)
def test_bad_usage(args, word):
    status, out, err = doctor(*args)
    assert (status, out) == (2, "")
    assert word in err


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["a", "-1", "9" * 20])
def test_ranks_that_are_no_numbers_are_bad_usage(monkeypatch, name, value):
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv(name, value)
    status, out, err = doctor()
    assert (status, out) == (2, "")
    assert f"{name}: found {value!r}, expected a number up to " in err
    assert f"fix: start ranks with torchrun, or unset {name}" in err


def test_a_port_without_a_launch_does_not_matter(monkeypatch, capsys):
    monkeypatch.setenv("MASTER_PORT", "tcp://10.0.0.1:23456")
    assert main(["doctor", "--no-probe"]) == 0
    assert "status: ok" in capsys.readouterr().out


def test_a_rank_beyond_the_world_is_bad_usage():
    launch = {"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = spawn(*DOCTOR, **launch)
    assert (done.returncode, done.stdout) == (2, "")
    assert "RANK: found 5, expected one below WORLD_SIZE=2, fix: start ranks with torchrun" in done.stderr


def test_a_rank_that_prints_no_tables_says_why_it_fails():
    launch = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # nobody listens there
    done = spawn(*DOCTOR, "--timeout", "1", **launch)
    assert (done.returncode, done.stdout) == (1, "")
    assert "fsdp-symm doctor: rank 1: " in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_cuda_where_there_is_none_is_bad_usage():
    assert doctor("--device", "cuda")[0] == 2


def test_tables_fit_a_terminal_of_80_columns():
    status, out, _ = doctor("--no-probe")
    assert status == 0
    assert max(len(line) for line in out.splitlines() if "libnccl" not in line) <= 80
    assert "no probe: --no-probe" in out
    assert "status: ok" in out


# --- between ranks -----------------------------------------------------------------------------------------


def all_right() -> tuple[int, str]:
    return doctor("--json", "--timeout", "60", "--device", "cpu")[:2]


def test_a_group_that_exists_is_probed_and_kept(ranks2):
    (first, text), (second, quiet) = ranks2.run(all_right)
    assert (first, second, quiet) == (0, 0, "")
    assert json.loads(text)["groups"][0]["collectives"][0]["correct"] is True


def wrong_on_rank_1() -> tuple[int, str]:
    import torch.distributed as dist

    true = probe.Calls._equal
    if dist.get_rank() == 1:
        probe.Calls._equal = lambda *_: False  # type: ignore[method-assign]
    try:
        return doctor("--json", "--timeout", "60", "--device", "cpu")[:2]
    finally:
        probe.Calls._equal = true  # type: ignore[method-assign]


def test_a_wrong_result_on_any_rank_fails_on_all(ranks2):
    (first, text), (second, _) = ranks2.run(wrong_on_rank_1)
    assert (first, second) == (1, 1)
    report = json.loads(text)
    assert report["status"] == "failed"
    assert [c["correct"] for c in report["groups"][0]["collectives"]] == [False] * 4


def one_rank_stays_away() -> tuple[int, str]:
    import torch.distributed as dist

    dist.barrier()  # both have connected: what follows is one rank that leaves
    if dist.get_rank() == 1:
        return 0, ""
    return doctor("--json", "--timeout", "2", "--device", "cpu")[:2]


def test_a_missing_rank_is_named_in_time(ranks2):
    status, text = ranks2.run(one_rank_stays_away)[0]
    assert status == 1
    (group,) = json.loads(text)["groups"]
    assert "SymmMemTimeoutError" in group["error"]
    assert "ranks [1]" in group["error"]


def no_arena() -> tuple[int, str]:
    import torch.distributed as dist

    true = probe.SymmMemArena
    rank = dist.get_rank()

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(f"no memory on rank {rank}")

    probe.SymmMemArena = refuse  # type: ignore[assignment, misc]
    try:
        return doctor("--json", "--timeout", "60", "--device", "cpu")[:2]
    finally:
        probe.SymmMemArena = true  # type: ignore[misc]


def test_an_arena_that_cannot_be_had_fails_its_collectives_only(ranks2):
    (status, text), (other, _) = ranks2.run(no_arena)
    assert (status, other) == (1, 1)
    for row in json.loads(text)["groups"][0]["collectives"]:
        if row["kind"] == "all_to_all":
            assert (row["correct"], row["error"]) == (True, "")
        else:
            assert (row["engine"], row["error"]) == ("not_run", "rank 0: RuntimeError: no memory on rank 0")


def no_trace_on_rank_1() -> tuple[int, str]:
    import torch.distributed as dist

    true = probe.judge

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    if dist.get_rank() == 1:
        probe.judge = refuse  # type: ignore[assignment]
    try:
        return doctor("--json", "--timeout", "60", "--device", "cpu")[:2]
    finally:
        probe.judge = true


def test_a_trace_that_one_rank_cannot_write_stops_nobody(ranks2):
    (status, text), (other, _) = ranks2.run(no_trace_on_rank_1)
    assert (status, other) == (0, 0)
    rows = json.loads(text)["groups"][0]["collectives"]
    assert [(r["correct"], r["engine"]) for r in rows] == [(True, "mixed")] * 4


def blocked_on_rank_1() -> tuple[int, str]:
    import torch.distributed as dist

    true = probe.Probe._blocked
    mine = (probe.Finding("two_rank_nvls_hang", "blocks", "x"),) if dist.get_rank() == 1 else ()
    probe.Probe._blocked = lambda self, _: true(self, mine)  # type: ignore[method-assign]
    try:
        return doctor("--json", "--timeout", "60", "--device", "cpu")[:2]
    finally:
        probe.Probe._blocked = true  # type: ignore[method-assign]


def test_what_one_rank_must_not_do_none_tries(ranks2):
    (status, text), _ = ranks2.run(blocked_on_rank_1)
    assert status == 0
    rows = {(c["kind"], c["way"]): c for c in json.loads(text)["groups"][0]["collectives"]}
    for key in (("all_gather", "staged"), ("reduce_scatter", "")):
        assert (rows[key]["engine"], rows[key]["correct"]) == ("not_run", None)
    # what can hang NCCL's all-gathers does not stand in the way of direct placement
    assert rows["all_to_all", ""]["correct"] is rows["all_gather", "direct"]["correct"] is True


class FakeArena:
    made: ClassVar[list[FakeArena]] = []

    def __init__(self, group, rings, *, backend, timeout_s, device):
        self.rings, self.backend, self.device = rings, backend, device
        self.segment = SimpleNamespace(timeout_s=timeout_s)
        FakeArena.made.append(self)

    def close(self):
        raise SymmMemTimeoutError("ranks [1] have not called close()")


@pytest.mark.parametrize(
    ("blocked", "unreachable", "measured"),
    [
        (set(), None, ["", "staged", "nccl", "direct", "copy_engine"]),
        ({"policy_differs"}, None, ["", "direct", "copy_engine"]),
        ({"nccl_no_windows"}, None, [""]),
        (set(), "the group spans 2 hosts", ["", "staged", "nccl"]),
        ({"no_nccl"}, None, []),
    ],
)
def test_on_gpus_each_way_is_probed_unless_something_stands_in_its_way(monkeypatch, blocked, unreachable, measured):
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    mine = probe.Probe(group, torch.device("cuda", 1), timeout_s=7.0)  # type: ignore[arg-type]
    seen: list[CollectiveRow] = []
    monkeypatch.setattr(probe, "SymmMemArena", FakeArena)
    monkeypatch.setattr(probe, "why_staged", lambda _: unreachable)
    monkeypatch.setattr(FakeArena, "made", [])
    for name in ("staged", "placed", "reduce_scatter"):
        monkeypatch.setattr(probe.Calls, name, lambda *_, **__: None)
    monkeypatch.setattr(mine, "_measure", lambda row, _: seen.append(row))

    rows = mine._collectives(GroupFacts(), blocked)
    assert [(r.kind, r.way) for r in rows] == [
        ("all_gather", "staged"),
        ("all_gather", "direct"),
        ("all_to_all", ""),
        ("reduce_scatter", "nccl"),
        ("reduce_scatter", "copy_engine"),
    ]
    assert [r.expected for r in rows if r.way in ("direct", "copy_engine")] == ["copy_engine"] * 2
    assert [r.way for r in seen] == measured
    if unreachable:
        assert rows[1].reason == unreachable
    for arena in FakeArena.made:
        assert {ring.role for ring in arena.rings} == {"all_gather", "unshard", "reduce_scatter"}
        assert (arena.backend, arena.device.index) == ("nccl", 1)
        assert arena.segment.timeout_s > 7.0, "the probe gives up before the wire's watchdog ends the process"
        last = seen[-1]
        assert last.error == "closing the arena: SymmMemTimeoutError: ranks [1] have not called close()"
    assert len(FakeArena.made) == (len(measured) > 1)


# --- the judge ---------------------------------------------------------------------------------------------


def nccl_trace(*device_rows: tuple[str, str, dict]) -> dict:
    """A trace of one all-gather of 2 ranks: its annotation, launches and device rows (what Kineto writes)."""
    meta = {
        "Collective name": "_allgather_base", "In msg nelems": 262144, "Out msg nelems": 524288, "Group size": 2,
        "dtype": "Float", "Process Group Name": "0", "Process Group Ranks": "[0, 1]",
    }  # fmt: skip
    rows = [
        {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 1, "tid": 1, "ts": 0, "dur": 100,
         "args": {**meta, "External id": 7}},
        {"ph": "X", "cat": "user_annotation", "name": "nccl:_all_gather_base", "pid": 1, "tid": 1, "ts": 1, "dur": 90,
         "args": {**meta, "External id": 8}},
    ]  # fmt: skip
    for index, (category, name, args) in enumerate(device_rows):
        at, common = 200 + 20 * index, {"correlation": index + 1, "External id": 8, "stream": 7, "device": 0}
        launch = "cudaLaunchKernel" if category == "kernel" else "cudaMemcpyBatchAsync"
        rows.append({"ph": "X", "cat": "cuda_runtime", "name": launch, "pid": 1, "tid": 1, "ts": 10 + index, "dur": 1,
                     "args": {"correlation": index + 1, "External id": 8}})  # fmt: skip
        rows.append({"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": at, "dur": 10,
                     "args": {**common, **args}})  # fmt: skip
    return {"schemaVersion": 1, "deviceProperties": [], "traceEvents": rows}


SYMMETRIC = ("kernel", "ncclSymkDevKernel_AllGather_ST(ncclSymkDevWorkArgs4K)", {"grid": [16, 1, 1]})
PLAIN = ("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", {"grid": [24, 1, 1]})
COPY = ("gpu_memcpy", "Memcpy PtoP (Device -> Device)", {"bytes": 1048576})


@pytest.mark.parametrize(
    ("row", "engine", "sms"),
    [(SYMMETRIC, "symmetric_kernel", 16), (PLAIN, "plain_kernel", 24), (COPY, "copy_engine", 0)],
)
def test_the_engine_comes_from_the_trace(tmp_path, row, engine, sms):
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(nccl_trace(row)))
    answer = CollectiveRow("all_gather", "arena", 2**21)
    probe.judge(answer, path)
    assert (answer.engine, answer.sms) == (engine, sms)


def test_a_trace_that_shows_nothing_is_no_verdict(tmp_path):
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(nccl_trace(COPY)))
    answer = CollectiveRow("reduce_scatter", "arena", 2**21)
    probe.judge(answer, path)
    assert (answer.engine, "no reduce_scatter" in answer.reason) == ("unknown", True)
    path.write_text("not json")
    probe.judge(answer, path)
    assert answer.engine == "unknown"


def test_without_the_trace_reader_the_engine_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsdp_symm.trace", None)
    answer = CollectiveRow("all_gather", "arena", 1)
    probe.judge(answer, tmp_path / "none.json")
    assert answer.engine == "unknown"


def test_a_collective_that_never_ends_is_given_up():
    group = SimpleNamespace(size=lambda: 2)
    mine = probe.Probe(group, torch.device("cuda", 0), timeout_s=0.05)  # type: ignore[arg-type]
    with pytest.raises(SymmMemTimeoutError, match=r"did not finish(.|\n)*nothing within 0.05 s"):
        mine._finish(SimpleNamespace(query=lambda: False))  # type: ignore[arg-type]
    assert mine.hung


# --- the machine -------------------------------------------------------------------------------------------


class FakeNvml:
    NVML_NVLINK_MAX_LINKS, NVML_FEATURE_ENABLED = 18, 1
    NVMLError = ValueError
    open = False

    def nvmlInit(self):
        self.open = True

    def nvmlShutdown(self):
        self.open = False

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return ("GPU-a", b"GPU-b")[handle]

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if handle == 1 and link == 4:
            raise ValueError("not supported")
        return 1


def test_links_from_nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    assert machine.nvlink() == NvLink("pynvml", active_links=[18, 4])
    assert active_nvlinks() == {"a": 18, "b": 4}
    assert not fake.open


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetHandleByIndex"])
def test_links_of_a_machine_that_nvml_cannot_be_asked_about(monkeypatch, tmp_path, call):
    def refuse(*_):
        raise ValueError("driver not loaded, GPU is lost, no permission")

    fake = FakeNvml()
    setattr(fake, call, refuse)
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert active_nvlinks() is None
    assert machine.nvlink() == NvLink()
    assert not fake.open


def test_links_from_nvidia_smi_or_nobody(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.nvlink() == NvLink()
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\nprintf '\\tGPU0\\tGPU1\\nGPU0\\t X \\tNV18\\nGPU1\\tNV18\\t X \\n\\nLegend:\\n  X = Self\\n'\n"
    )
    tool.chmod(0o755)
    link = machine.nvlink()
    assert (link.source, len(link.topology)) == ("nvidia-smi", 3)
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert machine.nvlink() == NvLink()


@pytest.mark.parametrize(
    ("shm", "word"),
    [
        (Shm("/dev/shm", 10, 10), ""),
        (Shm("/dev/shm", 10, 0), "is full"),
        (
            Shm("/none", None, None, "No such file or directory"),
            "/none: No such file or directory; mount a tmpfs there",
        ),
    ],
)
def test_conditions_of_the_host_backend(shm, word):
    row = machine.host_backend(shm)
    assert row.usable == (word == "")
    assert word in row.unmet


@pytest.mark.parametrize(
    ("folder", "error"),
    [
        ("/does/not/exist", "No such file or directory"),
        ("/etc/passwd", "Not a directory"),
    ],
)
def test_a_folder_that_cannot_hold_segments_is_told_as_the_switch_tells_it(monkeypatch, folder, error):
    monkeypatch.setenv(SHM_DIR_VARIABLE, folder)
    row = machine.host_backend(machine.shm_state())
    assert not row.usable
    assert row.unmet == f"{folder}: {error}; unset {SHM_DIR_VARIABLE}, or let it name a writable tmpfs"
    with pytest.raises(SymmMemMemoryError, match=error) as raised:
        reserve(4096)
    assert f"fix: unset {SHM_DIR_VARIABLE}" in str(raised.value)


def test_an_empty_variable_names_no_folder(monkeypatch):
    monkeypatch.setenv(SHM_DIR_VARIABLE, "")
    assert machine.shm_state().path == "/dev/shm"


@pytest.mark.parametrize(
    ("facts", "gpu", "usable", "word"),
    [
        (GroupFacts(), True, True, ""),
        (GroupFacts(), False, False, "no CUDA device"),
        (GroupFacts(policies=("default",)), True, True, ""),
        (GroupFacts(driver_version=(12, 4)), True, True, "12.4"),
        (GroupFacts(nccl_version=None, nccl_built=None), False, False, "no NCCL"),
        (GroupFacts(environment={"NCCL_CUMEM_ENABLE": "0"}), True, False, "NCCL_CUMEM_ENABLE=0"),
    ],
)
def test_conditions_of_the_nccl_backend(facts, gpu, usable, word):
    row = machine.nccl_backend(facts, has_gpu=gpu)
    assert row.usable == usable
    assert word in row.unmet
    assert bool(row.unmet) == bool(word)


@pytest.mark.parametrize(
    ("facts", "gpu", "usable", "word"),
    [
        (GroupFacts(), True, True, ""),
        (GroupFacts(), False, False, "no CUDA device"),
        (GroupFacts(nccl_version=None, nccl_built=None), True, True, ""),
        (GroupFacts(symm_backend="NVSHMEM"), True, False, "symmetric-memory backend of this process is another one"),
        (GroupFacts(peer_access=False), True, False, "cannot address each other"),
    ],
)
def test_conditions_of_torchs_peer_memory(facts, gpu, usable, word):
    row = machine.peer_memory_backend(facts, has_gpu=gpu)
    assert (row.usable, bool(row.unmet)) == (usable, bool(word))
    assert word in row.unmet


def test_settings_of_the_process_are_told_without_a_group(capsys):
    report = gpu_report()
    report.findings = machine.settings(GroupFacts(environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}))
    report.groups = []
    view.show(report)
    text = capsys.readouterr().out
    assert "warns (max_connections): copies will not overlap with compute" in text
    assert "fix: unset CUDA_DEVICE_MAX_CONNECTIONS" in text
    assert report.to_json()["findings"][0]["code"] == "max_connections"
    assert machine.settings(GroupFacts(policies=("default",), driver_version=(12, 4))) == []


def gpu_report() -> DoctorReport:
    base = machine.examine()
    base.gpus = [Gpu(i, "NVIDIA H200", f"GPU-{i}", "9.0", 150 * 2**30, 132) for i in range(2)]
    base.peer_access = [[True, True], [False, True]]
    base.nvlink = NvLink("nvidia-smi", topology=["\tGPU0\tGPU1", "GPU0\t X \tNV18", "GPU1\tNV18\t X"])
    base.environment = {"NCCL_CTA_POLICY": "2"}
    base.nccl_libraries = ["/opt/libnccl.so.2"]
    base.backends = [BackendRow("nccl", "cuda", True, "")]
    kernel = "ncclSymkDevKernel_ReduceScatter_LD_sum_f32"
    rows = [
        CollectiveRow("all_gather", "arena", 1, "copy_engine", "copy_engine", "zero-CTA", True, copies=1, time_us=88.2),
        CollectiveRow("all_to_all", "plain", 1, "plain_kernel", "copy_engine", "", True, ["ncclDevKernel_X"], 8),
        CollectiveRow("reduce_scatter", "arena", 1, "symmetric_kernel", "symmetric_kernel", "", False, [kernel], 16),
    ]
    finding = FindingRow("max_connections", "warns", "text [x]\n  found: a\n  expected: b\n  fix: c")
    base.groups = [GroupRow("0", [0, 1], "cuda:0", "nccl", "zero", "config", [finding], rows, "broken [y]")]
    return base


def test_a_gpu_report_shows_its_verdicts(capsys):
    view.show(gpu_report())
    text = capsys.readouterr().out
    joined = "".join(text.split())
    for word in (
        "NVIDIA H200", "y", "NV18", "copy engine", "WRONG", "CTA policy zero (config)", "warns (max_connections)",
        "text [x]", "error: broken [y]", "status: failed", "(differs)", "(1 copy)", "(16 SMs)", "/opt/libnccl.so.2",
    ):  # fmt: skip
        assert "".join(word.split()) in joined, word
    assert gpu_report().to_json()["status"] == "failed"


def test_every_library_named_is_a_path():
    assert all(Path(p).is_absolute() for p in machine.examine().nccl_libraries)


def test_a_lone_rank_variable_makes_no_launch(monkeypatch, capsys):
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "5")
    assert main(["doctor", "--json"]) == 0
    assert "run it under torchrun to probe" in json.loads(capsys.readouterr().out)["notes"][0]
