// SPDX-License-Identifier: MIT
// Suites: operations at shapes, measured one after the other. Read next: suites.cpp, suite_upstream.cpp.
#pragma once

#include "model/bench/cases/case.h"

namespace fp8flow::bench {

struct SuiteEntry {
    std::string operation, shape;
    Size size = Size::layer;
    Subject::Regimes regimes = Subject::Regimes::all;
};
std::vector<SuiteEntry> suite(const std::string& name);  // throws Error(usage) with the nearest name
const std::vector<std::pair<std::string, std::string>>& suite_names();  // and what they are for

std::vector<SuiteEntry> upstream_suite();

}  // namespace fp8flow::bench
