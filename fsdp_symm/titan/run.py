"""The command behind ``train.py``: arguments, one process of a torchrun group, exit status."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from fsdp_symm.output import OutputError, pipe
from fsdp_symm.titan.overlay import COMMAND_LINE, ConfigError, flatten
from fsdp_symm.titan.sections import help_text

CONFIG_ERROR_STATUS = 2
# How long a rank that is not the first of its host leaves the word to the first one (seconds).
_FIRST_RANK_SPEAKS_S = 30.0


def main(argv: Sequence[str], doc: str) -> int:
    """Train as the arguments say.

    Returns:
        0 after training (or ``--check``); 2 for a config that cannot be used, with one line on stderr; 1 for a
        failure while training, with a traceback.
    """
    # Read now: ranks that share a GPU get another LOCAL_RANK on the way.
    first_of_host = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        path, check, overrides = _parse(argv, doc)
        from fsdp_symm.titan.config import load

        config = load(path, overrides)
        if check:
            _print_config(config)
            return 0
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise ConfigError(
                "start: found no torchrun environment (RANK, WORLD_SIZE);"
                f" fix: torchrun --nproc-per-node 2 {sys.argv[0]} {' '.join(argv)}"
            )
        return _train(config)
    except ConfigError as error:
        return _report(error, first_of_host)
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{COMMAND_LINE}: {message}")


def _parse(argv: Sequence[str], doc: str) -> tuple[str, bool, list[str]]:
    parser = _Parser(
        prog="train.py",
        usage="torchrun --nproc-per-node N train.py --config FILE.toml [--check] [--section.key value ...]",
        description=doc,
        epilog=help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file, e.g. configs/debug_moe_cpu.toml")
    parser.add_argument("--check", action="store_true", help="check the config, print every key with its value, exit")
    options, overrides = parser.parse_known_args(argv)
    if not options.config:
        raise ConfigError(f"{COMMAND_LINE}: --config: found nothing; allowed: a TOML file")
    return options.config, options.check, overrides


def _print_config(config: Any) -> None:
    try:
        with pipe():
            for key, value in flatten(config, hidden=("model_spec",)):
                print(f"{key} = {value!r}")
    except OutputError as error:
        raise ConfigError(str(error)) from error


def _report(error: ConfigError, first_of_host: bool) -> int:
    """Print the line once a host, and return the status.

    Under torchrun every rank meets the same error, and the first to exit gets the others killed. So the other ranks
    wait for that signal and leave the word to the first; one whose first rank is content speaks up after a while.
    """
    # torchtitan's constructor hands an error's traceback to torchrun, which prints it: this one would help nobody.
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(error_file).unlink(missing_ok=True)
    if not first_of_host:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        if signal.sigtimedwait({signal.SIGTERM}, _FIRST_RANK_SPEAKS_S) is not None:
            return CONFIG_ERROR_STATUS
    print(f"config error: {error}", file=sys.stderr, flush=True)
    return CONFIG_ERROR_STATUS


# Messages that every run of torchtitan 0.3.0 prints and that ask nothing of the user.
_LOG_NOISE = (
    "ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING]",
    "model.safetensors.index.json not found",  # only for checkpoints in Hugging Face's format
    "initial_load_model_only=True has no effect",  # the registry's own default
    "Structured logging disabled via",
    "Peak FLOPS used for computing MFU: inf",  # a CPU: nobody knows its peak
)
_WARNING_NOISE = (
    "DTensor random operators may not have complete support on cpu",  # known: equal shards on every CPU rank
    "DTensor manual_seed.. may not have complete support on cpu",
    "In CPU autocast, but the target dtype is not supported",  # torchtitan asks for float32, which is what it gets
    "'set_vital' is deprecated",
)


def _drop_mfu(record: logging.LogRecord) -> bool:
    """Take the utilisation out of torchtitan's step line: of a CPU's unknown peak it is always zero."""
    if isinstance(record.msg, str):
        record.msg = record.msg.replace("mfu: 0.00%", "").rstrip()
    return True


def _quiet_logs() -> None:
    """One rank's log, without the lines that no one can act on."""
    import torch

    # torchtitan logs to the root logger on every rank. LOG_RANK (torchtitan's own variable) names the ranks to hear:
    # with pipeline parallelism the loss is on another rank than 0.
    heard = os.environ.get("LOG_RANK", "0").split(",")
    if os.environ.get("RANK", "0") not in heard:
        logging.getLogger().setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: not record.getMessage().startswith(_LOG_NOISE))
        if not torch.accelerator.is_available():
            handler.addFilter(_drop_mfu)
    os.environ["KINETO_LOG_LEVEL"] = "6"  # torchtitan's 5 still lets two lines through for every trace
    for message in _WARNING_NOISE:
        warnings.filterwarnings("ignore", message)


def _train(config: Any) -> int:
    import torch.distributed as dist
    from torchtitan.observability import structured_logger
    from torchtitan.tools.logging import init_logger

    init_logger()
    _quiet_logs()
    structured_logger.init_structured_logger(
        source="training", output_dir=config.dump_folder, enable=config.debug.enable_structured_logging
    )
    trainer, failure = None, None
    try:
        trainer = config.build()
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
            for line in trainer.finish():
                print(line, flush=True)
        return 0
    except ConfigError:
        raise
    except BaseException as error:
        failure = error
        if not isinstance(error, Exception):
            raise
        logging.getLogger().exception("training failed on rank %s", os.environ.get("RANK"))
        return 1
    finally:
        try:
            if trainer is not None:
                trainer.close(failure)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
