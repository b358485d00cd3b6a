// SPDX-License-Identifier: MIT
// One rank's file of a checkpoint: a safetensors file whose header carries the checksum of each tensor. Read
// next: saver.h.
#pragma once

#include "model/checkpoint/folder.h"
#include "model/checkpoint/manifest.h"
#include "model/safetensors/header.h"

#include <atomic>

namespace fp8flow::checkpoint {

// A tensor in host memory.
struct HostTensor {
    std::string name;
    std::vector<int64_t> shape;
    const uint8_t* data = nullptr;
    int64_t bytes = 0;
    FileDType dtype = FileDType::f32;
};

// Writes rank_R.safetensors into step_N.tmp and waits until it is on the disk. Ends early, with an Error,
// once `stop` is set.
CheckpointManifest::File write_rank_file(const CheckpointFolder& folder, int64_t step, int64_t rank,
                                         const std::vector<HostTensor>& tensors,
                                         const std::atomic<bool>& stop);

// The key of the header's metadata that holds the checksums, eight hexadecimal digits a tensor in the order
// of the data.
inline constexpr const char* kChecksumsKey = "crc32c";

}  // namespace fp8flow::checkpoint
