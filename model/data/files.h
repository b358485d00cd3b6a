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

// Which files a source reads, and how.
struct FileOptions {
    std::vector<std::string> data_path = {};  // files, folders, globs
    // Text. Kept inside folders; empty: all; "": names without an extension.
    std::vector<std::string> extensions = {};
    // Text is kept in memory, in every rank; files are taken in the order of their relative path until this
    // many bytes.
    int64_t max_bytes = int64_t{1} << 30;
    // Where the format does not define it. Of text the share of files (or, of a single file, of its bytes)
    // that is held out; 0: no held-out part.
    double held_out_fraction = 0.1;
    int64_t vocab_size = 50257;  // of tokens; text has that of bytes
    int64_t seq_length = 256;
    uint64_t seed = 1;
    // Tokens: parts of up to this many bytes are checked whole at the start; larger ones when a sample is
    // read.
    int64_t check_at_start_bytes = int64_t{64} << 20;
};

// Expands files, folders (recursive) and globs (*, ?, [..], {a,b}; a wildcard does not cross '/'). Of braces,
// one alternative that matches is enough, so that a list can name places of several systems. Sorted by
// relative path, then by path; a file reached twice (same device and inode) is listed once, with a warning.
// Inside folders, names that begin with '.' are skipped, links to files are followed and links to folders are
// not, so that no loop of links matters; a warning counts those to folders that no entry reaches, or to
// nothing. Throws ExitCode::data for an entry that does
// not exist, matches nothing, or cannot be read.
// `extensions`: kept endings of file names, e.g. ".h"; "": names without an extension; empty list: every
// file. A file that an entry names itself is kept whatever its ending.
DataFiles list_data_files(const std::vector<std::string>& entries,
                          const std::vector<std::string>& extensions = {});

// At most `limit` bytes from the start of a regular file. Throws ExitCode::data with the path and the
// system's reason.
std::vector<uint8_t> read_data_file(const std::string& path, int64_t limit);

}  // namespace fp8flow::data
