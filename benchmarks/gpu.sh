#!/usr/bin/env bash
# Build, test and measure on a machine with a CUDA torch; nothing is installed there.
#
#   benchmarks/gpu.sh a            build, report, check, tests of the GPU, Adam's kernels
#   benchmarks/gpu.sh b            batch norm, loss head, remat with budgets, a ViT-L/16
#   benchmarks/gpu.sh c            compute-sanitizer and ncu over our kernels
#   benchmarks/gpu.sh SET|PART...  other sets, or parts; the build comes first by itself
#   benchmarks/gpu.sh --list       what there is, with the seconds each may take
#   benchmarks/gpu.sh --dry-run ...  prints the commands, and runs none
#
# The first three end within eight minutes each, the others within ten. The build is packed into
# $BUILT, by default a file of benchmarks/out that is named after its sources. A later call, also in
# another tree with the same ones, takes it from there and compiles nothing. A part that fails or
# hangs does not stop the next one, but the script then exits non-zero. In $OUT (default
# benchmarks/out/gpu) it leaves gpu.log and gpu-results.tar.gz with the records of the benchmarks,
# for benchmarks/results.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/out/gpu}
RECORDS=$OUT/records
LOG=$OUT/gpu.log
SOURCES=$(find csrc tools setup.py memsave_ext \( -path 'memsave_ext/*.py' -o -path '*/__pycache__/*' \) \
  -prune -o -type f ! -name '*.so' ! -name '_build_info.json' -print 2>/dev/null |
  LC_ALL=C sort | xargs -d '\n' cat /dev/null | sha256sum)
BUILT=${BUILT:-benchmarks/out/built-${SOURCES:0:12}.tar.gz}
DRY=
BANDWIDTH=
failed=() skipped=()

# What a part runs: its limit in seconds, and what it is for.
declare -A LIMIT=(
  [build]=140 [report]=20 [check]=60 [copy]=20 [tests]=150 [adam]=60 [batch_norm]=60
  [loss_head]=70 [checkpoint]=55 [ncu]=80 [adam_host]=35 [adam_memory]=45 [densenet]=45
  [suite]=240 [python]=60 [blocking]=110 [cpu_build]=140 [overhead]=30
  [memcheck]=90 [racecheck]=80 [initcheck]=100 [synccheck]=50
  [sizes]=160 [data_parallel]=100 [largest_model]=150 [adam_modes]=110 [threads]=20 [distributed]=60
  [remat]=110
)
declare -A ABOUT=(
  [build]="compile for this GPU" [report]="what was built, and a kernel of it"
  [check]="every kernel beside pure Python and float64, and its speed"
  [loss_head]="the loss head beside torch's losses"
  [ncu]="one launch of each kernel: time, share of memory and issue, registers"
  [copy]="bandwidth of a copy, for every floor"
  [tests]="the tests of the GPU, but for tensors of more than 2^31 elements"
  [adam]="Adam's kernels beside their floors, 1 M to 500 M elements"
  [batch_norm]="batch norm's kernels beside their floors"
  [checkpoint]="DenseNet at batch 4 and 256, replicas in threads"
  [adam_host]="Adam: 296 tiny parameters, a whole step" [adam_memory]="ViT-L/16: memory and time"
  [densenet]="the main job, DenseNet-BC 100, k = 12"
  [suite]="all other tests, with CUDA on" [python]="the tests of the GPU in pure Python"
  [blocking]="the tests of the GPU with CUDA_LAUNCH_BLOCKING=1"
  [cpu_build]="a build without CUDA beside the GPU: its messages"
  [overhead]="the host's cost of a region"
  [memcheck]="compute-sanitizer: accesses" [racecheck]="compute-sanitizer: shared memory"
  [initcheck]="compute-sanitizer: memory that nobody wrote"
  [synccheck]="compute-sanitizer: barriers"
  [sizes]="tests of tensors of more than 2^31 elements"
  [data_parallel]="the original table: DenseNet at batch 4, 256 and 512"
  [largest_model]="largest ViT in 16 GB" [adam_modes]="every mode: error, time, bytes"
  [threads]="several Python threads on the CPU" [distributed]="two processes, by gloo"
  [remat]="rematerialization, also within budgets, beside torch's checkpoints"
)
declare -A SETS=(
  [a]="report check copy tests adam"
  [b]="copy batch_norm loss_head remat adam_memory"
  [c]="memcheck racecheck synccheck ncu"
  [second]="report suite blocking python"
  [training]="overhead densenet largest_model checkpoint adam_host"
  [big]="sizes data_parallel"
  [more]="cpu_build adam_modes distributed threads initcheck"
)
ORDER="a b c second training big more"

list() {
  local set part total
  for set in $ORDER; do
    total=${LIMIT[build]}
    for part in ${SETS[$set]}; do total=$((total + LIMIT[$part])); done
    echo "$set (at most $total s with the build)"
    for part in ${SETS[$set]}; do printf '  %-15s%5d s  %s\n' "$part" "${LIMIT[$part]}" "${ABOUT[$part]}"; done
  done
}

say() { echo "$*" | tee -a "$LOG"; }

# run NAME COMMAND...: the last lines are shown, all of them are logged.
run() {
  local name=$1 start=$SECONDS status=0
  shift
  say "== $name: ${ABOUT[$name]}"
  if [[ -n $DRY ]]; then
    say "$*"
    return
  fi
  # Interrupted, pytest still says what has failed so far.
  timeout -s INT -k 5 "${LIMIT[$name]}" "$@" </dev/null >"$OUT/part.log" 2>&1 || status=$?
  # A progress bar rewrites its line: keep what it showed last.
  sed 's/.*\r//' "$OUT/part.log" | tee -a "$LOG" | tail -n "${LINES_SHOWN:-40}"
  rm -f "$OUT/part.log"
  say "== $name: exit $status after $((SECONDS - start)) s of ${LIMIT[$name]}"
  ((status == 0)) || failed+=("$name")
  return "$status"
}

has() { "$PYTHON" -c "import $1" 2>/dev/null; }

# pytest ARGUMENTS...: without files that need hypothesis where there is none.
pytest() {
  local name=$1 file
  shift
  local arguments=(-q -rf -p no:cacheprovider)
  if ! has hypothesis; then
    while read -r file; do
      arguments+=("--ignore=$file")
    done < <(grep -lE '^(from|import) (hypothesis|random_programs)' tests/*/test_*.py)
  fi
  run "$name" env MEMSAVE_EXT_NATIVE=1 "${EXTRA[@]}" "$PYTHON" -m pytest "${arguments[@]}" "$@"
}

record() { # record NAME SCRIPT ARGUMENTS...
  local name=$1 script=$2
  shift 2
  run "$name" "$PYTHON" "benchmarks/$script" --save "$RECORDS" "$@"
}

# A tool of CUDA, where it is installed.
tool_of_cuda() {
  command -v "$1" || ls "${CUDA_HOME:-/usr/local/cuda}/bin/$1" 2>/dev/null ||
    compgen -G "/opt/nvidia/nsight-compute/*/$1" | LC_ALL=C sort -V | tail -n 1 | grep .
}

skip() { # skip NAME WHY
  say "== $1: skipped, $2"
  skipped+=("$1")
}

# Only our kernels are looked at; without torch's cache each tensor is an allocation of its own, so
# that an access beside it is seen. Graphs need the cache. A small choice: each launch is slowed down
# by a hundred.
sanitizer() {
  local name=$1
  shift
  local tool
  tool=$(tool_of_cuda compute-sanitizer)
  if [[ -z $tool ]]; then
    skip "$name" "there is no compute-sanitizer"
    return
  fi
  # Names that contain this, as every kernel of ours does by its namespace. `true` uses no CUDA.
  local ours=(--kernel-name kns=memsave_ext)
  if ! "$tool" --require-cuda-init no "${ours[@]}" true >/dev/null 2>&1; then
    # Without it all of torch's kernels would be slowed down, past any limit.
    skip "$name" "this compute-sanitizer cannot choose kernels"
    return
  fi
  [[ $name == initcheck ]] && ours=()  # what torch's kernels write would look missing
  EXTRA=(PYTORCH_NO_CUDA_MEMORY_CACHING=1)
  run "$name" env MEMSAVE_EXT_NATIVE=1 "${EXTRA[@]}" "$tool" --tool "$name" "${ours[@]}" \
    --target-processes all --error-exitcode 99 "$@" \
    "$PYTHON" -m pytest -q -x -p no:cacheprovider tests/emulation/sanitized_kernels.py
  EXTRA=()
}

built_files() { ls memsave_ext/_C.*.so memsave_ext/_build_info.json; }

part_build() {
  if [[ -z $DRY && -f $BUILT ]]; then
    tar -xzf "$BUILT" && say "== build: taken from $BUILT" && return
  fi
  run build env MEMSAVE_EXT_CUDA=1 "$PYTHON" setup.py -q build_ext --inplace || return
  if built_files >/dev/null 2>&1 && mkdir -p "$(dirname "$BUILT")"; then
    built_files | tar -czf "$BUILT" -T - || say "== build: not packed into $BUILT"
  fi
  return 0
}
part_report() { run report "$PYTHON" -m memsave_ext.report; }
part_check() { run check "$PYTHON" -m memsave_ext.check --device cuda --json "$RECORDS/check.json"; }
part_copy() {
  run copy "$PYTHON" benchmarks/cuda_timing.py &&
    BANDWIDTH=$(grep -E '^[0-9.]+$' "$LOG" | tail -n 1)
}

GPU_TESTS=(tests/*/test_*cuda*.py)
NOT_LARGE="not 2_to_the_31"
part_tests() {
  local parallel=()
  has xdist && parallel=(-n 4 --dist loadfile)
  pytest tests "${GPU_TESTS[@]}" "${parallel[@]}" -k "$NOT_LARGE"
}
part_blocking() {
  EXTRA=(CUDA_LAUNCH_BLOCKING=1)
  # Overlap is what this variable takes away, and captures need it unset.
  pytest blocking "${GPU_TESTS[@]}" -k "$NOT_LARGE and not overlaps and not captur and not graph"
  EXTRA=()
}
part_python() {
  run python env MEMSAVE_EXT_NATIVE=0 "$PYTHON" -m pytest -q -rf -p no:cacheprovider \
    "${GPU_TESTS[@]}" -k "$NOT_LARGE"
}
part_suite() {
  local file arguments=()
  for file in "${GPU_TESTS[@]}"; do arguments+=("--ignore=$file"); done
  has xdist && arguments+=(-n 8 --dist loadfile)
  EXTRA=(OMP_NUM_THREADS=2)
  pytest suite "${arguments[@]}"
  EXTRA=()
}
part_sizes() { pytest sizes "${GPU_TESTS[@]}" -k "2_to_the_31"; }

part_adam() { record adam adam_cuda.py ${BANDWIDTH:+--bandwidth "$BANDWIDTH"}; }
part_batch_norm() { LINES_SHOWN=110 record batch_norm batch_norm_cuda.py --rounds 9 ${BANDWIDTH:+--bandwidth "$BANDWIDTH"}; }
part_loss_head() {
  LINES_SHOWN=60 record loss_head linear_cross_entropy.py --device cuda --dtype bfloat16 --shapes 4 \
    --rounds 5
}
# The clock stays as it is in training. Of the check's calls each kernel and shape once.
part_ncu() {
  local tool
  tool=$(tool_of_cuda ncu)
  if [[ -z $tool ]]; then
    skip ncu "there is no ncu"
    return
  fi
  local metrics=gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed
  metrics+=,sm__inst_issued.avg.pct_of_peak_sustained_active,launch__registers_per_thread
  metrics+=,sm__warps_active.avg.pct_of_peak_sustained_active
  # Ended by its limit, it has written what it came to.
  run ncu "$tool" --clock-control none --kernel-name-base mangled \
    --kernel-name regex:memsave_ext --filter-mode per-launch-config --launch-count 1 \
    --metrics "$metrics" --csv --print-units base --log-file "$RECORDS/ncu.csv" \
    "$PYTHON" -m memsave_ext.check --device cuda
  if [[ -z $DRY ]]; then
    "$PYTHON" benchmarks/ncu_table.py "$RECORDS/ncu.csv" 2>&1 | tee -a "$LOG" | head -n 150
  fi
}
part_checkpoint() { record checkpoint checkpoint_cuda.py; }
part_adam_host() { record adam_host adam.py --device cuda --rounds 8; }
part_adam_memory() { record adam_memory adam_memory.py --device cuda --repeats 2; }
part_densenet() { record densenet densenet.py --depth 100 --growth-rate 12 --batch-size 64; }
part_adam_modes() {
  record adam_modes adam_modes.py --device cuda --rounds 8 --seeds 1 --loss-steps 100
}
part_overhead() { record overhead checkpoint_overhead.py --device cuda --rounds 300; }
part_threads() { record threads checkpoint_threads.py --rounds 10; }
part_remat() { record remat remat.py --device cuda --rounds 12 --scale 16; }
part_distributed() { record distributed distributed.py --device cuda; }
part_data_parallel() {
  record data_parallel data_parallel.py --device cuda --rounds 4 \
    --methods naive torch torch_reentrant memsave_ext memsave_ext_checkpoint
}
part_largest_model() { record largest_model largest_model.py --device cuda --budget-gb 16; }

# Elsewhere, so that the build with CUDA stays.
part_cpu_build() {
  local tree
  tree=$(mktemp -d)
  if git rev-parse --git-dir >/dev/null 2>&1; then
    git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$tree"
  else
    tar -c --exclude=./build --exclude=./.venv --exclude='*.so' --exclude=_build_info.json . | tar -xC "$tree"
  fi
  # shellcheck disable=SC2016  # $0 is the inner bash's
  run cpu_build env -C "$tree" PYTHONPATH="$tree" MEMSAVE_EXT_CUDA=0 MEMSAVE_EXT_NATIVE=auto bash -c '
    "$0" setup.py -q build_ext --inplace && "$0" -m memsave_ext.report &&
      MEMSAVE_EXT_NATIVE=1 "$0" -m pytest -q -rs -p no:cacheprovider \
        tests/packaging/test_cpu_build_cuda.py tests/packaging/test_native.py' "$PYTHON"
  rm -rf "$tree"
}

part_memcheck() { sanitizer memcheck --leak-check no; }
part_racecheck() { sanitizer racecheck --racecheck-report all; }
part_initcheck() { sanitizer initcheck; }
part_synccheck() { sanitizer synccheck; }

if [[ ${1:-} == --list ]]; then
  list
  exit
fi
if [[ ${1:-} == --dry-run ]]; then
  DRY=1
  shift
fi
parts=()
for name in "${@:-a}"; do
  if [[ -n ${SETS[$name]:-} ]]; then
    read -ra chosen <<<"${SETS[$name]}"
    parts+=("${chosen[@]}")
  elif [[ -n ${LIMIT[$name]:-} ]]; then
    [[ $name == build ]] || parts+=("$name")
  else
    echo "gpu.sh: no set or part $name; those there are:" >&2
    list >&2
    exit 2
  fi
done
EXTRA=()
rm -rf "$RECORDS"
mkdir -p "$RECORDS"
: >"$LOG"
if part_build; then
  for name in "${parts[@]}"; do "part_$name"; done
else
  say "not run without a build: ${parts[*]}"
fi

if [[ -n $(ls "$RECORDS") ]]; then tar -C "$RECORDS" -czf "$OUT/gpu-results.tar.gz" .; fi
rm -rf "$RECORDS"
((${#skipped[@]})) && say "skipped: ${skipped[*]}"
if ((${#failed[@]})); then
  say "failed: ${failed[*]}"
  exit 1
fi
say "all passed in $SECONDS s"
