#!/usr/bin/env bash
# Benchmarks and training on the GPUs of one host, most important first:
#
#     profiles/nvlink/run.sh [--dry-run] FOLDER [SECONDS [NAME...]]
#
# With names, only these. One rank for every visible GPU. Into FOLDER go doctor_wN.txt and .json, a CSV for each
# benchmark, train_wN.csv with a row for each training run, a trace for each of them in traces_wN, and output in NAME.log.
# What is there already is left out, so that a second run goes on where the first one ended: all of it takes 20 minutes by
# the estimates below, one run at most SECONDS (default 540; 0: no limit). What would probably not end in time is not
# started. The exit status is 1 when something failed, was not started, or the losses of a model's variants differ.
#
#     PYTHON=...      the interpreter (default python3), whose fsdp_symm is run; with torchtitan 0.3
#     RANKS=N         as many ranks instead; more than GPUs share them under MPS, to try the script: no measurement
#     LAYERS=N        layers of the two real-size models (default: all that the configurations name; 4 on shared GPUs)
#     DRY_RUN=1       as --dry-run: prints the commands and starts nothing, also without a GPU (two ranks then)
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../bench_lib.sh"

usage="usage: profiles/nvlink/run.sh [--dry-run] FOLDER [SECONDS [NAME...]]"
if [ "${1:-}" = --dry-run ]; then
  DRY_RUN=1
  shift
fi
need "$usage" "${1:-}" "${2:-0}" "${RANKS:-2}" "${LAYERS:-1}"
prepare "$1" "${2:-540}"

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 2
ranks=$((10#${RANKS:-$gpus}))
if [ "${DRY_RUN:-}" = 1 ] && [ "$gpus" -eq 0 ]; then
  ranks=$((10#${RANKS:-2}))
  gpus=$ranks
elif [ "$gpus" -eq 0 ] || [ "$ranks" -lt 2 ]; then
  echo "nvlink/run.sh: found $gpus GPUs and $ranks ranks, expected at least 1 and 2," \
    "fix: a machine with GPUs, RANKS=2 to share one, or --dry-run" >&2
  exit 2
fi
layers=${LAYERS:-}
if [ "$ranks" -gt "$gpus" ]; then
  share_gpus
  export NCCL_MAX_CTAS=$((32 / ranks > 0 ? 32 / ranks : 1))  # a rank's kernels must leave SMs to the others'
  layers=${layers:-4}
else
  # a rank has its GPU to itself: what a caller has set for sharing would only be measured with it
  unset NCCL_MULTI_RANK_GPU_ENABLE TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES NCCL_MAX_CTAS
fi
show_environment
torchrun=("$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks")
w=w$ranks

ep=(--override "parallelism.expert_parallel_degree=$ranks")
cut=()
[ -z "$layers" ] || cut=(--override "model.layers=$layers")

# Seconds are estimates for two H200s, imports and profiles included.
everything() {
  attempt "doctor_$w" "doctor_$w.txt" 20 "${torchrun[@]}" -m fsdp_symm.cli doctor
  train "$ranks" 35 debug_moe_gpu "symm+copy_engine plain+torchtitan native+torchtitan" "${ep[@]}"
  train "$ranks" 50 llama3_8b "symm plain native" "${cut[@]}"
  train "$ranks" 55 moe_16b "symm+copy_engine plain+torchtitan native+torchtitan" "${ep[@]}" "${cut[@]}"
  bench "unshard_$w" "$ranks" 30 unshard --mib 8,32,64,128,256
  bench "experts_$w" "$ranks" 70 experts --device cuda --experts 64x6 --tokens 4096 --hidden 2048
  bench "fsdp_step_$w" "$ranks" 100 fsdp-step --widths 4096x4 --tokens 2048 --steps 30 --profiled-steps 3
  # the same kernels in the same order every time: losses must be equal in every digit
  train "$ranks" 35 debug_dense_gpu "symm plain native" --override debug.deterministic=true
  bench "reduce_scatter_$w" "$ranks" 70 reduce-scatter --mib 8,32,64,128,256
  # three variants alive: four hold 93 GiB of masters and optimizer states on each of two ranks
  [ "$ranks" -gt "$gpus" ] ||
    bench "fsdp_step_d8192_$w" "$ranks" 160 fsdp-step --widths 8192x3 --steps 10 --profiled-steps 3 --alive 3
  bench "experts_e256_$w" "$ranks" 90 experts --device cuda --experts 256x8 --tokens 4096 --hidden 2048
  train "$ranks" 35 debug_moe_gpu symm+all_to_all "${ep[@]}"
  attempt "doctor_json_$w" "doctor_$w.json" 20 "${torchrun[@]}" -m fsdp_symm.cli doctor --json
}

choose everything "${@:3}"
everything

if [ "${DRY_RUN:-}" != 1 ]; then
  "$python" -m fsdp_symm.cli bench summary "$out" || status=1
fi
exit $status
