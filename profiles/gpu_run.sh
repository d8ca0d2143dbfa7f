#!/usr/bin/env bash
# All GPU benchmarks on one GPU, most important first:
#
#     profiles/gpu_run.sh FOLDER [SECONDS [NAME...]]
#
# With names, only these. CSVs go to FOLDER, traces to FOLDER/traces_w2 and _w4, output to FOLDER/NAME.log; nothing else
# is written. A benchmark whose CSV is there already is left out, a training run whose NAME.txt is, so that a second run
# goes on where the first one ended. With SECONDS, none is started that would probably not end in time. PYTHON names the
# interpreter (default python3), whose fsdp_symm is run. DRY_RUN=1 prints the commands instead.
#
# Several ranks share the GPU (or spread over those that are visible): NCCL 2.30 or newer, under MPS.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/bench_lib.sh"
need "usage: profiles/gpu_run.sh FOLDER [SECONDS [NAME...]]" "${1:-}" "${2:-0}"
prepare "$1" "${2:-0}"
share_gpus

# shared NAME RANKS ...: a rank's kernels must leave SMs to the other ranks' on the same GPU
shared() {
  export NCCL_MAX_CTAS=$((32 / $2))
  bench "$@"
}

# training RANKS ...: the same for train.py
training() {
  export NCCL_MAX_CTAS=$((32 / $1))
  train "$@"
}

# Seconds are estimates on one H200, imports and profiles included.
benchmarks() {
  shared fsdp_step_w2 2 165 fsdp-step --widths 4096x4 --steps 10 --profiled-steps 5
  shared unshard_w2 2 35 unshard --mib 8,32,128,256
  shared experts_w2 2 130 experts --device cuda --experts 64x6,256x8 --tokens 4096 --hidden 2048
  shared fsdp_step_w4 4 180 fsdp-step --widths 4096x4 --steps 8 --profiled-steps 3
  shared unshard_w4 4 35 unshard --mib 8,32,64
  shared experts_w4 4 150 experts --device cuda --experts 64x6 --tokens 4096 --hidden 2048
  training 2 35 debug_dense_gpu "symm plain native"
  training 2 35 debug_moe_gpu "symm+copy_engine plain+torchtitan native+torchtitan"
  shared reduce_scatter_w2 2 50 reduce-scatter --mib 8,32,64,128,256 --pieces 4,8
  shared reduce_scatter_w4 4 55 reduce-scatter --mib 8,32,64,128,256 --pieces 4,8
  shared fsdp_step_d2048_w2 2 100 fsdp-step --widths 2048x4 --steps 10 --profiled-steps 5
  shared experts_more_w2 2 150 experts --device cuda --experts 8x2,128x8 --tokens 1024,8192 --hidden 7168
}

choose benchmarks "${@:3}"
benchmarks
exit $status
