// SPDX-License-Identifier: MIT
// Table, stationary distribution, entropies and draws of the synthetic source.
#include "model/data/synthetic.h"

#include "kernels/core/error.h"
#include "model/data/permutation.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace fp8flow::data {

namespace {

constexpr int64_t kMaxTableEntries = int64_t{1}
                                     << 22;  // 16 MiB per rank, and about a second to find the entropy
constexpr double kWords = 0x1p32;
constexpr int kMaxPowerIterations = 20000;
constexpr double kStationaryTolerance = 1e-13;  // L1 change per step

double entropy_term(double p) { return p > 0.0 ? -p * std::log(p) : 0.0; }

}  // namespace

SyntheticSource::SyntheticSource(const Config& config)
    : spec_(config.data), seq_length_(config.model.seq_length) {
    // the ranges of data.synthetic_* in model/config
    FP8FLOW_CHECK(spec_.synthetic_vocab_size >= 2 && spec_.synthetic_order >= 1 &&
                      spec_.synthetic_noise > 0 && spec_.synthetic_successors >= 1 && seq_length_ >= 1,
                  "{} symbols, order {}, noise {}, {} successors, seq_length {}", spec_.synthetic_vocab_size,
                  spec_.synthetic_order, spec_.synthetic_noise, spec_.synthetic_successors, seq_length_);
    contexts_ = 1;
    for (int64_t i = 0; i < spec_.synthetic_order; ++i) {
        contexts_ *= spec_.synthetic_vocab_size;
        FP8FLOW_CHECK(contexts_ * spec_.synthetic_vocab_size <= kMaxTableEntries, "{} symbols, order {}",
                      spec_.synthetic_vocab_size, spec_.synthetic_order);
    }
    build_table();
    find_stationary();
    compute_entropies();
    fingerprint_ = mix64(spec_.synthetic_seed, static_cast<uint64_t>(spec_.synthetic_vocab_size),
                         static_cast<uint64_t>(spec_.synthetic_order));
    for (const double value :
         {spec_.synthetic_zipf_exponent, spec_.synthetic_noise, f64(spec_.synthetic_successors)})
        fingerprint_ = mix64(fingerprint_, std::bit_cast<uint64_t>(value));
}

void SyntheticSource::build_table() {
    const auto vocab = to_size(spec_.synthetic_vocab_size);
    std::vector<double> zipf(vocab), zipf_end(vocab);
    double sum = 0.0;
    for (size_t x = 0; x < vocab; ++x) sum += zipf[x] = std::pow(f64(x + 1), -spec_.synthetic_zipf_exponent);
    for (double& share : zipf) share /= sum;
    std::partial_sum(zipf.begin(), zipf.end(), zipf_end.begin());
    start_.resize(to_size(contexts_) * vocab);
    std::vector<double> row(vocab);
    for (int64_t context = 0; context < contexts_; ++context) {
        for (size_t x = 0; x < vocab; ++x) row[x] = spec_.synthetic_noise * zipf[x];
        double weight = 1.0 - spec_.synthetic_noise;
        for (int64_t j = 0; j < spec_.synthetic_successors; ++j) {
            if (j + 1 < spec_.synthetic_successors) weight *= 0.5;  // the last one takes what is left
            const double u = unit_interval(
                mix64(spec_.synthetic_seed, static_cast<uint64_t>(context), static_cast<uint64_t>(j)));
            const auto drawn = std::upper_bound(zipf_end.begin(), zipf_end.end() - 1, u) - zipf_end.begin();
            row[to_size(drawn)] += weight;
        }
        // Every symbol keeps at least one word, so that the chain stays ergodic; the last symbol takes the
        // rounding.
        double end = 0.0;
        int64_t words = 0;
        for (size_t x = 0; x < vocab; ++x) {
            start_[to_size(context) * vocab + x] = static_cast<uint32_t>(words);
            end += row[x];
            const int64_t rest = static_cast<int64_t>(vocab - 1 - x);
            words = std::clamp(static_cast<int64_t>(std::llround(end * kWords)), words + 1,
                               static_cast<int64_t>(kWords) - rest);
        }
    }
}

double SyntheticSource::probability(int64_t context, int64_t symbol) const {
    const size_t at = to_size(context * spec_.synthetic_vocab_size + symbol);
    const double end = symbol + 1 < spec_.synthetic_vocab_size ? f64(start_[at + 1]) : kWords;
    return (end - f64(start_[at])) / kWords;
}

// Power iteration over contexts: (c, x) leads to the context that drops c's oldest symbol and takes x.
void SyntheticSource::find_stationary() {
    const int64_t vocab = spec_.synthetic_vocab_size;
    const int64_t tail = contexts_ / vocab;
    std::vector<double> now(to_size(contexts_), 1.0 / f64(contexts_)), next(now.size());
    double change = 1.0;
    for (int i = 0; i < kMaxPowerIterations && change > kStationaryTolerance; ++i) {
        std::ranges::fill(next, 0.0);
        for (int64_t context = 0; context < contexts_; ++context) {
            const double mass = now[to_size(context)];
            double* to = &next[to_size(context % tail * vocab)];
            for (int64_t x = 0; x < vocab; ++x) to[x] += mass * probability(context, x);
        }
        const double sum = std::accumulate(next.begin(), next.end(), 0.0);
        change = 0.0;
        for (size_t c = 0; c < next.size(); ++c) {
            next[c] /= sum;
            change += std::abs(next[c] - now[c]);
        }
        now.swap(next);
    }
    require(change <= kStationaryTolerance, ExitCode::usage,
            "synthetic data: the stationary distribution did not settle in {} steps (change {:.1e}); raise "
            "noise (now {}) or lower order (now {})",
            kMaxPowerIterations, change, spec_.synthetic_noise, spec_.synthetic_order);
    stationary_ = std::move(now);
    cumulative_.resize(stationary_.size());
    std::partial_sum(stationary_.begin(), stationary_.end(), cumulative_.begin());
}

void SyntheticSource::compute_entropies() {
    const auto order = to_size(spec_.synthetic_order);
    // H(X_1 .. X_j): the marginal of the stationary distribution over the j latest symbols (any j neighbours
    // have that law).
    block_entropy_.assign(order + 1, 0.0);
    int64_t size = 1;
    for (size_t j = 1; j <= order; ++j) {
        size *= spec_.synthetic_vocab_size;
        std::vector<double> marginal(to_size(size), 0.0);
        for (int64_t c = 0; c < contexts_; ++c) marginal[to_size(c % size)] += stationary_[to_size(c)];
        for (const double p : marginal) block_entropy_[j] += entropy_term(p);
    }
    rate_ = 0.0;
    for (int64_t c = 0; c < contexts_; ++c) {
        double row = 0.0;
        for (int64_t x = 0; x < spec_.synthetic_vocab_size; ++x) row += entropy_term(probability(c, x));
        rate_ += stationary_[to_size(c)] * row;
    }
    // Target t of a window (1-based) has min(t, k) symbols before it that matter.
    const int64_t short_targets = std::min<int64_t>(spec_.synthetic_order - 1, seq_length_);
    const double first = block_entropy_[to_size(short_targets) + 1] - block_entropy_[1];
    floor_ = (first + f64(seq_length_ - short_targets) * rate_) / f64(seq_length_);
}

void SyntheticSource::sample(Split split, int64_t sample_index, std::span<int32_t> tokens) const {
    FP8FLOW_CHECK(std::ssize(tokens) == seq_length_ + 1, "{} tokens for seq_length {}", tokens.size(),
                  seq_length_);
    FP8FLOW_CHECK(sample_index >= 0, "sample index {}", sample_index);
    const int64_t vocab = spec_.synthetic_vocab_size;
    const int64_t tail = contexts_ / vocab;
    // The split and "sample" words keep this stream apart from the table's hashes of (seed, context, j).
    const uint64_t key = mix64(mix64(spec_.synthetic_seed, 0x73616d706c65ULL, static_cast<uint64_t>(split)),
                               static_cast<uint64_t>(sample_index));
    const auto drawn =
        std::upper_bound(cumulative_.begin(), cumulative_.end() - 1, unit_interval(mix64(key, 0)));
    int64_t context = drawn - cumulative_.begin();
    int64_t divisor = contexts_;
    for (size_t t = 0; t < tokens.size(); ++t) {
        if (divisor > 1) {  // the first k tokens are the context itself, oldest first
            divisor /= vocab;
            tokens[t] = static_cast<int32_t>(context / divisor % vocab);
            continue;
        }
        const auto row = start_.begin() + context * vocab;
        const auto word = static_cast<uint32_t>(mix64(key, t) >> 32);
        const int64_t symbol = std::upper_bound(row, row + vocab, word) - row - 1;
        tokens[t] = static_cast<int32_t>(symbol);
        context = context % tail * vocab + symbol;
    }
}

std::string SyntheticSource::description() const {
    return fmt::format(
        "synthetic Markov source of order {} over {} symbols (Zipf {}, {} successors, noise {}, seed {}): "
        "entropy rate {:.4f} nats, floor of the loss {:.4f} nats, unigram entropy {:.4f} nats",
        spec_.synthetic_order, spec_.synthetic_vocab_size, spec_.synthetic_zipf_exponent,
        spec_.synthetic_successors, spec_.synthetic_noise, spec_.synthetic_seed, rate_, floor_,
        unigram_entropy_nats());
}

}  // namespace fp8flow::data
