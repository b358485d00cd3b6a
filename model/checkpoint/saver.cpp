// SPDX-License-Identifier: MIT
// Copy, write, report, publish.
#include "model/checkpoint/saver.h"

#include "kernels/core/scaled_tensor.h"
#include "model/base/build_info.h"
#include "model/base/crc32c.h"
#include "model/checkpoint/agree.h"
#include "model/checkpoint/state.h"

#include <algorithm>
#include <thread>

namespace fp8flow::checkpoint {

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

template <class Result> bool is_ready(const std::future<Result>& future) {
    return future.valid() && future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

}  // namespace

CheckpointSaver::CheckpointSaver(const Config& config, uint64_t data_fingerprint, ProcessGroup& world,
                                 const std::string& path, uint64_t run, std::shared_ptr<Disk> disk)
    : config_(config), data_fingerprint_(data_fingerprint), run_(run), world_(world) {
    on_all_ranks(world, [&] {
        folder_ = std::make_unique<CheckpointFolder>(std::move(disk), path);
        if (world.rank() == 0) problems_ = folder_->clean_up();
    });
    // A folder that only one host sees is found now, not when the first checkpoint has been written.
    const int64_t probe = 0;
    on_all_ranks(world, [&] {
        if (world.rank() == 0) folder_->begin(probe);
    });
    on_all_ranks(world,
                 [&] { CheckpointFolder::Part(*folder_, probe, rank_file_name(world.rank())).finish(); });
    if (world.rank() == 0) folder_->abandon(probe);
}

CheckpointSaver::~CheckpointSaver() { stop_ = true; }

std::optional<CheckpointSaver::Published> CheckpointSaver::save(Trainer& trainer) {
    const std::optional<Published> before = finish();
    pending_ = std::make_unique<Pending>();
    Pending& pending = *pending_;
    pending.step = trainer.steps_done();
    pending.applied = trainer.steps_applied();
    pending.next_batch = pending.step + trainer.first_batch();
    pending.started = Clock::now();
    try {
        on_all_ranks(world_, [&] {
            if (world_.rank() != 0) return;
            check_owner_();
            folder_->begin(pending.step);
        });
    } catch (...) {
        pending_.reset();
        throw;
    }
    copy_state(trainer);
    pending.paused = seconds_since(pending.started);
    pending.file = std::async(std::launch::async, [this, &pending] { return write_file(pending); });
    if (config_.checkpoint.async_save) return before;
    const std::optional<Published> now = finish();
    return before ? before : now;
}

// All copies are queued, then waited for once: the device runs them at the speed of its link to the host.
void CheckpointSaver::copy_state(Trainer& trainer) {
    const RankLayout layout{world_.rank(), world_.size(), config_.parallel.expert_model_parallel_size};
    std::vector<StateTensor> state = training_state(trainer.transformer(), layout);
    std::erase_if(state, [&](const StateTensor& tensor) { return tensor.owner != layout.rank; });
    constexpr int64_t kAlignment = 256;
    int64_t total = 0;
    for (const StateTensor& tensor : state) total += round_up(tensor.bytes(), kAlignment);
    Device& device = trainer.ops().device();
    if (!copy_ || to_size(total) > copy_bytes_) {
        copy_.reset();
        copy_bytes_ = to_size(total);
        copy_ = std::make_unique<PinnedBuffer>(device, copy_bytes_);
    }
    HostEvent copied(device);
    size_t at = 0;
    for (const StateTensor& tensor : state) {
        auto* to = copy_->at<uint8_t>(at);
        device.copy_out_async(to, tensor.view.data, to_size(tensor.bytes()));
        pending_->tensors.push_back(
            {{tensor.stored_name(), file_dtype(tensor.dtype), tensor.stored_shape()}, to, tensor.bytes()});
        at += to_size(round_up(tensor.bytes(), kAlignment));
    }
    copied.record({});
    copied.wait();
}

// Checksums first, since the header holds them; then the file as a stream. Returns when it is on the disk.
CheckpointManifest::File CheckpointSaver::write_file(const Pending& pending) const {
    const auto go_on = [&] {
        require(!stop_, ExitCode::checkpoint, "the run ended while a checkpoint was being written");
    };
    std::vector<TensorDeclaration> declared;
    std::string checksums;
    for (const SavedTensor& tensor : pending.tensors) {
        go_on();
        declared.push_back(tensor.declared);
        checksums += fmt::format("{:08x}", crc32c(tensor.data, to_size(tensor.bytes)));
    }
    CheckpointFolder::Part part(*folder_, pending.step, rank_file_name(world_.rank()));
    CheckpointManifest::File file;
    bool in_header = true;
    SafetensorsWriter writer(declared,
                             {{"format", "fp8flow checkpoint"},
                              {"step", std::to_string(pending.step)},
                              {"rank", std::to_string(world_.rank())},
                              {kChecksumsKey, checksums}},
                             [&](const void* data, size_t bytes) {
                                 if (in_header) file.header_crc = crc32c(data, bytes, file.header_crc);
                                 part.write(data, bytes);
                             });
    in_header = false;
    for (const SavedTensor& tensor : pending.tensors)
        for (int64_t done = 0; done < tensor.bytes; done += kBlockBytes) {
            go_on();
            writer.append(tensor.declared.name, tensor.data + done,
                          std::min(kBlockBytes, tensor.bytes - done));
        }
    writer.finish();
    part.finish();
    file.bytes = writer.file_bytes();
    return file;
}

// Takes what the threads of this rank have done since the last poll.
void CheckpointSaver::look_at_threads() {
    Pending& p = *pending_;
    try {
        if (is_ready(p.file)) {
            const CheckpointManifest::File file = p.file.get();
            p.report = {.phase = Phase::written, .bytes = file.bytes, .header_crc = file.header_crc};
        }
        if (is_ready(p.publication)) {
            for (std::string& problem : p.publication.get()) problems_.push_back(std::move(problem));
            p.report.phase = Phase::published;
        }
    } catch (const Error& error) {
        p.error = error.what();
        p.report.phase = Phase::failed;
        p.report.error_code = static_cast<int64_t>(error.code());
    }
}

std::optional<CheckpointSaver::Published> CheckpointSaver::poll() {
    return pending_ ? exchange_reports() : std::nullopt;
}

std::optional<CheckpointSaver::Published> CheckpointSaver::finish() {
    constexpr std::chrono::milliseconds kBetweenLooks{2};
    while (pending_) {
        // Waiting for the slowest rank's file could exceed the peer deadline, so every rank polls.
        if (auto published = exchange_reports()) return published;
        std::this_thread::sleep_for(kBetweenLooks);
    }
    return std::nullopt;
}

// All ranks see the same reports and so do the same.
std::optional<CheckpointSaver::Published> CheckpointSaver::exchange_reports() {
    look_at_threads();
    Pending& p = *pending_;
    std::vector<Report> reports(to_size(world_.size()));
    world_.all_gather(&p.report, sizeof p.report, reports.data());
    const auto is = [](Phase phase) {
        return [phase](const Report& report) { return report.phase == phase; };
    };
    if (std::ranges::any_of(reports, is(Phase::failed)) && std::ranges::none_of(reports, is(Phase::writing)))
        give_up(reports);
    if (std::ranges::all_of(reports, is(Phase::written)) && world_.rank() == 0) start_publication(reports);
    if (reports[0].phase != Phase::published) return std::nullopt;
    Published published{.step = p.step,
                        .paused = p.paused,
                        .seconds = seconds_since(p.started),
                        .path = folder_->path_of(checkpoint_name(p.step))};
    for (const Report& report : reports) published.bytes += f64(report.bytes);
    pending_.reset();
    return published;
}

void CheckpointSaver::start_publication(const std::vector<Report>& reports) {
    Pending& p = *pending_;
    CheckpointManifest manifest{.step = p.step,
                                .applied_steps = p.applied,
                                .consumed_samples = p.next_batch * config_.training.global_batch_size,
                                .expert_parallel_size = config_.parallel.expert_model_parallel_size,
                                .global_batch_size = config_.training.global_batch_size,
                                .seed = config_.training.seed,
                                .seq_length = config_.model.seq_length,
                                .data_fingerprint = data_fingerprint_,
                                .run = run_,
                                .commit = build_commit(),
                                .config = dump_config(config_)};
    for (const Report& report : reports) manifest.files.push_back({report.bytes, report.header_crc});
    p.report.phase = Phase::publishing;
    p.publication = std::async(std::launch::async, [this, step = p.step, text = manifest_text(manifest)] {
        check_owner_();
        folder_->write_manifest(step, text);
        folder_->publish(step);
        check_owner_();
        const int64_t kept = config_.checkpoint.most_recent_k;
        return kept > 0 ? folder_->keep_latest(kept, run_) : std::vector<std::string>();
    });
}

// No rank writes any more. All ranks throw the error of the lowest rank that failed.
void CheckpointSaver::give_up(const std::vector<Report>& reports) {
    const auto failed = std::ranges::find(reports, Phase::failed, &Report::phase);
    std::string text = pending_->error;
    world_.broadcast(text, static_cast<int>(failed - reports.begin()));
    if (world_.rank() == 0) {
        try {
            check_owner_();
            folder_->abandon(pending_->step);
        } catch (const Error&) {  // another run's folder by now
        }
    }
    const auto code = static_cast<ExitCode>(failed->error_code);
    pending_.reset();
    throw Error(code, text);
}

}  // namespace fp8flow::checkpoint
