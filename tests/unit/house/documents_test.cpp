// SPDX-License-Identifier: MIT
// Holds the documents together: every relative link of a Markdown file leads to a file, and to a heading
// where it names one; files named in code spans exist; the README stays short; the version is the same
// wherever it is written. Each rule is also shown a planted violation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
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

namespace fs = std::filesystem;

using Problems = std::vector<std::string>;

// What the rules look at: texts of documents, names of all files and folders, from the repository root.
struct Documents {
    std::map<std::string, std::string> texts;
    std::set<std::string> files;
};

constexpr size_t kMaxReadmeLines = 150;

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
    return lines;
}

bool is_markdown(const std::string& path) { return path.ends_with(".md"); }

// The lines outside code blocks; a code block is an empty line each, so that line numbers stay.
std::vector<std::string> prose_of(const std::string& text) {
    std::vector<std::string> lines = lines_of(text);
    bool code = false;
    for (std::string& line : lines) {
        const size_t start = line.find_first_not_of(' ');
        const bool fence = start != std::string::npos && line.compare(start, 3, "```") == 0;
        if (fence) code = !code;
        if (fence || code) line.clear();
    }
    return lines;
}

std::string without_code(const std::string& line) {
    static const std::regex code("`[^`]*`");
    return std::regex_replace(line, code, "");
}

// The anchor that a heading gets: lower case, spaces become hyphens, other signs go.
std::string anchor_of(const std::string& heading) {
    std::string anchor;
    for (const char c : heading) {
        const auto u = static_cast<unsigned char>(c);
        if (c == ' ')
            anchor += '-';
        else if (std::isalnum(u) || c == '-' || c == '_' || u >= 0x80)
            anchor += static_cast<char>(std::tolower(u));
    }
    return anchor;
}

bool has_anchor(const std::string& text, const std::string& anchor) {
    static const std::regex heading("^#{1,6} +(.*[^ ]) *$");
    const std::vector<std::string> lines = prose_of(text);
    return std::any_of(lines.begin(), lines.end(), [&](const std::string& line) {
        std::smatch match;
        return std::regex_match(line, match, heading) && anchor_of(match[1]) == anchor;
    });
}

// `target` as written in `document`, from the repository root.
std::string resolved(const std::string& document, const std::string& target) {
    const fs::path base = target.starts_with("/") ? fs::path() : fs::path(document).parent_path();
    std::string path =
        (base / (target.starts_with("/") ? target.substr(1) : target)).lexically_normal().generic_string();
    if (path.ends_with("/")) path.pop_back();
    return path;
}

void check_link(const Documents& all, const std::string& where, const std::string& document,
                const std::string& link, Problems& problems) {
    static const std::regex outside("^[a-z]+:.*");
    if (std::regex_match(link, outside)) return;  // https:, mailto:
    const size_t hash = link.find('#');
    const std::string target = link.substr(0, hash);
    const std::string file = target.empty() ? document : resolved(document, target);
    if (!all.files.contains(file)) {
        problems.push_back(where + ": link to " + link + ": no such file");
        return;
    }
    if (hash == std::string::npos) return;
    const auto text = all.texts.find(file);
    if (text != all.texts.end() && !has_anchor(text->second, link.substr(hash + 1)))
        problems.push_back(where + ": link to " + link + ": no such heading");
}

void check_links(const Documents& all, Problems& problems) {
    static const std::regex link(R"(\]\(([^)\s]+)[^)]*\))");
    for (const auto& [path, text] : all.texts) {
        if (!is_markdown(path)) continue;
        const std::vector<std::string> lines = prose_of(text);
        for (size_t i = 0; i < lines.size(); ++i) {
            const std::string line = without_code(lines[i]), where = path + ":" + std::to_string(i + 1);
            for (auto it = std::sregex_iterator(line.begin(), line.end(), link); it != std::sregex_iterator();
                 ++it)
                check_link(all, where, path, (*it)[1], problems);
        }
    }
}

// `scripts/train.sh`, `configs/text.yaml` and the like. Histories name what is gone.
void check_named_files(const Documents& all, Problems& problems) {
    static const std::regex named(
        "`(?:\\./)?((?:scripts|configs|docs|kernels|layers|model|tests)/[a-z0-9_./-]+\\.[a-z]+)[ `]");
    for (const auto& [path, text] : all.texts) {
        if (!is_markdown(path) || path == "CHANGELOG.md") continue;
        const std::vector<std::string> lines = prose_of(text);
        for (size_t i = 0; i < lines.size(); ++i)
            for (auto it = std::sregex_iterator(lines[i].begin(), lines[i].end(), named);
                 it != std::sregex_iterator(); ++it)
                if (!all.files.contains((*it)[1]))
                    problems.push_back(path + ":" + std::to_string(i + 1) + ": names " + (*it)[1].str() +
                                       ": no such file");
    }
}

void check_readme(const Documents& all, Problems& problems) {
    const size_t lines = lines_of(all.texts.at("README.md")).size();
    if (lines > kMaxReadmeLines)
        problems.push_back("README.md: " + std::to_string(lines) + " lines, want at most " +
                           std::to_string(kMaxReadmeLines));
}

// What the first group of `pattern` matches in a line of `path`; empty: nothing.
std::string found(const Documents& all, const std::string& path, const std::string& pattern) {
    const std::regex wanted(pattern);
    for (const std::string& line : lines_of(all.texts.at(path))) {
        std::smatch match;
        if (std::regex_search(line, match, wanted)) return match[1];
    }
    return "";
}

void check_version(const Documents& all, Problems& problems) {
    const std::string version = found(all, "CMakeLists.txt", R"(^project\(fp8flow VERSION ([0-9.]+))");
    const std::pair<const char*, const char*> copies[] = {{"CITATION.cff", "^version: \"?([^\" ]+)"},
                                                          {"CHANGELOG.md", "^## \\[?([0-9.]+)"}};
    for (const auto& [path, pattern] : copies) {
        const std::string copy = found(all, path, pattern);
        if (copy != version)
            problems.push_back(std::string(path) + ": version " + copy + ", CMakeLists.txt has " + version);
    }
}

Problems problems_of(const Documents& all) {
    Problems problems;
    check_links(all, problems);
    check_named_files(all, problems);
    check_readme(all, problems);
    check_version(all, problems);
    return problems;
}

// Folders that hold no sources: builds, results of runs, git's own.
bool is_left_out(const std::string& folder) {
    return folder == ".git" || folder == "runs" || folder == ".deps" || folder == ".cache" ||
           folder.starts_with("build");
}

Documents read_repository() {
    Documents all;
    const fs::path root = FP8FLOW_SOURCE_DIR;
    for (auto it = fs::recursive_directory_iterator(root); it != fs::recursive_directory_iterator(); ++it) {
        const std::string path = it->path().lexically_relative(root).generic_string();
        if (it->is_directory() && it.depth() == 0 && is_left_out(path)) {
            it.disable_recursion_pending();
            continue;
        }
        all.files.insert(path);
        if (!is_markdown(path) && path != "CMakeLists.txt" && path != "CITATION.cff") continue;
        std::ifstream file(it->path(), std::ios::binary);
        std::ostringstream text;
        text << file.rdbuf();
        all.texts[path] = text.str();
    }
    return all;
}

TEST(Documents, HoldTogetherInTheRepository) {
    const Documents all = read_repository();
    ASSERT_TRUE(all.texts.contains("README.md"));
    for (const std::string& problem : problems_of(all)) ADD_FAILURE() << problem;
}

// A small tree that breaks no rule, with `text` as docs/a.md.
Documents tree(const std::string& text) {
    Documents all;
    all.texts = {{"CMakeLists.txt", "project(fp8flow VERSION 1.2.3 LANGUAGES CXX)\n"},
                 {"CITATION.cff", "cff-version: 1.2.0\nversion: 1.2.3\n"},
                 {"CHANGELOG.md", "# Changes\n\n## 1.2.3 - 2026-01-01\n"},
                 {"README.md", "# Title\n\n[a](docs/a.md)\n"},
                 {"docs/a.md", text}};
    all.files = {"docs", "docs/results", "docs/results/x.json", "scripts/train.sh"};
    for (const auto& [path, unused] : all.texts) all.files.insert(path);
    return all;
}

Documents with(const std::string& path, const std::string& text) {
    Documents all = tree("");
    all.texts[path] = text;
    return all;
}

struct Planted {
    std::string name;
    Documents all;
    std::string expected;  // part of the only problem; empty: none
};

class PlantedViolation : public testing::TestWithParam<Planted> {};

TEST_P(PlantedViolation, IsFound) {
    const Problems problems = problems_of(GetParam().all);
    if (GetParam().expected.empty()) {
        EXPECT_TRUE(problems.empty()) << problems.front();
        return;
    }
    ASSERT_EQ(problems.size(), 1u) << testing::PrintToString(problems);
    EXPECT_NE(problems[0].find(GetParam().expected), std::string::npos) << problems[0];
}

std::vector<Planted> planted() {
    std::string lengthy;
    for (size_t i = 0; i <= kMaxReadmeLines; ++i) lengthy += "A line.\n";
    return {
        {"clean", tree("[r](../README.md), ![p](results/x.json), [w](https://example.org/x#y)\n"), ""},
        {"missing_file", tree("Text.\n[b](b.md)\n"), "docs/a.md:2: link to b.md: no such file"},
        {"missing_picture", tree("![b](results/b.svg)\n"), "results/b.svg: no such file"},
        {"second_link_of_a_line", tree("[r](../README.md) and [b](b.md)\n"), "b.md: no such file"},
        {"titled_link", tree("[b](b.md \"title\")\n"), "b.md: no such file"},
        {"outside_the_repository", tree("[b](../../README.md)\n"), "no such file"},
        {"folder", tree("[b](results/)\n"), ""},
        {"heading", tree("[t](../README.md#title)\n"), ""},
        {"heading_with_signs", tree("# `a` (b), c-d: E\n[t](#a-b-c-d-e)\n"), ""},
        {"missing_heading", tree("[t](../README.md#titel)\n"), "#titel: no such heading"},
        {"missing_heading_here", tree("[t](#b)\n"), "#b: no such heading"},
        {"link_in_a_code_block", tree("```\n[b](b.md)\n```\n"), ""},
        {"link_in_code", tree("`[b](b.md)`\n"), ""},
        {"link_after_a_code_block", tree("```\n```\n[b](b.md)\n"), "docs/a.md:3:"},
        {"named_file", tree("`./scripts/train.sh -n 1` and `docs/results/x.json`\n"), ""},
        {"missing_named_file", tree("`scripts/tran.sh`\n"), "names scripts/tran.sh"},
        {"long_readme", with("README.md", lengthy), "README.md: 151 lines"},
        {"other_version_cited", with("CITATION.cff", "cff-version: 1.2.0\nversion: 1.2.2\n"),
         "CITATION.cff: version 1.2.2, CMakeLists.txt has 1.2.3"},
        {"other_version_in_the_changes", with("CHANGELOG.md", "## 1.3.0\n\n## 1.2.3\n"),
         "CHANGELOG.md: version 1.3.0"},
    };
}

INSTANTIATE_TEST_SUITE_P(Documents, PlantedViolation, testing::ValuesIn(planted()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fp8flow
