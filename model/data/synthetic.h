// SPDX-License-Identifier: MIT
// A seeded Markov source of order k over V symbols, shaped like text (Zipf unigrams, few likely successors),
// with known entropy: the lower bound of the loss is printed next to the loss. Nothing is stored but the
// table of transitions.
//
// P(x | context) = noise * zipf(x) + (1 - noise) * successors(x | context), where every context of k symbols
// has `successors` favoured next symbols, drawn from the same Zipf law by a hash of (seed, context), with
// weights 1/2, 1/4, ... Rounded to multiples of 2^-32, and the entropy is that of the rounded table, i.e. of
// what is really drawn. Read next: data.h.
#pragma once

#include "model/data/data.h"

#include <string>
#include <vector>

namespace fp8flow::data {

class SyntheticSource final : public TokenSource {
public:
    // The chain of data.synthetic_*.
    explicit SyntheticSource(const Config& config);

    int64_t vocab_size() const override { return spec_.synthetic_vocab_size; }
    int64_t seq_length() const override { return seq_length_; }
    int64_t num_tokens(Split) const override { return kUnlimited; }
    int64_t samples_per_epoch(Split) const override { return kUnlimited; }
    std::string description() const override;
    uint64_t fingerprint() const override { return fingerprint_; }
    // Begins with a context drawn from the stationary distribution, so that every position has the same law.
    // Train and held-out samples come from the same chain and never share a random stream.
    void sample(Split split, int64_t sample_index, std::span<int32_t> tokens) const override;

    // Mean over the targets of a window of H(target | tokens before it in the window). Slightly above the
    // entropy rate for k > 1, because the first k - 1 targets have less than k tokens before them.
    std::optional<double> entropy_floor_nats() const override { return floor_; }
    // H(x | k symbols before it), in nats, from the stationary distribution of contexts.
    double entropy_rate_nats() const { return rate_; }
    double unigram_entropy_nats() const { return block_entropy_[1]; }

    int64_t num_contexts() const { return contexts_; }
    // P(symbol | context); a context is its symbols as digits in base V, the latest symbol least significant.
    double probability(int64_t context, int64_t symbol) const;
    // Stationary probability of a context.
    double stationary(int64_t context) const { return stationary_[to_size(context)]; }

private:
    void build_table();
    void find_stationary();
    void compute_entropies();

    DataSpec spec_;
    int64_t seq_length_;
    int64_t contexts_ = 0;               // V^k
    std::vector<uint32_t> start_;        // [V^k, V] first of the 2^32 equally likely words that give a symbol
    std::vector<double> stationary_;     // [V^k]
    std::vector<double> cumulative_;     // [V^k] running sum of stationary_
    std::vector<double> block_entropy_;  // [k + 1] H(X_1 .. X_j)
    double rate_ = 0.0;
    double floor_ = 0.0;
    uint64_t fingerprint_ = 0;
};

}  // namespace fp8flow::data
