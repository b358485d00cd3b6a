// SPDX-License-Identifier: MIT
// A checkpoint opened for reading: manifest, headers and checksums hold, and every tensor has a place. Read
// next: resume.h.
#pragma once

#include "model/checkpoint/folder.h"
#include "model/checkpoint/manifest.h"
#include "model/safetensors/header.h"

#include <map>
#include <span>

namespace fp8flow::checkpoint {

class CheckpointReader {
public:
    // Reads the manifest and the header of every file. Throws Error(checkpoint), naming the file, unless they
    // are what was written.
    CheckpointReader(const CheckpointFolder& folder, int64_t step);

    const std::string& path() const { return path_; }
    const CheckpointManifest& manifest() const { return manifest_; }

    struct Place {
        int64_t file = 0;  // rank that wrote it
        int64_t offset = 0, bytes = 0;
        FileDType dtype = FileDType::f32;
        std::vector<int64_t> shape;
        uint32_t crc = 0;
    };
    const std::map<std::string, Place>& tensors() const { return tensors_; }  // as they are stored
    // A tensor of the state, as one or as the slices that ranks wrote (SliceName), which cover it exactly.
    struct Whole {
        FileDType dtype = FileDType::f32;
        std::vector<int64_t> shape;
        std::vector<std::string> parts;  // names in tensors(), in the order of their elements
        int64_t bytes = 0;
        int64_t file = 0;  // of the first
    };
    const std::map<std::string, Whole>& wholes() const { return wholes_; }
    std::string path_of_file(int64_t file) const { return path_ + "/" + rank_file_name(file); }

    // The bytes of a tensor. Throws Error(checkpoint), naming file and tensor, where they are not what was
    // written.
    void read(const std::string& name, const Place& place, std::span<uint8_t> out) const;
    void read(const Whole& whole, std::span<uint8_t> out) const;
    // Every byte of a file, by the checksums of its tensors.
    void verify_file(int64_t file) const;

private:
    void open_file(int64_t file);
    void join_slices();
    // Without `out` only the checksum is tested.
    void read_or_test(const std::string& name, const Place& place, uint8_t* out) const;

    Disk& disk_;
    std::string path_;
    DiskHandle folder_;
    CheckpointManifest manifest_;
    std::vector<DiskHandle> files_;
    std::map<std::string, Place> tensors_;
    std::map<std::string, Whole> wholes_;
};

}  // namespace fp8flow::checkpoint
