"""Makes ``"copy_engine"`` a name that transformers knows; nothing here is imported before it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

from torch.torch_version import TorchVersion

from fsdp_symm.errors import SymmMemConfigError, problem
from fsdp_symm.hf.copy_engine import CopyEngineCall

NAME = "copy_engine"
MINIMUM = "5.24"
_MODULE = "transformers.distributed.expert_parallel"


def register() -> type[Any]:
    """Add ``"copy_engine"`` to transformers' ``EPImplementationInterface``; a second call does nothing.

    Call it on every rank before a model is loaded with ``DistributedConfig(ep_implementation="copy_engine")``.

    Returns:
        The registered class.

    Raises:
        SymmMemConfigError: transformers is missing, or older than 5.24.
    """
    native = _expert_parallel()
    known = native.EPImplementationInterface()
    if NAME in known and issubclass(known[NAME], CopyEngineCall):
        return known[NAME]
    implementation = type("CopyEngineEP", (CopyEngineCall, native.EPImplementation), {})
    native.EPImplementationInterface.register(NAME, implementation)
    return implementation


def _expert_parallel() -> Any:
    """The module of transformers that holds the implementations."""
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise _refused("no module named transformers") from None
    version = str(getattr(transformers, "__version__", "unknown"))
    if not version[:1].isdigit() or TorchVersion(version) < MINIMUM:
        raise _refused(f"transformers {version}")
    return importlib.import_module(_MODULE)


def _refused(found: str) -> SymmMemConfigError:
    return SymmMemConfigError(
        problem(
            f"fsdp_symm.hf.register: {NAME!r} needs transformers with implementations of expert parallelism by name",
            found=found,
            expected=f"transformers {MINIMUM} or newer ({_MODULE})",
            fix=f'pip install "transformers>={MINIMUM}"',
        )
    )
