#!/usr/bin/env bash
# Build, test and measure on a machine with a CUDA torch; nothing is installed there.
# Results go to $OUT (default benchmarks/results). A part that fails or hangs does not stop the
# next one, but the script then exits non-zero. The limits add up to less than ten minutes.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results}
mkdir -p "$OUT"
failed=()

# part NAME SECONDS COMMAND...: the last lines are shown, all of them go to $OUT/gpu.log.
part() {
  local name=$1 limit=$2 start=$SECONDS status=0
  shift 2
  echo "== $name" | tee -a "$OUT/gpu.log"
  timeout "$limit" "$@" </dev/null >"$OUT/part.log" 2>&1 || status=$?
  # A progress bar rewrites its line: keep what it showed last.
  sed 's/.*\r//' "$OUT/part.log" | tee -a "$OUT/gpu.log" | tail -n 40
  rm -f "$OUT/part.log"
  echo "== $name: exit $status after $((SECONDS - start)) s" | tee -a "$OUT/gpu.log"
  ((status == 0)) || failed+=("$name")
}

: >"$OUT/gpu.log"
part build 140 env MEMSAVE_EXT_CUDA=1 "$PYTHON" setup.py -q build_ext --inplace
part report 10 "$PYTHON" -m memsave_ext.report
part tests 110 env MEMSAVE_EXT_NATIVE=1 "$PYTHON" -m pytest -q
# Again, apart from the others, which may run out of their time.
part adam_tests 30 env MEMSAVE_EXT_NATIVE=1 "$PYTHON" -m pytest -q tests/test_adam_cuda.py
part adam 60 "$PYTHON" benchmarks/adam.py --device cuda --rounds 10 --save "$OUT"
part adam_modes 65 "$PYTHON" benchmarks/adam_modes.py --device cuda --rounds 8 --seeds 1 \
  --loss-steps 100 --save "$OUT"
part adam_memory 40 "$PYTHON" benchmarks/adam_memory.py --device cuda --repeats 2 --save "$OUT"
part overhead 40 "$PYTHON" benchmarks/checkpoint_overhead.py --rounds 400 --save "$OUT"
part batch_norm 50 "$PYTHON" benchmarks/batch_norm_cuda.py --rounds 7 --save "$OUT"
part densenet 50 "$PYTHON" benchmarks/densenet.py --save "$OUT"

if ((${#failed[@]})); then
  echo "failed: ${failed[*]}"
  exit 1
fi
