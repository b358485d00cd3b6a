// SPDX-License-Identifier: MIT
// The errors of all ranks gathered: first whether there is one, then its text.
#include "model/checkpoint/agree.h"

#include "model/checkpoint/disk.h"

#include <algorithm>
#include <optional>

namespace fp8flow::checkpoint {

void on_all_ranks(ProcessGroup& world, const std::function<void()>& work) {
    struct Verdict {
        int64_t code = 0, unreadable = 0;
    };
    std::optional<Error> mine;
    bool unreadable = false;
    try {
        work();
    } catch (const Unreadable& error) {
        mine = error;
        unreadable = true;
    } catch (const Error& error) {
        mine = error;
    }
    std::string text = mine ? mine->what() : "";
    const Verdict verdict{mine ? static_cast<int64_t>(mine->code()) : 0, unreadable};
    std::vector<Verdict> all(static_cast<size_t>(world.size()));
    world.all_gather(&verdict, sizeof verdict, all.data());
    const auto first = std::ranges::find_if(all, [](const Verdict& v) { return v.code != 0; });
    if (first == all.end()) return;
    world.broadcast(text, static_cast<int>(first - all.begin()));
    if (std::ranges::any_of(all, [](const Verdict& v) { return v.unreadable != 0; }))
        throw Unreadable(static_cast<ExitCode>(first->code), text);
    throw Error(static_cast<ExitCode>(first->code), text);
}

}  // namespace fp8flow::checkpoint
