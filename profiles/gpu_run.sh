#!/usr/bin/env bash
# All GPU benchmarks on one GPU, most important first:
#
#     profiles/gpu_run.sh FOLDER [SECONDS]
#
# CSVs go to FOLDER, traces to FOLDER/traces_w2 and _w4, output to FOLDER/NAME.log; nothing else is written. A benchmark
# whose CSV is there already is left out, so that a second run goes on where the first one ended. With SECONDS, none is
# started that would probably not end in time. PYTHON names the interpreter (default python3), whose fsdp_symm is run.
#
# Several ranks share the GPU (or spread over those that are visible): NCCL 2.30 or newer, under MPS, without which the
# ranks' kernels would take turns. MPS is started here if nobody has, and ended again.
set -uo pipefail

out=${1:?usage: profiles/gpu_run.sh FOLDER [SECONDS]}
budget=${2:-0}
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
export NCCL_MULTI_RANK_GPU_ENABLE=1                # several ranks on one device
export TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1  # the same for torch's own symmetric memory
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

mps=$(command -v nvidia-cuda-mps-control || true)
if [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ] && [ -n "$mps" ]; then
  own_mps=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY=$own_mps/pipe CUDA_MPS_LOG_DIRECTORY=$own_mps/log
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  "$mps" -d
  trap 'echo quit | "$mps"; rm -rf "$own_mps"' EXIT
fi

status=0
SECONDS=0

# bench NAME RANKS ESTIMATE ARGUMENT...: one benchmark, for at most twice its estimated seconds.
bench() {
  local name=$1 ranks=$2 estimate=$3 began=$SECONDS
  shift 3
  [ -e "$out/$name.csv" ] && return
  if [ "$budget" -gt 0 ] && [ $((SECONDS + estimate)) -gt "$budget" ]; then
    echo "$name: not started, about $estimate s are needed and $((budget - SECONDS)) s are left"
    status=1
    return
  fi
  # a rank's kernels must leave SMs to the other ranks' on the same GPU
  if NCCL_MAX_CTAS=$((32 / ranks)) timeout $((2 * estimate)) "$python" -m fsdp_symm.cli bench "$@" \
    --csv "$out/$name.csv" --ranks "$ranks" --traces "$out/traces_w$ranks" >"$out/$name.log" 2>&1; then
    echo "$name: $((SECONDS - began)) s"
  else
    echo "$name: failed after $((SECONDS - began)) s, see $out/$name.log"
    status=1
  fi
}

# Seconds are estimates on one H200, imports and profiles included.
bench fsdp_step_w2 2 130 fsdp-step --widths 4096x4 --steps 10 --profiled-steps 5
bench unshard_w2 2 50 unshard --mib 32,128
bench experts_w2 2 130 experts --device cuda --experts 64x6,256x8 --tokens 4096 --hidden 2048
bench fsdp_step_w4 4 150 fsdp-step --widths 4096x4 --steps 8 --profiled-steps 3
bench unshard_w4 4 60 unshard --mib 32,64
bench experts_w4 4 150 experts --device cuda --experts 64x6 --tokens 4096 --hidden 2048
bench reduce_scatter_w2 2 70 reduce-scatter --mib 64,128 --pieces 2,4,8
bench reduce_scatter_w4 4 80 reduce-scatter --mib 64 --pieces 2,4,8
bench fsdp_step_d2048_w2 2 100 fsdp-step --widths 2048x4 --steps 10 --profiled-steps 5
bench experts_more_w2 2 150 experts --device cuda --experts 8x2,128x8 --tokens 1024,4096 --hidden 4096
exit $status
