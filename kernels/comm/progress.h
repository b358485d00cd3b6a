// SPDX-License-Identifier: MIT
// That this rank makes progress or waits for others. A note is a few relaxed stores. Deadlines count silence:
// a rank that waits looks at the newest progress of the ranks that share its notes (model/job/watchdog.h).
#pragma once

#include <atomic>
#include <cstdint>

namespace fp8flow {

void note_progress();

// While one exists, this rank waits for others: its silence is theirs.
class Waiting {
public:
    Waiting();
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
};

// Nanoseconds of the monotonic clock: the newest progress of this rank, or of all that share its notes.
int64_t newest_progress();

struct ProgressNotes {
    std::atomic<int32_t> waits;
    std::atomic<int64_t> progress;
};
// Notes of this process go there from now on; `newest` answers for all ranks that share them.
void share_progress(ProgressNotes& own, int64_t (*newest)());

}  // namespace fp8flow
