// SPDX-License-Identifier: MIT
// Reads suites.
#include "model/bench/suite.h"

#include "kernels/core/error.h"
#include "model/base/embedded.h"
#include "model/config/fields.h"
#include "model/safetensors/input.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>

namespace fp8flow::bench {

namespace {

using CLI::detail::trim_copy;

constexpr size_t kMostRows = 10000;

// The alternatives of `text`: {a | b} is a or b, {name} an entry of the list `name`.
void expand(const std::string& text, const std::map<std::string, std::string>& lists,
            std::vector<std::string>& out) {
    const size_t open = text.find('{'), close = text.find('}', std::min(open, text.size()));
    if (close == std::string::npos) {
        require(out.size() < kMostRows, ExitCode::usage, "more than {} rows", kMostRows);
        out.push_back(text);
        return;
    }
    std::string inside = text.substr(open + 1, close - open - 1);
    if (const auto list = lists.find(inside); list != lists.end()) inside = list->second;
    for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
        end = inside.find('|', begin);
        expand(text.substr(0, open) + trim_copy(inside.substr(begin, end - begin)) + text.substr(close + 1),
               lists, out);
    }
}

// Its lines without comments, each with the indented ones that continue it.
std::vector<std::string> lines_of(std::string_view text) {
    std::vector<std::string> lines;
    std::istringstream in{std::string(text)};
    for (std::string line; std::getline(in, line);) {
        if (line.empty() || line.front() == '#') continue;
        if (line.front() == ' ' && !lines.empty())
            lines.back() += line;
        else
            lines.push_back(line);
    }
    return lines;
}

std::vector<SuiteEntry> parse(std::string_view text) {
    std::vector<SuiteEntry> entries;
    std::set<std::string> known;
    std::map<std::string, std::string> lists;
    SuiteEntry each;
    const auto add = [&](const Case& what, const std::string& shape) {
        each.operation = what.name;
        each.shape = shape;
        if (known.insert(what.name + Shape(what.name, what.keys, each.size, shape).text()).second)
            entries.push_back(each);
    };
    for (const std::string& line : lines_of(text)) {
        if (line == "regimes burst") {
            each.regimes = Subject::Regimes::burst;
        } else if (line == "size small") {
            each.size = Size::small;
        } else if (const size_t equals = line.find(" = "); equals != std::string::npos) {
            lists[line.substr(0, equals)] = line.substr(equals + 3);
        } else {
            std::vector<std::string> rows;
            expand(line, lists, rows);
            for (const std::string& row : rows) {
                const size_t blank = std::min(row.find(' '), row.size());
                const std::string operation = row.substr(0, blank), shape = trim_copy(row.substr(blank));
                if (operation != "*")
                    add(find_case(operation), shape);
                else
                    for (const Case& what : all_cases()) add(what, shape);
            }
        }
    }
    return entries;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> suite_names() {
    std::vector<std::pair<std::string, std::string>> names;
    for (const EmbeddedFile& file : suite_files())
        names.emplace_back(file.name, file.text.substr(2, file.text.find('\n') - 2));  // after "# "
    return names;
}

std::vector<SuiteEntry> suite(const std::string& name) {
    std::vector<std::string> names;
    for (const EmbeddedFile& file : suite_files()) {
        if (name == file.name) return parse(file.text);
        names.emplace_back(file.name);
    }
    std::error_code error;
    if (std::filesystem::exists(name, error)) {
        const std::string text = read_text_file(name, ExitCode::usage, "--suite");
        try {
            return parse(text);
        } catch (const Error& problem) {
            fail(problem.code(), "--suite {}: {}", name, problem.what());
        }
    }
    const std::string near = nearest_name(name, names);
    fail(ExitCode::usage, "--suite: got '{}', want {} or a file{}", name, fmt::join(names, ", "),
         near.empty() ? "" : fmt::format(" (did you mean '{}')", near));
}

}  // namespace fp8flow::bench
