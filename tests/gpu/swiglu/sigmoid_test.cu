// SPDX-License-Identifier: MIT
// The fast sigmoid of the SwiGLU kernels (kernels/hopper/device/sigmoid.h) against the host: the reciprocal
// for every mantissa, and sigmoids near and far.
#include "kernels/hopper/device/sigmoid.h"
#include "tests/support/parity.h"

namespace fp8flow::test {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMantissas = 1 << 23;

// out[i] = 1 / d for the i-th float d of [1, 2) * 2^exponent
__global__ void reciprocals(float* out, int exponent) {
    const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
    if (i < kMantissas)
        out[i] = hopper::reciprocal_near(__uint_as_float((static_cast<uint32_t>(127 + exponent) << 23) + i));
}
// out[i] = x * sigmoid(x) for x of eight neighbours at a time, as the kernels use it
__global__ void silus(const float* x, float* out, int count) {
    const int first = static_cast<int>(blockIdx.x * kThreads + threadIdx.x) * 8;
    if (first >= count) return;
    float in[8], sigmoid[8];
    for (int i = 0; i < 8; ++i) in[i] = x[first + i];
    hopper::sigmoids_of(in, sigmoid);
    for (int i = 0; i < 8; ++i) out[first + i] = in[i] * sigmoid[i];
}

std::vector<float> on_host(HopperOps& gpu, const void* device, int64_t count) {
    std::vector<float> host(static_cast<std::size_t>(count));
    gpu.device().copy_out(host.data(), device, host.size() * sizeof(float), {});
    return host;
}

TEST(Sigmoid, ReciprocalOfEveryMantissa) {
    HopperOps gpu;
    float* device = static_cast<float*>(gpu.device().allocate(kMantissas * sizeof(float)));
    for (const int exponent : {0, 1, 60, 115}) {
        reciprocals<<<kMantissas / kThreads, kThreads>>>(device, exponent);
        const std::vector<float> got = on_host(gpu, device, kMantissas);
        int64_t differences = 0;
        for (int64_t i = 0; i < kMantissas; ++i) {
            const float d =
                bits_float((static_cast<uint32_t>(127 + exponent) << 23) + static_cast<uint32_t>(i));
            differences += got[static_cast<std::size_t>(i)] != 1.0f / d;
        }
        EXPECT_EQ(differences, 0) << "of 2^" << exponent;
    }
    gpu.device().free(device);
}

// Every BF16 value; units of near values only, and units in which one is far.
TEST(Sigmoid, OfNearAndFarValues) {
    std::vector<float> x;
    for (uint32_t top = 0; top < 0x10000; ++top) x.push_back(bits_float(top << 16));
    for (uint32_t top = 0; top < 0x10000; ++top)
        x.push_back(bits_float(top % 8 == 3 ? top << 16 : (top % 0x4280u) << 16));
    HopperOps gpu;
    const std::size_t bytes = x.size() * sizeof(float);
    float *in = static_cast<float*>(gpu.device().allocate(bytes)),
          *out = static_cast<float*>(gpu.device().allocate(bytes));
    gpu.device().copy_in(in, x.data(), bytes, {});
    const int count = static_cast<int>(x.size());
    silus<<<count / 8 / kThreads, kThreads>>>(in, out, count);
    const std::vector<float> got = on_host(gpu, out, count);
    int64_t differences = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
        const float want = silu_float(x[i]);
        if (float_bits(got[i]) == float_bits(want) || (std::isnan(got[i]) && std::isnan(want))) continue;
        if (++differences <= 5)
            ADD_FAILURE() << "silu(" << x[i] << "): device " << got[i] << ", host " << want;
    }
    EXPECT_EQ(differences, 0);
    gpu.device().free(in);
    gpu.device().free(out);
}

}  // namespace
}  // namespace fp8flow::test
