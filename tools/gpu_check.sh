#!/usr/bin/env bash
# Checks and benchmarks that need a GPU. Usage: tools/gpu_check.sh [build] [test] [sanitize] [ceilings]
# [operations] [profile] [accuracy] [models] [block_timeline] [in_part] [every_model] [pipelines] [few_steps] [decoders]
# [quality] [energy] [host_forward] [graphs] [fp8_models] [adapters] [parallel] [sequences]
#
# Without arguments all steps run, in this order. After a failed step the next one runs, except after a failed
# build. Logs go to $OUT (default build/gpu_check), with copies of the JSON that a step adds to
# benchmarks/results: the benchmarks' figures and, for the step test, the record of the suite.
#
# PYTHON        interpreter (default python3) with Torch for CUDA and requirements/test.txt
# PROCESSES     number of test processes (default one per core, at most 15)
# LEFT_OUT      test files to leave out of the steps test and sanitize
# DRAW          all or slow: the step test draws cases (tests/selection.py; default every case)
# SEQUENCES, FIRST_SEED   for the step sequences (default 2500 and 0)
# MODELS, MODEL_OPTIONS   for the steps models and graphs (default all models; "ltx,flux", "--rounds 5")
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=$(realpath -m "${OUT:-build/gpu_check}")
PROCESSES=${PROCESSES:-$(($(nproc) > 15 ? 15 : $(nproc)))}
LEFT_OUT=${LEFT_OUT:-}
DRAW=${DRAW:-}
SEQUENCES=${SEQUENCES:-2500}
FIRST_SEED=${FIRST_SEED:-0}
MODELS=${MODELS:-all}
MODEL_OPTIONS=${MODEL_OPTIONS:-}
STEPS=(build test sanitize ceilings operations profile accuracy models block_timeline in_part every_model
  pipelines few_steps decoders quality energy host_forward graphs fp8_models adapters parallel sequences)

step_build() {
  "$PYTHON" tools/build_variant.py --backend cuda &&
    "$PYTHON" tools/check_abi.py build/torch-stable-abi*-cu* &&
    "$PYTHON" tools/kernel_resources.py .build/cu[0-9]*
}

step_test() {
  local file arguments=()
  for file in $LEFT_OUT; do
    arguments+=(--leave-out "$file")
  done
  "$PYTHON" tools/quality/record_suite.py "${arguments[@]}" -- --slowest 20 ${DRAW:+--draw "$DRAW"} \
    --numprocesses "$PROCESSES" --dist worksteal
}

# Only this package's kernels are instrumented. Each tensor gets its own allocation: in Torch's pool an
# access out of bounds would hit a neighbour undetected.
step_sanitize() {
  local status=0 tool file arguments=()
  for file in $LEFT_OUT; do
    arguments+=(--ignore "$file")
  done
  if ! grep -q 22h100_diffusers_kernels build/torch-stable-abi*-cu*/*.so; then
    echo "no kernel in the namespace h100_diffusers_kernels: nothing would be checked"
    return 1
  fi
  for tool in memcheck racecheck synccheck; do
    echo "--- $tool"
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 \
      --kernel-name kns=h100_diffusers_kernels "$PYTHON" -m pytest -q -x -m sanitize --timeout 0 \
      ${arguments[@]+"${arguments[@]}"} || status=1
  done
  return "$status"
}

step_ceilings() { "$PYTHON" benchmarks/ceilings/run.py; }

# Compared with Liger, QuACK and FlashAttention-3 if requirements/benchmark.txt is installed.
step_operations() {
  local status=0 name
  for name in norm group_norm gated_residual rope activation softmax fp8 lora conv3d attention attention_int8 host; do
    echo "--- $name"
    "$PYTHON" "benchmarks/operations/bench_$name.py" || status=1
  done
  return "$status"
}

step_profile() { "$PYTHON" benchmarks/operations/profile_kernels.py; }
step_accuracy() { "$PYTHON" benchmarks/models/bench_accuracy.py; }
# Runs a benchmark of the chosen models.
of_models() {
  local options
  read -ra options <<<"$MODEL_OPTIONS"
  "$PYTHON" "benchmarks/models/bench_$1.py" --model "$MODELS" ${options[@]+"${options[@]}"}
}
step_models() { of_models models; }
step_block_timeline() { "$PYTHON" benchmarks/models/bench_block_timeline.py; }
step_pipelines() { "$PYTHON" benchmarks/pipelines/bench_pipelines.py; }
step_few_steps() { "$PYTHON" benchmarks/pipelines/bench_few_steps.py; }
step_decoders() { "$PYTHON" benchmarks/models/bench_decoders.py; }
step_quality() { "$PYTHON" benchmarks/pipelines/bench_quality.py; }
step_in_part() { "$PYTHON" benchmarks/models/bench_in_part.py; }
step_every_model() { "$PYTHON" benchmarks/models/bench_every_model.py; }
step_energy() { "$PYTHON" benchmarks/operations/bench_energy.py; }
step_host_forward() { "$PYTHON" benchmarks/models/bench_host_forward.py; }

step_graphs() {
  local status=0
  of_models cuda_graphs || status=1
  "$PYTHON" benchmarks/models/bench_cuda_graphs_memory.py || status=1
  return "$status"
}

# With torchao, and after it torch.compile, which then takes minutes for a model.
step_fp8_models() {
  local status=0 modes=eager,injected,injected+fp8 graphs=injected+graphs,injected+graphs+fp8 name
  local precisions=injected+precision-fp8,injected+precision-fp8-fast
  "$PYTHON" benchmarks/models/bench_models.py --model ltx,flux,flux2,qwenimage \
    --modes "$modes,$graphs,eager+fp8,$precisions" --weights peaked,outliers --peak-memory || status=1
  # Of so few blocks of Wan a precision quantizes none.
  "$PYTHON" benchmarks/models/bench_models.py --model wan --modes "$modes,$graphs,eager+fp8" \
    --weights peaked,outliers --peak-memory || status=1
  "$PYTHON" benchmarks/models/bench_models.py --model flux,qwenimage --calls 4 --modes "$modes,$graphs" \
    --weights peaked --no-distance || status=1
  "$PYTHON" benchmarks/pipelines/bench_pipelines.py --pipelines wan,flux,ltx,qwenimage \
    --modes "eager,injected,$precisions" || status=1
  for name in "ltx --sizes 161x512x768" "flux --sizes 1024x1024"; do
    "$PYTHON" benchmarks/models/bench_models.py --model $name --modes "$modes,compiled-regional+fp8" \
      --weights peaked --no-distance || status=1
  done
  return "$status"
}

step_adapters() { "$PYTHON" benchmarks/models/bench_adapters.py; }

# Modelled ranks on one GPU, then all GPUs if there are several.
step_parallel() {
  local status=0 gpus part
  "$PYTHON" benchmarks/operations/bench_attention_lse.py || status=1
  "$PYTHON" benchmarks/models/bench_parallel.py --modelled || status=1
  gpus=$(nvidia-smi --list-gpus | wc -l)
  if [ "$gpus" -gt 1 ]; then
    for part in step pipeline decode; do
      "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$gpus" \
        benchmarks/models/bench_parallel.py --only "$part" || status=1
    done
  fi
  return "$status"
}

# Random sequences of user actions on an injected model, with and without CUDA graphs and FP8 layers: $SEQUENCES
# per family and kind, from $FIRST_SEED on.
step_sequences() {
  local status=0 kind
  for kind in "" --graphs --fp8 "--fp8 --graphs" --lora "--lora --fp8" "--lora --graphs"; do
    echo "--- random sequences $kind"
    "$PYTHON" tests/random_sequences.py $kind --device cuda \
      --sequences "$SEQUENCES" --first-seed "$FIRST_SEED" --processes 14 || status=1
  done
  return "$status"
}

# Runs a step, logs it, shows the end of the log and copies the results that it wrote.
run_step() {
  local step=$1 started=$SECONDS status=0 result=ok mark
  mark=$(mktemp)
  "step_$step" >"$OUT/$step.log" 2>&1 || status=$?
  tail -n 25 "$OUT/$step.log"
  (cd benchmarks && find results -name '*.json' -newer "$mark" -exec cp --parents {} "$OUT" \;)
  rm "$mark"
  [ "$status" = 0 ] || result="FAILED with status $status"
  echo "=== $step: $result, $((SECONDS - started)) s"
  return "$status"
}

[ $# -gt 0 ] || set -- "${STEPS[@]}"
for step in "$@"; do
  if [[ " ${STEPS[*]} " != *" $step "* ]]; then
    echo "there is no step $step: the steps are ${STEPS[*]}" >&2
    exit 2
  fi
done

mkdir -p "$OUT"
export PYTHONUNBUFFERED=1
failed=()
for step in "$@"; do
  run_step "$step" && continue
  failed+=("$step")
  [ "$step" != build ] || break # later steps would test an old build
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
