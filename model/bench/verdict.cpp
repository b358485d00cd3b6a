// SPDX-License-Identifier: MIT
// Rows compared with their targets, their baselines and their peers.
#include "model/bench/report.h"

#include <fmt/core.h>

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
        row.meets_target.reset();
        row.missed.clear();
        const auto judge_part = [&](const char* what, bool met) {
            row.meets_target = row.meets_target.value_or(true) && met;
            if (!met) row.missed += fmt::format("{}{}", row.missed.empty() ? "" : ", ", what);
        };
        if (row.target && row.target->share > 0 && row.ceiling_seconds) {
            const Row* baseline = row.target->gain ? baseline_of(row, rows) : nullptr;
            const bool gained = baseline != nullptr && baseline->timing.median >= *row.target->gain * seconds;
            judge_part("share", gained || *row.ceiling_seconds >= row.target->share * seconds);
        }
        if (row.target && row.target->seconds) judge_part("time", seconds <= *row.target->seconds);
        if (row.target && row.target->launches && row.launches)
            judge_part("launches", *row.launches <= *row.target->launches);
        // GEMMs are compared with another backend of this program and have no peer target
        const bool peer = row.peer_comparable && row.peer_seconds && !row.family.empty();
        if (peer)
            judge_part("peer", *row.peer_seconds >= (row.target ? row.target->peer : kPeerShare) * seconds);
    }
}

}  // namespace fp8flow::bench
