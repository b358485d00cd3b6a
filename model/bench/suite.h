// SPDX-License-Identifier: MIT
// Suites: operations at shapes, measured one after the other. They are text (configs/suites/README.md).
#pragma once

#include "model/bench/cases/case.h"

namespace fp8flow::bench {

struct SuiteEntry {
    std::string operation, shape;
    Size size = Size::layer;
    Subject::Regimes regimes = Subject::Regimes::all;
};
// By the name of a shipped suite, or of a file. Throws Error(usage) with the nearest name.
std::vector<SuiteEntry> suite(const std::string& name);
std::vector<std::pair<std::string, std::string>> suite_names();  // of the shipped ones, and what they are for

}  // namespace fp8flow::bench
