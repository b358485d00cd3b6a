// SPDX-License-Identifier: MIT
// The errors of all ranks gathered: first whether there is one, then its text.
#include "model/checkpoint/agree.h"

#include "model/checkpoint/disk.h"

#include <algorithm>
#include <string>
#include <vector>

namespace fp8flow::checkpoint {

void on_all_ranks(ProcessGroup& world, const std::function<void()>& work) {
    struct Verdict {
        int64_t code = 0, unreadable = 0;
    };
    Verdict mine;
    std::string text;
    try {
        work();
    } catch (const Error& error) {
        mine = {static_cast<int64_t>(error.code()), dynamic_cast<const Unreadable*>(&error) != nullptr};
        text = error.what();
    }
    std::vector<Verdict> all(static_cast<size_t>(world.size()));
    world.all_gather(&mine, sizeof mine, all.data());
    const auto first = std::ranges::find_if(all, [](const Verdict& v) { return v.code != 0; });
    if (first == all.end()) return;
    world.broadcast(text, static_cast<int>(first - all.begin()));
    if (std::ranges::any_of(all, [](const Verdict& v) { return v.unreadable != 0; }))
        throw Unreadable(static_cast<ExitCode>(first->code), text);
    throw Error(static_cast<ExitCode>(first->code), text);
}

}  // namespace fp8flow::checkpoint
