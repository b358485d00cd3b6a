// SPDX-License-Identifier: MIT
// Where and with how much of the machine an op runs. The memory of the device it runs on: device.h.
#pragma once

#include <cstdint>

namespace fp8flow {

// An opaque stream of the backend (CUDA: cudaStream_t; reference: ignored).
struct Stream {
    void* handle = nullptr;
};

// A point in a stream's work that the host, or another stream, can wait for. Made before the step, recorded
// in it.
struct Event {
    void* handle = nullptr;
};

// What a stream is for. Operations of one role follow each other. Those of different roles may run at the
// same time, so each role has its own workspace. side, wire: layers/schedule/.
enum class StreamRole : uint8_t { main, side, wire };
constexpr int kNumStreamRoles = 3;

struct Launch {
    Stream stream;
    // 0: all; otherwise at most so many SMs, so that communication can run in parallel
    int sm_limit = 0;
    StreamRole role = StreamRole::main;
    // This call, and the calls of the stream since the last call without this mark (including that one), do
    // not depend on each other. A backend may run them in parallel. A call without the mark waits for
    // everything before it.
    bool independent = false;
    // Kernels of other streams run at the same time. A backend may then give each SM as much work as it has
    // time for, instead of equal shares; the results are the same.
    bool shared_device = false;
};

}  // namespace fp8flow
