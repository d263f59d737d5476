// A kernel runs on ranges of its items, in threads, compiled for the best instruction set of this machine.
//
// A kernel is a struct with `template <int kLanes> void run(int64_t begin, int64_t end) const`, where kLanes
// is the native number of floats in a vector. It must be ALWAYS_INLINE and so must all it calls on the way to
// the vectors: what is inlined into the functions below is compiled for their instruction set, and what is
// not is compiled for the baseline.
#pragma once

#include <cstdint>

#include "params.h"
#include "vector.h"

namespace h100_diffusers_kernels {

template <typename Kernel>
void run_baseline(const Kernel& kernel, int64_t begin, int64_t end) {
  kernel.template run<4>(begin, end);
}

#if defined(__x86_64__)

template <typename Kernel>
__attribute__((target("avx2,fma,f16c"))) void run_avx2(const Kernel& kernel, int64_t begin, int64_t end) {
  kernel.template run<8>(begin, end);
}

template <typename Kernel>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))) void run_avx512(
    const Kernel& kernel, int64_t begin, int64_t end) {
  kernel.template run<16>(begin, end);
}

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

inline InstructionSet best_instruction_set() {
  static const InstructionSet best = [] {
    __builtin_cpu_init();
    // No processor has AVX2 and lacks F16C.
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return InstructionSet::kBaseline;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? InstructionSet::kAvx512 : InstructionSet::kAvx2;
  }();
  return best;
}

template <typename Kernel>
void run_range(void* kernel, int64_t begin, int64_t end) {
  const Kernel& typed = *static_cast<const Kernel*>(kernel);
  switch (best_instruction_set()) {
    case InstructionSet::kAvx512:
      return run_avx512(typed, begin, end);
    case InstructionSet::kAvx2:
      return run_avx2(typed, begin, end);
    case InstructionSet::kBaseline:
      return run_baseline(typed, begin, end);
  }
}

#else

template <typename Kernel>
void run_range(void* kernel, int64_t begin, int64_t end) {
  run_baseline(*static_cast<const Kernel*>(kernel), begin, end);
}

#endif

// Splits `items` items of `item_size` elements among threads. A thread gets enough elements to be worth it.
template <typename Kernel>
void parallel_run(Stream stream, int64_t items, int64_t item_size, Kernel kernel) {
  constexpr int64_t kElementsPerThread = 32768;
  if (items == 0 || item_size == 0) return;
  const int64_t grain = (kElementsPerThread + item_size - 1) / item_size;
  stream.parallel_for(0, items, grain, &run_range<Kernel>, &kernel);
}

}  // namespace h100_diffusers_kernels
