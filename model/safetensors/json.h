// SPDX-License-Identifier: MIT
// JSON from outside as a document: bounded nesting, each key once.
#pragma once

#include "kernels/core/error.h"

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace fp8flow {

constexpr int kMaxJsonDepth = 64;  // writing a document recurses

// Throws Error(code) naming `where` if the text is no JSON, a key appears twice in an object, or the nesting
// is deeper than kMaxJsonDepth.
nlohmann::json parse_json(std::string_view text, const std::string& where, ExitCode code);

const char* kind_of(const nlohmann::json& value);  // for messages: "a list"
// A whole number that an int64_t holds. A fraction is none, nor is what is too large and read as a fraction.
std::optional<int64_t> whole_number(const nlohmann::json& value);

}  // namespace fp8flow
