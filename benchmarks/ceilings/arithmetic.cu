// Throughput of arithmetic outside the tensor cores: fused multiply-add and exp2, in results per clock of one
// multiprocessor and in results per second of all. A packed instruction has two results.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "common.cuh"

namespace ceilings {
namespace {

constexpr int kThreads = 1024;
constexpr int kChains = 8;  // independent chains of a thread
constexpr int kStepsPerIteration = 8;
constexpr int kIterations = 1024;
constexpr int kRepetitions = 7;
// More than half of a multiprocessor's shared memory, so that it holds one block.
constexpr int kSharedBytes = 120 * 1024;

// An operation on 32 bits of packed values: one step on the device, and its result for one value on the host.
// Steps are chained: x = step(x).
struct FloatFma {
  static constexpr const char* kName = "FP32 FMA";
  static constexpr int kResults = 1, kTheory = 128;
  static constexpr const char* kFormula = "128 lanes";
  static constexpr double kTolerance = 0;
  static __device__ uint32_t step(uint32_t x) {
    asm volatile("fma.rn.f32 %0, %0, %1, %2;"
                 : "+r"(x)
                 : "r"(__float_as_uint(0.75f)), "r"(__float_as_uint(0.3f)));
    return x;
  }
  static double host_step(double x) { return std::fma(static_cast<float>(x), 0.75f, 0.3f); }
  static uint32_t pack(float low, float) {
    uint32_t bits;
    std::memcpy(&bits, &low, sizeof(bits));
    return bits;
  }
  static double value(uint32_t bits, int) {
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
  }
};

template <typename T>
T from_bits(uint16_t bits) {
  T value;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof(value));
  return value;
}
template <typename T>
uint16_t to_bits(T value) {
  uint16_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

struct Half2 {
  static constexpr int kResults = 2;
  static uint32_t pack(float low, float high) {
    return to_bits(__float2half_rn(low)) | uint32_t{to_bits(__float2half_rn(high))} << 16;
  }
  static double value(uint32_t bits, int half) {
    return __half2float(from_bits<__half>(static_cast<uint16_t>(bits >> (16 * half))));
  }
};

struct BFloat162 {
  static constexpr int kResults = 2;
  static uint32_t pack(float low, float high) {
    return to_bits(__float2bfloat16_rn(low)) | uint32_t{to_bits(__float2bfloat16_rn(high))} << 16;
  }
  static double value(uint32_t bits, int half) {
    return __bfloat162float(from_bits<__nv_bfloat16>(static_cast<uint16_t>(bits >> (16 * half))));
  }
};

// Packed FMAs have two pipes, HFMA2 and HFMA2.MMA, which ptxas alternates. They square x: for a constant
// factor with equal halves ptxas would select one half (.H0_H0), which only HFMA2 can, and use one pipe.
struct HalfFma : Half2 {
  static constexpr const char* kName = "half2 FMA";
  static constexpr int kTheory = 256;
  static constexpr const char* kFormula = "128 lanes x 2";
  static constexpr double kTolerance = 0;
  static __device__ uint32_t step(uint32_t x) {
    asm volatile("fma.rn.f16x2 %0, %0, %0, %1;" : "+r"(x) : "r"(0xb800b800u));  // -0.5
    return x;
  }
  static double host_step(double x) { return __half2float(__double2half(x * x - 0.5)); }
};

struct BFloat16Fma : BFloat162 {
  static constexpr const char* kName = "bf162 FMA";
  static constexpr int kTheory = 256;
  static constexpr const char* kFormula = "128 lanes x 2";
  static constexpr double kTolerance = 0;
  static __device__ uint32_t step(uint32_t x) {
    asm volatile("fma.rn.bf16x2 %0, %0, %0, %1;" : "+r"(x) : "r"(0xbf00bf00u));
    return x;
  }
  static double host_step(double x) { return __bfloat162float(__double2bfloat16(x * x - 0.5)); }
};

// The negation keeps the chain finite: it converges to x = 2^-x.
constexpr int kSpecialTheory = 16;
constexpr const char* kSpecialFormula = "16 special functions";

struct FloatExp2 : FloatFma {
  static constexpr const char* kName = "exp2 f32";
  static constexpr int kTheory = kSpecialTheory;
  static constexpr const char* kFormula = kSpecialFormula;
  static constexpr double kTolerance = 1e-5;
  static __device__ uint32_t step(uint32_t x) {
    asm volatile("{ .reg .f32 n; neg.f32 n, %0; ex2.approx.ftz.f32 %0, n; }" : "+r"(x));
    return x;
  }
  static double host_step(double x) { return std::exp2(-x); }
};

struct HalfExp2 : Half2 {
  static constexpr const char* kName = "exp2 f16x2";
  static constexpr int kTheory = kSpecialTheory;
  static constexpr const char* kFormula = kSpecialFormula;
  static constexpr double kTolerance = 4e-3;
  static __device__ uint32_t step(uint32_t x) {
    asm volatile("{ .reg .b32 n; neg.f16x2 n, %0; ex2.approx.f16x2 %0, n; }" : "+r"(x));
    return x;
  }
  static double host_step(double x) { return std::exp2(-x); }
};

struct BFloat16Exp2 : BFloat162 {
  static constexpr const char* kName = "exp2 bf16x2";
  static constexpr int kTheory = kSpecialTheory;
  static constexpr const char* kFormula = kSpecialFormula;
  static constexpr double kTolerance = 4e-2;
  static __device__ uint32_t step(uint32_t x) {
    asm volatile("{ .reg .b32 n; neg.bf16x2 n, %0; ex2.approx.ftz.bf16x2 %0, n; }" : "+r"(x));
    return x;
  }
  static double host_step(double x) { return std::exp2(-x); }
};

template <class Operation>
__global__ void __launch_bounds__(kThreads, 1)
    throughput_kernel(const uint32_t* start, int iterations, uint32_t* out, long long* cycles) {
  uint32_t x[kChains];
#pragma unroll
  for (int i = 0; i < kChains; ++i) x[i] = start[i * kThreads + threadIdx.x];
  __syncthreads();
  const long long begin = clock_cycles();
#pragma unroll 1
  for (int iteration = 0; iteration < iterations; ++iteration) {
#pragma unroll
    for (int step = 0; step < kStepsPerIteration; ++step) {
#pragma unroll
      for (int i = 0; i < kChains; ++i) x[i] = Operation::step(x[i]);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) cycles[blockIdx.x] = clock_cycles() - begin;
  uint32_t* block_out = out + int64_t{blockIdx.x} * kChains * kThreads;
#pragma unroll
  for (int i = 0; i < kChains; ++i) block_out[i * kThreads + threadIdx.x] = x[i];
}

template <class Operation>
void verify(const std::vector<uint32_t>& start, const std::vector<uint32_t>& out, int steps) {
  for (size_t i = 0; i < out.size(); ++i)
    for (int half = 0; half < Operation::kResults; ++half) {
      double expected = Operation::value(start[i % start.size()], half);
      for (int step = 0; step < steps; ++step) expected = Operation::host_step(expected);
      const double value = Operation::value(out[i], half);
      if (!(std::fabs(value - expected) <= Operation::kTolerance * std::fabs(expected)))
        fail("%s: %d steps end at %.9g, not at %.9g", Operation::kName, steps, value, expected);
    }
}

template <class Operation>
void measure(const Device& device, const Report& report) {
  std::vector<uint32_t> values(kChains * kThreads);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = Operation::pack(0.25f + i / 16384.0f, 1.25f - i / 16384.0f);
  const Buffer<uint32_t> start(values);
  const int blocks = device.multiprocessors;
  Buffer<uint32_t> out(int64_t{blocks} * kChains * kThreads);
  Buffer<long long> cycles(blocks);
  const auto kernel = throughput_kernel<Operation>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const auto launch = [&](int iterations) {
    kernel<<<blocks, kThreads, kSharedBytes>>>(start.data(), iterations, out.data(), cycles.data());
    LAUNCH_CHECK();
  };
  launch(1);  // few steps, before the chains converge
  verify<Operation>(values, out.to_host(), kStepsPerIteration);

  const double seconds = median_seconds(kRepetitions, [] {}, [&] { launch(kIterations); });
  const double results = 1.0 * kThreads * kChains * kStepsPerIteration * kIterations * Operation::kResults;
  const std::string name = Operation::kName;
  report.add(name + " a multiprocessor", "results/clock", results / median(cycles.to_host()),
             {Operation::kTheory, Operation::kFormula});
  report.add(name, "Tresults/s", results * blocks / seconds * 1e-12,
             {Operation::kTheory * blocks * device.clock_hz * 1e-12,
              std::string(Operation::kFormula) + " x multiprocessors x clock"});
}

}  // namespace
}  // namespace ceilings

int main(int argc, char** argv) {
  using namespace ceilings;
  const Report report("arithmetic", argc, argv);
  const Device device;
  measure<FloatFma>(device, report);
  measure<HalfFma>(device, report);
  measure<BFloat16Fma>(device, report);
  measure<FloatExp2>(device, report);
  measure<HalfExp2>(device, report);
  measure<BFloat16Exp2>(device, report);
}
