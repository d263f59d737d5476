// gelu, silu, geglu and swiglu. Each thread computes one pack of the result; more were never faster, and
// slower below 64 MB (notes/row_kernels.md, "Activations").
#include <type_traits>

#include "activations.cuh"
#include "fast_divisor.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "params.h"
#include "row_index.cuh"

namespace h100_diffusers_kernels {
namespace {

// ----- Kernel -----

constexpr int kThreads = 256;
static_assert(kMultiprocessorThreads % kThreads == 0);

// Row and first column of a pack.
struct PackPosition {
  uint32_t row;
  int64_t column;
};

// Numbers fewer than 2^31 packs row by row.
struct PackNumbering {
  using Number = uint32_t;
  Number packs;
  FastDivisor packs_per_row;

  __device__ __forceinline__ PackPosition operator()(uint32_t pack, int pack_size) const {
    const uint32_t row = packs_per_row.divide(pack);
    return {row, int64_t{pack - row * packs_per_row.divisor} * pack_size};
  }
};

// Numbers any number of packs row by row.
struct LongPackNumbering {
  using Number = int64_t;
  Number packs;
  int64_t packs_per_row;

  __device__ __forceinline__ PackPosition operator()(int64_t pack, int pack_size) const {
    const int64_t row = pack / packs_per_row;
    return {static_cast<uint32_t>(row), (pack - row * packs_per_row) * pack_size};
  }
};

template <class Numbering>
struct ActivationKernelParams {
  RowIndexer::Operand x, out;
  RowIndexer indexer;
  Numbering numbering;
  int64_t gate_distance;  // elements from x to the gate, and from the bias to the gate's bias
  const void* bias;

  ActivationKernelParams(const ActivationParams& p, const Numbering& pack_numbering, int64_t distance)
      : x(p.x, p.shape.ndim),
        out(p.out, p.shape.ndim),
        indexer(p.shape),
        numbering(pack_numbering),
        gate_distance(distance),
        bias(p.bias) {}
};

template <typename T, class Activation, bool kIsGated, Access kAccess, class Numbering>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(const __grid_constant__ ActivationKernelParams<Numbering> params) {
  constexpr int kSize = kPackSize<T, kAccess>;
  constexpr bool kFast = sizeof(T) == 2;
  using PackNumber = typename Numbering::Number;
  const PackNumber number = blockIdx.x * PackNumber{kThreads} + threadIdx.x;
  const PackPosition position = params.numbering(number, kSize);
  const auto index = params.indexer(position.row);
  const T* in = static_cast<const T*>(params.x.data) + index.offset(params.x) + position.column;
  const T* bias = params.bias ? static_cast<const T*>(params.bias) + position.column : nullptr;
  griddepcontrol_wait();
  if (number >= params.numbering.packs) return;

  BiasedPack<T, kSize> x, gate;
  x.load(in, bias);
  if constexpr (kIsGated) gate.load(in + params.gate_distance, bias ? bias + params.gate_distance : nullptr);
  float values[kSize];
  x.to_floats(values, bias != nullptr);
  if constexpr (kIsGated) {
    float gates[kSize];
    gate.to_floats(gates, bias != nullptr);
#pragma unroll
    for (int j = 0; j < kSize; ++j) values[j] *= Activation::template apply<kFast>(gates[j]);
  } else {
#pragma unroll
    for (int j = 0; j < kSize; ++j) values[j] = Activation::template apply<kFast>(values[j]);
  }
  Pack<T, kSize> result;
  result.from_floats(values);
  result.store_whole(static_cast<T*>(params.out.data) + index.offset(params.out) + position.column);
}

// Merges all rows into one if they are contiguous in x and out. The halves of gated rows never are.
ActivationParams flattened(ActivationParams args) {
  const auto has_gaps = [&](const RowOperand& operand) { return operand.strides[0] != args.hidden; };
  if (args.bias || args.gate.data || args.shape.ndim != 1 || has_gaps(args.x) || has_gaps(args.out))
    return args;
  args.hidden *= args.shape.rows;
  args.shape.rows = args.shape.sizes[0] = 1;
  args.x.strides[0] = args.out.strides[0] = 0;
  return args;
}

template <class Activation, bool kIsGated>
void launch(const char* operation, const ActivationParams& given, Stream stream) {
  if (given.scale.data) return launch_quantized_activation<Activation, kIsGated>(operation, given, stream);
  const ActivationParams args = flattened(given);
  const int ndim = args.shape.ndim;
  const int64_t gate_bytes =
      kIsGated ? static_cast<const char*>(args.gate.data) - static_cast<const char*>(args.x.data) : 0;
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    const auto launch_with = [&]<class Numbering>(auto access, const Numbering& numbering) {
      launch_kernel(
          operation, activation_kernel<T, Activation, kIsGated, access, Numbering>,
          dim3(ceil_divide(numbering.packs, kThreads)), kThreads,
          ActivationKernelParams<Numbering>(args, numbering, gate_bytes / static_cast<int64_t>(sizeof(T))),
          stream);
    };
    const bool has_vectors = args.hidden * sizeof(T) % kVectorBytes == 0 && is_16_byte_aligned(args.bias) &&
                             has_vector_rows(args.x, ndim, sizeof(T)) &&
                             has_vector_rows(args.gate, ndim, sizeof(T)) &&
                             has_vector_rows(args.out, ndim, sizeof(T));
    const int64_t packs_per_row = args.hidden / kPackSize<T, Access::kVector>;
    if (has_vectors && args.shape.rows * packs_per_row < kFastDivisionEnd) {
      PackNumbering numbering{static_cast<uint32_t>(args.shape.rows * packs_per_row), {}};
      numbering.packs_per_row.set(static_cast<uint32_t>(packs_per_row));
      return launch_with(Constant<Access::kVector>{}, numbering);
    }
    const auto numbering_of = [&](int64_t row_packs) {
      return LongPackNumbering{args.shape.rows * row_packs, row_packs};
    };
    if (has_vectors) return launch_with(Constant<Access::kVector>{}, numbering_of(packs_per_row));
    launch_with(Constant<Access::kScalar>{}, numbering_of(args.hidden));
  });
}

template <bool kIsGated>
void launch_gelu(const char* operation, const ActivationParams& params, Stream stream) {
  if (params.tanh_approximation) return launch<GeluTanh, kIsGated>(operation, params, stream);
  launch<GeluErf, kIsGated>(operation, params, stream);
}

}  // namespace

void gelu(const ActivationParams& params, Stream stream) { launch_gelu<false>("gelu", params, stream); }

void silu(const ActivationParams& params, Stream stream) { launch<Silu, false>("silu", params, stream); }

void geglu(const ActivationParams& params, Stream stream) { launch_gelu<true>("geglu", params, stream); }

void swiglu(const ActivationParams& params, Stream stream) { launch<Silu, true>("swiglu", params, stream); }

}  // namespace h100_diffusers_kernels
