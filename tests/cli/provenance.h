// SPDX-License-Identifier: MIT
// What every result JSON says of its origin (model/base/provenance.h), checked on the reference backend.
#pragma once

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <regex>
#include <string>

namespace fp8flow {

// command: the start of the line that was typed, "mpirun -n 2 fp8flow train" for two ranks.
inline void expect_provenance(const nlohmann::json& result, const std::string& command, int ranks) {
    for (const char* key : {"commit", "command", "date", "machine"})
        ASSERT_TRUE(result.contains(key)) << command << " writes no " << key;
    EXPECT_TRUE(std::regex_match(result.at("commit").get<std::string>(),
                                 std::regex("[0-9a-f]{7,40}(-dirty)?|unknown")))
        << result.at("commit");
    const std::string typed = result.at("command");
    EXPECT_TRUE(typed.starts_with(ranks > 1 ? "mpirun -n " + std::to_string(ranks) + " " + command : command))
        << typed;
    // bench rows carry the day alone
    EXPECT_TRUE(std::regex_match(result.at("date").get<std::string>(),
                                 std::regex(R"(\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\dZ)?)")))
        << result.at("date");
    const nlohmann::json& machine = result.at("machine");
    EXPECT_TRUE(machine.at("gpu").is_null() && machine.at("gpu clock hertz").is_null()) << machine;
    EXPECT_FALSE(machine.at("cpu").get<std::string>().empty());
    EXPECT_GE(machine.at("host cores").get<int64_t>(), 1);
    EXPECT_EQ(machine.at("gpus"), 0);
    EXPECT_EQ(machine.at("ranks"), ranks);
}

}  // namespace fp8flow
