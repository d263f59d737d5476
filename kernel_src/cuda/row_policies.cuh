// The three policies of a row kernel:
//   input   the values of a row: x, or residual + gate * x, which is also stored
//   norm    RMS norm, layer norm or none
//   output  affine, modulated, or none (only the input policy stores)
// Here all operands have the dtype of the rows, and all modulators are given; general_policies.cuh has the
// other cases. Inputs and outputs have Operands, their part of the kernel's parameters, and a Row, the row's
// pointers, whose methods a kernel calls for each pack: `fetch` issues loads, the others use the loaded
// values. An input can also be fetched through shared memory, where it needs kOperands slots of 16 bytes for
// each pack, kLongRowThreads apart.
#pragma once

#include "async_copy.cuh"
#include "long_row.cuh"
#include "pack.cuh"
#include "params.h"
#include "row_index.cuh"

namespace h100_diffusers_kernels {

template <typename T>
__device__ __forceinline__ T* row_of(const RowIndexer::Operand& operand, const RowIndexer::Index& index) {
  return static_cast<T*>(operand.data) + index.offset(operand);
}

struct PlainInput {
  static constexpr int kOperands = 1;

  struct Operands {
    RowIndexer::Operand x;
    explicit Operands(const RowNormParams& p) : x(p.x, p.shape.ndim) {}
  };

  template <typename T>
  struct Row {
    const T* x;
    __device__ __forceinline__ Row(const Operands& operands, const RowIndexer::Index& index)
        : x(row_of<const T>(operands.x, index)) {}

    // The pack is kept as it was loaded: in 16 bits it needs half the registers of its values.
    template <int kSize>
    struct Pack {
      h100_diffusers_kernels::Pack<T, kSize> x;
      __device__ __forceinline__ void values(float (&h)[kSize]) const { x.to_floats(h); }
      // Keeps the compiler from holding the converted values in registers between two uses.
      __device__ __forceinline__ void hide_from_compiler() {
#pragma unroll
        for (uint4& word : x.words) asm("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
      }
    };
    template <int kSize>
    __device__ __forceinline__ void fetch(int64_t column, Pack<kSize>& pack) const {
      pack.x.load(x + column);
    }
    __device__ __forceinline__ void fetch_async(int64_t column, uint4* slots) const {
      cp_async(slots, x + column);
    }
    template <int kSize>
    __device__ __forceinline__ void read(const uint4* slots, Pack<kSize>& pack) const {
      pack.x.words[0] = slots[0];
    }
    template <int kSize>
    __device__ __forceinline__ void finish(Pack<kSize>&) const {}
    template <int kSize>
    __device__ __forceinline__ void store(int64_t, const Pack<kSize>&) const {}
  };
};

// A gate with the dtype of the rows.
struct SameDtypeGate {
  static constexpr int kSlots = 1;

  struct Operand : RowIndexer::Operand {
    Operand(const Modulator& gate, const RowNormParams& p) : RowIndexer::Operand(gate, p.shape.ndim) {}
  };

  template <typename T>
  struct Row {
    const T* gate;
    __device__ __forceinline__ Row(const Operand& operand, const RowIndexer::Index& index)
        : gate(operand.data ? row_of<const T>(operand, index) : nullptr) {}
    __device__ __forceinline__ bool is_given() const { return gate; }

    template <int kSize>
    using Pack = h100_diffusers_kernels::Pack<T, kSize>;
    template <int kSize>
    __device__ __forceinline__ void fetch(int64_t column, Pack<kSize>& pack) const {
      pack.load(gate + column);
    }
    __device__ __forceinline__ void fetch_async(int64_t column, uint4* slots) const {
      cp_async(slots, gate + column);
    }
    template <int kSize>
    __device__ __forceinline__ void read(const uint4* slots, Pack<kSize>& pack) const {
      pack.words[0] = slots[0];
    }
    template <int kSize>
    __device__ __forceinline__ void values(const Pack<kSize>& pack, float (&g)[kSize]) const {
      pack.to_floats(g);
    }
  };
};

// With kHasFloat32Residual, residual and residual_out are float32 beside 16-bit rows: two slots a pack.
template <class Gate, bool kHasFloat32Residual = false>
struct GatedInput {
  static constexpr int kResidualSlots = kHasFloat32Residual ? 2 : 1;
  static constexpr int kOperands = kResidualSlots + 1 + Gate::kSlots;

  struct Operands {
    RowIndexer::Operand x, residual;
    typename Gate::Operand gate;
    RowIndexer::Operand residual_out;
    explicit Operands(const RowNormParams& p)
        : x(p.x, p.shape.ndim),
          residual(p.residual, p.shape.ndim),
          gate(p.gate, p),
          residual_out(p.residual_out, p.shape.ndim) {}
  };

  template <typename T>
  struct Row {
    using GateRow = typename Gate::template Row<T>;
    using Residual = std::conditional_t<kHasFloat32Residual, float, T>;
    static_assert(!kHasFloat32Residual || sizeof(T) == 2);
    const T* x;
    const Residual* residual;
    GateRow gate;
    Residual* residual_out;
    __device__ __forceinline__ Row(const Operands& operands, const RowIndexer::Index& index)
        : x(row_of<const T>(operands.x, index)),
          residual(row_of<const Residual>(operands.residual, index)),
          gate(operands.gate, index),
          residual_out(row_of<Residual>(operands.residual_out, index)) {}

    template <int kSize>
    struct Pack {
      h100_diffusers_kernels::Pack<T, kSize> x;
      h100_diffusers_kernels::Pack<Residual, kSize> residual;
      typename GateRow::template Pack<kSize> gate;
      float h[kSize];
      __device__ __forceinline__ void hide_from_compiler() {}
      __device__ __forceinline__ void values(float (&copy)[kSize]) const {
#pragma unroll
        for (int i = 0; i < kSize; ++i) copy[i] = h[i];
      }
    };
    template <int kSize>
    __device__ __forceinline__ void fetch(int64_t column, Pack<kSize>& pack) const {
      pack.residual.load(residual + column);
      pack.x.load(x + column);
      if (gate.is_given()) gate.fetch(column, pack.gate);
    }
    __device__ __forceinline__ void fetch_async(int64_t column, uint4* slots) const {
#pragma unroll
      for (int i = 0; i < kResidualSlots; ++i)
        cp_async(slots + i * kLongRowThreads, residual + column + i * kVectorBytes / sizeof(Residual));
      cp_async(slots + kXSlot, x + column);
      if (gate.is_given()) gate.fetch_async(column, slots + kGateSlot);
    }
    template <int kSize>
    __device__ __forceinline__ void read(const uint4* slots, Pack<kSize>& pack) const {
#pragma unroll
      for (int i = 0; i < kResidualSlots; ++i) pack.residual.words[i] = slots[i * kLongRowThreads];
      pack.x.words[0] = slots[kXSlot];
      if (gate.is_given()) gate.read(slots + kGateSlot, pack.gate);
    }
    template <int kSize>
    __device__ __forceinline__ void finish(Pack<kSize>& pack) const {
      float branch[kSize];
      pack.residual.to_floats(pack.h);
      pack.x.to_floats(branch);
      if (gate.is_given()) {
        float g[kSize];
        gate.values(pack.gate, g);
#pragma unroll
        for (int i = 0; i < kSize; ++i) pack.h[i] = fmaf(g[i], branch[i], pack.h[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) pack.h[i] += branch[i];
      }
    }
    template <int kSize>
    __device__ __forceinline__ void store(int64_t column, const Pack<kSize>& pack) const {
      store_floats(residual_out + column, pack.h);
    }

   private:
    static constexpr int kXSlot = kResidualSlots * kLongRowThreads, kGateSlot = kXSlot + kLongRowThreads;
  };
};

struct GatedResidualInput : GatedInput<SameDtypeGate> {};

// A norm is (h - mean) / sqrt(mean((h - mean)^2) + eps), with a mean of 0 unless it is centered.
struct NoNorm {
  static constexpr bool kIsNorm = false;
  static constexpr bool kIsCentered = false;
};
struct RmsNorm {
  static constexpr bool kIsNorm = true;
  static constexpr bool kIsCentered = false;
};
struct LayerNorm {
  static constexpr bool kIsNorm = true;
  static constexpr bool kIsCentered = true;
};

struct NoOutput {
  static constexpr bool kIsQuantized = false;

  struct Operands {
    explicit Operands(const RowNormParams&) {}
  };

  template <typename T>
  struct Row {
    __device__ __forceinline__ Row(const Operands&, const RowIndexer::Index&) {}
    template <int kSize>
    struct Pack {};
    template <int kSize>
    __device__ __forceinline__ void fetch(int64_t, Pack<kSize>&) const {}
    template <int kSize>
    __device__ __forceinline__ void store(int64_t, const Pack<kSize>&, float (&)[kSize]) const {}
  };
};

template <bool kHasWeight, bool kHasBias>
struct AffineOutput {
  static constexpr bool kIsQuantized = false;

  struct Operands {
    RowIndexer::Operand out;
    const void* weight;
    const void* bias;
    explicit Operands(const RowNormParams& p)
        : out(p.out, p.shape.ndim), weight(p.weight.data), bias(p.bias.data) {}
  };

  template <typename T>
  struct Row {
    const T* weight;
    const T* bias;
    T* out;
    __device__ __forceinline__ Row(const Operands& operands, const RowIndexer::Index& index)
        : weight(static_cast<const T*>(operands.weight)),
          bias(static_cast<const T*>(operands.bias)),
          out(row_of<T>(operands.out, index)) {}

    template <int kSize>
    struct Pack {
      h100_diffusers_kernels::Pack<T, kSize> weight, bias;
    };
    template <int kSize>
    __device__ __forceinline__ void fetch(int64_t column, Pack<kSize>& pack) const {
      if constexpr (kHasWeight) pack.weight.load(weight + column);
      if constexpr (kHasBias) pack.bias.load(bias + column);
    }
    template <int kSize>
    __device__ __forceinline__ void store(int64_t column, const Pack<kSize>& pack, float (&n)[kSize]) const {
      if constexpr (kHasWeight) multiply(n, pack.weight);
      if constexpr (kHasBias) add(n, pack.bias);
      store_floats(out + column, n);
    }
  };
};

// With kHasAffine weight and bias are each optional, checked at run time, and not prefetched, which would
// cost registers.
template <bool kHasAffine>
struct ModulatedOutput {
  static constexpr bool kIsQuantized = false;

  struct Operands {
    RowIndexer::Operand out, scale, shift;
    const void* weight;
    const void* bias;
    explicit Operands(const RowNormParams& p)
        : out(p.out, p.shape.ndim),
          scale(p.scale, p.shape.ndim),
          shift(p.shift, p.shape.ndim),
          weight(p.weight.data),
          bias(p.bias.data) {}
  };

  template <typename T>
  struct Row {
    const T* scale;
    const T* shift;
    const T* weight;
    const T* bias;
    T* out;
    __device__ __forceinline__ Row(const Operands& operands, const RowIndexer::Index& index)
        : scale(row_of<const T>(operands.scale, index)),
          shift(row_of<const T>(operands.shift, index)),
          weight(static_cast<const T*>(operands.weight)),
          bias(static_cast<const T*>(operands.bias)),
          out(row_of<T>(operands.out, index)) {}

    template <int kSize>
    struct Pack {
      h100_diffusers_kernels::Pack<T, kSize> scale, shift;
    };
    template <int kSize>
    __device__ __forceinline__ void fetch(int64_t column, Pack<kSize>& pack) const {
      pack.scale.load(scale + column);
      pack.shift.load(shift + column);
    }
    template <int kSize>
    __device__ __forceinline__ void store(int64_t column, const Pack<kSize>& pack, float (&n)[kSize]) const {
      modulate(column, pack, n, [](float s) { return 1.0f + s; });
      store_floats(out + column, n);
    }
    // Leaves the result in n. The given values times norm_scale are normalized.
    template <int kSize>
    __device__ __forceinline__ void modulate(int64_t column, const Pack<kSize>& pack, float norm_scale,
                                             float (&n)[kSize]) const {
      if constexpr (kHasAffine) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) n[i] *= norm_scale;
        modulate(column, pack, n, [](float s) { return 1.0f + s; });
      } else {  // one instruction less for each value
        modulate(column, pack, n, [&](float s) { return fmaf(s, norm_scale, norm_scale); });
      }
    }

   private:
    template <int kSize, class FactorOf>
    __device__ __forceinline__ void modulate(int64_t column, const Pack<kSize>& pack, float (&n)[kSize],
                                             const FactorOf& factor_of) const {
      h100_diffusers_kernels::Pack<T, kSize> late;
      if (kHasAffine && weight) {
        late.load(weight + column);
        multiply(n, late);
      }
      if (kHasAffine && bias) {
        late.load(bias + column);
        add(n, late);
      }
      float factors[kSize], offsets[kSize];
      pack.scale.to_floats(factors);
      pack.shift.to_floats(offsets);
#pragma unroll
      for (int i = 0; i < kSize; ++i) n[i] = fmaf(n[i], factor_of(factors[i]), offsets[i]);
    }
  };
};

}  // namespace h100_diffusers_kernels
