// SPDX-License-Identifier: MIT
// One pass over the lines; state between lines is the stack of indentations and the depth of open brackets.
#include "model/config/yaml_guard.h"

#include <fmt/format.h>

#include <vector>

namespace fp8flow {
namespace {

// Length of the UTF-8 sequence that starts at `at`, or 0 where the bytes are not UTF-8.
size_t utf8_length(std::string_view text, size_t at) {
    const auto byte = static_cast<unsigned char>(text[at]);
    const size_t length = byte < 0x80                   ? 1
                          : byte >= 0xC2 && byte < 0xE0 ? 2
                          : byte >= 0xE0 && byte < 0xF0 ? 3
                          : byte >= 0xF0 && byte < 0xF5 ? 4
                                                        : 0;
    if (length == 0 || at + length > text.size()) return 0;
    for (size_t i = 1; i < length; ++i) {
        if ((static_cast<unsigned char>(text[at + i]) & 0xC0) != 0x80) return 0;
    }
    return length;
}

constexpr const char* kBlanks = " \t";
bool is_blank(char c) { return c == ' ' || c == '\t'; }

class Scanner {
public:
    std::optional<YamlProblem> scan(std::string_view text) {
        if (text.size() > kMaxYamlBytes) {
            return YamlProblem{1, 1,
                               fmt::format("got {} bytes, want at most {}", text.size(), kMaxYamlBytes)};
        }
        while (!text.empty() && !problem_) {
            const size_t end = text.find('\n');
            std::string_view line = text.substr(0, end);
            if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
            scan_line(line);
            ++line_;
            text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
        }
        if (!problem_ && brackets_ > 0) {
            line_ = open_line_;
            refuse(open_column_, "got a bracket that is never closed, want [ ] or { } in pairs");
        }
        return problem_;
    }

private:
    void refuse(size_t column, std::string text) {
        if (!problem_) problem_ = YamlProblem{line_, static_cast<int64_t>(column) + 1, std::move(text)};
    }

    void check_depth(size_t column) {
        const size_t depth = indents_.size() + static_cast<size_t>(dashes_) + static_cast<size_t>(brackets_);
        if (depth > static_cast<size_t>(kMaxYamlDepth)) {
            refuse(column,
                   fmt::format("got nesting deeper than {}, want at most {}", kMaxYamlDepth, kMaxYamlDepth));
        }
    }

    void check_bytes(std::string_view line) {
        for (size_t i = 0; i < line.size();) {
            const size_t length = utf8_length(line, i);
            const auto byte = static_cast<unsigned char>(line[i]);
            if (length == 0) return refuse(i, fmt::format("got byte 0x{:02x}, want UTF-8 text", byte));
            if ((byte < 0x20 && byte != '\t') || byte == 0x7F)
                return refuse(i, fmt::format("got control character 0x{:02x}, want text", byte));
            i += length;
        }
    }

    void scan_line(std::string_view line) {
        check_bytes(line);
        if (problem_) return;
        const size_t indent = line.find_first_not_of(' '), text = line.find_first_not_of(kBlanks);
        if (text == std::string_view::npos || line[text] == '#') return;
        if (line[indent] == '\t') return refuse(indent, "got a tab in front of the text, want spaces");
        if (indent == 0 && (line.starts_with("---") || line.starts_with("..."))) {
            const size_t after = line.find_first_not_of(kBlanks, 3);
            const bool alone = after == std::string_view::npos || (after > 3 && line[after] == '#');
            if (seen_content_ || line[0] == '.' || !alone)
                refuse(0, "got a document mark, want one document");
            seen_content_ = true;
            return;
        }
        if (indent == 0 && line[0] == '%') return refuse(0, "got a directive, want none");
        seen_content_ = true;
        if (brackets_ == 0) {
            while (!indents_.empty() && indents_.back() > indent) indents_.pop_back();
            if (indents_.empty() || indents_.back() < indent) indents_.push_back(indent);
            dashes_ = 0;
        }
        scan_tokens(line, indent);
    }

    void scan_tokens(std::string_view line, size_t begin) {
        bool token_start = true;  // whether a new YAML token may begin here
        for (size_t i = begin; i < line.size() && !problem_; ++i) {
            const char c = line[i];
            const bool space_follows = i + 1 == line.size() || is_blank(line[i + 1]);
            if (is_blank(c)) continue;
            if (c == '#' && (i == 0 || is_blank(line[i - 1]))) return;
            if (c == '"' || c == '\'') {
                if (!token_start)
                    return refuse(i, "got a quote inside a value, want the whole value in quotes");
                i = skip_quoted(line, i);
                token_start = false;
            } else if (token_start && (c == '&' || c == '*')) {
                return refuse(i, "got an anchor or alias, want the value itself (or put it in quotes)");
            } else if (token_start && c == '!') {
                return refuse(i, "got a tag, want a plain value (or put it in quotes)");
            } else if (token_start && (c == '|' || c == '>')) {
                return refuse(i, "got a block scalar, want the value on the line of its key");
            } else if (token_start && c == '?' && space_follows) {
                return refuse(i, "got a complex key, want key: value");
            } else if (token_start && c == '-' && space_follows && brackets_ == 0) {
                ++dashes_;
                check_depth(i);
            } else if (c == '[' || c == '{') {
                if (brackets_++ == 0) open_line_ = line_, open_column_ = i;
                check_depth(i);
                token_start = true;
            } else if (c == ']' || c == '}') {
                if (--brackets_ < 0)
                    return refuse(i, fmt::format("got '{}' without its opening bracket, want pairs", c));
                token_start = false;
            } else {
                token_start = c == ',' || (c == ':' && space_follows);
            }
        }
        check_depth(begin);
    }

    // Index of the closing quote of the scalar that opens at `open`.
    size_t skip_quoted(std::string_view line, size_t open) {
        const char quote = line[open];
        for (size_t i = open + 1; i < line.size(); ++i) {
            if (quote == '"' && line[i] == '\\') {
                ++i;
            } else if (line[i] == quote) {
                if (quote == '\'' && i + 1 < line.size() && line[i + 1] == '\'') {
                    ++i;
                } else {
                    return i;
                }
            }
        }
        refuse(open, "got a quote that is not closed on its line, want it closed");
        return line.size();
    }

    int64_t line_ = 1;
    int64_t open_line_ = 1;  // of the outermost open bracket
    size_t open_column_ = 0;
    std::vector<size_t> indents_;
    int dashes_ = 0;
    int brackets_ = 0;
    bool seen_content_ = false;
    std::optional<YamlProblem> problem_;
};

}  // namespace

std::optional<YamlProblem> scan_yaml(std::string_view text) { return Scanner().scan(text); }

}  // namespace fp8flow
