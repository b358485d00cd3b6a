// SPDX-License-Identifier: MIT
// The files of configs/gpus as text: cmake/GpuFiles.cmake writes their definition.
#pragma once

#include <vector>

namespace fp8flow::predict {

struct GpuFile {
    const char* name;  // without .json
    const char* text;
};

const std::vector<GpuFile>& shipped_gpu_files();

}  // namespace fp8flow::predict
