// Throughput of the tensor cores: wgmma with both operands in shared memory, bfloat16 and FP8 (e4m3),
// accumulated in float32. Operands are random, because zeros need less power and run faster. The first
// launch, at the maximum clock, and the last of many, at the power limit, are reported separately.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <chrono>
#include <cmath>
#include <random>
#include <thread>

#include "common.cuh"

namespace ceilings {
namespace {

// A block holds kStages pairs of tiles: kRows rows of A and kColumns rows of B, with 128 bytes of K each.
// Shared memory has the 128-byte swizzle of wgmma: 16-byte piece p of row r is at p ^ (r % 8).
constexpr int kWarpGroups = 2;
constexpr int kRows = 64 * kWarpGroups, kColumns = 256;
constexpr int kRowBytes = 128;
constexpr int kStages = 4;
constexpr int kInstructionBytes = 32;  // K of one instruction: 16 bfloat16 or 32 FP8
constexpr int kThreads = 128 * kWarpGroups;
constexpr int kAccumulators = 64 * kColumns / 128;  // of a thread

struct Stage {
  alignas(1024) unsigned char a[kRows * kRowBytes];
  alignas(1024) unsigned char b[kColumns * kRowBytes];
};
constexpr int kSharedBytes = kStages * static_cast<int>(sizeof(Stage)) + 1024;

// Matrix descriptor of a tile with contiguous K: groups of 8 rows of 128 bytes, 128-byte swizzle.
__device__ __forceinline__ uint64_t descriptor(const unsigned char* tile) {
  const uint64_t address = __cvta_generic_to_shared(tile);
  constexpr uint64_t kGroupBytes = 8 * kRowBytes, kSwizzle128 = 1;
  return (address & 0x3ffff) >> 4 | uint64_t{1} << 16 | (kGroupBytes >> 4) << 32 | kSwizzle128 << 62;
}

#define ACCUMULATORS_8(d, i)                                                                  \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define ACCUMULATORS_32(d, i) \
  ACCUMULATORS_8(d, i), ACCUMULATORS_8(d, i + 8), ACCUMULATORS_8(d, i + 16), ACCUMULATORS_8(d, i + 24)
#define REGISTERS                                                                                          \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "  \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "   \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "   \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "   \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, " \
  "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, " \
  "%119, %120, %121, %122, %123, %124, %125, %126, %127}"
#define MULTIPLY(shape_and_types, flags)                                                               \
  asm volatile(                                                                                        \
      "{\n"                                                                                            \
      ".reg .pred accumulate;\n"                                                                       \
      "setp.ne.b32 accumulate, %130, 0;\n"                                                             \
      "wgmma.mma_async.sync.aligned." shape_and_types " " REGISTERS ", %128, %129, accumulate, " flags \
      ";\n"                                                                                            \
      "}"                                                                                              \
      : ACCUMULATORS_32(d, 0), ACCUMULATORS_32(d, 32), ACCUMULATORS_32(d, 64), ACCUMULATORS_32(d, 96)  \
      : "l"(a), "l"(b), "r"(accumulate))

// d = A B^T + (accumulate ? d : 0) for 64 rows of A and 256 of B.
struct BFloat16 {
  using Element = __nv_bfloat16;
  static constexpr const char* kName = "bf16";
  static constexpr int kFlopsPerClock = 4096;
  static constexpr double kTolerance = 1e-4;  // of the result's norm
  static __device__ __forceinline__ void multiply(float (&d)[kAccumulators], uint64_t a, uint64_t b,
                                                  int accumulate) {
    MULTIPLY("m64n256k16.f32.bf16.bf16", "1, 1, 0, 0");
  }
};

struct Fp8 {
  using Element = __nv_fp8_e4m3;
  static constexpr const char* kName = "fp8 e4m3";
  static constexpr int kFlopsPerClock = 8192;
  static constexpr double kTolerance = 5e-3;  // FP8 products are added in fewer bits than float32 has
  static __device__ __forceinline__ void multiply(float (&d)[kAccumulators], uint64_t a, uint64_t b,
                                                  int accumulate) {
    MULTIPLY("m64n256k32.f32.e4m3.e4m3", "1, 1");
  }
};

// Computes the product of all stages `repetitions` times.
template <class Type>
__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const unsigned char* operands, int repetitions, float* out, long long* cycles) {
  extern __shared__ unsigned char unaligned[];
  // Aligned by its address in shared memory, on which the swizzle depends.
  const uint32_t offset = static_cast<uint32_t>(__cvta_generic_to_shared(unaligned));
  Stage* stages = reinterpret_cast<Stage*>(unaligned + ((offset + 1023) / 1024 * 1024 - offset));
  for (int stage = 0; stage < kStages; ++stage) {
    constexpr int kPieces = kRowBytes / 16;
    for (int i = threadIdx.x; i < (kRows + kColumns) * kPieces; i += kThreads) {
      const int row = i / kPieces, piece = i % kPieces;
      const int tile_row = row < kRows ? row : row - kRows;
      unsigned char* tile = row < kRows ? stages[stage].a : stages[stage].b;
      *reinterpret_cast<uint4*>(tile + tile_row * kRowBytes + (piece ^ tile_row % 8) * 16) =
          reinterpret_cast<const uint4*>(operands)[stage * (kRows + kColumns) * kPieces + i];
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();

  const int warp_group = threadIdx.x / 128;
  float d[kAccumulators];
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) d[i] = 0;
  const long long begin = clock_cycles();
#pragma unroll 1
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      const uint64_t a = descriptor(stages[stage].a + warp_group * 64 * kRowBytes);
      const uint64_t b = descriptor(stages[stage].b);
#pragma unroll
      for (int k = 0; k < kRowBytes; k += kInstructionBytes)
        Type::multiply(d, a + k / 16, b + k / 16, stage + k > 0);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    // The products of this repetition are pending while the next ones are issued.
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) cycles[blockIdx.x] = clock_cycles() - begin;

  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int row = warp_group * 64 + thread / 32 * 16 + lane / 4;
  float* tile = out + int64_t{blockIdx.x} * kRows * kColumns;
#pragma unroll
  for (int i = 0; i < kAccumulators; i += 4) {
    float* address = tile + row * kColumns + i * 2 + lane % 4 * 2;
    address[0] = d[i];
    address[1] = d[i + 1];
    address[8 * kColumns] = d[i + 2];
    address[8 * kColumns + 1] = d[i + 3];
  }
}

// Keeps the clock high at low power.
__global__ void spin_kernel(long long duration_ns) {
  const long long end = nanoseconds() + duration_ns;
  while (nanoseconds() < end) {
  }
}

template <class Type>
class Product {
 public:
  using Element = typename Type::Element;

  explicit Product(const Device& device)
      : device_(device),
        out_(int64_t{device.multiprocessors} * kRows * kColumns),
        cycles_(device.multiprocessors) {
    std::mt19937 generator(3);
    std::normal_distribution<float> normal;
    for (Element& element : elements_) element = Element(normal(generator));
    CUDA_CHECK(cudaMemcpy(operands_.data(), elements_.data(), operands_.bytes(), cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaFuncSetAttribute(product_kernel<Type>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    kSharedBytes));
  }

  void launch(int repetitions) {
    product_kernel<Type><<<device_.multiprocessors, kThreads, kSharedBytes>>>(operands_.data(), repetitions,
                                                                              out_.data(), cycles_.data());
    LAUNCH_CHECK();
  }

  double flops(int repetitions) const { return 2.0 * kRows * kColumns * kDepth * repetitions; }

  void verify() {
    out_.fill(0xff);
    launch(3);
    const std::vector<float> out = out_.to_host();
    std::vector<double> expected(kRows * kColumns);
    for (int row = 0; row < kRows; ++row)
      for (int column = 0; column < kColumns; ++column)
        for (int k = 0; k < kDepth; ++k)
          expected[row * kColumns + column] += element(row, k) * element(kRows + column, k);
    double norm = 0;
    for (const double value : expected) norm += value * value;
    for (int block = 0; block < device_.multiprocessors; ++block) {
      double error = 0;
      for (size_t i = 0; i < expected.size(); ++i) {
        const double difference = out[block * expected.size() + i] - expected[i];
        error += difference * difference;
      }
      const double relative = std::sqrt(error / norm);
      if (!(relative < Type::kTolerance))
        fail("%s: the product of block %d is off by %g of its norm", Type::kName, block, relative);
    }
  }

  void measure(const Report& report) {
    constexpr int kLaunches = 80;
    constexpr double kTargetSeconds = 2e-3;  // a launch
    const Theory theory{
        1.0 * Type::kFlopsPerClock * device_.multiprocessors * device_.clock_hz * 1e-12,
        std::to_string(Type::kFlopsPerClock) + " FLOP a clock a multiprocessor x multiprocessors x clock"};
    const int repetitions =
        static_cast<int>(kTargetSeconds * theory.value * 1e12 / (flops(1) * device_.multiprocessors));
    CUDA_CHECK(cudaDeviceSynchronize());
    std::this_thread::sleep_for(std::chrono::milliseconds(500));  // power and temperature decrease

    std::vector<Event> events(kLaunches + 1);
    spin_kernel<<<1, 1>>>(200'000'000);
    LAUNCH_CHECK();
    events[0].record();
    for (int i = 0; i < kLaunches; ++i) {
      launch(repetitions);
      events[i + 1].record();
    }
    const auto rate = [&](int first, int last) {
      return flops(repetitions) * device_.multiprocessors * (last - first) /
             events[last].seconds_since(events[first]) * 1e-12;
    };
    const double burst = rate(0, 1);
    const double sustained = rate(kLaunches / 2, kLaunches);
    const double cycles = median(cycles_.to_host());
    const std::string name = std::string("wgmma ") + Type::kName;
    report.add(name + ", first 2 ms", "TFLOP/s", burst, theory);
    report.add(name + ", sustained", "TFLOP/s", sustained, theory);
    report.add(name + " a multiprocessor", "FLOP/clock", flops(repetitions) / cycles,
               {1.0 * Type::kFlopsPerClock, "dense tensor cores of compute capability 9.0"});
    report.add(name + ", clock at the end", "MHz",
               cycles / events[kLaunches].seconds_since(events[kLaunches - 1]) * 1e-6,
               {device_.clock_hz * 1e-6, "highest clock"});
  }

 private:
  static constexpr int kStageDepth = kRowBytes / static_cast<int>(sizeof(Element));
  static constexpr int kDepth = kStages * kStageDepth;

  // row: of A, followed by the rows of B
  double element(int row, int k) const {
    const int stage = k / kStageDepth;
    return static_cast<float>(elements_[(stage * (kRows + kColumns) + row) * kStageDepth + k % kStageDepth]);
  }

  Device device_;
  std::vector<Element> elements_ = std::vector<Element>((kRows + kColumns) * kDepth);
  Buffer<unsigned char> operands_{kStages * (kRows + kColumns) * kRowBytes};
  Buffer<float> out_;
  Buffer<long long> cycles_;
};

template <class Type>
void measure(const Device& device, const Report& report) {
  Product<Type> product(device);
  product.verify();
  product.measure(report);
}

}  // namespace
}  // namespace ceilings

int main(int argc, char** argv) {
  using namespace ceilings;
  const Report report("tensor_core", argc, argv);
  const Device device;
  measure<BFloat16>(device, report);
  measure<Fp8>(device, report);
}
