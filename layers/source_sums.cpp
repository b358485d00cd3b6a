// SPDX-License-Identifier: MIT
// Reductions of expert gradients over ranks. With combine order `invariant` the tokens of each source rank
// have separate sums. These are added in ascending source rank over the whole job, ((s0 + s1) + s2) + ..., so
// the result does not depend on which rank holds an expert.
#include "layers/parameter.h"

namespace fp8flow {

namespace {

constexpr int64_t kRowsBytes = 64 << 20;  // bytes of one piece of the gradients of all sources
constexpr int64_t kUnit = 64;             // a row of a piece has a multiple of so many elements

}  // namespace

// The gradients of all source ranks of the job, in rank order. If other ranks hold replicas, each rank has
// some of these rows and gathers the others.
std::vector<TensorView> ParameterStore::rows_of_sources(Exchange& exchange, int64_t replica,
                                                        const TensorView& piece, const Launch& launch) {
    const int64_t replicas = exchange.num_ranks(Ranks::expert_replicas), element = size_of(piece.dtype);
    const auto own = [&](int64_t source) {
        return make_view(piece.bytes_ptr() + source * source_stride_ * element, piece.dtype, {piece.numel()});
    };
    std::vector<TensorView> rows;
    if (replicas == 1) {
        for (int64_t source = 0; source < sources_; ++source) rows.push_back(own(source));
        return rows;
    }
    const TensorView all =
        sums_.tensor(piece.dtype, {replicas * sources_, round_up(piece.numel(), kUnit)}, "sums");
    Shards shards(static_cast<size_t>(replicas));
    for (int64_t row = 0; row < all.dim(0); ++row) {
        rows.push_back(make_view(all[row].data, piece.dtype, {piece.numel()}));
        shards[static_cast<size_t>(row / sources_)].push_back({row * all.dim(1), piece.numel()});
    }
    for (int64_t source = 0; source < sources_; ++source) {
        const TensorView& row = rows[static_cast<size_t>(replica * sources_ + source)];
        ops_.device().copy(row.data, own(source).data, static_cast<size_t>(row.bytes()), launch.stream);
    }
    exchange.all_gather(Ranks::expert_replicas, make_view(all.data, piece.dtype, {all.numel()}), shards,
                        launch);
    return rows;
}

void ParameterStore::reduce_expert_gradients(Exchange& exchange, int64_t replica, const TensorView& gradient,
                                             const Launch& launch) {
    if (sources_ == 1) {
        exchange.all_reduce(Reduce::sum, Ranks::expert_replicas, gradient, launch);
        return;
    }
    const int64_t all = exchange.num_ranks(Ranks::expert_replicas) * sources_;
    const int64_t most = std::max(kUnit, kRowsBytes / (all * size_of(gradient.dtype)) / kUnit * kUnit);
    for (int64_t first = 0; first < gradient.numel(); first += most) {
        ArenaScope scope(sums_);
        const TensorView piece = gradient.slice(first, std::min(most, gradient.numel() - first));
        const std::vector<TensorView> rows = rows_of_sources(exchange, replica, piece, launch);
        // in FP32, rounded to the gradient's dtype by the last addition
        TensorView sum = piece;
        if (piece.dtype != DType::f32) sum = sums_.tensor(DType::f32, {piece.numel()}, "sums");
        for (size_t row = 1; row < rows.size(); ++row)
            ops_.add(
                {.a = row == 1 ? rows[0] : sum, .b = rows[row], .y = row + 1 == rows.size() ? piece : sum},
                launch);
    }
}

}  // namespace fp8flow
