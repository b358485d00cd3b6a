// RMSNorm to FP8 rows and their transposed copy at once.
#pragma once

#include "kernels/hopper/norm_rows.h"

namespace fp8flow::hopper {

struct NormTransposeKnobs {
    int band_tiles = 1, lag_rows = 1024, interleaved = 1, ahead = 256;
};
bool launch_norm_transpose(const NormForward& args, const Fp8Tensor& rows, const Fp8Tensor& transposed,
                           uint32_t* zeros, const Launch& launch, const NormTransposeKnobs& knobs = {});

}  // namespace fp8flow::hopper
