// SPDX-License-Identifier: MIT
// Messages in host memory.
#include "kernels/comm/messages.h"

namespace fp8flow {

namespace {

class HostMessages final : public Messages {
public:
    explicit HostMessages(ProcessGroup& world) : world_(world) {}
    void all_to_all(std::span<const AllToAll> all, const Launch&) override {
        for (const AllToAll& one : all) world_.all_to_all(one.from, one.out, one.to, one.in);
    }

private:
    ProcessGroup& world_;
};

}  // namespace

std::unique_ptr<Messages> make_host_messages(ProcessGroup& world) {
    return std::make_unique<HostMessages>(world);
}

}  // namespace fp8flow
