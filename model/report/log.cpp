// SPDX-License-Identifier: MIT
// Lines go to standard output and to the file.
#include "model/report/log.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace fp8flow::report {

// A text of several lines may have a warning in one of them.
void RunLog::line(std::string_view text) {
    for (size_t begin = 0, end = 0; end != std::string_view::npos; begin = end + 1) {
        end = text.find('\n', begin);
        const std::string_view one = text.substr(begin, end - begin);
        write(one, detail_ != Detail::quiet || one.starts_with("warning:"));
    }
}

void RunLog::result(std::string_view text) { write(text, true); }

void RunLog::write(std::string_view text, bool shown) {
    if (!speaks_) return;
    if (shown) print(text);
    if (file_)
        file_->write_line(text);
    else
        kept_.emplace_back(text);
}

// If the terminal or the reader of the pipe has gone, the run continues.
void RunLog::print(std::string_view text) {
    if (std::ferror(stdout) != 0) return;
    const std::string shown = std::string(text) + "\n";
    if (std::fwrite(shown.data(), 1, shown.size(), stdout) == shown.size() && std::fflush(stdout) == 0)
        return;
    const std::string lost = fmt::format(
        "warning: standard output cannot be written ({}); the run goes on, and its lines are in its log",
        std::strerror(errno));
    print_err(lost + "\n");
    write(lost, false);
}

void RunLog::open(const OutputFolder& folder, std::string_view name, LineFile::Start start) {
    file_.emplace(folder.open_lines(name, start));
    for (const std::string& text : kept_) file_->write_line(text);
    kept_.clear();
}

}  // namespace fp8flow::report
