// SPDX-License-Identifier: MIT
// Row access in float for every storage type, and the sums over a row in their stated order.
#include "kernels/reference/rows.h"

#include "kernels/core/error.h"

#include <algorithm>

namespace fp8flow::reference {

namespace {

template <class T> void load_as(const TensorView& view, int64_t offset, int64_t count, float* out) {
    const T* data = static_cast<const T*>(view.data) + offset;
    for (int64_t i = 0; i < count; ++i) out[i] = to_float(data[i]);
}

template <class T, class Convert>
void store_as(const TensorView& view, int64_t offset, int64_t count, const float* values, Convert convert) {
    T* data = static_cast<T*>(view.data) + offset;
    for (int64_t i = 0; i < count; ++i) data[i] = convert(values[i]);
}

float combine_lanes(const float* lanes) {
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

}  // namespace

void load_floats(const TensorView& view, int64_t offset, int64_t count, float* out) {
    switch (view.dtype) {
        case DType::f32: {
            const float* data = static_cast<const float*>(view.data) + offset;
            for (int64_t i = 0; i < count; ++i) out[i] = data[i];
            return;
        }
        case DType::bf16: return load_as<Bf16>(view, offset, count, out);
        case DType::f16: return load_as<Fp16>(view, offset, count, out);
        case DType::e4m3: return load_as<E4m3>(view, offset, count, out);
        case DType::e5m2: return load_as<E5m2>(view, offset, count, out);
        case DType::e8m0: {
            const uint8_t* data = view.bytes_ptr() + offset;
            for (int64_t i = 0; i < count; ++i) out[i] = e8m0_to_float(data[i]);
            return;
        }
        case DType::i32:
        case DType::i64:
        case DType::f64: break;
    }
    FP8FLOW_CHECK(false, "cannot read {} as floats", describe(view));
}

void store_floats(const TensorView& view, int64_t offset, int64_t count, const float* values) {
    switch (view.dtype) {
        case DType::f32: {
            float* data = static_cast<float*>(view.data) + offset;
            for (int64_t i = 0; i < count; ++i) data[i] = values[i];
            return;
        }
        case DType::bf16:
            return store_as<Bf16>(view, offset, count, values, [](float x) { return to_bf16(x); });
        case DType::f16:
            return store_as<Fp16>(view, offset, count, values, [](float x) { return to_f16(x); });
        case DType::e4m3:
            return store_as<E4m3>(view, offset, count, values, [](float x) { return to_e4m3(x); });
        case DType::e5m2:
            return store_as<E5m2>(view, offset, count, values, [](float x) { return to_e5m2(x); });
        case DType::e8m0:
        case DType::i32:
        case DType::i64:
        case DType::f64: break;
    }
    FP8FLOW_CHECK(false, "cannot store floats into {}", describe(view));
}

std::vector<GroupRange> group_ranges(const RowGroups& groups, int64_t rows) {
    if (groups.num_groups == 0) return {{0, 0, rows, rows}};
    const int64_t* counts = groups.counts.as<int64_t>();
    const int64_t* offsets = groups.offsets.as<int64_t>();
    std::vector<GroupRange> ranges;
    for (int64_t g = 0; g < groups.num_groups; ++g) {
        const int64_t first = offsets[g], end = offsets[g + 1];
        require(
            first >= 0 && first % groups.alignment == 0 && counts[g] >= 0 && end >= first &&
                counts[g] <= end - first && end <= groups.row_capacity,
            ExitCode::usage,
            "group {} has {} rows from row {} to {}, want them inside a capacity of {}, from multiples of {}",
            g, counts[g], first, end, groups.row_capacity, groups.alignment);
        ranges.push_back({g, first, counts[g], end});
    }
    return ranges;
}

void check_rows_named(const TensorView& numbers, int64_t count, const char* what, int64_t end) {
    const int32_t* const all = numbers.as<int32_t>() + base_of(numbers);
    for (int64_t i = 0; i < count; ++i)
        require(all[i] >= -1 && all[i] < end, ExitCode::usage, "{}: number {} is {}, want -1 to {}", what, i,
                all[i], end - 1);
}

void check_expert_ids(const TensorView& ids, const char* what, int32_t least, int64_t experts) {
    const int64_t topk = ids.cols();
    for (int64_t first = 0; first < ids.numel(); first += topk) {
        const int32_t* const own = ids.as<int32_t>() + first;
        for (int64_t k = 0; k < topk; ++k) {
            require(own[k] >= least && own[k] < experts, ExitCode::usage,
                    "{}: token {} names expert {}, want 0 to {}", what, first / topk, own[k], experts - 1);
            require(own[k] < 0 || std::find(own, own + k, own[k]) == own + k, ExitCode::usage,
                    "{}: token {} names expert {} twice", what, first / topk, own[k]);
        }
    }
}

float lane_sum(const float* values, int64_t count) {
    float lanes[8] = {};
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (int lane = 0; lane < 8; ++lane) lanes[lane] += values[i + lane];
    for (; i < count; ++i) lanes[i % 8] += values[i];
    return combine_lanes(lanes);
}

float lane_dot(const float* a, const float* b, int64_t count) {
    float lanes[8] = {};
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (int lane = 0; lane < 8; ++lane) lanes[lane] = fma_float(a[i + lane], b[i + lane], lanes[lane]);
    for (; i < count; ++i) lanes[i % 8] = fma_float(a[i], b[i], lanes[i % 8]);
    return combine_lanes(lanes);
}

}  // namespace fp8flow::reference
