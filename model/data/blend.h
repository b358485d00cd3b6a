// SPDX-License-Identifier: MIT
// Several sources in given shares: data_path with weights, as Megatron-LM has it. Read next: data.h.
#pragma once

#include "model/data/data.h"

#include <memory>

namespace fp8flow::data {

// An entry of data_path and its weight.
struct WeightedPath {
    double weight = 1;
    std::string path;
};
// [weight, path, weight, path, ...]; nothing where data_path has no weights. A file or folder that is named
// like a number is a path. Throws Error(data) for weights that stand alone or are not above 0.
std::vector<WeightedPath> blend_of(const std::vector<std::string>& data_path);
// Its entries without their weights.
std::vector<std::string> paths_of(const std::vector<std::string>& data_path);
// A checksum of which sample comes from which entry; 0 without weights.
uint64_t blend_order(const std::vector<std::string>& data_path);

// Sample i comes from the source that is furthest below its share, as in Megatron-LM's blended data sets;
// the pattern is repeated after kPeriod samples. So every sample index has its place without a list of all,
// and the shares hold for the whole run. When all windows of a source are read, its next epoch begins.
class BlendedSource final : public TokenSource {
public:
    static constexpr int64_t kPeriod = 1 << 16;
    struct Part {
        WeightedPath of;
        std::shared_ptr<const TokenSource> source;
    };
    // Where a sample comes from.
    struct Place {
        uint32_t part = 0;
        int32_t before = 0;  // samples of it in the period before this one
    };
    explicit BlendedSource(std::vector<Part> parts);

    int64_t vocab_size() const override { return parts_[0].source->vocab_size(); }
    int64_t seq_length() const override { return parts_[0].source->seq_length(); }
    int64_t num_tokens(Split split) const override;
    // Until the first source is read once; 0 where one has no such part.
    int64_t samples_per_epoch(Split split) const override;
    // Its windows have the shares of the sources.
    std::optional<double> bytes_per_token() const override;
    std::string description() const override;
    std::string epochs_text(int64_t samples) const override;
    std::vector<std::string> warnings() const override;
    uint64_t fingerprint() const override;
    uint64_t order() const override;
    std::vector<Piece> pieces(Split split) const override;
    void sample(Split split, int64_t sample_index, std::span<int32_t> tokens) const override;

private:
    double share(size_t part) const { return f64(counts_[part]) / kPeriod; }

    std::vector<Part> parts_;
    std::vector<Place> order_;     // of a period
    std::vector<int64_t> counts_;  // samples of each part in it
};

}  // namespace fp8flow::data
