// SPDX-License-Identifier: MIT
// The manifest of a checkpoint: which step it is, how its tensors are spread over files, and what a resumed
// run must agree with. It is written last, so a folder with a manifest that checks out is a whole checkpoint.
// It carries the checksum of each file's header, each header carries those of its tensors, and the manifest
// its own: every bit of a checkpoint is covered. It names no files: names follow from the rank. Read next:
// folder.h, reader.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fp8flow::checkpoint {

struct CheckpointManifest {
    struct File {
        int64_t bytes = 0;
        uint32_t header_crc = 0;  // of everything before the first tensor

        bool operator==(const File&) const = default;
    };
    int64_t step = 0;  // steps that were done
    // Those of them that were applied: the rest was skipped (training.on_divergence). Absent: saved before
    // they were counted, as if all were.
    std::optional<int64_t> applied_steps;
    // The position in the data: samples are drawn by index. More than those of the steps after a rollback.
    int64_t consumed_samples = 0;
    int64_t expert_parallel_size = 1;
    int64_t global_batch_size = 1;
    uint64_t seed = 0;  // of all random numbers: data order, initial weights
    // consumed_samples counts samples of this length. 0 in manifests of older versions: the length is in
    // their configuration, and their fingerprint is fingerprint_without_content.
    int64_t seq_length = 0;
    uint64_t data_fingerprint = 0;  // TokenSource::fingerprint
    uint64_t run = 0;         // which run wrote it, through all its resumes; 0: saved before runs had one
    std::string commit;       // of the program
    std::string config;       // dump_config
    std::vector<File> files;  // by rank

    bool operator==(const CheckpointManifest&) const = default;
};

inline constexpr int64_t kMaxManifestBytes = int64_t{16} << 20;
inline constexpr const char* kManifestName = "manifest.json";
std::string rank_file_name(int64_t rank);  // "rank_0003.safetensors"
// The key of its header's metadata that holds the checksums of its tensors, eight hexadecimal digits each in
// the order of the data.
inline constexpr const char* kChecksumsKey = "crc32c";

// JSON; its first line is the checksum of the others.
std::string manifest_text(const CheckpointManifest& manifest);
// Throws Error(checkpoint) beginning with `where` for anything that manifest_text would not have written.
CheckpointManifest parse_manifest(std::string_view text, const std::string& where);

}  // namespace fp8flow::checkpoint
