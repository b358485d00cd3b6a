// SPDX-License-Identifier: MIT
// Rounds in which every rank has one partner, timed on the host around transfers that follow one another.
#include "model/base/wire_speed.h"

#include "kernels/core/error.h"
#include "kernels/core/pinned.h"

#include <unistd.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>

namespace fp8flow {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTurns = 4;  // timed, after one that makes connections
constexpr std::size_t kMostNamed = 4;

double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
}

class MessageTraffic final : public PairTraffic {
public:
    MessageTraffic(Messages& messages, ProcessGroup& group, Device& device, int64_t bytes)
        : messages_(messages),
          size_(static_cast<std::size_t>(group.size())),
          device_(device),
          bytes_(bytes),
          from_(device.allocate(static_cast<std::size_t>(bytes))),
          to_(device.allocate(static_cast<std::size_t>(bytes))) {
        device.fill(from_, 0, static_cast<std::size_t>(bytes));
    }
    ~MessageTraffic() override {
        device_.free(to_);
        device_.free(from_);
    }
    MessageTraffic(const MessageTraffic&) = delete;
    MessageTraffic& operator=(const MessageTraffic&) = delete;

    int64_t bytes() const override { return bytes_; }
    void start(int partner) override {
        Messages::AllToAll one{.from = from_, .to = to_, .out = {}, .in = {}};
        one.out.resize(size_);
        one.out[static_cast<std::size_t>(partner)].bytes = static_cast<std::size_t>(bytes_);
        one.in = one.out;
        messages_.all_to_all(std::span(&one, 1), {});
    }

private:
    Messages& messages_;
    std::size_t size_;
    Device& device_;
    int64_t bytes_;
    void *from_, *to_;
};

class StoreTraffic final : public PairTraffic {
public:
    explicit StoreTraffic(std::unique_ptr<PeerProbe> probe) : probe_(std::move(probe)) {}
    int64_t bytes() const override { return probe_->bytes_to_one(); }
    void start(int partner) override { probe_->store_to(partner); }

private:
    std::unique_ptr<PeerProbe> probe_;
};

// Polled: only the host can tell a late partner from a lost one.
void wait(Device& device, int partner, double deadline_seconds) {
    HostEvent event(device);
    event.record({});
    const auto begin = Clock::now();
    while (!event.has_passed()) {
        require(seconds_since(begin) < deadline_seconds, ExitCode::peer,
                "parallel.wire_self_test: no answer from rank {} of the level for {:g} s; "
                "parallel.peer_deadline_seconds is the limit",
                partner, deadline_seconds);
        std::this_thread::yield();
    }
}

double median_of(const std::vector<WirePair>& pairs) {  // by speed
    const std::size_t middle = pairs.size() / 2;
    const double upper = pairs[middle].bytes_per_second;
    return pairs.size() % 2 == 1 ? upper : (pairs[middle - 1].bytes_per_second + upper) / 2;
}

std::string rate_text(double bytes_per_second) { return fmt::format("{:.3g} GB/s", bytes_per_second * 1e-9); }

}  // namespace

std::unique_ptr<PairTraffic> make_message_traffic(Messages& messages, ProcessGroup& group, Device& device,
                                                  int64_t bytes) {
    return std::make_unique<MessageTraffic>(messages, group, device, bytes);
}

std::unique_ptr<PairTraffic> make_store_traffic(std::unique_ptr<PeerProbe> probe) {
    return std::make_unique<StoreTraffic>(std::move(probe));
}

int num_rounds(int ranks) { return ranks % 2 == 0 ? ranks - 1 : ranks; }

// The circle method: with an odd number of seats around, two ranks r and p are partners in the round in which
// r + p is twice its number, and who would be his own partner has the seat in the middle.
int partner_of(int rank, int round, int ranks) {
    const int around = num_rounds(ranks);
    if (rank == around) return round;
    const int partner = (2 * round - rank + 2 * around) % around;
    if (partner != rank) return partner;
    return around < ranks ? around : -1;
}

std::vector<double> measure_pairs(PairTraffic& traffic, ProcessGroup& group, Device& device,
                                  const WireSpeedLimits& limits) {
    std::vector<double> speeds(static_cast<std::size_t>(group.size()), 0.0);
    if (group.size() == 1) return speeds;
    const auto begin = Clock::now();
    for (int round = 0; round < num_rounds(group.size()); ++round) {
        int64_t late = seconds_since(begin) > limits.seconds ? 1 : 0;
        group.all_reduce_max(std::span<int64_t>(&late, 1));  // also starts the round
        if (late != 0) break;
        const int partner = partner_of(group.rank(), round, group.size());
        // Messages are collective: without a partner, with oneself, which moves nothing between ranks.
        const int other = partner < 0 ? group.rank() : partner;
        traffic.start(other);
        wait(device, other, limits.deadline_seconds);
        const auto start = Clock::now();
        for (int turn = 0; turn < kTurns; ++turn) traffic.start(other);
        wait(device, other, limits.deadline_seconds);
        if (partner >= 0)
            speeds[static_cast<std::size_t>(partner)] =
                static_cast<double>(kTurns * traffic.bytes()) / seconds_since(start);
    }
    return speeds;
}

std::vector<WirePair> gather_pairs(const std::vector<double>& speeds, ProcessGroup& group,
                                   ProcessGroup& world) {
    const auto ranks = static_cast<std::size_t>(world.size());
    const int own = world.rank();
    std::vector<int> members(static_cast<std::size_t>(group.size()));
    group.all_gather(&own, sizeof own, members.data());
    std::vector<double> mine(ranks, 0.0), all(ranks * ranks);
    for (std::size_t i = 0; i < members.size(); ++i) mine[static_cast<std::size_t>(members[i])] = speeds[i];
    world.all_gather(mine.data(), ranks * sizeof(double), all.data());
    std::vector<WirePair> pairs;
    for (std::size_t a = 0; a < ranks; ++a)
        for (std::size_t b = a + 1; b < ranks; ++b)
            if (const double slower = std::min(all[a * ranks + b], all[b * ranks + a]); slower > 0)
                pairs.push_back({static_cast<int>(a), static_cast<int>(b), slower});
    return pairs;
}

std::vector<std::string> names_of_ranks(ProcessGroup& world, const HostLayout& hosts) {
    using Name = std::array<char, 64>;
    Name own{};
    ::gethostname(own.data(), own.size() - 1);
    std::vector<Name> all(static_cast<std::size_t>(world.size()));
    world.all_gather(own.data(), sizeof own, all.data());
    std::vector<std::string> names;
    for (int r = 0; r < world.size(); ++r)
        names.push_back(fmt::format("rank {} on host {} ({})", r, hosts.host(r),
                                    all[static_cast<std::size_t>(r)].data()));
    return names;
}

std::string wire_speed_text(const std::string& level, const std::vector<WirePair>& pairs,
                            const std::vector<std::string>& names) {
    if (pairs.empty()) return fmt::format("wire {}: no pair was measured", level);
    std::vector<WirePair> sorted = pairs;
    std::stable_sort(sorted.begin(), sorted.end(), [](const WirePair& x, const WirePair& y) {
        return x.bytes_per_second < y.bytes_per_second;
    });
    const auto name = [&](const WirePair& pair) {
        return fmt::format("{} and {}", names[static_cast<std::size_t>(pair.a)],
                           names[static_cast<std::size_t>(pair.b)]);
    };
    const double median = median_of(sorted);
    std::string text = fmt::format("wire {}: {} pair{} each way, median {}, slowest {}: {}", level,
                                   pairs.size(), pairs.size() == 1 ? "" : "s", rate_text(median),
                                   rate_text(sorted.front().bytes_per_second), name(sorted.front()));
    const auto slow =
        static_cast<std::size_t>(std::count_if(sorted.begin(), sorted.end(), [&](const WirePair& pair) {
            return pair.bytes_per_second < median / 2;
        }));
    if (slow == 0) return text;
    text += fmt::format("\nwarning: wire {}: less than half of the median:", level);
    for (std::size_t i = 0; i < std::min(slow, kMostNamed); ++i)
        text += fmt::format("{} {} ({})", i == 0 ? "" : ";", name(sorted[i]),
                            rate_text(sorted[i].bytes_per_second));
    if (slow > kMostNamed) text += fmt::format("; {} more", slow - kMostNamed);
    return text;
}

}  // namespace fp8flow
