// SPDX-License-Identifier: MIT
// The field table: every key of a configuration with type, range, default and meaning. Parsing, error texts,
// `--help-config`, the dump of the resolved configuration and the diff of two are loops over this one table.
#pragma once

#include "model/config/config.h"

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fp8flow {

// A value as written: one scalar, or a list of scalars.
struct WrittenValue {
    bool is_list = false;
    std::vector<std::string> items;

    std::string scalar() const { return is_list ? "" : items.at(0); }  // empty: a list
    std::string text() const;                                          // for messages: 5, [a, b]
};

// Why a value does not fit its field.
struct Refusal {
    std::string want;  // "an integer in [1, 64]"
    std::string hint;  // "did you mean ...", or empty

    std::string text() const { return hint.empty() ? want : want + "; " + hint; }
};

struct ConfigField {
    std::string section;
    std::string key;
    std::string type;  // with range: "integer >= 1", "bf16 | fp8_flow | ..."
    std::string doc;
    std::function<std::string(const Config&)> get = nullptr;  // the value as YAML
    std::function<std::optional<Refusal>(Config&, const WrittenValue&)> set = nullptr;
    std::vector<Recipe> recipes = {};  // the recipes that have this option; empty: all
    std::string off = {};              // a value that all recipes have, as they have the default
    std::string null = {};             // the value that null means; empty: null is refused
    bool is_text = false;              // --set and options of the command line give it literally

    std::string name() const { return section + "." + key; }
};

const std::vector<ConfigField>& config_fields();
const std::vector<std::string>& config_sections();
const ConfigField* find_field(std::string_view section, std::string_view key);
const ConfigField* find_leaf(std::string_view key);     // leaf keys are unique over all sections
const ConfigField& field_named(std::string_view name);  // "section.key", which exists

// For an unknown key: "did you mean 'hidden_size'", the reason why a known feature is refused, or empty.
std::string explain_unknown_key(std::string_view key);
// For a key of Megatron-LM with one legal value here, or a key of an earlier version: whether this value is
// ignored (text: a note, or empty) or refused (text: why). Absent: never a key. An empty section: any.
struct KeyWithoutSetting {
    bool ignored = false;
    std::string text;
};
std::optional<KeyWithoutSetting> key_without_setting(std::string_view section, std::string_view key,
                                                     std::string_view value);
// For an argument of Megatron-LM that has another name here, or none: the leaf key that it sets, and the
// value. Empty key: it sets nothing. Absent: it has the same name here, or is not known.
struct MegatronSetting {
    std::string key, value;
};
std::optional<MegatronSetting> megatron_setting(std::string_view name, std::string_view value);
// Removes keys that no longer exist from the dump of an earlier version.
std::string without_old_keys(std::string_view dump);
// The candidate nearest to `word`, or empty when none is near.
std::string nearest_name(std::string_view word, const std::vector<std::string>& candidates);
// "did you mean 'fp8_flow'": every candidate that has `word` as a whole part, as fp8_flow has fp8 and flow.
// Otherwise the nearest one; empty when none is near.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace fp8flow
