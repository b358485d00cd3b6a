// Peer memory as the probe sees it: a region of every rank, mapped by all.
#include "kernels/hopper/factory.h"
#include "kernels/hopper/peer_memory.h"

namespace fp8flow::hopper {

namespace {

class MappedRegion final : public PeerRegion {
public:
    explicit MappedRegion(std::unique_ptr<PeerMemory> memory) : memory_(std::move(memory)) {}
    void* of(int rank) override { return memory_->of(rank); }

private:
    std::unique_ptr<PeerMemory> memory_;
};

}  // namespace

std::unique_ptr<PeerRegion> make_peer_region(ProcessGroup& world, int64_t bytes, std::string& reason) {
    std::unique_ptr<PeerMemory> memory = PeerMemory::create(world, bytes, reason);
    if (memory == nullptr) return nullptr;
    return std::make_unique<MappedRegion>(std::move(memory));
}

}  // namespace fp8flow::hopper
