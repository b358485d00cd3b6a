// SPDX-License-Identifier: MIT
// Records that this rank makes progress or waits for others, by a few relaxed stores. Deadlines count the
// time without progress of all ranks that share a record: those of a host (model/job/watchdog.h).
#pragma once

#include <atomic>
#include <cstdint>

namespace fp8flow {

void note_progress();

// While one exists, this rank waits for other ranks, so its missing progress is theirs.
class Waiting {
public:
    Waiting();
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
};

// Time of the newest progress of this rank, or of all that share its record, in nanoseconds of the steady
// clock.
int64_t newest_progress();

struct ProgressRecord {
    std::atomic<int32_t> waits;
    std::atomic<int64_t> progress;
};
// From now on this process records its progress in `own`. `newest` returns that of all ranks that share it.
void share_progress(ProgressRecord& own, int64_t (*newest)());

}  // namespace fp8flow
