// SPDX-License-Identifier: MIT
// The table of all cases, generated from the list of operations, so that none can be missing; then those that
// are no single operation.
#include "kernels/core/error.h"
#include "model/bench/cases/case.h"
#include "model/config/fields.h"

namespace fp8flow::bench {

const std::vector<Case>& all_cases() {
    static const std::vector<Case> cases = [] {
        std::vector<Case> table;
#define FP8FLOW_ADD_CASE(name, Args) table.push_back(name##_case());
        FP8FLOW_FOR_EACH_OP(FP8FLOW_ADD_CASE)
        FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_ADD_CASE)
#undef FP8FLOW_ADD_CASE
        table.push_back(route_case());
        for (Case& exchange : exchange_cases()) table.push_back(std::move(exchange));
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
    fail(ExitCode::usage, "bench: unknown operation '{}'{}; see fp8flow bench --list", name,
         near.empty() ? "" : fmt::format(", did you mean '{}'", near));
}

}  // namespace fp8flow::bench
