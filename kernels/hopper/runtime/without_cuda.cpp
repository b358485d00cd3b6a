// SPDX-License-Identifier: MIT
// Stubs of the CUDA backend for a build without CUDA: no devices, and the reason why. CMake passes that
// reason as FP8FLOW_NO_CUDA_REASON and compiles this file instead of the .cu files.
#include "kernels/core/error.h"
#include "kernels/hopper/factory.h"
#include "kernels/hopper/runtime/count_launches.h"
#include "kernels/hopper/runtime/device_query.h"
#include "kernels/hopper/runtime/self_test.h"

namespace fp8flow::hopper {

bool built_with_cuda() { return false; }
int device_count() { return 0; }
std::string driver_version() { return {}; }
std::string runtime_version() { return {}; }
std::string device_name(int) { return {}; }
double max_clock_hertz(int) { return 0; }
int64_t memory_bytes(int) { return 0; }
std::string peer_problem() { return {}; }
std::optional<double> energy_joules(int) { return {}; }

std::string unavailable_reason() {
    if (!gpu_visible()) return "no device";
    return "a GPU is visible, but this program was built without CUDA: " FP8FLOW_NO_CUDA_REASON;
}

void evaluate_on_device(DeviceFunction, std::span<const float>, std::span<uint32_t>) {
    fail(ExitCode::usage, "the device self-test needs a Hopper GPU: {}", unavailable_reason());
}

std::optional<LaunchCount> count_launches(const std::function<void(const Launch&)>&) { return {}; }

std::unique_ptr<Ops> make_ops(int, const KernelChoice&) {
    fail(ExitCode::usage, "the Hopper backend is not in this program: {}", unavailable_reason());
}
std::unique_ptr<Probe> make_probe(Ops&) {
    fail(ExitCode::usage, "the Hopper backend is not in this program: {}", unavailable_reason());
}
std::unique_ptr<PeerProbe> make_peer_probe(Ops&, ProcessGroup&, PeerMapping, int64_t, std::string&) {
    fail(ExitCode::usage, "the Hopper backend is not in this program: {}", unavailable_reason());
}
std::unique_ptr<Exchange> make_local_exchange(Ops&, CombineOrder) {
    fail(ExitCode::usage, "the Hopper backend is not in this program: {}", unavailable_reason());
}
std::unique_ptr<Exchange> make_peer_exchange(Ops&, const ExchangeGroups&, const ExchangeLimits&, CombineOrder,
                                             double, PeerMapping, std::string&) {
    fail(ExitCode::usage, "the Hopper backend is not in this program: {}", unavailable_reason());
}
void derive_level_plans(const DispatchPlan&, const LevelMap&, const LevelPlans&, Arena&, const Launch&) {
    fail(ExitCode::usage, "the Hopper backend is not in this program: {}", unavailable_reason());
}

}  // namespace fp8flow::hopper
