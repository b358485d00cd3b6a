// SPDX-License-Identifier: MIT
// The checks run while the text is read, so that a hostile document is refused before it is built.
#include "model/safetensors/json.h"

#include "model/safetensors/header.h"

#include <nlohmann/json.hpp>

#include <set>
#include <vector>

namespace fp8flow {

nlohmann::json parse_json(std::string_view text, const std::string& where, ExitCode code) {
    using Json = nlohmann::json;
    refuse_lfs_pointer(text, where, code);
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
    return Json::parse(text.begin(), text.end(), watch, false);
}

}  // namespace fp8flow
