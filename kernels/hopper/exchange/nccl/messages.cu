// SPDX-License-Identifier: MIT
// Messages between GPUs: ncclSend and ncclRecv of all parts in one group; parts for this rank are copied.
#include "kernels/hopper/exchange/nccl/comm.h"
#include "kernels/hopper/factory.h"
#include "kernels/hopper/runtime/cuda_check.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::nccl {

namespace {

class NcclMessages final : public Messages {
public:
    NcclMessages(Device& device, ProcessGroup& world, double deadline_seconds)
        : device_(device), comm_(world, world.rank(), deadline_seconds) {}

    void all_to_all(std::span<const AllToAll> all, const Launch& launch) override {
        std::vector<NcclComm::Send> sends;
        std::vector<NcclComm::Receive> receives;
        for (const AllToAll& one : all) {
            const auto* from = static_cast<const uint8_t*>(one.from);
            auto* to = static_cast<uint8_t*>(one.to);
            for (int r = 0; r < comm_.size(); ++r) {
                const ProcessGroup::Part &out = one.out[static_cast<std::size_t>(r)],
                                         &in = one.in[static_cast<std::size_t>(r)];
                if (r == comm_.rank()) {
                    device_.copy(to + in.offset, from + out.offset, out.bytes, launch.stream);
                    continue;
                }
                sends.push_back({from + out.offset, static_cast<int64_t>(out.bytes), r});
                receives.push_back({to + in.offset, static_cast<int64_t>(in.bytes), r});
            }
        }
        comm_.send_receive("all_to_all", sends, receives, stream_of(launch));
    }

private:
    Device& device_;
    NcclComm comm_;
};

}  // namespace

}  // namespace fp8flow::hopper::nccl

namespace fp8flow::hopper {

std::unique_ptr<Messages> make_nccl_messages(Ops& ops, ProcessGroup& world, double deadline_seconds) {
    return std::make_unique<nccl::NcclMessages>(ops.device(), world, deadline_seconds);
}

}  // namespace fp8flow::hopper
