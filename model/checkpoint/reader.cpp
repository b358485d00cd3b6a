// SPDX-License-Identifier: MIT
// Sizes before contents, headers before tensors: no allocation trusts a number of the file.
#include "model/checkpoint/reader.h"

#include "model/base/crc32c.h"
#include "model/checkpoint/state.h"
#include "model/job/watchdog.h"

#include <algorithm>
#include <charconv>

namespace fp8flow::checkpoint {

CheckpointReader::CheckpointReader(const CheckpointFolder& folder, int64_t step)
    : disk_(folder.disk()),
      path_(folder.path_of(checkpoint_name(step))),
      folder_(folder.open_checkpoint(step)),
      manifest_(folder.manifest(step)) {
    for (size_t file = 0; file < manifest_.files.size(); ++file) open_file(static_cast<int64_t>(file));
    join_slices();
}

void CheckpointReader::open_file(int64_t file) {
    const std::string where = path_of_file(file);
    const CheckpointManifest::File& expected = manifest_.files[static_cast<size_t>(file)];
    const int opened = files_.emplace_back(disk_, disk_.open_file(folder_.get(), rank_file_name(file))).get();
    require_read(opened, where);
    const int64_t size = disk_.size(opened);
    require_read(size, where);
    require(size == expected.bytes, ExitCode::checkpoint, "{}: {}: {} bytes, {} were written", where,
            size < expected.bytes ? "truncated" : "grown", size, expected.bytes);
    const auto read = [&](void* out, size_t bytes, int64_t offset) {
        require_read(read_all(disk_, opened, out, bytes, offset), where + ": cannot read the header");
    };
    std::vector<uint8_t> first(static_cast<size_t>(std::min<int64_t>(8, size)));
    read(first.data(), first.size(), 0);
    const int64_t length = header_length(first, size, where, ExitCode::checkpoint);
    std::string text(static_cast<size_t>(length), '\0');
    read(text.data(), text.size(), 8);
    require(crc32c(text, crc32c(first.data(), first.size())) == expected.header_crc, ExitCode::checkpoint,
            "{}: the checksum of the header does not fit: damaged, or of another checkpoint", where);
    const SafetensorsHeader header = parse_header(text, size, where, ExitCode::checkpoint);
    const auto found = header.metadata.find(kChecksumsKey);
    require(found != header.metadata.end() && found->second.size() == 8 * header.tensors.size(),
            ExitCode::checkpoint, "{}: no checksums of its {} tensors", where, header.tensors.size());
    for (size_t i = 0; i < header.tensors.size(); ++i) {
        const TensorEntry& entry = header.tensors[i];
        const char* digits = found->second.data() + 8 * i;
        Place place{file, header.data_start + entry.begin, entry.bytes(), entry.dtype, entry.shape, 0};
        const auto [end, error] = std::from_chars(digits, digits + 8, place.crc, 16);
        require(error == std::errc() && end == digits + 8, ExitCode::checkpoint, "{}: tensor {}: no checksum",
                where, entry.name);
        const auto [at, inserted] = tensors_.emplace(entry.name, std::move(place));
        require(inserted, ExitCode::checkpoint, "{}: tensor {} is in {} as well", where, entry.name,
                rank_file_name(at->second.file));
    }
}

void CheckpointReader::read(const std::string& name, const Place& place, std::span<uint8_t> out) const {
    FP8FLOW_CHECK(static_cast<int64_t>(out.size()) == place.bytes, "{}: {} bytes for {}", name, out.size(),
                  place.bytes);
    read_or_test(name, place, out.data());
}

void CheckpointReader::read_or_test(const std::string& name, const Place& place, uint8_t* out) const {
    constexpr int64_t kAtOnce = int64_t{4} << 20;  // of a tensor in memory, if it is only tested
    std::vector<uint8_t> block(out != nullptr ? 0 : static_cast<size_t>(std::min(kAtOnce, place.bytes)));
    uint32_t crc = 0;
    for (int64_t done = 0; done < place.bytes; done += kAtOnce) {
        note_progress();
        const auto bytes = static_cast<size_t>(std::min(kAtOnce, place.bytes - done));
        uint8_t* const to = out != nullptr ? out + done : block.data();
        require_read(
            read_all(disk_, files_[static_cast<size_t>(place.file)].get(), to, bytes, place.offset + done),
            fmt::format("{}: tensor {}: cannot read it", path_of_file(place.file), name));
        crc = crc32c(to, bytes, crc);
    }
    require(crc == place.crc, ExitCode::checkpoint, "{}: tensor {}: the checksum does not fit: damaged",
            path_of_file(place.file), name);
}

void CheckpointReader::read(const Whole& whole, std::span<uint8_t> out) const {
    size_t at = 0;
    for (const std::string& name : whole.parts) {
        const Place& place = tensors_.at(name);
        read(name, place, out.subspan(at, static_cast<size_t>(place.bytes)));
        at += static_cast<size_t>(place.bytes);
    }
}

void CheckpointReader::join_slices() {
    std::map<std::string, std::map<int64_t, std::pair<SliceName, std::string>>> sliced;
    for (const auto& [name, place] : tensors_) {
        const auto slice = parse_slice_name(name);
        if (!slice) {
            wholes_[name] = {place.dtype, place.shape, {name}, place.bytes, place.file};
            continue;
        }
        require(place.shape == std::vector<int64_t>{slice->last - slice->first}, ExitCode::checkpoint,
                "{}: tensor {} has another size than its name says", path_of_file(place.file), name);
        sliced[slice->tensor].emplace(slice->first, std::pair(*slice, name));
    }
    for (const auto& [tensor, slices] : sliced) {
        const auto& [first, stored] = slices.begin()->second;
        const Place& place = tensors_.at(stored);
        Whole whole{place.dtype, first.shape, {}, 0, place.file};
        int64_t next = 0, numel = 1;
        for (const int64_t size : whole.shape) numel *= size;
        for (const auto& [begin, named] : slices) {
            const Place& part = tensors_.at(named.second);
            require(begin == next && named.first.shape == whole.shape && part.dtype == whole.dtype,
                    ExitCode::checkpoint, "{}: tensor {} does not follow the {} elements before it",
                    path_of_file(part.file), named.second, next);
            next = named.first.last;
            whole.parts.push_back(named.second);
            whole.bytes += part.bytes;
        }
        require(next == numel, ExitCode::checkpoint, "{}: tensor {}: {} of {} elements are there", path_,
                tensor, next, numel);
        require(wholes_.emplace(tensor, std::move(whole)).second, ExitCode::checkpoint,
                "{}: tensor {} is there whole and in slices", path_, tensor);
    }
}

void CheckpointReader::verify_file(int64_t file) const {
    std::vector<std::pair<std::string, Place>> in_file;
    for (const auto& [name, place] : tensors_)
        if (place.file == file) in_file.emplace_back(name, place);
    std::ranges::sort(in_file, {}, [](const auto& named) { return named.second.offset; });
    for (const auto& [name, place] : in_file) read_or_test(name, place, nullptr);
}

}  // namespace fp8flow::checkpoint
