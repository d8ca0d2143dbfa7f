"""From a TOML file and command-line overrides to a checked ``SymmTrainer.Config``."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import os
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from fsdp_symm.titan import cpu
from fsdp_symm.titan.overlay import (
    ConfigError,
    FieldError,
    Setting,
    Tree,
    merge,
    nearest_name,
    overlay,
    source_of,
    tree_from_arguments,
    tree_from_table,
)
from fsdp_symm.titan.sections import ModelSection

HIDDEN = ("model_spec",)  # chosen by [model], not written by hand


def load(path: str, overrides: Sequence[str] = ()) -> Any:
    """Read a TOML file and lay it, then the overrides, over the registry's config of the model it names.

    Args:
        path: the TOML file.
        overrides: command-line words, ``--section.key value``.

    Returns:
        A ``SymmTrainer.Config``; call ``build()`` on it inside ``torchrun``.

    Raises:
        ConfigError: file, key, what was found, what is allowed, nearest name; one line.
    """
    tree = merge(read_toml(path), tree_from_arguments(overrides))
    model_tree = tree.pop("model", {})
    if isinstance(model_tree, Setting):
        raise ConfigError(f"{model_tree.source}: model: found {model_tree.value!r}; allowed: a table")
    model = _model_section(model_tree, path)

    from fsdp_symm.titan.trainer import SymmTrainer  # imports torchtitan: seconds

    _refuse_two_switches(tree, path)
    with _quiet():
        base = _registry_config(model, model_tree, path)
        _keep_layers(base.model_spec, model, model_tree, path)
        fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
        fields["metrics"] = _symm_metrics(base.metrics)
        base = SymmTrainer.Config(**fields, model=model)
        config = overlay(base, tree, file=path, hidden=HIDDEN, variants=_variants(base))
    if model.attention == "sdpa" or (model.attention == "auto" and cpu.on_cpu()):
        cpu.use_sdpa(config.model_spec)
    _check_files(config, tree, path)
    return config


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back torchtitan's warnings about values that the overlay may still replace; building repeats them."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def read_toml(path: str) -> Tree:
    """A TOML file as a tree of settings.

    Raises:
        ConfigError: missing, unreadable or malformed.
    """
    try:
        with open(path, "rb") as file:
            return tree_from_table(tomllib.load(file), path)
    except OSError as error:
        nearest = nearest_name(os.path.basename(path), _toml_files(os.path.dirname(path) or "."))
        hint = f"; nearest: {os.path.join(os.path.dirname(path), nearest)}" if nearest else ""
        raise ConfigError(f"{path}: found {error.strerror}; expected a readable TOML file{hint}") from None
    except ValueError as error:  # also of text that is no UTF-8, and of numbers with thousands of digits
        raise ConfigError(f"{path}: found malformed TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: found malformed TOML: values or names nested too deeply") from None


def _toml_files(folder: str) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".toml")) if os.path.isdir(folder) else []


def _model_section(tree: Tree, path: str) -> ModelSection:
    # The placeholders stand for "not given": ModelSection itself refuses to be empty.
    section = overlay(ModelSection(module="?", config="?"), tree, file=path, where="model")
    for name in ("module", "config"):
        if name not in tree:
            raise ConfigError(
                f"{path}: model.{name}: found nothing; allowed: a name, e.g. {name} = "
                + ("'llama3'" if name == "module" else "'llama3_debugmodel'")
            )
    return section


def _refuse_two_switches(tree: Tree, path: str) -> None:
    """torchtitan's own switch beside ours, said before torchtitan's check of the GPU hides it."""

    def value(section: str, key: str, default: Any) -> Any:
        table = tree.get(section, {})
        setting = table.get(key) if isinstance(table, dict) else None
        if not isinstance(setting, Setting):
            return default
        return {"true": True, "false": False}.get(str(setting.value).lower(), default)

    if value("parallelism", "enable_fsdp_symm_mem", False) and value("fsdp_symm", "enable", True):
        raise ConfigError(
            f"{source_of(tree['parallelism'], path)}: parallelism.enable_fsdp_symm_mem: found true beside"
            " fsdp_symm.enable = true; allowed: one switch only, set one of the two to false"
        )


def _registry_config(model: ModelSection, tree: Tree, path: str) -> Any:
    module = _registry_module(model.module, source_of(tree["module"], path))
    function = getattr(module, model.config, None)
    known = sorted(
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not inspect.signature(value).parameters
    )
    if model.config not in known or function is None:
        nearest = nearest_name(model.config, known)
        raise ConfigError(
            f"{source_of(tree['config'], path)}: model.config: found {model.config!r};"
            f" allowed for {model.module!r}: {', '.join(known)}" + (f"; nearest: {nearest!r}" if nearest else "")
        )
    config = function()
    for name in ("model_spec", "parallelism", "training"):
        if not hasattr(config, name):
            raise ConfigError(
                f"{path}: model.config: {model.config!r} returned {type(config).__qualname__};"
                " allowed: a function that returns a torchtitan Trainer.Config"
            )
    return cpu.adapt_defaults(config)


def _keep_layers(model_spec: Any, model: ModelSection, tree: Tree, path: str) -> None:
    """Leave a model with its first ``model.layers`` layers: each layer's config and init depend on its own number only.

    Raises:
        ConfigError: more layers than the model has, or a model without a list of layers.
    """
    if not model.layers:
        return
    source = source_of(tree["layers"], path)
    known = getattr(model_spec.model, "layers", None)
    if not isinstance(known, list):
        raise ConfigError(
            f"{source}: model.layers: found {model.layers} for {model.config!r}, whose model has no list of layers;"
            " allowed: 0 (the whole model)"
        )
    if model.layers > len(known):
        raise ConfigError(
            f"{source}: model.layers: found {model.layers}; allowed for {model.config!r}: 0 (all) to {len(known)}"
        )
    model_spec.model.layers = known[: model.layers]


def _registry_module(name: str, source: str) -> ModuleType:
    from torchtitan.models import _supported_models  # private; read in torchtitan 0.3.0

    candidates = [f"torchtitan.models.{name}.config_registry"] if name in _supported_models else []
    candidates += [f"{name}.config_registry", name] if "." in name and all(name.split(".")) else []
    for candidate in candidates:
        try:
            return importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            if error.name is None or not candidate.startswith(error.name):
                raise ConfigError(f"{source}: model.module: importing {candidate} failed: {error}") from error
        except Exception as error:  # the module is the user's own: anything may go wrong in it
            raise ConfigError(
                f"{source}: model.module: importing {candidate} failed: {type(error).__name__}: {error}"
            ) from error
    nearest = nearest_name(name, sorted(_supported_models))
    raise ConfigError(
        f"{source}: model.module: found {name!r}; allowed: {', '.join(sorted(_supported_models))}, or the dotted name"
        " of an importable module" + (f"; nearest: {nearest!r}" if nearest else "")
    )


def _symm_metrics(metrics: Any) -> Any:
    from fsdp_symm.titan.metrics import SymmMetricsProcessor

    return SymmMetricsProcessor.Config(**{f.name: getattr(metrics, f.name) for f in dataclasses.fields(metrics)})


def _variants(base: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

    current = base.activation_checkpoint
    policies: dict[str, Any] = {"none": None}
    for name, policy in {"full": FullAC, "selective": SelectiveAC, "memory_budget": MemoryBudgetAC}.items():
        policies[name] = current if isinstance(current, policy.Config) else policy.Config()
    return {"activation_checkpoint": ("mode", policies)}


def _check_files(config: Any, tree: Tree, path: str) -> None:
    """Say now, in one line, which file is missing, instead of later from inside a loader."""

    def source(*keys: str) -> str:
        branch: Setting | Tree = tree
        for key in keys:
            if not isinstance(branch, dict) or key not in branch:
                return path
            branch = branch[key]
        return source_of(branch, path)

    _require_folder(config.hf_assets_path, "hf_assets_path", source("hf_assets_path"), "a folder with tokenizer.json")
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

    loader = config.dataloader
    if type(loader) is not HuggingFaceTextDataLoader.Config:
        return
    if loader.dataset not in DATASETS:
        nearest = nearest_name(loader.dataset, list(DATASETS))
        raise ConfigError(
            f"{source('dataloader', 'dataset')}: dataloader.dataset: found {loader.dataset!r};"
            f" allowed: {', '.join(DATASETS)}" + (f"; nearest: {nearest!r}" if nearest else "")
        )
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        data = loader.dataset_path or DATASETS[loader.dataset].path
        where = source("dataloader", "dataset_path")
        _require_folder(data, "dataloader.dataset_path", where, "a local folder (HF_HUB_OFFLINE=0 allows downloads)")


def _require_folder(found: str, key: str, source: str, allowed: str) -> None:
    if not os.path.exists(found):
        raise ConfigError(f"{source}: {key}: found {found!r} (no such folder below {os.getcwd()}); allowed: {allowed}")


__all__ = ["ConfigError", "FieldError", "load", "read_toml"]
