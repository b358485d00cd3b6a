// SPDX-License-Identifier: MIT
// Measures the bandwidth between GPUs of one host, the upper bound of the exchange: all ranks load from, or
// store to, the memory of all others at the same time.
#include "kernels/hopper/exchange/peer/peer_memory.h"
#include "kernels/hopper/factory.h"
#include "kernels/hopper/runtime/launch.h"

#include <fmt/core.h>

namespace fp8flow::hopper::peer {

namespace {

constexpr int kThreads = 256;
constexpr int kDepth = 4;  // 16-byte accesses in flight per thread
constexpr int kCtasPerSm = 8;

struct ProbeRegions {
    uint4* of[PeerMemory::kMaxRanks];
};

enum class Direction { load, store };

// Traffic: 16 * words bytes per other rank over NVLink. Each rank has its own part of `words` words in every
// region, so no two ranks access the same bytes. A CTA serves one peer, number blockIdx.x % others from
// `first_peer` on, so that all links are busy. No barriers. Deterministic: one thread stores each word.
// Loaded words are combined by exclusive or, and written to `sink` if the result is kNever, so that the
// compiler keeps the loads.
template <Direction direction>
__global__ void __launch_bounds__(kThreads)
    peer_kernel(ProbeRegions regions, int rank, int ranks, int first_peer, int others, int64_t words,
                uint4* sink) {
    const int peer = (first_peer + static_cast<int>(blockIdx.x) % others) % ranks;
    uint4* part = regions.of[peer] + rank * words;
    const int64_t first = static_cast<int64_t>(blockIdx.x) / others * kThreads * kDepth + threadIdx.x;
    const int64_t stride = static_cast<int64_t>(gridDim.x) / others * kThreads * kDepth;
    uint4 sum = make_uint4(threadIdx.x, blockIdx.x, 0, 0);
    for (int64_t base = first; base < words; base += stride) {
        uint4 loaded[kDepth];
#pragma unroll
        for (int i = 0; i < kDepth; ++i) {
            const int64_t at = base + i * kThreads;
            if constexpr (direction == Direction::store) {
                if (at < words) __stcs(part + at, sum);
            } else {
                loaded[i] = at < words ? __ldcs(part + at) : make_uint4(0, 0, 0, 0);
            }
        }
        if constexpr (direction == Direction::load) {
#pragma unroll
            for (int i = 0; i < kDepth; ++i) {
                sum.x ^= loaded[i].x;
                sum.y ^= loaded[i].y;
                sum.z ^= loaded[i].z;
                sum.w ^= loaded[i].w;
            }
        }
    }
    constexpr uint32_t kNever = 0x9E3779B9u;
    if (direction == Direction::load && sum.x == kNever && sum.y == kNever && sum.z == kNever &&
        sum.w == kNever)
        *sink = sum;
}

class CudaPeerProbe final : public PeerProbe {
public:
    CudaPeerProbe(Device& device, ProcessGroup& world, std::unique_ptr<PeerMemory> memory,
                  int64_t region_bytes)
        : device_(device),
          rank_(world.rank()),
          ranks_(world.size()),
          words_(region_bytes / static_cast<int64_t>(sizeof(uint4)) / world.size()),
          memory_(std::move(memory)) {
        for (int r = 0; r < ranks_; ++r) regions_.of[r] = reinterpret_cast<uint4*>(memory_->of(r));
        sink_ = static_cast<uint4*>(device_.allocate(sizeof(uint4)));
    }
    ~CudaPeerProbe() override { device_.free(sink_); }
    CudaPeerProbe(const CudaPeerProbe&) = delete;
    CudaPeerProbe& operator=(const CudaPeerProbe&) = delete;

    int64_t bytes() const override { return (ranks_ - 1) * words_ * static_cast<int64_t>(sizeof(uint4)); }
    void load(const Launch& launch) override { run<Direction::load>(launch); }
    void store(const Launch& launch) override { run<Direction::store>(launch); }

private:
    template <Direction direction> void run(const Launch& launch) {
        const int others = ranks_ - 1,
                  ctas = others * std::max(1, kNumSms * kCtasPerSm / others);  // equal for all ranks
        launch_kernel(peer_kernel<direction>, ctas, kThreads, launch, "peer traffic", regions_, rank_, ranks_,
                      (rank_ + 1) % ranks_, others, words_, sink_);
    }

    Device& device_;
    int rank_, ranks_;
    int64_t words_;
    std::unique_ptr<PeerMemory> memory_;
    ProbeRegions regions_{};
    uint4* sink_ = nullptr;
};

}  // namespace

}  // namespace fp8flow::hopper::peer

namespace fp8flow::hopper {

std::unique_ptr<PeerProbe> make_peer_probe(Ops& ops, ProcessGroup& world, PeerMapping mapping,
                                           int64_t region_bytes, std::string& reason) {
    if (world.size() < 2 || world.size() > peer::PeerMemory::kMaxRanks) {
        reason = fmt::format("{} ranks", world.size());
        return nullptr;
    }
    auto memory = peer::PeerMemory::create(world, mapping, region_bytes, reason);
    if (memory == nullptr) return nullptr;
    return std::make_unique<peer::CudaPeerProbe>(ops.device(), world, std::move(memory), region_bytes);
}

}  // namespace fp8flow::hopper
