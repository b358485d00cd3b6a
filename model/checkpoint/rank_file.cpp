// SPDX-License-Identifier: MIT
// Checksums first, since the header holds them; then the file as a stream.
#include "model/checkpoint/rank_file.h"

#include "model/base/crc32c.h"
#include "model/safetensors/writer.h"

#include <algorithm>

namespace fp8flow::checkpoint {

namespace {

constexpr size_t kBlock =
    size_t{8} << 20;  // between two checks of `stop`; small tensors are gathered into one write

void stop_if(const std::atomic<bool>& stop) {
    require(!stop, ExitCode::checkpoint, "the run ended while a checkpoint was being written");
}

// Tensors by the thousand, most of them small, as few writes.
class Gathered {
public:
    Gathered(CheckpointFolder::Part& part, const std::atomic<bool>& stop) : part_(part), stop_(stop) {}

    void write(const uint8_t* data, size_t bytes) {
        while (bytes > 0) {
            const size_t count = std::min(bytes, kBlock - block_.size());
            block_.insert(block_.end(), data, data + count);
            data += count;
            bytes -= count;
            if (block_.size() == kBlock) flush();
        }
    }
    void flush() {
        stop_if(stop_);
        part_.write(block_.data(), block_.size());
        block_.clear();
    }

private:
    CheckpointFolder::Part& part_;
    const std::atomic<bool>& stop_;
    std::vector<uint8_t> block_;
};

}  // namespace

CheckpointManifest::File write_rank_file(const CheckpointFolder& folder, int64_t step, int64_t rank,
                                         const std::vector<HostTensor>& tensors,
                                         const std::atomic<bool>& stop) {
    std::vector<TensorDeclaration> declared;
    std::string checksums;
    for (const HostTensor& tensor : tensors) {
        stop_if(stop);
        declared.push_back({tensor.name, tensor.dtype, tensor.shape});
        checksums += fmt::format("{:08x}", crc32c(tensor.data, static_cast<size_t>(tensor.bytes)));
    }
    CheckpointFolder::Part part(folder, step, rank_file_name(rank));
    Gathered gathered(part, stop);
    CheckpointManifest::File file;
    bool in_header = true;
    SafetensorsWriter writer(declared,
                             {{"format", "fp8flow checkpoint"},
                              {"step", std::to_string(step)},
                              {"rank", std::to_string(rank)},
                              {kChecksumsKey, checksums}},
                             [&](const void* data, size_t bytes) {
                                 if (in_header) file.header_crc = crc32c(data, bytes, file.header_crc);
                                 gathered.write(static_cast<const uint8_t*>(data), bytes);
                             });
    in_header = false;
    for (const HostTensor& tensor : tensors) writer.append(tensor.name, tensor.data, tensor.bytes);
    writer.finish();
    gathered.flush();
    part.finish();
    file.bytes = writer.file_bytes();
    return file;
}

}  // namespace fp8flow::checkpoint
