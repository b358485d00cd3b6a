// SPDX-License-Identifier: MIT
// From `data_path` entries to a sorted list of regular files, and bounded reads of them. Shared by the text
// and the shard reader. Read next: text.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fp8flow::data {

struct DataFile {
    std::string path;  // as opened
    // To its data_path entry: a file's name, or the path below the folder, or below the glob's part without
    // wildcards.
    std::string relative;
    int64_t bytes = 0;
    bool named = false;  // by an entry that is its path
};

struct DataFiles {
    std::vector<DataFile> files;        // in the order in which they are read
    std::vector<std::string> warnings;  // of what is named and has no effect
};

// Expands files, folders (recursive) and globs (*, ?, [..], {a,b}; a wildcard does not cross '/'). Of braces,
// one alternative that matches is enough, so that a list can name places of several systems. Sorted by
// relative path, then by path; a file reached twice (same device and inode) is listed once, with a warning.
// Inside folders, names that begin with '.' are skipped, links to files are followed and links to folders are
// not, so that no loop of links matters; a warning counts those to folders that no entry reaches, or to
// nothing. Throws ExitCode::data for an entry that does not exist, matches nothing, or cannot be read.
// `extensions`: kept endings of file names, e.g. ".h"; "": names without an extension; empty list: every
// file. A file that an entry names itself is kept whatever its ending.
DataFiles list_data_files(const std::vector<std::string>& entries,
                          const std::vector<std::string>& extensions = {});

// At most `limit` bytes from the start of a regular file. Throws ExitCode::data with the path and the
// system's reason.
std::vector<uint8_t> read_data_file(const std::string& path, int64_t limit);

}  // namespace fp8flow::data
