// linear_fp8: products of FP8 rows and FP8 weights, rounded to 16 bits.
#include "product.cuh"
#include "rounded_output.cuh"

namespace h100_diffusers_kernels {

void linear_fp8(const LinearParams& args, Stream stream) {
  constexpr const char* kOperation = "linear_fp8";
  dispatch_16_bit_product<192, 128>(kOperation, args, stream,
                                    [&]<typename T>(std::type_identity<T>, auto columns) {
                                      launch_fp8_product<columns, RoundedOutput<T>>(kOperation, args, stream);
                                    });
}

}  // namespace h100_diffusers_kernels
