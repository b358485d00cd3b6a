// SPDX-License-Identifier: MIT
// Keys of a configuration compared with the lines that its dump has for them.
#pragma once

#include "model/config/fields.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fp8flow {

// want: "num_layers: 48", by leaf keys.
inline void expect_settings(const Config& config, const std::vector<std::string>& want) {
    for (const std::string& line : want) {
        const std::string key = line.substr(0, line.find(':'));
        const ConfigField* field = find_leaf(key);
        ASSERT_NE(field, nullptr) << key;
        EXPECT_EQ(key + ": " + field->get(config), line);
    }
}

}  // namespace fp8flow
