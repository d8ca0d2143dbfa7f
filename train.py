"""Train a torchtitan model with FSDP2's communication in symmetric memory.

# two CPU processes, a mixture-of-experts model, about a minute:
torchrun --nproc-per-node 2 train.py --config configs/debug_moe_cpu.toml

# the same without the switch (plain FSDP2), to compare the losses:
torchrun --nproc-per-node 2 train.py --config configs/debug_moe_cpu.toml --fsdp_symm.enable false

# any key of the TOML file can be given on the command line; lists are TOML or comma-separated:
torchrun --nproc-per-node 2 train.py --config configs/debug_dense_cpu.toml --training.steps 5 --trace.ranks 0

tensorboard --logdir outputs     # losses, bytes moved, seconds waited
"""

import os
import sys


def main() -> int:
    """Prepare the environment, then hand over; every value already set by the user wins."""
    for name, value in {
        "HF_HUB_OFFLINE": "1",  # tokenizer and text are local files: nothing asks the network
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "WANDB_MODE": "disabled",
    }.items():
        os.environ.setdefault(name, value)
    from fsdp_symm.titan.run import main as run

    return run(sys.argv[1:], __doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
