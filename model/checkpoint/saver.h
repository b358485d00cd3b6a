// SPDX-License-Identifier: MIT
// CheckpointSaver: takes the state of a run between two steps and writes it in the background. Training
// pauses only until the device has copied the state to page-locked host memory; a thread of each rank writes
// that rank's file, the first rank then publishes the checkpoint. Threads use the disk only; ranks
// communicate in poll, between steps. Read next: folder.h.
#pragma once

#include "kernels/core/pinned.h"
#include "model/checkpoint/folder.h"
#include "model/checkpoint/manifest.h"
#include "model/safetensors/writer.h"
#include "model/train/trainer.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>

namespace fp8flow::checkpoint {

class CheckpointSaver {
public:
    // Collective, as every member function. `path`: an existing folder, the same on every rank. Removes
    // incomplete checkpoints of earlier runs. Throws Error(checkpoint) where a rank does not see the folder
    // that the first rank sees. `run`: CheckpointManifest::run; checkpoints of others are never removed.
    CheckpointSaver(const Config& config, uint64_t data_fingerprint, ProcessGroup& world,
                    const std::string& path, uint64_t run,
                    std::shared_ptr<Disk> disk = std::make_shared<Disk>());
    // Waits for what is being written; without publish, which needs all ranks, it is lost.
    ~CheckpointSaver();
    CheckpointSaver(const CheckpointSaver&) = delete;
    CheckpointSaver& operator=(const CheckpointSaver&) = delete;

    // `check` throws Error where another run has the folder now. The first rank calls it before each change
    // of the folder, on any thread; after it has thrown, nothing there is touched.
    void check_owner_with(std::function<void()> check) { check_owner_ = std::move(check); }

    struct Published {
        int64_t step = 0;
        double bytes = 0;    // of all ranks
        double paused = 0;   // seconds that training paused on this rank
        double seconds = 0;  // from the start to the new name
        std::string path;
    };
    // The state after trainer.steps_done() steps, with none in flight. Waits for the checkpoint
    // before, if it is still being written. Throws Error(checkpoint), or what check_owner_with() threw, on
    // every rank if the one before failed on any.
    std::optional<Published> save(Trainer& trainer);
    // Between steps: what has been published since the last call. Throws like save.
    std::optional<Published> poll();
    // Waits for what is being written. Throws like save.
    std::optional<Published> finish();
    // What could not be removed since the last call, on the first rank.
    std::vector<std::string> take_problems() { return std::exchange(problems_, {}); }
    const CheckpointFolder& folder() const { return *folder_; }

private:
    using Clock = std::chrono::steady_clock;
    enum class Phase : int64_t { writing, written, publishing, published, failed };
    // What a rank says of itself; gathered by poll.
    struct Report {
        Phase phase = Phase::writing;
        int64_t bytes = 0;
        uint32_t header_crc = 0;
        int64_t error_code = 0;
    };
    // In host memory.
    struct SavedTensor {
        TensorDeclaration declared;
        const uint8_t* data = nullptr;
        int64_t bytes = 0;
    };
    struct Pending {
        int64_t step = 0, applied = 0, next_batch = 0;
        Clock::time_point started;
        double paused = 0;
        Report report;
        std::string error;
        std::vector<SavedTensor> tensors;
        // last: their threads end before what they use
        std::future<CheckpointManifest::File> file;
        std::future<std::vector<std::string>> publication;  // first rank
    };

    void copy_state(Trainer& trainer);
    CheckpointManifest::File write_file(const Pending& pending) const;
    void look_at_threads();
    std::optional<Published> exchange_reports();
    void start_publication(const std::vector<Report>& reports);
    [[noreturn]] void give_up(const std::vector<Report>& reports);

    Config config_;
    uint64_t data_fingerprint_, run_;
    ProcessGroup& world_;
    std::function<void()> check_owner_ = [] {};
    std::unique_ptr<CheckpointFolder> folder_;
    std::unique_ptr<PinnedBuffer> copy_;
    size_t copy_bytes_ = 0;
    std::vector<std::string> problems_;
    std::atomic<bool> stop_ = false;
    std::unique_ptr<Pending> pending_;  // last: its threads end before what they use
};

}  // namespace fp8flow::checkpoint
