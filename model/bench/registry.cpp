// SPDX-License-Identifier: MIT
// The table of all cases. A test runs every operation of kernels/ops/list.h, so that none is missing.
#include "kernels/core/error.h"
#include "model/bench/cases/case.h"
#include "model/config/fields.h"
#include "model/safetensors/input.h"

namespace fp8flow::bench {

const std::vector<Case>& all_cases() {
    static const std::vector<Case> cases = [] {
        std::vector<Case> table;
        for (const auto cases_of :
             {norm_cases, router_cases, quantize_cases, permute_cases, gemm_cases, swiglu_cases,
              attention_cases, token_cases, optimizer_cases, exchange_cases})
            for (Case& one : cases_of()) table.push_back(std::move(one));
        return table;
    }();
    return cases;
}

const Case& find_case(const std::string& name) {
    std::vector<std::string> names;
    for (const Case& known : all_cases()) {
        if (known.name == name) return known;
        names.push_back(known.name);
    }
    const std::string near = nearest_name(name, names);
    fail(ExitCode::usage, "bench: unknown operation '{}'{}; see fp8flow bench --list", printable(name),
         near.empty() ? "" : fmt::format(", did you mean '{}'", near));
}

}  // namespace fp8flow::bench
