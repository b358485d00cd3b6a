# SPDX-License-Identifier: MIT
# Makes the files of configs/gpus part of the program: fp8flow_gpu_files(OUT) sets OUT to a source file.
function(fp8flow_gpu_files out)
    file(GLOB files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/configs/gpus/*.json)
    list(SORT files)
    set(entries "")
    foreach(path ${files})
        set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${path})
        get_filename_component(name ${path} NAME_WE)
        file(READ ${path} text)
        string(APPEND entries "        {\"${name}\", R\"json(${text})json\"},\n")
    endforeach()
    set(written ${PROJECT_BINARY_DIR}/generated/gpu_files.cpp)
    file(CONFIGURE OUTPUT ${written} CONTENT [[
// Written by cmake/GpuFiles.cmake.
#include "model/predict/gpu.h"

namespace fp8flow::predict {
const std::vector<GpuFile>& shipped_gpu_files() {
    static const std::vector<GpuFile> files = {
@entries@    };
    return files;
}
}  // namespace fp8flow::predict
]] @ONLY)
    set(${out} ${written} PARENT_SCOPE)
endfunction()
