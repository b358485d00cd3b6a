// SPDX-License-Identifier: MIT
// Checks of a given file and of its ids; the header of a recorded one, and writes to places in it.
#include "model/data/routing_file.h"

#include "model/base/output.h"
#include "model/safetensors/writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

namespace fp8flow::data {

namespace {

constexpr const char *kRecorded = "recorded", *kRun = "run";

// A file that a run has recorded.
struct Recording {
    std::string run;  // empty: of a version that did not write it
    bool is_complete = false;
};
// Absent: there is no such file.
std::optional<Recording> recording_in(const std::string& path) {
    try {
        const SafetensorsFile file(path);
        const auto run = file.header().metadata.find(kRun);
        const TensorEntry* const recorded = file.find(kRecorded);
        if (recorded == nullptr) return std::nullopt;
        return Recording{.run = run == file.header().metadata.end() ? "" : run->second,
                         .is_complete = std::ranges::count(file.bytes(*recorded), 0) == 0};
    } catch (const Error&) {
        return std::nullopt;
    }
}

std::string ids_of(int64_t layer) { return fmt::format("layers.{}.moe.router.ids", layer); }

}  // namespace

GivenRouting::GivenRouting(const std::string& path, const RoutingShape& shape) : file_(path), shape_(shape) {
    const auto require_same = [&](const char* key, const std::string& wanted, const char* advice = "") {
        const auto given = file_.header().metadata.find(key);
        require(given != file_.header().metadata.end() && given->second == wanted, ExitCode::data,
                "{}: its metadata has {} {}, this run wants {}{}", path, key,
                given == file_.header().metadata.end() ? "nowhere" : printable(given->second), wanted,
                advice);
    };
    require_same("num_experts", std::to_string(shape.num_experts));
    for (const int64_t layer : shape.layers) {
        const TensorEntry* entry = file_.find(ids_of(layer));
        require(entry != nullptr, ExitCode::data,
                "{}: has no tensor \"{}\", which this run wants as I16[{}, {}]", path, ids_of(layer),
                shape.tokens, shape.topk);
        const bool fits =
            entry->dtype == FileDType::i16 && entry->shape.size() == 2 && entry->shape[1] == shape.topk &&
            (entry->shape[0] == shape.tokens || (shape.data != 0 && entry->shape[0] > shape.tokens));
        require(fits, ExitCode::data,
                "{}: \"{}\" is {}, this run wants I16[{}{}, {}] (tokens, moe_router_topk)", path, entry->name,
                describe(*entry), shape.data != 0 ? "at least " : "", shape.tokens, shape.topk);
        ids_.push_back(file_.bytes(*entry));
    }
    const TensorEntry* recorded = file_.find(kRecorded);
    if (recorded == nullptr || shape.data == 0) return;
    require_same("data", checksum_text(shape.data),
                 ": record it with the data and the training.seed of this run");
    require(recorded->numel() * shape.seq_length == tokens(), ExitCode::data,
            "{}: has {} samples of {} tokens, this run has model.seq_length {}", path, recorded->numel(),
            tokens() / std::max<int64_t>(1, recorded->numel()), shape.seq_length);
    recorded_ = file_.bytes(*recorded);
}

void GivenRouting::require_after_rollback(int64_t wanted) const {
    require(wanted <= tokens(), ExitCode::data,
            "{}: has {} tokens, this run reads {}: it is resumed after a rollback (training.on_divergence), "
            "which skipped data; resume it without data.routing_path",
            file_.path(), tokens(), wanted);
}

void GivenRouting::read(size_t layer, int64_t row, std::span<int32_t> ids) const {
    const int64_t k = shape_.topk, count = std::ssize(ids) / k;
    const std::span<const uint8_t> all = ids_[layer];
    require((row + count) * k * 2 <= std::ssize(all), ExitCode::data,
            "{}: has {} tokens, this run reads {}: record it with a larger training.train_iters, or take "
            "fewer steps (profile.profile_step_end, profile.energy_seconds)",
            file_.path(), tokens(), row + count);
    for (int64_t t = row; !recorded_.empty() && t < row + count; t += shape_.seq_length)
        require(recorded_[static_cast<size_t>(t / shape_.seq_length)] == 1, ExitCode::data,
                "{}: the run that recorded it did not come to sample {}", file_.path(),
                t / shape_.seq_length);
    for (int64_t t = 0; t < count; ++t) {
        int32_t* token = ids.data() + t * k;
        for (int64_t i = 0; i < k; ++i) {
            int16_t id = 0;
            std::memcpy(&id, all.data() + ((row + t) * k + i) * 2, sizeof id);
            if (id < 0 || id >= shape_.num_experts || std::find(token, token + i, id) != token + i)
                fail(ExitCode::data, "{}: \"{}\": expert {} of token {} is not in [0, {}), or is there twice",
                     file_.path(), ids_of(shape_.layers[layer]), id, row + t, shape_.num_experts);
            token[i] = id;
        }
    }
}

RecordedRouting::RecordedRouting(const std::string& path, const RoutingShape& shape, const Options& options)
    : path_(path), shape_(shape), narrow_(static_cast<size_t>(shape.seq_length * shape.topk)) {
    std::vector<TensorDeclaration> tensors;
    for (const int64_t layer : shape.layers)
        tensors.push_back({ids_of(layer), FileDType::i16, {shape.tokens, shape.topk}});
    tensors.push_back({kRecorded, FileDType::u8, {shape.tokens / shape.seq_length}});
    std::map<std::string, std::string> metadata = {{"num_experts", std::to_string(shape.num_experts)},
                                                   {"data", checksum_text(shape.data)},
                                                   {"recipe", options.recipe},
                                                   {kRun, options.run}};
    const std::optional<Recording> there = recording_in(path);
    if (options.continues && there) metadata[kRun] = there->run;  // also of the run that it branches off
    if (metadata[kRun].empty()) metadata.erase(kRun);
    std::string text;
    const SafetensorsWriter writer(tensors, metadata, [&](const void* bytes, size_t count) {
        text.append(static_cast<const char*>(bytes), count);
    });
    header_ = writer.header();
    const bool unfinished = there && there->run == options.run && !options.run.empty() && !there->is_complete;
    if (options.makes_file)
        make_file(text, writer.file_bytes(),
                  options.continues               ? IfThere::is_continued
                  : options.resumes && unfinished ? IfThere::is_replaced
                                                  : IfThere::is_refused);
    file_ = Descriptor(::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW));
    check(static_cast<bool>(file_), "open");
}

void RecordedRouting::make_file(const std::string& header, int64_t bytes, IfThere if_there) {
    const std::filesystem::path path = std::filesystem::absolute(path_);
    if (std::filesystem::exists(path)) {
        require(if_there != IfThere::is_refused, ExitCode::output,
                "{}: exists; remove it, or record to another file", path_);
        const InputFile file(path_, ExitCode::output);
        std::string there(std::min(header.size(), static_cast<size_t>(file.size())), '\0');
        file.read(0, there.data(), std::ssize(there));
        require(
            there == header && file.size() == bytes, ExitCode::output,
            "{}: was recorded by a run of other tokens, layers, experts or recipe than this one; remove it, "
            "or record to another file",
            path_);
        if (if_there == IfThere::is_continued) return;
        note_ = fmt::format("{}: replaced, because the run of --out that began it left no checkpoint", path_);
    }
    const OutputFolder folder(path.parent_path().string(), "output.record_routing");
    folder.write_atomic(path.filename().string(), header);
    check(::truncate(path.c_str(), bytes) == 0, "extend");  // sparse: what is not recorded takes no space
}

void RecordedRouting::write(size_t layer, int64_t sample, std::span<const int32_t> ids) {
    FP8FLOW_CHECK(sample * shape_.seq_length < shape_.tokens, "sample {} of a file of {} tokens", sample,
                  shape_.tokens);
    std::ranges::transform(ids, narrow_.begin(), [](int32_t id) { return static_cast<int16_t>(id); });
    const auto bytes = static_cast<int64_t>(narrow_.size() * sizeof(int16_t));
    write_at(header_.tensors[layer].begin + sample * bytes, narrow_.data(), bytes);
}

void RecordedRouting::mark(int64_t sample) {
    const uint8_t yes = 1;
    write_at(header_.tensors.back().begin + sample, &yes, sizeof yes);
}

void RecordedRouting::write_at(int64_t offset, const void* data, int64_t bytes) const {
    check(::pwrite(file_.get(), data, static_cast<size_t>(bytes), header_.data_start + offset) == bytes,
          "write");
}

void RecordedRouting::check(bool done, const char* what) const {
    require(done, class_of(errno, ExitCode::output), "{}: cannot {}: {}", path_, what, std::strerror(errno));
}

}  // namespace fp8flow::data
