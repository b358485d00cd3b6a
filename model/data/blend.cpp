// SPDX-License-Identifier: MIT
// The pattern of a blend, and its sources by sample index.
#include "model/data/blend.h"

#include "kernels/core/error.h"
#include "model/base/crc32c.h"
#include "model/data/permutation.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <optional>

namespace fp8flow::data {

namespace {

// Absent where the entry is a path.
std::optional<double> weight_of(const std::string& entry) {
    double weight = 0;
    const auto [end, error] = std::from_chars(entry.data(), entry.data() + entry.size(), weight);
    std::error_code ignored;
    if (error != std::errc() || end != entry.data() + entry.size() || std::filesystem::exists(entry, ignored))
        return std::nullopt;
    return weight;
}

// Of a period.
std::vector<BlendedSource::Place> places_of(const std::vector<WeightedPath>& blend) {
    constexpr int64_t kPeriod = BlendedSource::kPeriod;
    double sum = 0;
    for (const WeightedPath& part : blend) sum += part.weight;
    std::vector<BlendedSource::Place> order(kPeriod);
    std::vector<int64_t> counts(blend.size());
    for (int64_t i = 0; i < kPeriod; ++i) {
        const auto behind = [&](size_t p) {
            return blend[p].weight / sum * f64(std::max<int64_t>(i, 1)) - f64(counts[p]);
        };
        size_t next = 0;
        for (size_t p = 1; p < blend.size(); ++p)
            if (behind(p) > behind(next)) next = p;
        order[to_size(i)] = {static_cast<uint32_t>(next), static_cast<int32_t>(counts[next]++)};
    }
    for (const WeightedPath& part : blend)
        require(part.weight / sum * kPeriod >= 1, ExitCode::data,
                "data.data_path: got weight {} for {}, want at least 1 / {} of the sum of weights, {}",
                part.weight, part.path, kPeriod, sum);
    return order;
}

uint64_t checksum_of(const std::vector<BlendedSource::Place>& order) {
    return crc32c(order.data(), order.size() * sizeof(BlendedSource::Place));
}

}  // namespace

std::vector<WeightedPath> blend_of(const std::vector<std::string>& data_path) {
    std::vector<WeightedPath> blend;
    if (std::ranges::none_of(data_path,
                             [](const std::string& entry) { return weight_of(entry).has_value(); }))
        return blend;
    for (size_t i = 0; i < data_path.size(); i += 2) {
        const auto weight = weight_of(data_path[i]);
        require(weight && i + 1 < data_path.size() && !weight_of(data_path[i + 1]), ExitCode::data,
                "data.data_path: got [{}], want a weight before each data set, as [0.7, a, 0.3, b]",
                fmt::join(data_path, ", "));
        require(*weight > 0 && std::isfinite(*weight), ExitCode::data,
                "data.data_path: got weight {} for {}, want a number above 0", data_path[i],
                data_path[i + 1]);
        blend.push_back({*weight, data_path[i + 1]});
    }
    return blend;
}

std::vector<std::string> paths_of(const std::vector<std::string>& data_path) {
    std::vector<std::string> paths;
    for (const WeightedPath& part : blend_of(data_path)) paths.push_back(part.path);
    return paths.empty() ? data_path : paths;
}

uint64_t blend_order(const std::vector<std::string>& data_path) {
    const std::vector<WeightedPath> blend = blend_of(data_path);
    return blend.empty() ? 0 : checksum_of(places_of(blend));
}

BlendedSource::BlendedSource(std::vector<Part> parts) : parts_(std::move(parts)), counts_(parts_.size()) {
    std::vector<WeightedPath> blend;
    for (const Part& part : parts_) blend.push_back(part.of);
    order_ = places_of(blend);
    for (const Place& place : order_) ++counts_[place.part];
}

int64_t BlendedSource::num_tokens(Split split) const {
    int64_t tokens = 0;
    for (const Part& part : parts_) tokens += part.source->num_tokens(split);
    return tokens;
}

int64_t BlendedSource::samples_per_epoch(Split split) const {
    int64_t least = kUnlimited;
    for (size_t p = 0; p < parts_.size(); ++p)
        least =
            std::min(least, static_cast<int64_t>(f64(parts_[p].source->samples_per_epoch(split)) / share(p)));
    return least;
}

std::optional<double> BlendedSource::bytes_per_token() const {
    double bytes = 0;
    for (size_t p = 0; p < parts_.size(); ++p) {
        const auto own = parts_[p].source->bytes_per_token();
        if (!own) return std::nullopt;
        bytes += share(p) * *own;
    }
    return bytes;
}

std::string BlendedSource::description() const {
    std::vector<std::string> texts;
    for (size_t p = 0; p < parts_.size(); ++p)
        texts.push_back(fmt::format("{:.4g} % {} ({})", 100 * share(p), parts_[p].of.path,
                                    parts_[p].source->description()));
    return fmt::format("blend, each source read again after its last window: {}", fmt::join(texts, "; "));
}

std::string BlendedSource::epochs_text(int64_t samples) const {
    std::vector<std::string> texts;
    for (size_t p = 0; p < parts_.size(); ++p)
        texts.push_back(
            fmt::format("{:.3g} epochs of {}",
                        f64(samples) * share(p) / f64(parts_[p].source->samples_per_epoch(Split::train)),
                        parts_[p].of.path));
    return fmt::format("{}", fmt::join(texts, ", "));
}

std::vector<std::string> BlendedSource::warnings() const {
    std::vector<std::string> all;
    for (const Part& part : parts_)
        for (std::string& warning : part.source->warnings()) all.push_back(std::move(warning));
    if (const int64_t files = held_out_in(*this, *this); files > 0)
        all.push_back(
            fmt::format("data.data_path: files that one data set holds out and another trains on: {}; the "
                        "held-out loss is too low; name each file in one data set",
                        files));
    return all;
}

std::vector<TokenSource::Piece> BlendedSource::pieces(Split split) const {
    std::vector<Piece> all;
    for (const Part& part : parts_)
        for (const Piece& piece : part.source->pieces(split)) all.push_back(piece);
    return all;
}

uint64_t BlendedSource::fingerprint() const {
    uint64_t state = 0;
    for (size_t p = 0; p < parts_.size(); ++p)
        state = mix64(state, parts_[p].source->fingerprint(), static_cast<uint64_t>(counts_[p]));
    return state;
}

uint64_t BlendedSource::order() const { return checksum_of(order_); }

void BlendedSource::sample(Split split, int64_t sample_index, std::span<int32_t> tokens) const {
    FP8FLOW_CHECK(sample_index >= 0, "sample index {}", sample_index);
    const Place& place = order_[to_size(sample_index % kPeriod)];
    parts_[place.part].source->sample(split, sample_index / kPeriod * counts_[place.part] + place.before,
                                      tokens);
}

}  // namespace fp8flow::data
