// SPDX-License-Identifier: MIT
// Messages: plain all-to-all messages, as a program without a dispatch plan sends them; the baseline of the
// exchanges. Over the ProcessGroup in host memory here, over NCCL between GPUs
// (kernels/hopper/exchange/nccl/messages.cu).
#pragma once

#include "kernels/comm/process_group.h"
#include "kernels/core/stream.h"

#include <memory>
#include <span>
#include <vector>

namespace fp8flow {

class Messages {
public:
    // Bytes out[r] of `from` go to rank r, where they become the bytes in[r] of `to`.
    struct AllToAll {
        const void* from = nullptr;
        void* to = nullptr;
        std::vector<ProcessGroup::Part> out, in;
    };
    virtual ~Messages() = default;
    // Collective; all messages as one operation. On a GPU they are enqueued on the stream.
    virtual void all_to_all(std::span<const AllToAll> all, const Launch& launch) = 0;
};

// In host memory; `world` outlives it.
std::unique_ptr<Messages> make_host_messages(ProcessGroup& world);

}  // namespace fp8flow
