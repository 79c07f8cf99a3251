#!/usr/bin/env bash
# A GPU's first visit, in three calls of under ten minutes each, for a machine that is lent for half
# an hour and may have no network: torch, Triton, NumPy, pytest and a compiler.
#
#   tools/first_gpu.sh test  FOLDER   builds in place, compiles kernels, then correctness
#   tools/first_gpu.sh bench FOLDER   benchmarks against eager, torch.compile and installed peers
#   tools/first_gpu.sh tune  FOLDER   a tuning table per op, then one of all of them
#
# In each call what matters most comes first, and FOLDER holds a result as soon as there is one: a
# call that is cut off, or that an op ends, has told all before it. PYTHON names the interpreter,
# SECONDS_HERE what a call may take (570), PROCESSES how many processors compile. The second and the
# third call need typer and rich as well.
set -uo pipefail
cd "$(dirname "$0")/.."

usage() {
  sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
  exit 2
}
[ $# -eq 2 ] || usage
step=$1
mkdir -p "$2" && folder=$(cd "$2" && pwd) || exit 2
python=${PYTHON:-python3}
limit=${SECONDS_HERE:-570}
processes=${PROCESSES:-$(nproc)}
export PYTHONPATH="$PWD/tools:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
log="$folder/$step.log"
failures=0

# run SECONDS NAME COMMAND...: at most so long, and no longer than the call has; told in the log.
run() {
  local most=$1 name=$2 started=$SECONDS left=$((limit - SECONDS)) code
  shift 2
  [ "$left" -lt "$most" ] && most=$left
  if [ "$most" -lt 5 ]; then
    echo "$name: no time left" | tee -a "$log"
    failures=$((failures + 1))
    return 1
  fi
  # An interrupt lets pytest and the benchmarks write what they have.
  timeout --signal=INT --kill-after=10 "$most" "$@" >>"$log" 2>&1
  code=$?
  echo "$name: exit code $code after $((SECONDS - started)) s" | tee -a "$log"
  [ "$code" -eq 0 ] || failures=$((failures + 1))
  return "$code"
}

# What was written so far, as few files: they travel better than many.
pack() {
  [ -d "$folder/$1" ] && tar -C "$folder" -czf "$folder/$1.tar.gz" "$1"
}

case $step in
  test)
    run 300 build "$python" setup.py build_ext --inplace
    run 120 warm "$python" tools/warm_kernels.py --processes "$processes" --seconds 110 \
      --record "$folder"
    run "$limit" tests "$python" -m pytest -q -p gpu_session -p no:cacheprovider tests -m gpu \
      --record "$folder"
    ;;
  bench)
    mkdir -p "$folder/results" "$folder/records"
    for op in $("$python" tools/gpu_order.py); do
      run 60 "bench $op" "$python" -m fusedops.cli.main bench "$op" --device cuda \
        --dtype bfloat16 --seconds 0.5 --results "$folder/results" \
        --json "$folder/records/$op.json"
      pack results
      pack records
    done
    ;;
  tune)
    mkdir -p "$folder/tables"
    for op in $("$python" tools/gpu_order.py); do
      run 60 "tune $op" "$python" -m fusedops.cli.main bench tune --ops "$op" --device cuda \
        --dtype bfloat16,float32 --seconds 0.3 --out "$folder/tables/$op.json" &&
        "$python" tools/merge_tables.py "$folder/tables" "$folder" >>"$log" 2>&1
    done
    pack tables
    ;;
  *) usage ;;
esac
echo "$step: $failures steps failed; $SECONDS s; $folder" | tee -a "$log"
[ "$failures" -eq 0 ]
