// SPDX-License-Identifier: MIT
// What the SwiGLU kernels share: arguments, the layout of scales, and the launch functions of the kernels for
// many wide BF16 rows.
#pragma once

#include "kernels/core/stream.h"
#include "kernels/hopper/device/gated_unit.h"
#include "kernels/hopper/device/groups.h"

namespace fp8flow::hopper::swiglu {

// Scales of FP8 values in layout vec128: the blocks of a row are `pitch` apart, the scales of neighbouring
// rows adjacent.
struct BlockScales {
    float* data = nullptr;  // nullptr: the output holds values
    int64_t pitch = 0;
    ScaleFormat format = ScaleFormat::pow2;
    __device__ float* at(int64_t row, int col) const {
        return data + row + col / static_cast<int>(kBlock) * pitch;
    }
};
enum class Output { values, e4m3, e5m2 };
constexpr DType fp8_of(Output output) { return output == Output::e5m2 ? DType::e5m2 : DType::e4m3; }

// Tickets of the rows that one warp of every CTA works on: how many rounds are taken, and how many of these
// warps have finished. 0 between launches: the last warp resets it. A line of L2 each.
struct alignas(128) RowTicket {
    static constexpr int kCount = 32;  // at least the warps of a CTA
    uint32_t taken, finished;
};

struct SwigluForward {
    RowView h, prob, a;  // prob absent: 1; a: plain or FP8 values
    BlockScales scales;
    DeviceGroups groups;
    RowTicket* tickets;
};
struct SwigluGradient {
    RowView da, h, prob, dh, dprob;
    BlockScales scales;
    DeviceGroups groups;
    RowTicket* tickets;
};

// Every lane has whole aligned units of BF16 (and FP8), or none: swiglu.cu checks it.
// Args: SwigluForward or SwigluGradient, or these Shaped.
template <class Args>
void launch_swiglu_rows(const Args& args, Output output, int64_t rows, const Launch& launch);
template <class Args>
void launch_swiglu_backward_rows(const Args& args, Output output, int64_t rows, const Launch& launch);

}  // namespace fp8flow::hopper::swiglu
