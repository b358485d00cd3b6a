// SPDX-License-Identifier: MIT
// The progress record of this process, its own until share_progress.
#include "kernels/comm/progress.h"

#include <chrono>

namespace fp8flow {

namespace {

ProgressRecord alone;
ProgressRecord* own = &alone;
int64_t (*newest_of_all)() = [] { return alone.progress.load(std::memory_order_relaxed); };

}  // namespace

void note_progress() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    own->progress.store(std::chrono::nanoseconds(now).count(), std::memory_order_relaxed);
}

Waiting::Waiting() {
    note_progress();
    own->waits.fetch_add(1, std::memory_order_relaxed);
}
Waiting::~Waiting() {
    note_progress();
    own->waits.fetch_sub(1, std::memory_order_relaxed);
}

int64_t newest_progress() { return newest_of_all(); }

void share_progress(ProgressRecord& notes, int64_t (*newest)()) {
    own = &notes;
    newest_of_all = newest;
}

}  // namespace fp8flow
