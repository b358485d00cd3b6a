// SPDX-License-Identifier: MIT
// Configurations: keys compared with the lines of the dump, and the error of a file.
#pragma once

#include "model/config/fields.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

namespace fp8flow {

// want: "num_layers: 48", by leaf keys.
inline void expect_settings(const Config& config, const Texts& want) {
    for (const std::string& line : want) {
        const std::string key = line.substr(0, line.find(':'));
        const ConfigField* field = find_leaf(key);
        ASSERT_NE(field, nullptr) << key;
        EXPECT_EQ(key + ": " + field->get(config), line);
    }
}

inline Config shipped(const std::string& name, const Texts& overrides = {}) {  // configs/NAME.yaml
    return load_config(std::string(FP8FLOW_SOURCE_DIR "/configs/") + name + ".yaml", overrides);
}

// The error of reading `yaml` under the name t.yaml, or "" where it is accepted.
inline std::string config_error(const std::string& yaml, const Texts& overrides = {},
                                std::optional<int64_t> world_size = std::nullopt) {
    return error_or_none(ExitCode::usage, [&] { parse_config(yaml, "t.yaml", overrides, world_size); });
}

}  // namespace fp8flow
