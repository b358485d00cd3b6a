// SPDX-License-Identifier: MIT
// The checks run while the text is read, so that a hostile document is refused before it is built.
#include "model/safetensors/json.h"

#include "model/safetensors/input.h"

#include <nlohmann/json.hpp>

#include <set>
#include <vector>

namespace fp8flow {

nlohmann::json parse_json(std::string_view text, const std::string& where, ExitCode code) {
    using Json = nlohmann::json;
    refuse_lfs_pointer(text, where, code);
    // the parser would take one for the end of the text
    require(text.find('\0') == std::string_view::npos, code, "{}: has a zero byte, want JSON", where);
    std::vector<std::set<std::string>> keys(kMaxJsonDepth + 1);  // of the open objects
    const auto watch = [&](int depth, Json::parse_event_t event, Json& value) {
        if (event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start) {
            require(depth < kMaxJsonDepth, code, "{}: nested deeper than {}", where, kMaxJsonDepth);
            keys[static_cast<size_t>(depth) + 1].clear();
        } else if (event == Json::parse_event_t::key) {
            const auto& key = value.get_ref<const std::string&>();
            require(keys[static_cast<size_t>(depth)].insert(key).second, code,
                    "{}: key \"{}\" appears twice, want it once", where, printable(key));
        }
        return true;
    };
    try {
        return Json::parse(text.begin(), text.end(), watch);
    } catch (const Json::parse_error& error) {
        fail(code, "{}: no JSON at byte {}: {}", where, error.byte, printable(error.what()));
    } catch (const Json::exception& error) {
        fail(code, "{}: no JSON: {}", where, printable(error.what()));
    }
}

const char* kind_of(const nlohmann::json& value) {
    if (value.is_null()) return "null";
    if (value.is_boolean()) return "true or false";
    if (value.is_number()) return "a number";
    if (value.is_string()) return "text";
    return value.is_array() ? "a list" : "an object";
}

std::optional<int64_t> whole_number(const nlohmann::json& value) {
    const bool fits = value.is_number_integer() &&
                      (!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t{INT64_MAX});
    return fits ? std::optional(value.get<int64_t>()) : std::nullopt;
}

}  // namespace fp8flow
