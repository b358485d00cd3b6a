// SPDX-License-Identifier: MIT
// Masters are read and written through host memory, once per run.
#include "model/validate/initial_weights.h"

#include "model/base/crc32c.h"

#include <fmt/format.h>

#include <vector>

namespace fp8flow::validate {

namespace {

// `use` gets the words of each master on this rank and says whether it has changed them.
template <class Use> void for_each_master(Transformer& model, Device& device, Use use) {
    std::vector<uint32_t> words;
    for (Parameter& parameter : model.parameters().all()) {
        const auto bytes = static_cast<size_t>(parameter.master.bytes());
        words.resize(bytes / sizeof(uint32_t));
        device.copy_out(words.data(), parameter.master.data, bytes);
        if (!use(words)) continue;
        device.copy_in(parameter.master.data, words.data(), bytes);
        device.synchronize();
    }
}

}  // namespace

std::string weights_fingerprint(Transformer& model, Device& device, ProcessGroup& world) {
    uint32_t mine = 0;
    device.synchronize();
    for_each_master(model, device, [&](const std::vector<uint32_t>& words) {
        mine = crc32c(words.data(), words.size() * sizeof(uint32_t), mine);
        return false;
    });
    std::vector<uint32_t> all(static_cast<size_t>(world.size()));
    world.all_gather(&mine, sizeof mine, all.data());
    return fmt::format("{:08x}", crc32c(all.data(), all.size() * sizeof(uint32_t)));
}

void move_by_one_unit(Transformer& model, Device& device) {
    constexpr uint32_t kAllButSign = 0x7fffffff;
    for_each_master(model, device, [](std::vector<uint32_t>& words) {
        for (uint32_t& word : words) word ^= (word & kAllButSign) != 0 ? 1 : 0;
        return true;
    });
}

}  // namespace fp8flow::validate
