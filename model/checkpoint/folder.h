// SPDX-License-Identifier: MIT
// The folder of a run's checkpoints. A checkpoint is a folder of its own:
//   step_00000020           whole: it got this name when everything in it was on the disk
//   step_00000020.tmp       being written or being removed; the next run removes what a run that died left
//   step_00000020.refused   failed its checks when a run wanted to resume from it, or could not be removed;
//                           kept for the user to look at, as step_00000020.refused-2 where there is one
// The order that loses nothing: every file written and synced, the manifest last, the folder synced, renamed,
// its parent synced; and only then the oldest checkpoint renamed to .tmp and removed. Read next: reader.h,
// saver.h.
#pragma once

#include "model/checkpoint/disk.h"
#include "model/checkpoint/manifest.h"

#include <memory>
#include <optional>

namespace fp8flow::checkpoint {

inline constexpr const char* kCheckpoints = "checkpoints";  // below a run's output folder, where train saves

inline constexpr int64_t kBlockBytes = int64_t{8} << 20;  // of a file, written at once

std::string checkpoint_name(int64_t step);  // "step_00000020"
// The step of such a name, exactly as checkpoint_name writes it; nothing for other names.
std::optional<int64_t> step_of_name(std::string_view name);

class CheckpointFolder {
public:
    // An existing folder. Throws Error(checkpoint).
    CheckpointFolder(std::shared_ptr<Disk> disk, const std::string& path);

    const std::string& path() const { return path_; }
    std::string path_of(const std::string& name) const { return path_ + "/" + name; }
    Disk& disk() const { return *disk_; }
    std::vector<int64_t> steps() const;  // of whole checkpoints, ascending
    DiskHandle open_checkpoint(int64_t step) const;
    // Throws Error(checkpoint); Unreadable where it may be whole.
    CheckpointManifest manifest(int64_t step) const;

    // All below: of one process at a time, the first rank of the run that saves here. What cannot be removed
    // stays and is no error: the reasons are returned. Files that are not of a checkpoint are never removed.
    std::vector<std::string> clean_up();  // removes what runs that died left
    void begin(int64_t step);             // makes step_N.tmp
    void write_manifest(int64_t step, std::string_view text);
    void publish(int64_t step);  // step_N.tmp becomes step_N
    void abandon(int64_t step);  // removes step_N.tmp as far as that is possible
    // Removes the oldest checkpoints of a run, or of all runs, until `count` of them are left.
    std::vector<std::string> keep_latest(int64_t count, std::optional<uint64_t> run);
    void set_aside(int64_t step) { set_aside(checkpoint_name(step), step); }  // step_N becomes step_N.refused

    // A file of step_N.tmp, by any rank. Tensors by the thousand, most of them small, become few writes.
    class Part {
    public:
        Part(const CheckpointFolder& folder, int64_t step, const std::string& name);
        void write(const void* data, size_t bytes);
        void finish();  // on the disk, with its name

    private:
        void flush();

        Disk& disk_;
        std::string path_;
        DiskHandle folder_, file_;
        std::vector<uint8_t> block_;
    };

private:
    void check(int64_t result, const std::string& name, std::string_view what) const;
    void remove_checkpoint(const std::string& name);
    void try_to_remove(const std::string& name, std::vector<std::string>& problems);
    void set_aside(const std::string& name, int64_t step);

    std::shared_ptr<Disk> disk_;
    std::string path_;
    DiskHandle folder_;
};

}  // namespace fp8flow::checkpoint
