// SPDX-License-Identifier: MIT
// RunFolder: the folder of one run, held by a lock from the start of the run to its end. The first rank
// holds it; all ranks know its name. A folder is free if it holds nothing but hidden files and empty folders.
// Until keep(), a run writes no file here, and if it fails by then, what it made is removed. What processes
// that died were writing is removed at the start. Read next: folder_lock.h, output.h.
#pragma once

#include "kernels/comm/process_group.h"
#include "model/base/output.h"
#include "model/job/folder_lock.h"

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fp8flow {

class RunFolder {
public:
    // What becomes of a folder that is not free.
    enum class Taken {
        next,      // the run goes to the first of NAME-2, NAME-3, ... that is
        enter,     // one to continue; refused while another run is in it
        overwrite  // the same, and keep() removes what an earlier run wrote
    };
    struct Request {
        std::string path;           // as the user wrote it
        std::string key = "--out";  // what names it, for errors
        std::string command = {};   // as typed
        Taken taken = Taken::next;
        FolderLock::Holder holder = FolderLock::Holder::keeps;
        std::chrono::milliseconds wait{5000};  // to enter: for the end of a run that is in it
    };
    // Collective. Throws ExitCode::output on the first rank, as OutputFolder does and where it is refused.
    RunFolder(const Request& request, ProcessGroup& world);
    ~RunFolder();
    RunFolder(const RunFolder&) = delete;
    RunFolder& operator=(const RunFolder&) = delete;

    const std::string& name() const { return name_; }  // as the user wrote it, with the number
    const std::string& note() const { return note_; }  // a warning where the run goes elsewhere; else empty
    bool is_first_rank() const { return folder_.has_value(); }
    // Of the first rank.
    const OutputFolder& folder() const { return *folder_; }

    // The run starts: call it before the first file is written.
    void keep();
    // Throw ExitCode::output if another run has the folder now. On other ranks they do nothing.
    void check() const;
    void check_if_unsure() const;

private:
    void take_this(const Request& request);
    void take_next(const Request& request);
    FolderLock::Attempt try_to_take(const Request& request);
    void open(const Request& request);
    void close();
    std::vector<OutputFolder> folders_below() const;

    std::string name_, note_;
    bool overwrites_ = false;
    std::optional<OutputFolder> folder_;
    std::unique_ptr<FolderLock> lock_;
    std::vector<std::string> made_;  // folders, outer before inner
    bool kept_ = false;
};

// What `train` writes at its end.
inline constexpr std::array kFilesOfTheEnd = {"report.html", "memory.json", "tensor_stats.json",
                                              "transposed_stats.json"};
// Files of the initial model that are copied into an export of the trained one.
inline constexpr std::array kCarriedFiles = {"generation_config.json",
                                             "tokenizer.json",
                                             "tokenizer_config.json",
                                             "tokenizer.model",
                                             "special_tokens_map.json",
                                             "added_tokens.json",
                                             "vocab.json",
                                             "vocab.txt",
                                             "merges.txt",
                                             "chat_template.jinja",
                                             "chat_template.json"};
// Removes the files of an export, but not the copied ones, which may be the user's.
void remove_exported(const OutputFolder& folder);

}  // namespace fp8flow
