// SPDX-License-Identifier: MIT
// JSON from outside as a document: bounded nesting, each key once. Formats that are large or have a fixed
// form read events instead (header.h).
#pragma once

#include "kernels/core/error.h"

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <string_view>

namespace fp8flow {

constexpr int kMaxJsonDepth = 64;  // writing a document recurses

// A discarded value (nlohmann) where the text is no JSON. Throws Error(code) naming `where` if a key appears
// twice in an object or the nesting is deeper than kMaxJsonDepth.
nlohmann::json parse_json(std::string_view text, const std::string& where, ExitCode code);

}  // namespace fp8flow
