// SPDX-License-Identifier: MIT
// The golden cases: which runs are pinned bit by bit, on every backend. The expected values lie in
// reference.json and hopper.json; what compares them: golden.h.
#pragma once

#include "model/config/config.h"

#include <string>
#include <vector>

namespace fp8flow::golden {

struct Case {
    std::string recipe;
    std::string recompute = "none";  // none, full, or modules joined by '+'
    int expert_ranks = 1;            // EP
    int ranks = 1;                   // DP: all ranks share the batch, groups of EP ranks share the experts
    std::string dispatcher = "flex";
    int micro_batches = 1;             // of a step
    std::string variant = "standard";  // a key of variants(): what else differs from golden.yaml
    int hosts = 1;                     // that the ranks are taken to be on; gives the bits of one

    bool operator==(const Case&) const = default;
    std::string name() const;
    Config config() const;
};

// How the cases were selected, one line each; written into the head of a golden file.
const std::vector<std::string>& selection();
const std::vector<Case>& all_cases();

}  // namespace fp8flow::golden
