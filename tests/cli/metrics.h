// SPDX-License-Identifier: MIT
// The records of a run's metrics.jsonl, each checked for its form: a type, flat names without spaces.
#pragma once

#include "tests/cli/command.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace fp8flow {

// Those of a type: run, step or evaluation; empty: of every type but run, which says who ran it and when.
inline std::vector<nlohmann::json> metrics_of(const std::string& out, const std::string& type = "") {
    std::vector<nlohmann::json> records;
    for (const std::string& line : lines_of(read_whole(out + "/metrics.jsonl"))) {
        auto record = nlohmann::json::parse(line);
        const std::string own = record.value("type", "none");
        EXPECT_TRUE(own == "run" || own == "step" || own == "evaluation") << line;
        EXPECT_TRUE(record.contains("iteration")) << line;
        for (const auto& [name, value] : record.items()) {
            EXPECT_EQ(name.find_first_of(" /-.,"), std::string::npos) << name;
            EXPECT_FALSE(value.is_object()) << name;
        }
        if (type.empty() ? own != "run" : own == type) records.push_back(std::move(record));
    }
    return records;
}

inline std::vector<double> losses_of(const std::string& out) {
    std::vector<double> losses;
    for (const nlohmann::json& record : metrics_of(out, "step")) losses.push_back(record.at("lm_loss"));
    return losses;
}

}  // namespace fp8flow
