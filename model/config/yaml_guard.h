// SPDX-License-Identifier: MIT
// A scan of YAML text before yaml-cpp sees it. yaml-cpp has had stack overflows and wild reads on hostile
// input, so only a plain subset passes: small, shallow, one document, no anchors, aliases, tags, directives,
// block scalars or complex keys, quotes closed on their line. Configurations need no more.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace fp8flow {

constexpr size_t kMaxYamlBytes = 64 * 1024;
constexpr int kMaxYamlDepth = 8;

struct YamlProblem {
    int64_t line = 1;  // from 1
    int64_t column = 1;
    std::string text;
};

// The first reason to refuse the text, or nothing.
std::optional<YamlProblem> scan_yaml(std::string_view text);

}  // namespace fp8flow
