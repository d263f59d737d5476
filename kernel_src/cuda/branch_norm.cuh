// Residual branches with more parts than row_norm.cuh has, and the norm after them: an addend and an RMS norm
// of the branch, tanh of the gate, table rows that are added to gate, scale and shift, and tables from which
// each row chooses its gate, scale and shift.
//
// The kernels branch on the parts at run time, uniformly for all threads. A row is held in registers.
// Operands that may differ by row are loaded before the first reduction, those of all rows when they are
// used. So are scale and shift from tables: their few rows are in the cache.
//
// With kQuantizes the result is quantized. quantized_norm.cu calls it for what it does not compute itself.
//
// The kernels with a layer norm are in a file of their own, because they compile longest.
#pragma once

#include "general_policies.cuh"
#include "row_norm.cuh"

namespace h100_diffusers_kernels {
struct BranchParams {
  RowIndexer::Operand x, addend, residual, residual_out, out;
  GeneralOperand gate, gate_row, x_weight, scale, scale_row, shift, shift_row, weight, bias;
  RowIndexer indexer;
  uint32_t rows;
  int64_t hidden;
  float eps, x_eps;
  bool normalizes_x, has_tanh_gate;
  RowIndexer::Operand index;
  int32_t last_table_row;
  RowIndexer::Operand row_scale;

  explicit BranchParams(const RowNormParams& p)
      : x(p.x, p.shape.ndim),
        addend(p.addend, p.shape.ndim),
        residual(p.residual, p.shape.ndim),
        residual_out(p.residual_out, p.shape.ndim),
        out(p.out, p.shape.ndim),
        gate(p.gate, p),
        gate_row(p.gate_row, p),
        x_weight(p.x_weight, p),
        scale(p.scale, p),
        scale_row(p.scale_row, p),
        shift(p.shift, p),
        shift_row(p.shift_row, p),
        weight(p.weight, p),
        bias(p.bias, p),
        indexer(p.shape),
        rows(static_cast<uint32_t>(p.shape.rows)),
        hidden(p.hidden),
        eps(p.eps),
        x_eps(p.x_eps),
        normalizes_x(p.normalizes_x),
        has_tanh_gate(p.has_tanh_gate),
        index(p.index, p.shape.ndim),
        last_table_row(p.table_rows - 1),
        row_scale(p.row_scale, p.shape.ndim) {}

  // The index of a row in its modulators. Vectors have strides of 0.
  template <bool kHasTables>
  __device__ __forceinline__ RowIndexer::Index modulator_index(const RowIndexer::Index& row) const {
    if constexpr (!kHasTables) return row;
    const int32_t given = *row_of<const int32_t>(index, row);
    return {0, static_cast<uint32_t>(min(max(given, 0), last_table_row))};
  }
};

// One row. The values of a pack pass through its methods in order. kHasTables: whether there is an index.
template <typename T, int kSize, bool kHasTables>
class BranchRow {
 public:
  // What is loaded before the first reduction.
  struct Loaded {
    Pack<T, kSize> residual;
    typename GeneralRow<T>::template Pack<kSize> gate, scale, shift;
  };

  __device__ __forceinline__ BranchRow(const BranchParams& params, const RowIndexer::Index& index)
      : params_(params), index_(index), modulator_index_(params.modulator_index<kHasTables>(index)) {}

  __device__ __forceinline__ bool has_residual() const { return params_.residual.data; }

  __device__ __forceinline__ void load(int64_t column, float (&h)[kSize], Loaded& loaded) const {
    Pack<T, kSize> x;
    x.load(row_of<const T>(params_.x, index_) + column);
    if (has_residual()) loaded.residual.load(row_of<const T>(params_.residual, index_) + column);
    row(params_.gate).fetch(column, loaded.gate);
    if constexpr (!kHasTables) fetch_modulation(column, loaded);
    x.to_floats(h);
    if (params_.addend.data) {
      x.load(row_of<const T>(params_.addend, index_) + column);
      add(h, x);
    }
  }

  // Sets the branch to the new residual and stores it. x_scale: of its norm.
  __device__ __forceinline__ void finish(int64_t column, const Statistic<T>& x_scale, float (&h)[kSize],
                                         Loaded& loaded) const {
    if (!has_residual()) return;
    float values[kSize];
    if (params_.normalizes_x) {
#pragma unroll
      for (float& value : h) value = x_scale.times(value);
      if (params_.x_weight.is_given()) {
        row(params_.x_weight).load(column, values);
#pragma unroll
        for (int i = 0; i < kSize; ++i) h[i] *= values[i];
      }
    }
    float residual[kSize];
    loaded.residual.to_floats(residual);
    if (sum(params_.gate, loaded.gate, params_.gate_row, column, values)) {
      if (params_.has_tanh_gate)
#pragma unroll
        for (float& value : values) value = tanhf(value);
#pragma unroll
      for (int i = 0; i < kSize; ++i) h[i] = fmaf(values[i], h[i], residual[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) h[i] += residual[i];
    }
    store_floats(row_of<T>(params_.residual_out, index_) + column, h);
  }

  // Modulates normalized values.
  __device__ __forceinline__ void modulate(int64_t column, float (&n)[kSize], Loaded& loaded) const {
    if constexpr (kHasTables) fetch_modulation(column, loaded);
    float values[kSize];
    if (params_.weight.is_given()) {
      row(params_.weight).load(column, values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) n[i] *= values[i];
    }
    if (params_.bias.is_given()) {
      row(params_.bias).load(column, values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) n[i] += values[i];
    }
    if (sum(params_.scale, loaded.scale, params_.scale_row, column, values))
#pragma unroll
      for (int i = 0; i < kSize; ++i) n[i] *= 1.0f + values[i];
    if (sum(params_.shift, loaded.shift, params_.shift_row, column, values))
#pragma unroll
      for (int i = 0; i < kSize; ++i) n[i] += values[i];
  }

  __device__ __forceinline__ void store(int64_t column, const float (&values)[kSize]) const {
    store_floats(row_of<T>(params_.out, index_) + column, values);
  }

  // Stores the values over the row's scale.
  __device__ __forceinline__ void store(int64_t column, const float (&values)[kSize],
                                        const Fp8Quotient& quotient) const {
    store_fp8(row_of<uint8_t>(params_.out, index_) + column, values, quotient);
  }

  __device__ __forceinline__ void store_scale(float scale) const {
    *row_of<float>(params_.row_scale, index_) = scale;
  }

 private:
  __device__ __forceinline__ void fetch_modulation(int64_t column, Loaded& loaded) const {
    row(params_.scale).fetch(column, loaded.scale);
    row(params_.shift).fetch(column, loaded.shift);
  }

  __device__ __forceinline__ GeneralRow<T> row(const GeneralOperand& operand) const {
    return GeneralRow<T>(operand, modulator_index_);
  }

  // Sets values to the sum of a modulator and a table's row. Returns false if both are absent.
  __device__ __forceinline__ bool sum(const GeneralOperand& modulator,
                                      typename GeneralRow<T>::template Pack<kSize>& loaded,
                                      const GeneralOperand& table_row, int64_t column,
                                      float (&values)[kSize]) const {
    row(modulator).fetch_upper(column, loaded);
    row(modulator).values(loaded, values);
    if (table_row.is_given()) {
      float terms[kSize];
      row(table_row).load(column, terms);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] += terms[i];
    }
    return modulator.is_given() || table_row.is_given();
  }

  const BranchParams& params_;
  RowIndexer::Index index_, modulator_index_;
};

// The statistics of a row: total(round, term) is the sum of term(h) over it.
template <typename T, class Norm, class Total>
__device__ __forceinline__ RowStatistics<T> statistics_of(const Total& total, int64_t hidden, float eps) {
  RowStatistics<T> row;
  if constexpr (Norm::kIsCentered)
    row.mean =
        Statistic<T>::from(divide<T>(total(1, [](float h) { return h; }), static_cast<RowSum<T>>(hidden)));
  const auto square = [&](float h) {
    const float difference = Norm::kIsCentered ? row.mean.subtracted_from(h) : h;
    return difference * difference;
  };
  row.scale = rms_scale_of<T>(total(2, square), hidden, eps);
  return row;
}

constexpr int kRounds = 3;  // the branch's norm, the mean, the variance

// With tables and 512 threads the compiler would spill for a second block.
template <typename T, int kThreads, bool kHasTables>
constexpr int kMinBranchBlocks = kHasTables && kThreads == 512 ? 1 : kMinBlocks<T>;

template <typename T, class Norm, int kThreadsPerRow, bool kHasTables, bool kQuantizes>
__global__ void __launch_bounds__(kBlockThreads<kThreadsPerRow>,
                                  (kMinBranchBlocks<T, kBlockThreads<kThreadsPerRow>, kHasTables>))
    branch_norm_kernel(const __grid_constant__ BranchParams params) {
  constexpr int kSize = kPackSize<T, Access::kVector>, kPacks = kRowPacks;
  const HeldRow<kThreadsPerRow, kSize> held(params);
  griddepcontrol_wait();
  const BranchRow<T, kSize, kHasTables> row(params, held.index);

  float h[kPacks][kSize] = {};
  typename BranchRow<T, kSize, kHasTables>::Loaded loaded[kPacks];
  held.for_each_pack([&](int i, int column) { row.load(column, h[i], loaded[i]); });
  const GroupReduce<Sum, RowSum<T>, kThreadsPerRow, 1, kRounds> reduce;
  const auto total = [&](int round, const auto& term) {
    RowSum<T> sums[1] = {0};
    held.for_each_pack([&](int i, int) { sums[0] += tree_sum<kSize>([&](int j) { return term(h[i][j]); }); });
    reduce(sums, round);
    return sums[0];
  };
  Statistic<T> x_scale;
  if (params.normalizes_x)
    x_scale = rms_scale_of<T>(total(0, [](float x) { return x * x; }), held.hidden, params.x_eps);
  held.for_each_pack([&](int i, int column) { row.finish(column, x_scale, h[i], loaded[i]); });
  if constexpr (Norm::kIsNorm) {
    const auto statistics = statistics_of<T, Norm>(total, held.hidden, params.eps);
    const auto set_results = [&](int i, int column) {
      normalize<Norm>(statistics, h[i]);
      row.modulate(column, h[i], loaded[i]);
    };
    if constexpr (kQuantizes) {
      store_quantized(held, row, h, set_results);
    } else {
      held.for_each_pack([&](int i, int column) {
        set_results(i, column);
        row.store(column, h[i]);
      });
    }
  }
}

// Rows of any length and alignment: read one element at a time, and again in each step.
template <typename T, class Norm, bool kHasTables, bool kQuantizes>
__global__ void __launch_bounds__(kAnyRowThreads, 1)
    scalar_branch_norm_kernel(const __grid_constant__ BranchParams params) {
  using Row = BranchRow<T, 1, kHasTables>;
  const ThreadRow<kAnyRowThreads> thread_row(params);
  griddepcontrol_wait();
  const Row row(params, thread_row.index);
  Statistic<T> x_scale;
  const auto for_each_column = [&](const auto& body) {
    thread_row.template for_each_column<1>(params.hidden, [&](int64_t column) {
      typename Row::Loaded loaded;
      float h[1];
      row.load(column, h, loaded);
      body(column, h, loaded);
    });
  };
  // Sums are double because a thread may add thousands of elements one by one.
  const GroupReduce<Sum, double, kAnyRowThreads, 1, kRounds> reduce;
  const auto total = [&](int round, const auto& term) {
    double sums[1] = {0};
    for_each_column([&](int64_t column, float (&h)[1], typename Row::Loaded& loaded) {
      if (round > 0) row.finish(column, x_scale, h, loaded);
      sums[0] += term(h[0]);
    });
    reduce(sums, round);
    return static_cast<RowSum<T>>(sums[0]);
  };
  if (params.normalizes_x)
    x_scale = rms_scale_of<T>(total(0, [](float x) { return x * x; }), params.hidden, params.x_eps);
  RowStatistics<T> statistics;
  if constexpr (Norm::kIsNorm) statistics = statistics_of<T, Norm>(total, params.hidden, params.eps);
  const auto for_each_result = [&](const auto& body) {
    for_each_column([&](int64_t column, float (&h)[1], typename Row::Loaded& loaded) {
      row.finish(column, x_scale, h, loaded);
      if constexpr (Norm::kIsNorm) {
        normalize<Norm>(statistics, h);
        row.modulate(column, h, loaded);
        body(column, h);
      }
    });
  };
  if constexpr (kQuantizes) {
    uint32_t largest[1] = {0};
    for_each_result(
        [&](int64_t, const float (&h)[1]) { largest[0] = max(largest[0], largest_magnitude(h)); });
    GroupReduce<UnsignedMax, uint32_t, kAnyRowThreads>{}(largest);
    const Fp8Quotient quotient(fp8_scale(largest[0]));
    for_each_result([&](int64_t column, const float (&h)[1]) { row.store(column, h, quotient); });
    if (threadIdx.x == 0) row.store_scale(quotient.scale);
  } else {
    for_each_result([&](int64_t column, const float (&h)[1]) { row.store(column, h); });
  }
}

inline bool has_vector_branch(const RowNormParams& args, int element_bytes) {
  bool vector =
      has_vector_access(args, element_bytes) && has_vector_rows(args.addend, args.shape.ndim, element_bytes);
  for (const Modulator* row : {&args.gate_row, &args.scale_row, &args.shift_row, &args.x_weight})
    vector = vector && has_vector_rows(*row, args.shape.ndim, row->is_float32 ? 4 : element_bytes);
  return vector;
}

using BranchThreads = RowThreads<64, 128, 192, 256, 320, 384, 512>;

template <class Norm, bool kHasTables, bool kQuantizes>
void launch_branch_kernel(const char* operation, const RowNormParams& args, Stream stream) {
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    const BranchParams params(args);
    const auto launch_short = [&](auto threads) {
      launch_kernel(operation, branch_norm_kernel<T, Norm, threads, kHasTables, kQuantizes>,
                    RowPosition<threads>::blocks(args.shape.rows), kBlockThreads<threads>, params, stream);
    };
    const int64_t packs = args.hidden / kPackSize<T, Access::kVector>;
    if (has_vector_branch(args, sizeof(T)) && dispatch_row_threads(BranchThreads{}, packs, launch_short))
      return;
    launch_kernel(operation, scalar_branch_norm_kernel<T, Norm, kHasTables, kQuantizes>,
                  static_cast<unsigned>(args.shape.rows), kAnyRowThreads, params, stream);
  });
}

template <class Norm>
void launch_branch_norm(const char* operation, const RowNormParams& args, Stream stream) {
  if constexpr (Norm::kIsNorm) {
    if (args.row_scale.data && args.index.data)
      return launch_branch_kernel<Norm, true, true>(operation, args, stream);
    if (args.row_scale.data) return launch_branch_kernel<Norm, false, true>(operation, args, stream);
  }
  if (args.index.data) return launch_branch_kernel<Norm, true, false>(operation, args, stream);
  launch_branch_kernel<Norm, false, false>(operation, args, stream);
}

}  // namespace h100_diffusers_kernels
