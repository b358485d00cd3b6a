// RMSNorm forward with E4M3 rows and their transposed copy from one kernel: its arguments and launch. Read next: norm_bands.cu.
#pragma once

#include "kernels/hopper/norm_forward.h"
#include "kernels/hopper/turn_tile.h"

namespace fp8flow::hopper {

struct NormBands : NormForward {
    CodeRows row_codes;  // what the rows become, to be turned
    RowView transposed;  // [H, >= T]: columns past T are pads
    float* tile_scales;  // optional: otherwise both copies have one scale
    int scale_stride;
    uint32_t* progress;  // [bands of 128 rows]: 0 before and after
    int slots;           // of a CTA
};

// False: two kernels have to do it. `progress` has `most_bands` counters.
bool launch_norm_bands(const NormForward& norm, const Fp8Tensor& rows, const Fp8Tensor& transposed,
                       uint32_t* progress, int64_t most_bands, const Launch& launch);

}  // namespace fp8flow::hopper
