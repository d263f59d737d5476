// Tensors overlap if a linear equation with strides as coefficients has a solution in bounded integers. It is
// solved one stride at a time, the largest first. The sum of the smaller strides' terms is bounded, so only
// few multiples of the largest remain to try, because dimensions of real tensors are nested.

#include "overlap.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace h100_diffusers_kernels {
namespace {

constexpr size_t kMaxTerms = 16;
constexpr int kMaxSteps = 1 << 14;

// The multiples of `step` from 0 to `count`.
struct Term {
  int64_t step, count;
};

// Terms in descending order of step; reach[i] is the largest sum of terms i and later.
struct Terms {
  Term terms[kMaxTerms];
  int64_t reach[kMaxTerms + 1];
  size_t size = 0;
  bool is_full = false;

  void add(int64_t step, int64_t count) {
    if (count == 0) return;
    size_t i = size;
    while (i > 0 && terms[i - 1].step < step) --i;
    if (i > 0 && terms[i - 1].step == step) {
      terms[i - 1].count += count;
    } else if (size == kMaxTerms) {
      is_full = true;
    } else {
      std::copy_backward(terms + i, terms + size, terms + size + 1);
      terms[i] = {step, count};
      ++size;
    }
  }

  void add_up() {
    reach[size] = 0;
    for (size_t i = size; i-- > 0;) reach[i] = reach[i + 1] + terms[i].step * terms[i].count;
  }
};

int64_t floor_divide(int64_t a, int64_t b) { return a / b - (a % b < 0); }
int64_t ceil_divide(int64_t a, int64_t b) { return a / b + (a % b > 0); }

// Whether the terms from `first` on can add up to `sum`. Also true if the search exceeds kMaxSteps.
bool can_add_up(const Terms& terms, size_t first, int64_t sum, int& steps) {
  if (sum < 0 || sum > terms.reach[first]) return false;
  if (first == terms.size) return true;
  const auto [step, count] = terms.terms[first];
  const int64_t least = std::max<int64_t>(0, ceil_divide(sum - terms.reach[first + 1], step));
  const int64_t most = std::min(count, sum / step);
  for (int64_t i = least; i <= most; ++i)
    if (++steps > kMaxSteps || can_add_up(terms, first + 1, sum - i * step, steps)) return true;
  return false;
}

// Whether `sum` plus multiples of the terms from `first` on, of either sign and not all 0, can be 0.
bool can_cancel(const Terms& terms, size_t first, int64_t sum, bool has_multiple, int& steps) {
  if (std::abs(sum) > terms.reach[first]) return false;
  if (first == terms.size) return has_multiple;
  const auto [step, count] = terms.terms[first];
  const int64_t rest = terms.reach[first + 1];
  // By symmetry the first nonzero multiple is taken as positive.
  const int64_t least = std::max(has_multiple ? -count : 0, ceil_divide(-sum - rest, step));
  const int64_t most = std::min(count, floor_divide(rest - sum, step));
  for (int64_t i = least; i <= most; ++i)
    if (++steps > kMaxSteps || can_cancel(terms, first + 1, sum + i * step, has_multiple || i != 0, steps))
      return true;
  return false;
}

// Adds the tensor's dimensions in bytes, and returns the distance from its first to its last byte.
int64_t add_bytes(Terms& terms, const Tensor& tensor) {
  const int64_t bytes = tensor.element_bytes();
  int64_t extent = bytes - 1;
  terms.add(1, bytes - 1);
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const int64_t step = tensor.stride(dim) * bytes, count = tensor.size(dim) - 1;
    if (step == 0) continue;
    terms.add(step, count);
    extent += step * count;
  }
  return extent;
}

// Merges the innermost terms into one run of bytes as long as they are contiguous.
void merge_bytes(Terms& terms) {
  while (terms.size > 1) {
    Term &bytes = terms.terms[terms.size - 1], &next = terms.terms[terms.size - 2];
    if (bytes.step != 1 || next.step > bytes.count + 1) return;
    next = {1, next.step * next.count + bytes.count};
    --terms.size;
  }
}

}  // namespace

bool overlaps_itself(const Tensor& tensor) {
  if (tensor.numel() == 0) return false;
  Terms terms;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) == 1) continue;
    if (tensor.stride(dim) == 0) return true;
    // Two dimensions with the same stride overlap.
    for (size_t i = 0; i < terms.size; ++i)
      if (terms.terms[i].step == tensor.stride(dim)) return true;
    terms.add(tensor.stride(dim), tensor.size(dim) - 1);
  }
  if (terms.is_full) return true;
  terms.add_up();
  bool is_nested = true;
  for (size_t i = 0; i < terms.size; ++i) is_nested &= terms.terms[i].step > terms.reach[i + 1];
  int steps = 0;
  return !is_nested && can_cancel(terms, 0, 0, false, steps);
}

bool overlap(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const auto address_of = [](const Tensor& tensor) {
    return static_cast<int64_t>(reinterpret_cast<intptr_t>(tensor.const_data_ptr()));
  };
  Terms terms;
  const int64_t a_begin = address_of(a), b_begin = address_of(b);
  const int64_t a_extent = add_bytes(terms, a), b_extent = add_bytes(terms, b);
  if (a_begin > b_begin + b_extent || b_begin > a_begin + a_extent) return false;
  if (terms.is_full) return true;
  // Equation: an offset in a, plus an offset counted back from the end of b, equals the distance of the two.
  merge_bytes(terms);
  terms.add_up();
  int steps = 0;
  return can_add_up(terms, 0, b_begin - a_begin + b_extent, steps);
}

}  // namespace h100_diffusers_kernels
