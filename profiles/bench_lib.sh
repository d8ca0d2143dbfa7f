# What the scripts that run benchmarks share; to be sourced by one of them:
#
#     need USAGE FOLDER NUMBER...  ends the script with its usage if these are no folder and no whole numbers
#     choose STEPS NAME...         which attempts of the function STEPS are wanted; without names, all
#     prepare FOLDER SECONDS       where everything goes, how long all of it may take (0: no limit)
#     share_gpus                   several ranks on one GPU: MPS, NCCL's permission
#     show_environment             for a dry run: what every command is started with
#     attempt NAME PRODUCT ESTIMATE COMMAND...
#     bench NAME RANKS ESTIMATE ARGUMENT...
#     train RANKS ESTIMATE CONFIG VARIANTS ARGUMENT...
#
# PYTHON names the interpreter (default python3), whose fsdp_symm is run. With DRY_RUN=1 nothing is started or written:
# the commands are printed, for machines without a GPU. `status` is 1 when something failed or was not started.

python=${PYTHON:-python3}
status=0
listing=
names=()

need() {
  local usage=$1 number
  case "$2" in '' | -*) echo "$usage" >&2 && exit 2 ;; esac
  shift 2
  for number in "$@"; do
    case "$number" in
      '' | *[!0-9]*) echo "$usage; found $number, expected a whole number" >&2 && exit 2 ;;
      ??????????*) echo "$usage; found $number, expected at most nine digits" >&2 && exit 2 ;;
    esac
  done
}

# choose STEPS NAME...: sets `names` to the names of all that is wanted, in the order of STEPS.
choose() {
  local steps=$1 name chosen=()
  shift
  listing=1
  "$steps"
  listing=
  for name in "$@"; do
    [[ " ${names[*]} " == *" $name "* ]] && continue
    echo "${0##*/}: found no $name, expected some of: ${names[*]}" >&2
    exit 2
  done
  [ $# -gt 0 ] || return 0
  for name in "${names[@]}"; do
    [[ " $* " != *" $name "* ]] || chosen+=("$name")
  done
  names=("${chosen[@]}")
}

# prepare FOLDER SECONDS: to be called in the folder that FOLDER may be relative to; ends in the repository.
prepare() {
  local root
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  # below the repository as a short name: it becomes part of the command that every row of a CSV carries
  out=$(realpath -m --relative-base="$root" "$1")
  budget=$((10#$2))  # 08 is eight, not a bad octal number
  cd "$root" || exit 2
  [ "${DRY_RUN:-}" = 1 ] || mkdir -p "$out" || exit 2
  export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
  export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1  # no NVLink multicast anywhere
  SECONDS=0
  planned=0
}

# share_gpus: without MPS the ranks' kernels would take turns; it is started here if nobody has, and ended again.
share_gpus() {
  export NCCL_MULTI_RANK_GPU_ENABLE=1                # several ranks on one device, NCCL 2.30 or newer
  export TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1  # the same for torch's own symmetric memory
  mps=$(command -v nvidia-cuda-mps-control || true)
  if [ "${DRY_RUN:-}" != 1 ] && [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ] && [ -n "$mps" ]; then
    own_mps=$(mktemp -d)
    export CUDA_MPS_PIPE_DIRECTORY=$own_mps/pipe CUDA_MPS_LOG_DIRECTORY=$own_mps/log
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    "$mps" -d
    trap 'echo quit | "$mps"; rm -rf "$own_mps"' EXIT
  fi
}

show_environment() {
  [ "${DRY_RUN:-}" = 1 ] || return 0
  local name
  for name in NCCL_NVLS_ENABLE TORCH_SYMM_MEM_DISABLE_MULTICAST NVSHMEM_DISABLE_NVLS OMP_NUM_THREADS \
    NCCL_MULTI_RANK_GPU_ENABLE TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES NCCL_MAX_CTAS; do
    [ -z "${!name:-}" ] || echo "export $name=${!name}"
  done
}

# attempt NAME PRODUCT ESTIMATE COMMAND...: one command, for at most twice its estimated seconds and within the budget.
# PRODUCT is the file below the folder that the command writes, or, where it writes none, that gets what it prints. If it
# is there already, the command is left out, so that a second run goes on where the first one ended.
attempt() {
  local name=$1 product=$2 estimate=$3 began=$SECONDS limit=$((2 * $3)) left
  shift 3
  [ -z "$listing" ] || { names+=("$name") && return; }
  [[ " ${names[*]} " == *" $name "* ]] || return 0
  [ -e "$out/$product" ] && return
  if [ "${DRY_RUN:-}" = 1 ]; then
    planned=$((planned + estimate))
    printf '%s, about %s s (%s s so far): timeout -k 45 %s' "$name" "$estimate" "$planned" "$limit"
    printf ' %q' "$@"
    echo
    return
  fi
  if [ "$budget" -gt 0 ]; then
    left=$((budget - SECONDS))
    if [ "$estimate" -gt "$left" ]; then
      echo "$name: not started, about $estimate s are needed and $left s are left"
      status=1
      return
    fi
    [ "$limit" -le "$left" ] || limit=$left
  fi
  # torchrun gives its ranks 30 s to end
  if timeout -k 45 "$limit" "$@" >"$out/$name.printed" 2>"$out/$name.log"; then
    echo "$name: $((SECONDS - began)) s"
    [ -e "$out/$product" ] || mv "$out/$name.printed" "$out/$product"
  else
    echo "$name: failed after $((SECONDS - began)) s, see $out/$name.log"
    status=1
  fi
  if [ -e "$out/$name.printed" ]; then
    cat "$out/$name.printed" >>"$out/$name.log"
    rm "$out/$name.printed"
  fi
}

# bench NAME RANKS ESTIMATE ARGUMENT...: one benchmark into NAME.csv, its traces beside it.
bench() {
  local name=$1 ranks=$2 estimate=$3
  shift 3
  attempt "$name" "$name.csv" "$estimate" "$python" -m fsdp_symm.cli bench "$@" \
    --csv "$out/$name.csv" --ranks "$ranks" --traces "$out/traces_w$ranks"
}

# train RANKS ESTIMATE CONFIG VARIANTS ARGUMENT...: one run of train.py for each variant, each with a time limit of its
# own, its row in train_wRANKS.csv.
train() {
  local ranks=$1 estimate=$2 config=$3 variants=$4 variant name
  shift 4
  for variant in $variants; do
    name=train_${config}_${variant/+/_}_w$ranks
    attempt "$name" "$name.txt" "$estimate" "$python" -m fsdp_symm.cli bench train --csv "$out/train_w$ranks.csv" \
      --config "configs/$config.toml" --ranks "$ranks" --variants "$variant" --limit $((2 * estimate - 20)) \
      --traces "$out/traces_w$ranks" "$@"
  done
}
