// linears_lora: products of 16-bit rows and weights, with low-rank terms, or their GELU, rounded to 16 bits.
#include "activations.cuh"
#include "product.cuh"
#include "rounded_output.cuh"

namespace h100_diffusers_kernels {
namespace {

template <typename T>
struct ActivatedOutput : RoundedOutput<T> {
  template <int kValues>
  __device__ __forceinline__ static void finish(const ProductParams& params, const WarpRole&,
                                                const ProductPosition&, float (&values)[kValues]) {
    if (params.args.gelu == Gelu::kErf) apply<GeluErf>(values);
    if (params.args.gelu == Gelu::kTanh) apply<GeluTanh>(values);
  }

 private:
  template <class Activation, int kValues>
  __device__ __forceinline__ static void apply(float (&values)[kValues]) {
    constexpr bool kFast = true;
#pragma unroll
    for (float& value : values) value = Activation::template apply<kFast>(value);
  }
};

}  // namespace

void linears_lora(const LinearParams& args, Stream stream) {
  constexpr const char* kOperation = "linears_lora";
  dispatch_16_bit_product<256, 160, 128>(
      kOperation, args, stream, [&]<typename T>(std::type_identity<T>, auto columns) {
        launch_product<columns, ActivatedOutput<T>, Operands::k16Bit>(kOperation, args, stream);
      });
}

}  // namespace h100_diffusers_kernels
