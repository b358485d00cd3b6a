// SPDX-License-Identifier: MIT
// Recursive descent over sums of repeated lists: sum = term {'+' term}; term = factor {'*' count}; factor =
// '(' sum ')' | list.
#include "model/config/layer_pattern.h"

#include <cctype>
#include <charconv>
#include <utility>

namespace fp8flow {
namespace {

using Layers = std::vector<int>;
constexpr int kMaxDepth = 8;  // of parentheses

class PatternReader {
public:
    explicit PatternReader(std::string_view text) : rest_(text) {}

    bool at_end() { return skip_space().empty(); }

    bool integer(int64_t most, int64_t& value) {
        const std::string_view text = skip_space();
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        rest_.remove_prefix(static_cast<size_t>(end - text.data()));
        return error == std::errc() && value >= 0 && value <= most;
    }

    // Each of these appends to `layers`; false where the text is none.
    bool sum(int depth, Layers& layers) {
        do {
            Layers one;
            if (!term(depth, one) || !append(layers, one)) return false;
        } while (take('+'));
        return true;
    }

private:
    std::string_view skip_space() {
        while (!rest_.empty() && std::isspace(static_cast<unsigned char>(rest_.front())))
            rest_.remove_prefix(1);
        return rest_;
    }
    bool take(char wanted) {
        const bool found = skip_space().starts_with(wanted);
        if (found) rest_.remove_prefix(1);
        return found;
    }
    static bool append(Layers& layers, const Layers& more) {
        layers.insert(layers.end(), more.begin(), more.end());
        return layers.size() <= static_cast<size_t>(kMaxLayers);
    }

    bool term(int depth, Layers& layers) {
        if (!factor(depth, layers)) return false;
        while (take('*')) {
            int64_t count = 0;
            if (!integer(kMaxLayers, count)) return false;
            const Layers once = std::exchange(layers, {});
            for (int64_t i = 0; i < count; ++i)
                if (!append(layers, once)) return false;
        }
        return true;
    }

    bool factor(int depth, Layers& layers) {
        if (depth > kMaxDepth) return false;
        if (take('(')) return sum(depth + 1, layers) && take(')');
        if (!take('[')) return false;
        if (take(']')) return true;
        do {
            int64_t entry = 0;
            if (!integer(1, entry) || !append(layers, {static_cast<int>(entry)})) return false;
        } while (take(','));
        return take(']');
    }

    std::string_view rest_;
};

}  // namespace

std::optional<std::vector<int>> expand_layer_pattern(std::string_view pattern, int64_t num_layers) {
    Layers layers;
    PatternReader number(pattern);
    if (int64_t every = 0; number.integer(INT64_MAX, every) && number.at_end()) {
        if (every < 1 || num_layers > kMaxLayers) return std::nullopt;
        for (int64_t layer = 0; layer < num_layers; ++layer) layers.push_back(layer % every == 0 ? 1 : 0);
        return layers;
    }
    PatternReader lists(pattern);
    if (!lists.sum(0, layers) || !lists.at_end()) return std::nullopt;
    return layers;
}

}  // namespace fp8flow
