// SPDX-License-Identifier: MIT
// Any text as a pattern that a user writes: the regular expression of `bench --match` and an entry of
// data.data_path. Both are refused with an error of their class or end within the driver's time.
#include "model/bench/row_pattern.h"
#include "model/data/files.h"
#include "tests/fuzz/fuzz.h"

#include <algorithm>
#include <string>

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace fp8flow;
    std::string text(reinterpret_cast<const char*>(data), size);
    fuzz::accepts(ExitCode::usage, [&] {
        bench::RowPattern(text).matches(
            "grouped_gemm_fprop experts=8 hidden=7168 tokens=4096 recipe=fp8_flow");
    });
    // below a folder that is not there: the expansion runs, the machine's files stay out of it
    std::replace(text.begin(), text.end(), '\0', '0');
    std::replace(text.begin(), text.end(), '/', '_');  // no way out of it
    fuzz::accepts(ExitCode::data, [&] { data::list_data_files({"/proc/self/fp8flow_absent/" + text}, {}); });
    return 0;
}
