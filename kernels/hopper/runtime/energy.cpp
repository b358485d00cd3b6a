// SPDX-License-Identifier: MIT
// The energy counter of a GPU, from the driver's management library, which is loaded when it is first asked
// for: a machine without it has no counter.
#include "kernels/hopper/runtime/device_query.h"

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <type_traits>

namespace fp8flow::hopper {

namespace {

// The types of nvml.h that are used.
using Handle = void*;
struct Library {
    int (*init)() = nullptr;
    int (*by_bus_id)(const char*, Handle*) = nullptr;
    int (*energy)(Handle, unsigned long long*) = nullptr;

    Library() {
        void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) return;
        const auto find = [&](const char* name, auto& function) {
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
        };
        find("nvmlInit_v2", init);
        find("nvmlDeviceGetHandleByPciBusId_v2", by_bus_id);
        find("nvmlDeviceGetTotalEnergyConsumption", energy);
        usable = init != nullptr && by_bus_id != nullptr && energy != nullptr && init() == 0;
    }
    bool usable = false;
};

}  // namespace

std::optional<double> energy_joules(int device) {
    static const Library library;
    constexpr int kBusIdLength = 32;
    char bus_id[kBusIdLength] = {};
    Handle handle = nullptr;
    unsigned long long millijoules = 0;
    if (!library.usable || cudaDeviceGetPCIBusId(bus_id, kBusIdLength, device) != cudaSuccess ||
        library.by_bus_id(bus_id, &handle) != 0 || library.energy(handle, &millijoules) != 0)
        return std::nullopt;
    return static_cast<double>(millijoules) * 1e-3;
}

}  // namespace fp8flow::hopper
