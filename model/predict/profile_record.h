// SPDX-License-Identifier: MIT
// A result of `profile` read back: what was run, and what was measured. Results of older commits are read
// too: keys that the configuration no longer has are skipped.
#pragma once

#include "model/config/config.h"

#include <string>
#include <vector>

namespace fp8flow::predict {

struct MeasuredRow {
    std::string key;  // "part/stage/direction", as key_of
    double seconds = 0, bytes = 0, gemm_flops = 0, wire_bytes = 0;
};

struct MeasuredArm {
    std::string name;
    Config config;  // of this arm: its recipe, schedule and state dtypes
    std::vector<MeasuredRow> rows;
    double layer = 0, step = 0;  // seconds; the MoE layer of one micro-batch without marks, the whole step
    double clock = 0;            // Hz, in the layer; 0: not recorded

    const MeasuredRow* row(const std::string& key) const;  // null: none
};

struct ProfileRecord {
    std::string file;  // its name without folders
    std::string device, commit, date;
    int64_t ranks = 1;
    std::vector<MeasuredArm> arms;
};

// True for a JSON file that `profile` wrote.
bool is_profile(const std::string& path);
// Throws Error(usage) if it is none.
ProfileRecord read_profile(const std::string& path);
ProfileRecord parse_profile(const std::string& text, const std::string& file);

}  // namespace fp8flow::predict
