// SPDX-License-Identifier: MIT
// Any bytes as metrics.jsonl: what is kept can be written, and is read again as it was.
#include "model/report/records.h"
#include "tests/fuzz/fuzz.h"

#include <sstream>

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace fp8flow;
    constexpr int64_t kSteps = 1000;
    std::istringstream lines(std::string(reinterpret_cast<const char*>(data), size));
    const auto records = report::parse_records(lines, kSteps);
    std::string kept;
    for (const auto& record : records) {
        fuzz::expect(record.at("iteration").get<int64_t>() <= kSteps, "an iteration after the last");
        kept += record.dump() + "\n";
    }
    std::istringstream again(kept);
    fuzz::expect(report::parse_records(again, kSteps) == records, "records are not read as they are written");
    return 0;
}
