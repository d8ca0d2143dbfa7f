#!/usr/bin/env bash
# All checks that need a GPU, on one GPU that ranks share, most important first:
#
#     profiles/gpu_checks.sh FOLDER [SECONDS [NAME...]]
#
# With names, only these checks. For each of them FOLDER gets NAME.txt with what it printed when all was well, else
# NAME.log; training runs leave their traces in NAME/traces. A check that has its NAME.txt is left out, so that a second
# run goes on where the first one ended. With SECONDS, none is started that would probably not end in time. The last
# lines are one for each check; the exit status is 1 if one failed or was not started. PYTHON names the interpreter
# (default python3), whose fsdp_symm is checked; with pytest, hypothesis and torchtitan. DRY_RUN=1 prints the commands
# instead.
#
# NCCL 2.30 or newer, under MPS.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/bench_lib.sh"
need "usage: profiles/gpu_checks.sh FOLDER [SECONDS [NAME...]]" "${1:-}" "${2:-0}"
prepare "$1" "${2:-0}"
share_gpus
export FSDP_SYMM_TEST_DEVICE=cuda
export FSDP_SYMM_RANDOM_MODELS_4=10  # 500 random steps in all

# tests NAME ESTIMATE ARGUMENT...: pytest on files, with the names of what passed and reasons for what it leaves out.
tests() {
  local name=$1 estimate=$2
  shift 2
  attempt "$name" "$name.txt" "$estimate" "$python" -m pytest -q -rsp -p no:cacheprovider "$@"
}

# trains CONFIG RANKS ESTIMATE EXPECTED ARGUMENT...: a training run whose trace must show what is expected. Processes that
# last longer than estimated print where they are.
trains() {
  local name=train_$1_w$2 ranks=$2 estimate=$3 expected=$4 config=configs/$1.toml
  shift 4
  # shellcheck disable=SC2016 # expanded by the inner shell
  attempt "$name" "$name.txt" "$estimate" bash -euc '
    python=$1 ranks=$2 folder=$3 expected=$4 estimate=$5; shift 5
    mkdir -p "$folder/hooks"
    echo "import faulthandler; faulthandler.dump_traceback_later($estimate)" >"$folder/hooks/sitecustomize.py"
    export PYTHONPATH=$folder/hooks:$PYTHONPATH
    export NCCL_MAX_CTAS=$((32 / ranks))  # a rank must leave SMs to the others, whose kernels it waits for
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" train.py "$@" --dump_folder "$folder"
    for claim in $expected; do "$python" -m fsdp_symm.cli inspect "$folder/traces" --expect "$claim"; done
    echo "shown: $expected"
  ' trains "$python" "$ranks" "$out/$name" "$expected" "$estimate" --config "$config" "$@"
}

# trains_experts RANKS ESTIMATE: padded rows, with room for all that could come, so that nothing is read on the host.
trains_experts() {
  trains debug_moe_gpu "$1" "$2" "copy-engine:all_gather copy-engine:dispatch,combine" \
    --parallelism.expert_parallel_degree "$1" --expert_parallel.implementation copy_engine \
    --expert_parallel.overflow drop --expert_parallel.recv_capacity_factor "$1"
}

# probes RANKS ESTIMATE: what each way is moved by; fails on a wrong byte or an error.
probes() {
  attempt "doctor_w$1" "doctor_w$1.txt" "$2" "$python" -m torch.distributed.run --standalone --nproc-per-node "$1" \
    -m fsdp_symm.cli doctor
}

# Seconds are estimates on one H200, imports included.
checks() {
  tests experts 250 tests/gpu/test_experts.py
  tests copy_engine 200 tests/gpu/test_copy_engine.py
  trains debug_dense_gpu 2 30 copy-engine:all_gather
  trains_experts 2 40
  trains_experts 4 60
  probes 2 30
  tests random 200 tests/test_random.py
  tests nccl 60 tests/gpu/test_nccl.py
  tests narrow 40 tests/test_narrow.py
  tests parity 450 tests/test_parity.py
}

choose checks "${@:3}"
checks
[ "${DRY_RUN:-}" = 1 ] && exit
for name in "${names[@]}"; do
  if [ -e "$out/$name.txt" ]; then
    echo "$name: $(tail -n 1 "$out/$name.txt")"
  elif [ -e "$out/$name.log" ]; then
    echo "$name: FAILED, $(grep -m 1 -E '^(FAILED|ERROR)|Error' "$out/$name.log" || tail -n 1 "$out/$name.log" | grep . ||
      echo "see $name.log")"
  else
    echo "$name: NOT RUN"
  fi
done
exit "$status"
