// SPDX-License-Identifier: MIT
// The rules between fields of a configuration (a single field's range is in the field table), and the
// collector of problems that lets all of them be reported at once.
#pragma once

#include "model/config/config.h"

#include <fmt/format.h>

#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace fp8flow {

class ConfigProblems {
public:
    template <class... Args>
    void add(const std::string& where, fmt::format_string<Args...> text, Args&&... args) {
        lines_.push_back(where + ": " + fmt::format(text, std::forward<Args>(args)...));
    }
    // The named field has no usable value; rules that read it are skipped.
    void mark_bad(const std::string& name) { bad_.insert(name); }
    // It has the value of an imported model, which is rarely what is to be changed.
    void mark_imported(const std::string& name) { imported_.insert(name); }
    bool imported(const std::string& name) const { return imported_.contains(name); }
    bool usable(std::span<const char* const> names) const;
    bool empty() const { return lines_.empty(); }
    void throw_if_any() const;  // one Error(usage), a line per problem

private:
    std::vector<std::string> lines_;
    std::set<std::string> bad_, imported_;
};

void collect_config_problems(const Config& config, std::optional<int64_t> world_size,
                             ConfigProblems& problems);

// Whether no rule is broken. Without world_size the rules on the number of ranks are left out.
bool is_legal(const Config& config, std::optional<int64_t> world_size = std::nullopt);

// Sets a key, unless a rule between keys excludes the value. Returns whether it is set.
bool set_if_legal(Config& config, const std::string& key, const std::string& value,
                  std::optional<int64_t> world_size = std::nullopt);

}  // namespace fp8flow
