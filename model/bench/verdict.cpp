// SPDX-License-Identifier: MIT
// Rows against their bars, their baselines and their peers.
#include "model/bench/report.h"

namespace fp8flow::bench {

namespace {

constexpr std::string_view kFused = " fused=yes", kUnfused = " fused=no";

}  // namespace

void add_peer(Row& row, const Peers& peers, const std::string& gpu, int64_t ranks) {
    if (!row.peer.empty()) {  // measured in this run
        row.peer_gpu = gpu;
        return;
    }
    const PeerFigure* figure = peers.best(row.operation, row.shape, gpu, ranks);
    if (figure == nullptr) return;
    row.peer = figure->peer;
    row.peer_seconds = figure->seconds;
    row.peer_gpu = figure->same_sitting ? gpu : figure->gpu;
    row.peer_source = figure->source;
    row.peer_comparable = comparable(*figure, gpu);
}

const Row* baseline_of(const Row& row, const std::vector<Row>& rows) {
    const size_t at = row.shape.find(kFused);
    if (at == std::string::npos) return nullptr;
    std::string shape = row.shape;
    shape.replace(at, kFused.size(), kUnfused);
    for (const Row& other : rows)
        if (other.operation == row.operation && other.shape == shape) return &other;
    return nullptr;
}

void judge(std::vector<Row>& rows) {
    for (Row& row : rows) {
        const double seconds = row.timing.median;
        row.holds_bar.reset();
        row.missed.clear();
        const auto ask = [&](const char* what, bool held) {
            row.holds_bar = row.holds_bar.value_or(true) && held;
            if (!held) row.missed += fmt::format("{}{}", row.missed.empty() ? "" : ", ", what);
        };
        if (row.bar && row.bar->share > 0 && row.ceiling_seconds) {
            const Row* baseline = row.bar->gain ? baseline_of(row, rows) : nullptr;
            const bool gained = baseline != nullptr && baseline->timing.median >= *row.bar->gain * seconds;
            ask("share", gained || *row.ceiling_seconds >= row.bar->share * seconds);
        }
        if (row.bar && row.bar->seconds) ask("time", seconds <= *row.bar->seconds);
        if (row.bar && row.bar->launches && row.launches)
            ask("launches", *row.launches <= *row.bar->launches);
        // products stand beside another backend of this program, and have bars of their own
        const bool peer = row.peer_comparable && row.peer_seconds && !row.family.empty();
        if (peer) ask("peer", *row.peer_seconds >= (row.bar ? row.bar->peer : kPeerShare) * seconds);
    }
}

}  // namespace fp8flow::bench
