// SPDX-License-Identifier: MIT
// RunLog: what a run prints, and its log file. main decides from the command line and the environment what of
// it a terminal shows.
#pragma once

#include "model/base/output.h"

#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fp8flow::report {

// What a terminal shows. quiet: warnings and the result; verbose: Megatron-LM's whole step line.
enum class Detail : uint8_t { quiet, normal, verbose };

// Prints on the first rank and appends to <out>/<name>; silent on other ranks. open() creates the file and
// writes the earlier lines, so that a run that does not start leaves no file. The file has every line.
class RunLog {
public:
    RunLog(int rank, Detail detail) : speaks_(rank == 0), detail_(detail) {}
    void line(std::string_view text);
    void result(std::string_view text);  // what the run was started for
    // The same of a format and its arguments.
    template <class First, class... Rest>
    void line(fmt::format_string<First, Rest...> format, First&& first, Rest&&... rest) {
        line(fmt::format(format, std::forward<First>(first), std::forward<Rest>(rest)...));
    }
    template <class First, class... Rest>
    void result(fmt::format_string<First, Rest...> format, First&& first, Rest&&... rest) {
        result(fmt::format(format, std::forward<First>(first), std::forward<Rest>(rest)...));
    }
    void open(const OutputFolder& folder, std::string_view name,
              LineFile::Start start = LineFile::Start::truncate);

    Detail detail() const { return detail_; }

private:
    void write(std::string_view text, bool shown);
    void print(std::string_view text);

    bool speaks_;
    Detail detail_;
    std::vector<std::string> kept_;
    std::optional<LineFile> file_;
};

}  // namespace fp8flow::report
