// SPDX-License-Identifier: MIT
// Looks for NVIDIA device files without the help of a driver or of CUDA; part of every build.
#include "kernels/hopper/runtime/device_query.h"

#include <cctype>
#include <filesystem>
#include <string>
#include <system_error>

namespace fp8flow::hopper {

// /dev/nvidia0, /dev/nvidia1, ...: inside a container these exist only for the GPUs handed to it, while /proc
// lists those of the host.
bool gpu_visible() {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator("/dev", error)) {
        const std::string name = entry.path().filename().string();
        if (name.starts_with("nvidia") && name.size() > 6 &&
            std::isdigit(static_cast<unsigned char>(name[6])) != 0) {
            return true;
        }
    }
    return false;
}

}  // namespace fp8flow::hopper
