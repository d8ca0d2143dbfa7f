"""TOML files and overrides over torchtitan's real config objects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from fsdp_symm.titan.config import load
from fsdp_symm.titan.overlay import ConfigError, flatten
from fsdp_symm.titan.sections import SECTIONS, help_text

REPO = Path(__file__).parents[2]
CONFIGS = sorted(path.name for path in (REPO / "configs").glob("*.toml"))
DENSE = "configs/debug_dense_cpu.toml"
REAL_SIZE = ("llama3_8b.toml", "moe_16b.toml")  # more about them in test_real_sizes.py


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def toml(tmp_path: Path):
    """Writes a dense config plus some lines, and names the file."""

    def write(extra: str, head: str = "") -> str:
        path = tmp_path / "mine.toml"
        model = '[model]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n'
        assets = 'hf_assets_path = "configs/tiny/tokenizer"\ndataloader.dataset_path = "configs/tiny/text"\n'
        path.write_text(head + assets + ("" if "[model]" in extra else model) + extra)
        return str(path)

    return write


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_configs_load(name: str) -> None:
    config = load(f"configs/{name}")
    values = dict(flatten(config, hidden=("model_spec",)))
    assert values["fsdp_symm.enable"] is True
    assert values["trace.enable"] is True
    assert values["metrics.enable_tensorboard"] is True
    real_size = name in REAL_SIZE
    assert values["training.steps"] == (10 if real_size else 20)
    assert values["trace.start_step"] < values["training.steps"], "a step after the traced one is as long as any"
    assert values["metrics.log_freq"] == 1
    assert values["checkpoint.enable"] is False
    assert values["lr_scheduler.decay_ratio"] is None, "any other makes torchtitan warn about short runs"
    assert values["fsdp_symm.zero_cta"] is ("gpu" in name or real_size)
    assert values["parallelism.expert_parallel_degree"] == (2 if "moe" in name else 1)
    assert values["model.module"] == ("deepseek_v3" if "moe" in name else "llama3")


def test_a_backend_of_another_device_is_blamed_on_the_word_that_named_it() -> None:
    with pytest.raises(ConfigError) as refused:
        load(DENSE, ["--fsdp_symm.backend", "nccl"])
    assert str(refused.value) == "command line: fsdp_symm.backend: found 'nccl'; allowed on CPU: 'auto', 'host'"
    assert load(DENSE, ["--fsdp_symm.backend", "nccl", "--fsdp_symm.enable", "false"]).fsdp_symm.backend == "nccl"


def test_learning_rate_can_be_set_alone() -> None:
    config = load(DENSE, ["--optimizer.param_groups.0.optimizer_kwargs.lr", "1e-5"])
    kwargs = config.optimizer.param_groups[0].optimizer_kwargs
    assert kwargs["lr"] == 1e-5
    assert kwargs["weight_decay"] == 0.1


def test_model_and_trace_can_be_overridden() -> None:
    config = load(DENSE, ["--model.module=deepseek_v3", "--model.config=deepseek_v3_debugmodel", "--trace.ranks", "1"])
    assert config.model_spec.name == "deepseek_v3"
    assert config.trace.ranks == (1,)


def test_activation_checkpoint_is_chosen_by_mode() -> None:
    assert load(DENSE).activation_checkpoint is None
    assert (
        type(load(DENSE, ["--activation_checkpoint.mode", "full"]).activation_checkpoint).__qualname__
        == "FullAC.Config"
    )


def test_cpu_replaces_flex_attention_unless_told_otherwise() -> None:
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    sdpa = load(DENSE).model_spec
    assert not list(sdpa.traverse(FlexAttention.Config))
    assert list(sdpa.traverse(ScaledDotProductAttention.Config))
    assert list(load(DENSE, ["--model.attention", "default"]).model_spec.traverse(FlexAttention.Config))


# (lines in the file, parts of the one-line message)
REFUSED: list[tuple[str, list[str]]] = [
    (
        "[fsdp_symm]\nenabel = true",
        [
            "fsdp_symm.enabel: unknown key; allowed: all_gather, backend, dedicated_all_gather, enable,",
            "nearest: fsdp_symm.enable",
        ],
    ),
    (
        "[fsdp_sym]\nenable = true",
        [
            "fsdp_sym: unknown table; allowed:",
            "nearest: fsdp_symm",
        ],
    ),
    (
        "[fsdp_symm]\nbackend = 'ncl'",
        [
            "fsdp_symm.backend: found 'ncl' (str); allowed: 'auto', 'host', 'nccl', 'cuda'; nearest: 'nccl'",
        ],
    ),
    (
        "[fsdp_symm]\nbackend = 'cuda'",
        [
            "fsdp_symm.backend: found 'cuda'; allowed on CPU: 'auto', 'host'",
        ],
    ),
    (
        "[fsdp_symm]\nbackend = 'nccl'",
        [
            "fsdp_symm.backend: found 'nccl'; allowed on CPU: 'auto', 'host'",
        ],
    ),
    (
        "[fsdp_symm]\nzero_cta = true\ndedicated_all_gather = true",
        [
            "fsdp_symm.dedicated_all_gather: found true beside zero_cta = true",
            "allowed: one of the two, e.g. zero_cta = false",
        ],
    ),
    (
        "[fsdp_symm]\nmin_bytes = -1",
        [
            "fsdp_symm.min_bytes: found -1; allowed: 0 or more",
        ],
    ),
    (
        "[fsdp_symm]\nslots = -1",
        [
            "fsdp_symm.slots: found -1; allowed: 0 to 4096",
        ],
    ),
    (
        "[fsdp_symm]\ntimeout_s = 0",
        [
            "fsdp_symm.timeout_s: found 0; allowed: seconds from 0.01 to 1000000",
        ],
    ),
    (
        "[fsdp_symm]\nslots = 5000",
        [
            "fsdp_symm.slots: found 5000; allowed: 0 to 4096",
        ],
    ),
    (
        "[fsdp_symm]\ntimeout_s = 1e9",
        [
            "fsdp_symm.timeout_s: found 1e+09; allowed: seconds from 0.01 to 1000000",
        ],
    ),
    (
        "[fsdp_symm]\ntimeout_s = nan",
        [
            "fsdp_symm.timeout_s: found nan; allowed: seconds from 0.01",
        ],
    ),
    (
        "[fsdp_symm]\nstrict = 1",
        [
            "fsdp_symm.strict: found 1 (int); allowed: bool",
        ],
    ),
    (
        "[trace]\nstart_step = 0",
        [
            "trace.start_step: found 0; allowed: 1 or more",
        ],
    ),
    (
        "[trace]\nsteps = 0",
        [
            "trace.steps: found 0; allowed: 1 or more",
        ],
    ),
    (
        "[trace]\nranks = [-1]",
        [
            "trace.ranks: found -1; allowed: rank numbers of 0 or more",
        ],
    ),
    (
        "[trace]\ndir = ''",
        [
            "trace.dir: found ''; allowed: a folder name",
        ],
    ),
    (
        "[expert_parallel]\nimplementation = 'magic'",
        [
            "expert_parallel.implementation: found 'magic' (str); allowed: 'torchtitan', 'auto', 'copy_engine',",
        ],
    ),
    (
        "[training]\nsteps = 'ten'",
        [
            "training.steps: found 'ten' (str); allowed: int",
        ],
    ),
    (
        "[training]\nlocal_batch_size = true",
        [
            "training.local_batch_size: found True (bool); allowed: int",
        ],
    ),
    (
        "[training]\nmixed_precision_param = 'float23'",
        [
            "training.mixed_precision_param: found 'float23' (str); allowed: 'bfloat16', 'float32'; nearest: 'float32'",
        ],
    ),
    (
        "[parallelism]\ncontext_parallel_load_balancer = ''",
        [
            "[parallelism]: refused by ParallelismConfig:",
            "cannot be an empty string",
        ],
    ),
    (
        "[parallelism]\nenable_fsdp_symm_mem = true",
        [
            "parallelism.enable_fsdp_symm_mem: found true beside fsdp_symm.enable = true; allowed: one switch only",
        ],
    ),
    (
        "[activation_checkpoint]\nmode = 'ful'",
        [
            "activation_checkpoint.mode: found 'ful' (str); allowed: 'none', 'full', 'selective',"
            " 'memory_budget'; nearest: 'full'",
        ],
    ),
    (
        "[activation_checkpoint]\nmode = 'memory_budget'",
        [
            "Memory budget activation checkpointing requires",
        ],
    ),
    (
        "[training]\ndisable_cuda_graphs = false",
        [
            "training.disable_cuda_graphs: found false; allowed on CPU: true",
        ],
    ),
    (
        "[training]\nenable_cpu_offload = true",
        [
            "training.enable_cpu_offload: found true; allowed on CPU: false",
        ],
    ),
    (
        "[profiler]\nenable_profiling = true",
        [
            "profiler.enable_profiling: found true; allowed on CPU: false (use [trace] enable = true)",
        ],
    ),
    (
        "[model_spec]\nname = 'x'",
        [
            "model_spec: unknown table; allowed:",
        ],
    ),
    (
        "[model]\nmodule = 'lama3'\nconfig = 'x'",
        [
            "model.module: found 'lama3'; allowed: deepseek_v3,",
            "nearest: 'llama3'",
        ],
    ),
    (
        "[model]\nmodule = 'llama3'\nconfig = 'llama3_debug'",
        [
            "model.config: found 'llama3_debug'; allowed for 'llama3': llama3_405b",
            "nearest: 'llama3_debugmodel'",
        ],
    ),
    (
        "[model]\nmodule = 'llama3'",
        [
            "model.config: found nothing; allowed: a name, e.g. config =",
        ],
    ),
    (
        "[model]\nmodule = ''\nconfig = 'x'",
        [
            "model.module: found nothing; allowed: a name such as 'llama3'",
        ],
    ),
    (
        "[model]\nmodul = 'llama3'",
        [
            "model.modul: unknown key; allowed: attention, config, layers, module; nearest: model.module",
        ],
    ),
    (
        "[model]\nmodule = 'llama3'\nconfig = 'llama3_debugmodel'\nattention = 'flash'",
        [
            "model.attention: found 'flash' (str); allowed: 'auto', 'sdpa', 'default'",
        ],
    ),
    (
        "[model]\nmodule = 'no.such.module'\nconfig = 'x'",
        [
            "model.module: found 'no.such.module'; allowed:",
        ],
    ),
    (
        "[parallelism]\npipeline_parallel_degree = 2",
        [
            "parallelism.pipeline_parallel_degree: found 2; allowed before torch 2.14: 1",
        ],
    ),
]


@pytest.mark.parametrize(("extra", "parts"), REFUSED, ids=[extra.replace("\n", " ") for extra, _ in REFUSED])
def test_config_errors_name_file_key_found_and_allowed(toml, extra: str, parts: list[str]) -> None:
    if extra.startswith("[parallelism]\npipeline") and TorchVersion(torch.__version__) >= "2.14":
        pytest.skip("torch 2.14 runs torchtitan's pipelines")
    path = toml(extra)
    with pytest.raises(ConfigError) as refused:
        load(path)
    message = str(refused.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_an_unknown_data_set_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as refused:
        load(DENSE, ["--dataloader.dataset", "c4_tset"])
    assert str(refused.value) == (
        "command line: dataloader.dataset: found 'c4_tset'; allowed: c4, c4_test, c4_validation; nearest: 'c4_test'"
    )


def test_both_switches_on_the_command_line() -> None:
    with pytest.raises(ConfigError) as refused:
        load(DENSE, ["--parallelism.enable_fsdp_symm_mem"])
    assert str(refused.value).startswith("command line: parallelism.enable_fsdp_symm_mem: found true beside fsdp_symm")


@pytest.mark.parametrize(
    ("key", "missing", "allowed"),
    [
        ("hf_assets_path", "no/tokenizer", "a folder with tokenizer.json"),
        ("dataloader.dataset_path", "no/text", "a local folder (HF_HUB_OFFLINE=0 allows downloads)"),
    ],
)
def test_missing_assets_are_named(key: str, missing: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(DENSE, [f"--{key}", missing])
    assert str(refused.value) == (
        f"command line: {key}: found '{missing}' (no such folder below {REPO}); allowed: {allowed}"
    )


def test_a_missing_file_offers_its_neighbour() -> None:
    with pytest.raises(ConfigError) as refused:
        load("configs/debug_mo_cpu.toml")
    assert str(refused.value) == (
        "configs/debug_mo_cpu.toml: found No such file or directory; expected a readable TOML file;"
        " nearest: configs/debug_moe_cpu.toml"
    )


def test_malformed_toml_is_one_line_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[training\nsteps = 1\n")
    with pytest.raises(ConfigError, match=r"bad\.toml: found malformed TOML: .*line 1"):
        load(str(path))


@pytest.mark.parametrize(
    "text", ["a = " + "9" * 5000, "a = " + "[" * 3000 + "]" * 3000, "[" + ".".join("a" * 3000) + "]"]
)
def test_toml_beyond_the_parser_s_limits_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.toml: found malformed TOML: [^\n]*$"):
        load(str(path))


def test_a_number_of_thousands_of_digits_on_the_command_line_is_text() -> None:
    with pytest.raises(ConfigError, match=r"training\.steps: found '9{20,}"):
        load("configs/debug_dense_cpu.toml", ["--training.steps", "9" * 5000])


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (".", r"model\.module: found '\.'; allowed: "),
        ("..x", r"model\.module: found '\.\.x'; allowed: "),
        ("broken_models.one", r"importing broken_models\.one\S* failed: ZeroDivisionError: division by zero$"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, text: str
) -> None:
    (tmp_path / "broken_models").mkdir()
    (tmp_path / "broken_models/one.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "m.toml"
    path.write_text(f'[model]\nmodule = "{module}"\nconfig = "llama3_debugmodel"\n')
    with pytest.raises(ConfigError, match=text):
        load(str(path))


def test_help_names_every_key_of_ours() -> None:
    text = help_text()
    for name, section in SECTIONS.items():
        assert f"[{name}]" in text
        for key in section.__dataclass_fields__:
            assert f"  {key} = " in text
