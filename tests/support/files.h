// SPDX-License-Identifier: MIT
// A temporary folder, which is removed at the end of the test; lists of texts; and checks of texts and
// errors.
#pragma once

#include "kernels/core/error.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace fp8flow {

using Texts = std::vector<std::string>;

// The one list after the other.
inline Texts with(Texts texts, const Texts& more) {
    texts.insert(texts.end(), more.begin(), more.end());
    return texts;
}

class TemporaryFolder {
public:
    TemporaryFolder() {
        std::string name = (std::filesystem::temp_directory_path() / "fp8flow_test_XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
        path_ = name;
    }
    ~TemporaryFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;

    std::string path(const std::string& relative = "") const {
        return relative.empty() ? path_ : path_ + "/" + relative;
    }

    std::string write(const std::string& relative, const std::string& bytes) const {
        const std::filesystem::path file = path(relative);
        std::filesystem::create_directories(file.parent_path());
        std::ofstream(file, std::ios::binary) << bytes;
        return file.string();
    }

private:
    std::string path_;
};

inline std::string read_whole(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// The names of what is in a folder.
inline std::set<std::string> names_in(const std::string& folder) {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
        names.insert(entry.path().filename().string());
    return names;
}

// The message of the Error that `action` throws, or "" where it throws none; fails the test if it is one of
// another class.
inline std::string error_or_none(ExitCode code, const std::function<void()>& action) {
    try {
        action();
    } catch (const Error& error) {
        EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << error.what();
        return error.what();
    }
    return "";
}

// The same where it must throw, and a message of one line.
inline std::string error_of(ExitCode code, const std::function<void()>& action) {
    const std::string text = error_or_none(code, action);
    EXPECT_NE(text, "") << "no error was thrown";
    EXPECT_EQ(text.find('\n'), std::string::npos) << "more than one line: " << text;
    return text;
}

inline void expect_contains(const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << "\"" << part << "\" is missing in: " << text;
}

}  // namespace fp8flow
