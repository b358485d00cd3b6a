// SPDX-License-Identifier: MIT
// Holds the floors of the house over the source text: who may include whom, no cycles, how a file opens, how
// long it may be, and where inline assembly lives. Each rule is also shown a planted violation.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace fp8flow {
namespace {

using Tree = std::map<std::string, std::string>;  // path from the repository root -> text
using Problems = std::vector<std::string>;

constexpr int kMaxLines = 600;
constexpr int kReasonLines = 5;  // "Long because" stands in the first lines

bool under(const std::string& path, const std::string& folder) { return path.starts_with(folder + "/"); }
bool is_header(const std::string& path) { return path.ends_with(".h") || path.ends_with(".cuh"); }
bool is_source(const std::string& path) {
    return is_header(path) || path.ends_with(".cpp") || path.ends_with(".cu");
}
bool is_ours(const std::string& include) {
    return under(include, "kernels") || under(include, "layers") || under(include, "model") ||
           under(include, "tests");
}

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
    return lines;
}

// Files named by include lines: every quoted one, and bracketed ones that name a floor.
std::vector<std::string> includes_of(const std::string& text) {
    static const std::regex pattern(R"(^\s*#\s*include\s*([<"])([^>"]+)[>"])");
    std::vector<std::string> includes;
    for (const std::string& line : lines_of(text)) {
        std::smatch match;
        if (line.find("include") == std::string::npos || !std::regex_search(line, match, pattern)) continue;
        if (match[1] == "\"" || is_ours(match[2])) includes.push_back(match[2]);
    }
    return includes;
}

// Why `file` may not include `include`; empty if it may.
std::string forbidden(const std::string& file, const std::string& include) {
    if (!is_ours(include)) return "quoted includes name a file from the repository root";
    if (under(file, "tests"))
        return under(include, "model/main") ? "model/commands/main.cpp is the program" : "";
    if (under(include, "tests")) return "only tests include tests/";
    if (under(file, "kernels") && (under(include, "layers") || under(include, "model"))) {
        return "kernels/ stands below layers/ and model/";
    }
    if (under(file, "kernels/core") && !under(include, "kernels/core")) {
        return "kernels/core includes only kernels/core";
    }
    if (under(file, "layers")) {
        if (under(include, "model")) return "layers/ stands below model/";
        if (under(include, "kernels/comm")) return "layers/ sees Ops, Exchange and core only";
    }
    for (const std::string backend : {"kernels/reference", "kernels/hopper"}) {
        if (under(include, backend) && !under(file, backend) && file != "model/base/backend.cpp") {
            return "only model/base/backend.cpp names a concrete backend";
        }
    }
    const bool seam = under(file, "kernels/ops") ||
                      (under(file, "kernels") && std::count(file.begin(), file.end(), '/') == 1);
    if (seam && under(include, "kernels/comm")) return "the list of operations stands below kernels/comm";
    return "";
}

void check_includes(const Tree& tree, Problems& problems) {
    for (const auto& [path, text] : tree) {
        for (const std::string& include : includes_of(text)) {
            const std::string reason = forbidden(path, include);
            if (!reason.empty()) problems.push_back(path + " includes " + include + ": " + reason);
            if (is_ours(include) && !tree.contains(include)) {
                problems.push_back(path + " includes " + include + ": no such file");
            }
        }
    }
}

// Depth-first walk; `open` is the chain of files being visited.
void visit(const Tree& tree, const std::string& path, std::vector<std::string>& open,
           std::set<std::string>& done, Problems& problems) {
    if (done.contains(path) || !tree.contains(path)) return;
    const auto start = std::find(open.begin(), open.end(), path);
    if (start != open.end()) {
        std::string cycle = "include cycle: ";
        for (auto it = start; it != open.end(); ++it) cycle += *it + " -> ";
        problems.push_back(cycle + path);
        return;
    }
    open.push_back(path);
    for (const std::string& include : includes_of(tree.at(path))) visit(tree, include, open, done, problems);
    open.pop_back();
    done.insert(path);
}

void check_cycles(const Tree& tree, Problems& problems) {
    std::vector<std::string> open;
    std::set<std::string> done;
    for (const auto& [path, text] : tree) visit(tree, path, open, done, problems);
}

void check_texts(const Tree& tree, Problems& problems) {
    static const std::regex assembly(R"((^|[^A-Za-z0-9_])(asm|__asm__)\s*(volatile|__volatile__)?\s*[({])");
    for (const auto& [path, text] : tree) {
        const std::vector<std::string> lines = lines_of(text);
        if (!text.starts_with("// "))
            problems.push_back(path + ": opens without a comment on what it holds and why");
        if (is_header(path) && text.find("\n#pragma once\n") == std::string::npos) {
            problems.push_back(path + ": no #pragma once");
        }
        bool reason = false;
        for (int i = 0; i < std::min<int>(kReasonLines, static_cast<int>(lines.size())); ++i) {
            reason = reason || lines[i].find("Long because") != std::string::npos;
        }
        if (lines.size() > kMaxLines && !reason) {
            problems.push_back(path + ": " + std::to_string(lines.size()) +
                               " lines without a 'Long because' at the top");
        }
        if (under(path, "kernels/hopper/device")) continue;
        for (const std::string& line : lines) {
            const std::string code = line.substr(0, line.find("//"));
            if (code.find("asm") != std::string::npos && std::regex_search(code, assembly)) {
                problems.push_back(path + ": inline assembly outside kernels/hopper/device: " + line);
            }
        }
    }
}

Problems problems_of(const Tree& tree) {
    Problems problems;
    check_includes(tree, problems);
    check_cycles(tree, problems);
    check_texts(tree, problems);
    return problems;
}

Tree read_repository() {
    namespace fs = std::filesystem;
    Tree tree;
    const fs::path root = FP8FLOW_SOURCE_DIR;
    for (const char* floor : {"kernels", "layers", "model", "tests"}) {
        if (!fs::exists(root / floor)) continue;
        for (const auto& entry : fs::recursive_directory_iterator(root / floor)) {
            const std::string path = entry.path().lexically_relative(root).generic_string();
            if (!entry.is_regular_file() || !is_source(path)) continue;
            std::ifstream file(entry.path(), std::ios::binary);
            std::ostringstream text;
            text << file.rdbuf();
            tree[path] = text.str();
        }
    }
    return tree;
}

TEST(IncludeRules, HoldInTheRepository) {
    const Tree tree = read_repository();
    ASSERT_GT(tree.size(), 10u);
    for (const std::string& problem : problems_of(tree)) ADD_FAILURE() << problem;
}

// A header that breaks no rule by itself; includes are added by the cases below.
std::string header(const std::vector<std::string>& includes) {
    std::string text = "// What it holds.\n#pragma once\n";
    for (const std::string& include : includes) text += "#include \"" + include + "\"\n";
    return text;
}

struct Planted {
    std::string name;
    Tree tree;
    std::string expected;  // part of the only problem; empty: none
};

class PlantedViolation : public testing::TestWithParam<Planted> {};

TEST_P(PlantedViolation, IsFound) {
    const Problems problems = problems_of(GetParam().tree);
    if (GetParam().expected.empty()) {
        EXPECT_TRUE(problems.empty()) << problems.front();
        return;
    }
    ASSERT_EQ(problems.size(), 1u) << testing::PrintToString(problems);
    EXPECT_NE(problems[0].find(GetParam().expected), std::string::npos) << problems[0];
}

// The tree with one file that includes another, both otherwise in order.
Tree pair(const std::string& file, const std::string& include) {
    return {{file, header({include})}, {include, header({})}};
}

std::vector<Planted> planted() {
    const std::string keyword = "as";  // in two parts, so that this file obeys the rule on assembly
    const std::string assembly = header({}) + "void f() { " + keyword + "m volatile(\"nop;\"); }\n";
    std::string lengthy = header({});
    for (int i = 0; i < kMaxLines; ++i) lengthy += "int x;\n";
    return {
        {"clean", pair("model/a.h", "layers/b.h"), ""},
        {"kernel_sees_layer", pair("kernels/ops/a.h", "layers/b.h"), "stands below"},
        {"kernel_sees_model", pair("kernels/comm/a.h", "model/b.h"), "stands below"},
        {"layer_sees_model", pair("layers/a.h", "model/b.h"), "layers/ stands below"},
        {"layer_sees_reference", pair("layers/flows/a.h", "kernels/reference/b.h"), "concrete backend"},
        {"layer_sees_hopper", pair("layers/a.h", "kernels/hopper/b.h"), "concrete backend"},
        {"layer_sees_comm", pair("layers/a.h", "kernels/comm/b.h"), "Ops, Exchange and core"},
        {"layer_sees_ops", pair("layers/a.h", "kernels/ops.h"), ""},
        {"core_sees_ops", pair("kernels/core/a.h", "kernels/ops.h"), "only kernels/core"},
        {"ops_see_comm", pair("kernels/exchange.h", "kernels/comm/b.h"), "stands below kernels/comm"},
        {"model_sees_backend", pair("model/train/trainer.cpp", "kernels/reference/b.h"), "concrete backend"},
        {"backend_sees_backend", pair("model/base/backend.cpp", "kernels/hopper/b.h"), ""},
        {"reference_sees_hopper", pair("kernels/reference/a.h", "kernels/hopper/b.h"), "concrete backend"},
        {"test_sees_backend", pair("tests/unit/a_test.cpp", "kernels/reference/b.h"), ""},
        {"model_sees_tests", pair("model/a.h", "tests/support/b.h"), "only tests"},
        {"relative_include", {{"model/a.h", header({"b.h"})}}, "from the repository root"},
        {"missing_file", {{"model/a.h", header({"model/b.h"})}}, "no such file"},
        {"cycle",
         {{"model/a.h", header({"model/b.h"})},
          {"model/b.h", header({"model/c.h"})},
          {"model/c.h", header({"model/a.h"})}},
         "include cycle: model/a.h -> model/b.h -> model/c.h -> model/a.h"},
        {"no_comment", {{"model/a.cpp", "int x;\n"}}, "without a comment"},
        {"no_pragma", {{"model/a.h", "// What it holds.\nint x;\n"}}, "no #pragma once"},
        {"too_long", {{"model/a.h", lengthy}}, "Long because"},
        {"long_with_reason", {{"model/a.h", "// Long because it is a table.\n" + lengthy}}, ""},
        {"assembly_elsewhere", {{"kernels/hopper/a.h", assembly}}, "inline assembly"},
        {"assembly_in_place", {{"kernels/hopper/device/a.h", assembly}}, ""},
    };
}

INSTANTIATE_TEST_SUITE_P(IncludeRules, PlantedViolation, testing::ValuesIn(planted()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fp8flow
