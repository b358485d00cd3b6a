// SPDX-License-Identifier: MIT
// Reading the shapes of benchmarked operations.
#include "model/bench/shape.h"

#include "kernels/core/error.h"
#include "model/config/builders.h"

#include <algorithm>

namespace fp8flow::bench {

Shape::Shape(std::string operation, const Keys& keys, Size size, std::string_view given)
    : operation_(std::move(operation)) {
    for (const Key& key : keys)
        values_.push_back({key.name, size == Size::small ? key.small : key.layer, key.layer});
    while (!given.empty()) {
        const size_t comma = std::min(given.find(','), given.size());
        const std::string_view part = given.substr(0, comma);
        given.remove_prefix(std::min(comma + 1, given.size()));
        const size_t equals = part.find('=');
        require(equals != std::string_view::npos && equals > 0 && equals + 1 < part.size(), ExitCode::usage,
                "bench {}: --shape: got '{}', want key=value", operation_, part);
        const std::string_view name = part.substr(0, equals);
        const auto found = std::ranges::find(values_, name, &Value::name);
        if (found == values_.end()) {
            std::vector<std::string> names;
            for (const Value& known : values_) names.push_back(known.name);
            const std::string near = nearest_name(name, names);
            fail(ExitCode::usage, "bench {}: unknown key '{}'{}; it has {}", operation_, name,
                 near.empty() ? "" : fmt::format(", did you mean '{}'", near), fmt::join(names, ", "));
        }
        found->given = part.substr(equals + 1);
    }
    constexpr double kMostElements = 0x1p58;
    double all = 1;  // elements and FLOPs are products of some of them
    for (const Value& value : values_)
        if (const auto n = builders::read_number<int64_t>(value.given); n && *n > 1) all *= f64(*n);
    require(all <= kMostElements, ExitCode::usage,
            "bench {}: --shape: got sizes with the product {:.2g}, want at most {:.2g}", operation_, all,
            kMostElements);
}

const std::string& Shape::value(std::string_view key) const {
    const auto found = std::ranges::find(values_, key, &Value::name);
    if (found != values_.end()) return found->given;
    fail(ExitCode::internal, "bench {} has no key {}", operation_, key);
}

bool Shape::has(std::string_view key) const {
    return std::ranges::find(values_, key, &Value::name) != values_.end();
}

void Shape::refuse(std::string_view key, const std::string& want) const {
    fail(ExitCode::usage, "bench {}: {}: got '{}', want {}", operation_, key, value(key), want);
}

int64_t Shape::number(std::string_view key) const {
    constexpr int64_t kLargest = int64_t{1} << 40;
    const int64_t result = builders::read_number<int64_t>(value(key)).value_or(-1);
    if (result < 0 || result > kLargest) refuse(key, fmt::format("a whole number from 0 to {}", kLargest));
    return result;
}

int64_t Shape::positive(std::string_view key) const {
    const int64_t result = number(key);
    if (result == 0) refuse(key, "at least 1");
    return result;
}

int64_t Shape::choice(std::string_view key, const std::vector<std::string>& words) const {
    const auto found = std::ranges::find(words, value(key));
    if (found == words.end()) refuse(key, fmt::format("{}", fmt::join(words, " | ")));
    return found - words.begin();
}

bool Shape::yes(std::string_view key) const { return choice(key, {"no", "yes"}) == 1; }

DType Shape::dtype(std::string_view key, std::initializer_list<DType> allowed) const {
    std::vector<std::string> names;
    for (DType dtype : allowed) names.emplace_back(name_of(dtype));
    return allowed.begin()[choice(key, names)];
}

ScaleLayout Shape::layout(std::string_view key, std::initializer_list<ScaleLayout> allowed) const {
    std::vector<std::string> names;
    for (ScaleLayout layout : allowed)
        names.emplace_back(layout == ScaleLayout::none ? "no" : name_of(layout));
    return allowed.begin()[choice(key, names)];
}

ScaleFormat Shape::scale_format() const {
    return choice("scale", {"pow2", "fp32"}) == 0 ? ScaleFormat::pow2 : ScaleFormat::fp32;
}
MxRounding Shape::mx_rounding() const {
    return choice("rounding", {"floor", "rceil"}) == 0 ? MxRounding::floor : MxRounding::rceil;
}
Gradient Shape::gradient() const {
    return choice("mode", {"overwrite", "accumulate"}) == 0 ? Gradient::overwrite : Gradient::accumulate;
}

std::string Shape::text() const {
    std::string text;
    for (const auto& [name, given, usual] : values_) text += (text.empty() ? "" : " ") + name + "=" + given;
    return text;
}

std::string Shape::short_text() const {
    std::string text;
    for (const auto& [name, given, usual] : values_) {
        const bool number = given.find_first_not_of("0123456789") == std::string::npos;
        if (number || given != usual) text += (text.empty() ? "" : " ") + name + "=" + given;
    }
    return text;
}

}  // namespace fp8flow::bench
