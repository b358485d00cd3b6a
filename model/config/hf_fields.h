// SPDX-License-Identifier: MIT
// The fields of a config.json: read with their types, turned into settings, and problems listed. Read next:
// hf_config.cpp.
#pragma once

#include "kernels/core/error.h"
#include "model/config/config.h"
#include "model/safetensors/header.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace fp8flow {

class HfFields {
public:
    HfFields(const nlohmann::json& json, const std::string& file) : json_(json), file_(file) {}

protected:
    using Json = nlohmann::json;

    bool present(const char* name) const { return json_.contains(name) && !json_[name].is_null(); }
    static std::string shown(const Json& value) {
        return printable(value.dump(-1, ' ', false, Json::error_handler_t::replace));
    }
    void problem(const char* name, const std::string& message) {
        problems_.push_back(fmt::format("{}: {}: {}", file_, name, message));
    }
    void set(const char* key, const std::string& value, const char* name) {
        model_.settings.push_back({key, value, fmt::format("{}: {}", file_, name)});
    }
    void want(const char* name, const std::string& got, const std::string& wanted, const char* reason) {
        if (got != wanted) problem(name, fmt::format("got {}, want {}: {}", printable(got), wanted, reason));
    }
    int64_t integer(const char* name, int64_t otherwise) {
        if (!present(name)) return otherwise;
        const Json& value = json_[name];
        if (value.is_number_integer() && (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX))
            return value.get<int64_t>();
        problem(name, fmt::format("got {}, want an integer", shown(value)));
        return otherwise;
    }
    bool boolean(const char* name, bool otherwise) {
        if (!present(name)) return otherwise;
        if (json_[name].is_boolean()) return json_[name].get<bool>();
        problem(name, fmt::format("got {}, want true or false", shown(json_[name])));
        return otherwise;
    }
    std::string text(const char* name, const char* otherwise) const {
        if (!present(name)) return otherwise;
        return json_[name].is_string() ? json_[name].get<std::string>() : shown(json_[name]);
    }
    void copy(const char* name, const char* key) {
        if (!present(name)) return problem(name, "is missing");
        const size_t before = problems_.size();
        const int64_t value = integer(name, 0);
        if (problems_.size() == before) set(key, std::to_string(value), name);
    }
    void copy_or(const char* name, const char* key, int64_t absent) {
        if (json_.contains(name)) return copy(name, key);
        set(key, std::to_string(absent), name);
    }
    void number(const char* name, const char* key) {
        if (!present(name)) return problem(name, "is missing");
        if (!json_[name].is_number())
            return problem(name, fmt::format("got {}, want a number", shown(json_[name])));
        set(key, fmt::format("{}", json_[name].get<double>()), name);
    }

    // Said unless the user sets `key`.
    void note(const char* key, const std::string& text) {
        model_.notes.push_back({key, fmt::format("{}: {}", file_, text)});
    }

    const Json& json_;
    const std::string& file_;
    ImportedModel model_;
    std::vector<std::string> problems_;
};

}  // namespace fp8flow
