// gelu, silu and their gated forms: a thread takes one pack of the result. More than one was never faster,
// and slower below 64 MB (NOTES, "Activations").
#include <algorithm>
#include <cfloat>
#include <type_traits>

#include "fast_divisor.cuh"
#include "fast_math.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "params.h"
#include "row_index.cuh"
#include "sigmoid.cuh"

namespace h100_diffusers_kernels {
namespace {

// ----- Formulas of a float. The fast form is for results that are rounded to 16 bits. -----

struct Silu {
  template <bool kFast>
  __device__ __forceinline__ static float apply(float x) {
    return Sigmoid<kFast>::times(x, x);
  }
};

struct GeluErf {
  template <bool kFast>
  __device__ __forceinline__ static float apply(float x) {
    if constexpr (!kFast) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    // GELU is max(x, 0) - |x| * tail, where the tail of the normal distribution beyond a = |x| is taken as
    // 2^(a * polynomial(a) - 1). The polynomial is a fit of log2(erfc(a / sqrt(2))) / a; the tail's relative
    // error is 2e-6 for a < 1, 1e-5 for a = 4. With erff the arithmetic takes longer than the memory (NOTES,
    // "Activations").
    const float a = fabsf(x);
    float slope = -2.69856475e-08f;
    for (const float coefficient : {-8.29682847e-07f, 4.87766993e-05f, -0.000853764534f, 0.00827150792f,
                                    -0.0535870492f, -0.458741397f, -1.15117264f})
      slope = fmaf(slope, a, coefficient);
    const float tail = fast_exp2(fmaf(a, slope, -1.0f));
    // For x = infinity the product must be 0; for -infinity it is NaN, as in PyTorch.
    return fmaf(-fabsf(fminf(x, FLT_MAX)), tail, fmaxf(x, 0.0f));
  }
};

struct GeluTanh {
  template <bool kFast>
  __device__ __forceinline__ static float apply(float x) {
    constexpr float kSqrtTwoOverPi = 0.79788456080286536f;
    const float u = kSqrtTwoOverPi * fmaf(0.044715f * x * x, x, x);
    // (1 + tanh(u)) / 2 is sigmoid(2u), which takes an exponential and a division, and no hyperbolic tangent.
    if constexpr (kFast) return Sigmoid<kFast>::times(x, 2.0f * u);
    return 0.5f * x * (1.0f + tanhf(u));
  }
};

// ----- Kernel -----

constexpr int kThreads = 256;

// A gate is at the same distance from x in all rows, as are the halves of one tensor and any two tensors of
// the same strides; or it has rows of its own.
enum class Gating { kNone, kAtDistance, kOwnRows };

// A pack of the results is in this row, from this column on.
struct PackPlace {
  uint32_t row;
  int64_t column;
};

// Packs are numbered row by row, and there are fewer than 2^31.
struct PackNumbering {
  using Number = uint32_t;
  Number packs;
  FastDivisor packs_per_row;

  __device__ __forceinline__ PackPlace operator()(uint32_t pack, int pack_size) const {
    const uint32_t row = packs_per_row.divide(pack);
    return {row, int64_t{pack - row * packs_per_row.divisor} * pack_size};
  }
};

// There may be any number of packs.
struct LongPackNumbering {
  using Number = int64_t;
  Number packs;
  int64_t packs_per_row;

  __device__ __forceinline__ PackPlace operator()(int64_t pack, int pack_size) const {
    const int64_t row = pack / packs_per_row;
    return {static_cast<uint32_t>(row), (pack - row * packs_per_row) * pack_size};
  }
};

template <class Numbering_>
struct ActivationKernelParams {
  using Numbering = Numbering_;
  RowIndexer::Operand x, out;
  RowIndexer indexer;
  Numbering numbering;
  int64_t gate_distance;  // in elements, from x to the gate and from the bias to the gate's
  const void* bias;

  ActivationKernelParams(const ActivationParams& p, const Numbering& pack_numbering, int64_t distance)
      : x(p.x, p.shape.ndim),
        out(p.out, p.shape.ndim),
        indexer(p.shape),
        numbering(pack_numbering),
        gate_distance(distance),
        bias(p.bias) {}
};

template <class Numbering>
struct GateRowsKernelParams : ActivationKernelParams<Numbering> {
  RowIndexer::Operand gate;

  GateRowsKernelParams(const ActivationParams& p, const Numbering& pack_numbering, int64_t distance)
      : ActivationKernelParams<Numbering>(p, pack_numbering, distance), gate(p.gate, p.shape.ndim) {}
};

// This is a pack of x and, if there is one, of the bias that is added to it.
template <typename T, int kSize>
struct BiasedPack {
  Pack<T, kSize> value, bias;

  __device__ __forceinline__ void load(const T* x, const T* x_bias) {
    value.load(x);
    if (x_bias) bias.load(x_bias);
  }
  __device__ __forceinline__ void to_floats(float (&sum)[kSize], bool has_bias) const {
    value.to_floats(sum);
    if (has_bias) add(sum, bias);
  }
};

template <typename T, class Activation, Gating kGating, Access kAccess, class Params>
__global__ void __launch_bounds__(kThreads) activation_kernel(const __grid_constant__ Params params) {
  constexpr int kSize = kPackSize<T, kAccess>;
  constexpr bool kIsGated = kGating != Gating::kNone, kFast = sizeof(T) == 2;
  using PackNumber = typename Params::Numbering::Number;
  const PackNumber number = blockIdx.x * PackNumber{kThreads} + threadIdx.x;
  const PackPlace place = params.numbering(number, kSize);
  const auto index = params.indexer(place.row);
  const T* in = static_cast<const T*>(params.x.data) + index.offset(params.x) + place.column;
  const T* bias = nullptr;
  const T* gate_in = nullptr;
  if constexpr (kGating == Gating::kOwnRows)
    gate_in = static_cast<const T*>(params.gate.data) + index.offset(params.gate) + place.column;
  else
    bias = params.bias ? static_cast<const T*>(params.bias) + place.column : nullptr;
  wait_for_earlier_kernels();
  if (number >= params.numbering.packs) return;

  BiasedPack<T, kSize> x, gate;
  x.load(in, bias);
  if constexpr (kGating == Gating::kAtDistance)
    gate.load(in + params.gate_distance, bias ? bias + params.gate_distance : nullptr);
  if constexpr (kGating == Gating::kOwnRows) gate.load(gate_in, nullptr);
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
  result.store_whole(static_cast<T*>(params.out.data) + index.offset(params.out) + place.column);
}

// Makes one row of all where nothing tells rows apart: those of every operand follow each other without a
// gap.
ActivationParams flattened(ActivationParams args) {
  const auto has_gaps = [&](const RowOperand& operand) {
    return operand.data != nullptr && operand.strides[0] != args.hidden;
  };
  if (args.bias || args.shape.ndim != 1 || has_gaps(args.x) || has_gaps(args.gate) || has_gaps(args.out))
    return args;
  args.hidden *= args.shape.rows;
  args.shape.rows = args.shape.sizes[0] = 1;
  args.x.strides[0] = args.gate.strides[0] = args.out.strides[0] = 0;
  return args;
}

template <class Activation, Gating kGating>
void launch_flattened(const char* operation, const ActivationParams& args, int64_t gate_distance,
                      Stream stream) {
  const int ndim = args.shape.ndim;
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    const auto launch_with = [&]<class Numbering>(auto access, const Numbering& numbering) {
      using Params = std::conditional_t<kGating == Gating::kOwnRows, GateRowsKernelParams<Numbering>,
                                        ActivationKernelParams<Numbering>>;
      launch_kernel(operation, activation_kernel<T, Activation, kGating, access, Params>,
                    dim3(ceil_divide(numbering.packs, kThreads)), kThreads,
                    Params(args, numbering, gate_distance), stream);
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

template <class Activation>
void launch(const char* operation, const ActivationParams& args, Stream stream) {
  launch_flattened<Activation, Gating::kNone>(operation, flattened(args), 0, stream);
}

template <class Activation>
void launch_gated(const char* operation, const ActivationParams& given, Stream stream) {
  const ActivationParams args = flattened(given);
  const int64_t bytes = reinterpret_cast<intptr_t>(args.gate.data) - reinterpret_cast<intptr_t>(args.x.data);
  const int64_t element_bytes = bytes_of(args.dtype);
  const bool is_at_distance = bytes % element_bytes == 0 &&
                              std::equal(args.x.strides, args.x.strides + args.shape.ndim, args.gate.strides);
  if (is_at_distance)
    launch_flattened<Activation, Gating::kAtDistance>(operation, args, bytes / element_bytes, stream);
  else
    launch_flattened<Activation, Gating::kOwnRows>(operation, args, 0, stream);
}

void launch_gated_gelu(const char* operation, const ActivationParams& params, Stream stream) {
  if (params.tanh_approximation) return launch_gated<GeluTanh>(operation, params, stream);
  launch_gated<GeluErf>(operation, params, stream);
}

}  // namespace

void gelu(const ActivationParams& params, Stream stream) {
  if (params.tanh_approximation) return launch<GeluTanh>("gelu", params, stream);
  launch<GeluErf>("gelu", params, stream);
}

void silu(const ActivationParams& params, Stream stream) { launch<Silu>("silu", params, stream); }

void geglu(const ActivationParams& params, Stream stream) { launch_gated_gelu("geglu", params, stream); }

void swiglu(const ActivationParams& params, Stream stream) { launch_gated<Silu>("swiglu", params, stream); }

void gated_gelu(const ActivationParams& params, Stream stream) {
  launch_gated_gelu("gated_gelu", params, stream);
}

void gated_silu(const ActivationParams& params, Stream stream) {
  launch_gated<Silu>("gated_silu", params, stream);
}

}  // namespace h100_diffusers_kernels
