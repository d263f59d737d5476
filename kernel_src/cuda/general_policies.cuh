// Policies for float32 modulators with 16-bit rows, for absent modulators, and for a second modulation of
// the same norm. The kernels branch on these, uniformly for all threads of a launch: one instantiation for
// each combination would be a hundred times as many kernels.
#pragma once

#include <type_traits>

#include "row_norm.cuh"
#include "row_policies.cuh"

namespace h100_diffusers_kernels {

// A modulator that may be absent, or float32 with rows of another dtype.
struct GeneralOperand {
  RowIndexer::Operand rows;  // strides in bytes
  int element_bytes;         // 0 if absent

  GeneralOperand(const Modulator& modulator, const RowNormParams& p)
      : rows(modulator, p.shape.ndim),
        element_bytes(modulator.data == nullptr ? 0 : (modulator.is_float32 ? 4 : bytes_of(p.dtype))) {
    rows.outer_stride *= element_bytes;
    rows.inner_stride *= element_bytes;
  }

  __device__ __forceinline__ bool is_given() const { return element_bytes != 0; }
};

// A row of a GeneralOperand. The values for a pack of eight 16-bit elements are one 16-byte word, or two in
// float32: lower and upper. Loading the lower words brings all cache lines of a row, so only these are
// prefetched. The upper words, which would need as many registers again, are loaded when they are used.
template <typename T>
class GeneralRow {
 public:
  __device__ __forceinline__ GeneralRow(const GeneralOperand& operand, const RowIndexer::Index& index)
      : operand_(operand), index_(index) {}

  template <int kSize>
  struct Pack {
    uint4 lower, upper;
  };

  __device__ __forceinline__ bool is_given() const { return operand_.is_given(); }

  // Absent values are 0.
  template <int kSize>
  __device__ __forceinline__ void fetch(int64_t column, Pack<kSize>& pack) const {
    pack.lower = make_uint4(0, 0, 0, 0);
    if (is_given()) pack.lower = *reinterpret_cast<const uint4*>(address(column));
  }
  __device__ __forceinline__ void fetch(int64_t column, Pack<1>& pack) const {
    float value = 0;
    if (is_wide())
      value = *reinterpret_cast<const float*>(address(column));
    else if (is_given())
      value = to_float(*reinterpret_cast<const T*>(address(column)));
    pack.lower.x = __float_as_uint(value);
  }
  template <int kSize>
  __device__ __forceinline__ void fetch_upper(int64_t column, Pack<kSize>& pack) const {
    if (kSize > 1 && is_wide()) pack.upper = reinterpret_cast<const uint4*>(address(column))[1];
  }

  template <int kSize>
  __device__ __forceinline__ void values(const Pack<kSize>& pack, float (&values)[kSize]) const {
    if (kSize > kFloats && is_wide()) {
      const uint32_t* words = &pack.lower.x;
      const uint32_t* upper_words = &pack.upper.x;
#pragma unroll
      for (int i = 0; i < kSize; ++i)
        values[i] = __uint_as_float(i < kFloats ? words[i] : upper_words[i - kFloats]);
    } else {
      h100_diffusers_kernels::Pack<T, kSize> elements;
      elements.words[0] = pack.lower;
      elements.to_floats(values);
    }
  }
  __device__ __forceinline__ void values(const Pack<1>& pack, float (&values)[1]) const {
    values[0] = __uint_as_float(pack.lower.x);
  }

  // Loads a pack without prefetching.
  template <int kSize>
  __device__ __forceinline__ void load(int64_t column, float (&loaded)[kSize]) const {
    Pack<kSize> pack;
    fetch(column, pack);
    fetch_upper(column, pack);
    values(pack, loaded);
  }

  __device__ __forceinline__ const char* address(int64_t column) const {
    return static_cast<const char*>(operand_.rows.data) + index_.offset(operand_.rows) +
           column * operand_.element_bytes;
  }
  // Returns whether a pack is two words.
  __device__ __forceinline__ bool is_wide() const { return sizeof(T) == 2 && operand_.element_bytes == 4; }

 private:
  static constexpr int kFloats = kVectorBytes / 4;
  const GeneralOperand& operand_;
  RowIndexer::Index index_;
};

// A gate for 16-bit rows.
struct GeneralGate {
  static constexpr int kSlots = 2;

  struct Operand : GeneralOperand {
    using GeneralOperand::GeneralOperand;
  };

  template <typename T>
  struct Row : GeneralRow<T> {
    using GeneralRow<T>::GeneralRow;
    template <int kSize>
    using Pack = typename GeneralRow<T>::template Pack<kSize>;

    template <int kSize>
    __device__ __forceinline__ void fetch(int64_t column, Pack<kSize>& pack) const {
      GeneralRow<T>::fetch(column, pack);
      this->fetch_upper(column, pack);
    }
    __device__ __forceinline__ void fetch_async(int64_t column, uint4* slots) const {
      cp_async(slots, this->address(column));
      if (this->is_wide()) cp_async(slots + kLongRowThreads, this->address(column) + kVectorBytes);
    }
    template <int kSize>
    __device__ __forceinline__ void read(const uint4* slots, Pack<kSize>& pack) const {
      pack.lower = slots[0];
      if (this->is_wide()) pack.upper = slots[kLongRowThreads];
    }
  };
};

struct GeneralGatedResidualInput : GatedInput<GeneralGate> {};

// Weight and bias of the norm, applied before scale and shift, and a second output with its own scale and
// shift.
struct ExtraOperands {
  GeneralOperand weight, bias;
  RowIndexer::Operand second_out;
  GeneralOperand second_scale, second_shift;

  explicit ExtraOperands(const RowNormParams& p)
      : weight(p.weight, p),
        bias(p.bias, p),
        second_out(p.second_out, p.shape.ndim),
        second_scale(p.second_scale, p),
        second_shift(p.second_shift, p) {}
};
struct NoExtraOperands {
  explicit NoExtraOperands(const RowNormParams&) {}
};

// Stores n * (1 + scale) + shift, where n is the normalized value. Without ExtraOperands, which need
// registers, the output has either scale and shift or weight and bias; the latter are passed in place of the
// former.
template <bool kHasExtra>
struct GeneralOutput {
  static constexpr bool kIsQuantized = false;

  struct Operands {
    RowIndexer::Operand out;
    GeneralOperand scale, shift;
    float factor;  // is added to scale
    std::conditional_t<kHasExtra, ExtraOperands, NoExtraOperands> extra;

    explicit Operands(const RowNormParams& p) : Operands(p, kHasExtra || p.scale.data || p.shift.data) {}

   private:
    Operands(const RowNormParams& p, bool is_modulated)
        : out(p.out, p.shape.ndim),
          scale(is_modulated ? p.scale : p.weight, p),
          shift(is_modulated ? p.shift : p.bias, p),
          factor(is_modulated || p.weight.data == nullptr ? 1.0f : 0.0f),
          extra(p) {}
  };

  template <typename T>
  struct Row {
    const Operands& operands;
    RowIndexer::Index index;
    GeneralRow<T> scale, shift;
    __device__ __forceinline__ Row(const Operands& operands, const RowIndexer::Index& index)
        : operands(operands), index(index), scale(operands.scale, index), shift(operands.shift, index) {}

    template <int kSize>
    struct Pack {
      typename GeneralRow<T>::template Pack<kSize> scale, shift;
    };
    template <int kSize>
    __device__ __forceinline__ void fetch(int64_t column, Pack<kSize>& pack) const {
      scale.fetch(column, pack.scale);
      shift.fetch(column, pack.shift);
    }
    // Leaves the result in n, without ExtraOperands. The given values times norm_scale are normalized.
    template <int kSize>
    __device__ __forceinline__ void modulate(int64_t column, Pack<kSize>& pack, float norm_scale,
                                             float (&n)[kSize]) const {
      static_assert(!kHasExtra);
      float factors[kSize], terms[kSize];
      load_modulation(column, pack, factors, terms);
#pragma unroll
      for (int i = 0; i < kSize; ++i)
        n[i] = fmaf(n[i], fmaf(factors[i], norm_scale, operands.factor * norm_scale), terms[i]);
    }
    template <int kSize>
    __device__ __forceinline__ void store(int64_t column, Pack<kSize>& pack, float (&n)[kSize]) const {
      float factors[kSize], terms[kSize];
      if constexpr (kHasExtra) {
        const auto& extra = operands.extra;
        if (extra.weight.is_given()) {
          GeneralRow<T>(extra.weight, index).load(column, factors);
#pragma unroll
          for (int i = 0; i < kSize; ++i) n[i] *= factors[i];
        }
        if (extra.bias.is_given()) {
          GeneralRow<T>(extra.bias, index).load(column, terms);
#pragma unroll
          for (int i = 0; i < kSize; ++i) n[i] += terms[i];
        }
      }
      load_modulation(column, pack, factors, terms);
      store_modulated(operands.out, column, n, operands.factor, factors, terms);
      if constexpr (kHasExtra) {
        const auto& extra = operands.extra;
        if (extra.second_out.data == nullptr) return;
        GeneralRow<T>(extra.second_scale, index).load(column, factors);
        GeneralRow<T>(extra.second_shift, index).load(column, terms);
        store_modulated(extra.second_out, column, n, 1.0f, factors, terms);
      }
    }

   private:
    template <int kSize>
    __device__ __forceinline__ void load_modulation(int64_t column, Pack<kSize>& pack,
                                                    float (&factors)[kSize], float (&terms)[kSize]) const {
      scale.fetch_upper(column, pack.scale);
      shift.fetch_upper(column, pack.shift);
      scale.values(pack.scale, factors);
      shift.values(pack.shift, terms);
    }
    template <int kSize>
    __device__ __forceinline__ void store_modulated(const RowIndexer::Operand& out, int64_t column,
                                                    const float (&n)[kSize], float factor,
                                                    const float (&factors)[kSize],
                                                    const float (&terms)[kSize]) const {
      float modulated[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) modulated[i] = fmaf(n[i], factor + factors[i], terms[i]);
      store_floats(row_of<T>(out, index) + column, modulated);
    }
  };
};

// Norms and gated residuals with float32 modulators with 16-bit rows, with absent modulators, or with two
// modulations. The kernels of each input are in a file of their own, because they compile longest.

// Beside float32 rows a gate is always float32, so it needs no general policy.
template <typename T, class Input>
using InputOf = std::conditional_t<std::is_same_v<Input, GatedResidualInput> && sizeof(T) == 2,
                                   GeneralGatedResidualInput, Input>;

inline bool needs_extra_operands(const RowNormParams& args) {
  return args.second_out.data ||
         ((args.weight.data || args.bias.data) && (args.scale.data || args.shift.data));
}

template <class Input, class Norm>
void launch_general(const char* operation, const RowNormParams& args, Stream stream) {
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    if (needs_extra_operands(args))
      return launch_rows<T, InputOf<T, Input>, Norm, GeneralOutput<true>>(operation, args, stream);
    launch_rows<T, InputOf<T, Input>, Norm, GeneralOutput<false>>(operation, args, stream);
  });
}

}  // namespace h100_diffusers_kernels
