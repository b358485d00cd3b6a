// SPDX-License-Identifier: MIT
// Constructors of field-table entries: each turns an accessor of Config into the get and set of one type.
// Internal to model/config/fields.cpp; a separate file keeps the table readable.
#pragma once

#include "model/config/fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <cfloat>
#include <charconv>
#include <cmath>
#include <type_traits>

namespace fp8flow::builders {

inline std::optional<Refusal> refuse(std::string want, std::string hint = {}) {
    return Refusal{std::move(want), std::move(hint)};
}

template <class Number> std::optional<Number> read_number(std::string_view text) {
    Number value{};
    if (text.size() > 1 && text[0] == '+' && text[1] != '-') text.remove_prefix(1);
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
    if constexpr (std::is_floating_point_v<Number>) {
        if (!std::isfinite(value)) return std::nullopt;
    }
    return value;
}

// 5000, and 5e3 where it is whole: what --help-config calls an integer; YAML's 0x1388 and 0o11610 too. Above
// 2^53 digits only.
inline std::optional<int64_t> read_integer(const std::string& text) {
    constexpr double kExact = 0x1p53;
    if (const auto value = read_number<int64_t>(text)) return value;
    if (text.size() > 2 && text[0] == '0' && (text[1] == 'x' || text[1] == 'o')) {
        int64_t value = 0;
        const char* const last = text.data() + text.size();
        const auto [end, error] = std::from_chars(text.data() + 2, last, value, text[1] == 'x' ? 16 : 8);
        return error == std::errc() && end == last && text[2] != '-' ? std::optional(value) : std::nullopt;
    }
    if (text.find_first_of("eE") == std::string::npos) return std::nullopt;
    const auto value = read_number<double>(text);
    if (!value || std::abs(*value) > kExact || *value != std::trunc(*value)) return std::nullopt;
    return static_cast<int64_t>(*value);
}

// YAML's spellings.
inline std::optional<bool> read_truth(std::string_view text) {
    for (const char* name : {"true", "True", "TRUE"})
        if (text == name) return true;
    for (const char* name : {"false", "False", "FALSE"})
        if (text == name) return false;
    return std::nullopt;
}

// Double quotes, so that any text survives the way through YAML.
inline std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        if (byte < 0x20 || byte == 0x7F) {
            out += fmt::format("\\x{:02x}", byte);
            continue;
        }
        if (c == '"' || c == '\\') out += '\\';
        out += c;
    }
    return out + "\"";
}

template <class Range, class Print> std::string yaml_list(const Range& values, Print print) {
    std::string out = "[";
    for (const auto& value : values) {
        if (out.size() > 1) out += ", ";
        out += print(value);
    }
    return out + "]";
}

// What is counted in steps or bytes: exact as a double, and some of it still multiplied in 64 bits.
constexpr int64_t kLargestCount = int64_t{1} << 53;

struct IntegerRange {
    int64_t min = 0;
    int64_t max = kLargestCount;
    int64_t multiple_of = 1;

    std::string text() const {
        if (multiple_of > 1) return fmt::format("a multiple of {} in [{}, {}]", multiple_of, min, max);
        if (max >= kLargestCount) return fmt::format("an integer >= {}", min);
        return fmt::format("an integer in [{}, {}]", min, max);
    }
    // Why not; nothing where `value` is legal.
    std::optional<Refusal> refusal(std::optional<int64_t> value) const {
        if (value && *value > max && max >= kLargestCount)
            return refuse(text(), fmt::format("the largest is {}", max));
        if (!value || *value > max) return refuse(text());
        if (multiple_of > 1 && (*value < min || *value % multiple_of != 0)) {
            const int64_t below = std::max<int64_t>(*value, 0) / multiple_of * multiple_of;
            const int64_t above = below + multiple_of;
            return refuse(below >= min ? fmt::format("{} (nearest: {} and {})", text(), below, above)
                                       : fmt::format("{} (nearest: {})", text(), std::max(above, min)));
        }
        return *value < min ? refuse(text()) : std::nullopt;
    }
};

template <class Access>
ConfigField integer(std::string section, std::string key, Access at, IntegerRange range, std::string doc) {
    using Number = std::remove_reference_t<std::invoke_result_t<Access, Config&>>;
    ConfigField field{section, key, range.text(), std::move(doc)};
    field.get = [at](const Config& config) { return fmt::format("{}", at(config)); };
    field.set = [at, range](Config& config, const WrittenValue& written) -> std::optional<Refusal> {
        const auto value = read_integer(written.scalar());
        if (auto refusal = range.refusal(value)) return refusal;
        at(config) = static_cast<Number>(*value);
        return std::nullopt;
    };
    return field;
}

// A model computes in FP32: a value that FP32 rounds to 0, to infinity or to a bound that is not legal
// itself is outside too.
struct NumberRange {
    double min = 0;
    double max = FLT_MAX;
    bool above_min = false;  // min itself is not legal
    bool below_max = false;

    std::string text() const {
        if (max == FLT_MAX) return fmt::format("a number {} {}", above_min ? ">" : ">=", min);
        return fmt::format("a number in {}{}, {}{}", above_min ? "(" : "[", min, max, below_max ? ")" : "]");
    }
    std::optional<Refusal> refusal(std::optional<double> value) const {
        if (!value || *value < min || (above_min && *value == min) || (below_max && *value >= max) ||
            (*value > max && max != FLT_MAX))
            return refuse(text());
        const auto rounded = static_cast<float>(*value);
        if ((*value != 0 && std::abs(*value) < FLT_MIN) || *value > FLT_MAX ||
            (above_min && rounded <= static_cast<float>(min)) ||
            (below_max && rounded >= static_cast<float>(max)))
            return refuse(text(), fmt::format("FP32 has no such number, the nearest is {}", rounded));
        return std::nullopt;
    }
};

template <class Access>
ConfigField number(std::string section, std::string key, Access at, NumberRange range, std::string doc) {
    ConfigField field{section, key, range.text(), std::move(doc)};
    field.get = [at](const Config& config) { return fmt::format("{}", at(config)); };
    field.set = [at, range](Config& config, const WrittenValue& written) -> std::optional<Refusal> {
        const auto value = read_number<double>(written.scalar());
        if (auto refusal = range.refusal(value)) return refusal;
        at(config) = *value;
        return std::nullopt;
    };
    return field;
}

template <class Access>
ConfigField numbers(std::string section, std::string key, Access at, NumberRange range, std::string doc) {
    ConfigField field{section, key, "a list of numbers, each " + range.text(), std::move(doc)};
    field.get = [at](const Config& config) {
        return yaml_list(at(config), [](double value) { return fmt::format("{}", value); });
    };
    field.set = [at, range](Config& config, const WrittenValue& written) -> std::optional<Refusal> {
        std::vector<double> values;
        for (const auto& item : written.items) {
            const auto value = read_number<double>(item);
            if (const auto refusal = range.refusal(value))
                return refuse("a list of numbers, each " + refusal->want, refusal->hint);
            values.push_back(*value);
        }
        at(config) = std::move(values);
        return std::nullopt;
    };
    return field;
}

template <class Access>
ConfigField boolean(std::string section, std::string key, Access at, std::string doc) {
    ConfigField field{section, key, "true or false", std::move(doc)};
    field.get = [at](const Config& config) { return at(config) ? "true" : "false"; };
    field.set = [at](Config& config, const WrittenValue& written) -> std::optional<Refusal> {
        const auto value = read_truth(written.scalar());
        if (!value) return refuse("true or false");
        at(config) = *value;
        return std::nullopt;
    };
    return field;
}

// How many are joined, or auto (0): decided before the run. Earlier versions had true, two, and false, one.
template <class Access>
ConfigField joined(std::string section, std::string key, Access at, int64_t most, std::string doc) {
    const IntegerRange range{.min = 1, .max = most};
    ConfigField field{section, key, "auto, or " + range.text(), std::move(doc)};
    field.off = "1";
    field.get = [at](const Config& config) {
        return at(config) == 0 ? std::string("auto") : fmt::format("{}", at(config));
    };
    field.set = [at, range](Config& config, const WrittenValue& written) -> std::optional<Refusal> {
        const std::string text = written.scalar();
        const auto truth = read_truth(text);
        const auto value = truth ? (*truth ? 2 : 1) : read_integer(text);
        if (text != "auto" && range.refusal(value)) return refuse("auto, or " + range.text());
        at(config) = text == "auto" ? 0 : *value;
        return std::nullopt;
    };
    return field;
}

template <class Access>
ConfigField optional_text(std::string section, std::string key, Access at, std::string doc,
                          const char* want = "text, or \"\"", size_t least = 0) {
    ConfigField field{section, key, want, std::move(doc)};
    field.is_text = true;
    field.get = [at](const Config& config) { return quoted(at(config)); };
    field.set = [=](Config& config, const WrittenValue& written) -> std::optional<Refusal> {
        if (written.is_list || written.items.at(0).size() < least) return refuse(want);
        at(config) = written.items.at(0);
        return std::nullopt;
    };
    return field;
}
template <class Access> ConfigField text(std::string section, std::string key, Access at, std::string doc) {
    return optional_text(std::move(section), std::move(key), at, std::move(doc), "text", 1);
}

template <class Access> ConfigField texts(std::string section, std::string key, Access at, std::string doc) {
    ConfigField field{section, key, "a list of texts", std::move(doc)};
    field.is_text = true;
    field.get = [at](const Config& config) { return yaml_list(at(config), quoted); };
    field.set = [at](Config& config, const WrittenValue& written) -> std::optional<Refusal> {
        at(config) = written.items;
        return std::nullopt;
    };
    return field;
}

// The position of a name is the value of its enumerator.
using Names = std::vector<std::string>;

inline std::string joined(const Names& names) { return fmt::format("{}", fmt::join(names, " | ")); }

inline Refusal refuse_name(const std::string& got, const Names& names, const std::string& want) {
    return Refusal{want, did_you_mean(got, names)};
}

inline std::optional<size_t> index_of(const std::string& name, const Names& names) {
    for (size_t i = 0; i < names.size(); ++i)
        if (names[i] == name) return i;
    return std::nullopt;
}

template <class Access>
ConfigField choice(std::string section, std::string key, Access at, Names names, std::string doc) {
    using Enum = std::remove_reference_t<std::invoke_result_t<Access, Config&>>;
    ConfigField field{section, key, joined(names), std::move(doc)};
    field.get = [at, names](const Config& config) {
        const auto index = to_size(at(config));
        return index < names.size() ? names[index]
                                    : std::string("internal");  // recipe fp32 of the gradient tests
    };
    field.set = [at, names](Config& config, const WrittenValue& written) -> std::optional<Refusal> {
        const auto index = index_of(written.scalar(), names);
        if (!index) return refuse_name(written.text(), names, "one of " + joined(names));
        at(config) = static_cast<Enum>(*index);
        return std::nullopt;
    };
    return field;
}

// A list of distinct names; the scalar `none` is the empty list.
template <class Access>
ConfigField choices(std::string section, std::string key, Access at, Names names, std::string doc) {
    using Enum = typename std::remove_reference_t<std::invoke_result_t<Access, Config&>>::value_type;
    const std::string want = "a list of " + joined(names);
    ConfigField field{section, key, want, std::move(doc)};
    field.get = [at, names](const Config& config) {
        return yaml_list(at(config), [&](Enum value) { return names[to_size(value)]; });
    };
    field.set = [at, names, want](Config& config, const WrittenValue& written) -> std::optional<Refusal> {
        std::vector<Enum> values;
        if (written.scalar() != "none") {
            for (const auto& item : written.items) {
                const auto index = index_of(item, names);
                if (!index) return refuse_name(item, names, want);
                const auto value = static_cast<Enum>(*index);
                if (std::ranges::count(values, value) > 0) return refuse(want + ", each once");
                values.push_back(value);
            }
        }
        at(config) = std::move(values);
        return std::nullopt;
    };
    return field;
}

}  // namespace fp8flow::builders
