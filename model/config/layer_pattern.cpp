// SPDX-License-Identifier: MIT
// Recursive descent over sums of repeated lists: sum = term {'+' term}; term = factor {'*' count}; factor =
// '(' sum ')' | list.
#include "model/config/layer_pattern.h"

#include <cctype>
#include <charconv>

namespace fp8flow {
namespace {

constexpr int kMaxDepth = 8;  // of parentheses

class PatternReader {
public:
    explicit PatternReader(std::string_view text) : text_(text) {}

    std::optional<std::vector<int>> read() {
        auto layers = sum(0);
        skip_space();
        if (!layers || !rest_.empty()) return std::nullopt;
        return layers;
    }

    std::optional<int64_t> integer() {
        skip_space();
        int64_t value = 0;
        const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
        if (error != std::errc() || value < 0) return std::nullopt;
        rest_.remove_prefix(static_cast<size_t>(end - rest_.data()));
        return value;
    }

    bool at_end() {
        skip_space();
        return rest_.empty();
    }

private:
    void skip_space() {
        while (!rest_.empty() && std::isspace(static_cast<unsigned char>(rest_.front())))
            rest_.remove_prefix(1);
    }

    bool take(char wanted) {
        skip_space();
        if (rest_.empty() || rest_.front() != wanted) return false;
        rest_.remove_prefix(1);
        return true;
    }

    std::optional<std::vector<int>> sum(int depth) {
        auto layers = term(depth);
        while (layers && take('+')) {
            const auto more = term(depth);
            if (!more || layers->size() + more->size() > static_cast<size_t>(kMaxLayers)) return std::nullopt;
            layers->insert(layers->end(), more->begin(), more->end());
        }
        return layers;
    }

    std::optional<std::vector<int>> term(int depth) {
        auto layers = factor(depth);
        while (layers && take('*')) {
            const auto count = integer();
            if (!count || *count > kMaxLayers || static_cast<int64_t>(layers->size()) * *count > kMaxLayers) {
                return std::nullopt;
            }
            const std::vector<int> once = *layers;
            layers->clear();
            for (int64_t i = 0; i < *count; ++i) layers->insert(layers->end(), once.begin(), once.end());
        }
        return layers;
    }

    std::optional<std::vector<int>> factor(int depth) {
        if (depth > kMaxDepth) return std::nullopt;
        if (take('(')) {
            auto layers = sum(depth + 1);
            if (!take(')')) return std::nullopt;
            return layers;
        }
        if (!take('[')) return std::nullopt;
        std::vector<int> layers;
        if (take(']')) return layers;
        do {
            const auto entry = integer();
            if (!entry || *entry > 1 || layers.size() >= static_cast<size_t>(kMaxLayers)) return std::nullopt;
            layers.push_back(static_cast<int>(*entry));
        } while (take(','));
        if (!take(']')) return std::nullopt;
        return layers;
    }

    std::string_view text_;
    std::string_view rest_ = text_;
};

}  // namespace

std::optional<std::vector<int>> expand_layer_pattern(std::string_view pattern, int64_t num_layers) {
    PatternReader number(pattern);
    if (const auto every = number.integer(); every && number.at_end()) {
        if (*every < 1 || num_layers > kMaxLayers) return std::nullopt;
        std::vector<int> layers(static_cast<size_t>(num_layers));
        for (int64_t layer = 0; layer < num_layers; ++layer) {
            layers[static_cast<size_t>(layer)] = layer % *every == 0 ? 1 : 0;
        }
        return layers;
    }
    return PatternReader(pattern).read();
}

}  // namespace fp8flow
