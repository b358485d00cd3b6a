// SPDX-License-Identifier: MIT
// Random tensors on a device: one period is drawn on the host, the rest are copies of it on the device.
#include "kernels/core/random_fill.h"

#include "kernels/core/random.h"
#include "kernels/core/scalar_math.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace fp8flow {

namespace {

constexpr int64_t kPeriod = 1048573;  // elements; a prime, so that no two rows of a matrix are alike

void store(uint8_t* bytes, DType dtype, int64_t i, double value) {
    const auto put = [&](auto element) {
        std::memcpy(bytes + i * static_cast<int64_t>(sizeof element), &element, sizeof element);
    };
    const float f = static_cast<float>(value);
    switch (dtype) {
        case DType::f32: return put(f);
        case DType::bf16: return put(to_bf16(f));
        case DType::f16: return put(to_f16(f));
        case DType::e4m3:
        case DType::e5m2: return put(to_fp8(f, dtype));
        case DType::e8m0: return put(float_to_e8m0(f));
        case DType::i32: return put(static_cast<int32_t>(value));
        case DType::i64: return put(static_cast<int64_t>(value));
        case DType::f64: return put(value);
    }
}

double draw(const RandomFill& fill, DType dtype, uint64_t i) {
    switch (fill.distribution) {
        case Distribution::normal: {
            const double z = random_normal(fill.seed, 0, i);
            if (!is_fp8(dtype)) return z * fill.spread;
            const double largest = fp8_max(dtype);
            return std::clamp(z * largest / 3.0, -largest, largest);
        }
        case Distribution::pow2:
            return std::exp2(
                std::floor((2.0 * fill.spread + 1.0) * random_uniform(fill.seed, 1, i) - fill.spread));
        case Distribution::integers: return std::floor(fill.spread * random_uniform(fill.seed, 2, i));
    }
    return 0.0;
}

}  // namespace

void fill_random(Device& device, const TensorView& view, const RandomFill& fill) {
    RandomFiller().fill(device, view, fill);
}

void RandomFiller::fill(Device& device, const TensorView& view, const RandomFill& fill) {
    const int64_t period = std::min(view.numel(), kPeriod), size = size_of(view.dtype);
    if (period == 0) return;
    std::vector<uint8_t>& drawn = drawn_[{view.dtype, fill.distribution, fill.spread, fill.seed}];
    const int64_t known = static_cast<int64_t>(drawn.size()) / size;
    drawn.resize(static_cast<std::size_t>(std::max(known, period) * size));
    for (int64_t i = known; i < period; ++i)
        store(drawn.data(), view.dtype, i, draw(fill, view.dtype, static_cast<uint64_t>(i)));
    device.copy_in(view.data, drawn.data(), static_cast<std::size_t>(period * size));
    device.synchronize();  // `drawn` may move before the copy has been made
    for (int64_t done = period; done < view.numel();) {
        // what is filled already is whole periods, or the end of the tensor
        const int64_t more = std::min(done, view.numel() - done);
        device.copy(view.bytes_ptr() + done * size, view.data, static_cast<std::size_t>(more * size));
        done += more;
    }
}

}  // namespace fp8flow
